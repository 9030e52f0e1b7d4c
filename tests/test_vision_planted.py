"""The comparison meant for a bug of tests/vision_plants.py finds it, by a margin.

Towers are compared with transformers in float32, ranks with one process in float64. Errors are shares of their bounds:
above 1 something is wrong. Each group has a run without a bug.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import RankError
from meshwright.verify.report import ROWS
from tests import parts, seeing, trials, vision_plants, worlds
from tests.plants import Plant, planted
from tests.test_vision import Outputs, misplaced, ours, reference_outputs, shares
from tests.test_vision_meshes import Case, differs, off, seeing_trial, steps
from tests.trials import world_of

Source = Callable[[str], Path]
CLEAN = "nothing"

MARGIN = 4.0  # times what is allowed, at least
NUMBERS: dict[str, tuple[Plant, str]] = {  # what is planted, and the comparison that finds it
    "height and width exchanged": (vision_plants.height_and_width_exchanged, "rows 0"),
    "patches row by row": (vision_plants.raster_order, "rows 0"),
    "time before channels": (vision_plants.time_before_channels, "rows 0"),
    "corners not aligned": (vision_plants.corners_not_aligned, "rows 0"),
    "parts within heads": (vision_plants.parts_within_heads, "rows 0"),
    "theta of a text": (vision_plants.theta_of_a_text, "rows 0"),
    "a merger with tanh": (vision_plants.merger_with_tanh, "rows 0"),
    "blocks with the exact GELU": (vision_plants.blocks_with_exact_gelu, "rows 0"),
    "the epsilon of torch": (vision_plants.eps_of_torch, "norms"),
    "a clip that sees itself": (vision_plants.frames_of_a_clip_see_each_other, "rows 0"),
    "a norm over four patches": (vision_plants.merger_norm_over_four, "rows 0"),
    "images of a size exchanged": (vision_plants.images_of_a_size_exchanged, "rows 0"),
    "features a layer late": (vision_plants.features_a_layer_late, "logits"),
    "features reversed": (vision_plants.features_reversed, "logits"),
    "places count patches": (vision_plants.positions_count_patches, "logits"),
    "time counts frames": (vision_plants.time_counts_frames, "logits"),
    "a table without gradient": (vision_plants.table_of_zero_gradient, "gradients"),
    "rows of places are trained": (vision_plants.places_train_their_row, "the rows of places"),
}
FEATURES = ("features a layer late", "features reversed")  # which Qwen3.5 has not
TRIED = [  # by `make test`: each comparison, and what docs/bugs.md names
    "corners not aligned", "a merger with tanh", "the epsilon of torch", "a clip that sees itself", "features reversed",
    "a table without gradient", "rows of places are trained",
]  # fmt: skip
BY_FAMILY = {"qwen3_vl": [*NUMBERS] if parts.ALL else TRIED, "qwen3_5": [n for n in NUMBERS if n not in FEATURES]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    at = tmp_path_factory.mktemp("seeing")
    return functools.cache(lambda family: seeing.directory(at / family, family))


def acted(plant: Plant, act: Callable[[], Any]) -> Any:
    with planted(plant):
        return act()


@pytest.fixture(scope="module")
def errors_of(source: Source) -> Callable[[str], dict[str, dict[str, float]]]:
    """Return the error of each comparison as a share of its bound, by family and bug; without a bug last."""

    def run(family: str) -> dict[str, dict[str, float]]:
        act = functools.partial(ours, source(family))
        cases = {name: functools.partial(acted, NUMBERS[name][0], act) for name in BY_FAMILY[family]}
        answers: dict[str, list[Outputs]] = worlds.in_turn(1, {**cases, CLEAN: act})
        peer = reference_outputs(family)
        return {name: shares(result, peer) for name, (result,) in answers.items()}

    return functools.cache(run)


def _marks(family: str) -> list[pytest.MarkDecorator]:
    return [parts.IN_MATRIX] if family != "qwen3_vl" else []


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(family, name, marks=_marks(family)) for family, names in BY_FAMILY.items() for name in names],
)
def test_numbers(errors_of: Callable[[str], dict[str, dict[str, float]]], family: str, name: str) -> None:
    errors = errors_of(family)[name]
    assert errors[NUMBERS[name][1]] > MARGIN, errors


@pytest.mark.parametrize("family", [pytest.param(family, marks=_marks(family)) for family in BY_FAMILY])
def test_numbers_without_a_bug(errors_of: Callable[[str], dict[str, dict[str, float]]], family: str) -> None:
    """Errors use at most half of each bound: other machines round differently."""
    assert max(errors_of(family)[CLEAN].values()) < 0.5


PLACED: dict[str, tuple[Plant, str]] = {  # and the document in which it shows
    "places count patches": (vision_plants.positions_count_patches, "beyond the table"),
    "time counts frames": (vision_plants.time_counts_frames, "a video"),
    "places run over documents": (vision_plants.positions_run_over_documents, ", "),
}


@pytest.mark.parametrize("name", PLACED)
def test_positions(name: str) -> None:
    """RoPE hides positions that continue over documents from the logits."""
    plant, where = PLACED[name]
    wrong = {case for case, num in acted(plant, misplaced).items() if num}
    assert any(where in case for case in wrong), wrong


@dataclass(frozen=True)
class OnRanks:
    """`first`: the first finding of the oracles, or the error of a run that ends early. `images`: which ranks have
    some. `stops`: the error in which the ranks end, if they do."""

    plant: Plant
    mesh: dict[str, int]
    first: str
    images: str = "all"
    stops: str = ""


TP, CP, FSDP, BOTH = dict(tp=2), dict(cp=2), dict(fsdp=2), dict(replicate=2, fsdp=2)
FORWARD = r"D1 layers\.0\.norm: .*\bfirst that is wrong\b"
TWICE = r"G1 \S*visual\S*\.bias: .*\bratio 2\b.*\b2 times too large = {0}\b.*\bover {0}\b"
LOST = r"G1 \S*visual\S*: .*\blost in backward\b"
NO_GRADIENT = r"tower\.patches\.weight has no gradient, like \d+ of \d+ parameters"
RANKS: dict[str, OnRanks] = {
    "biases summed by each rank": OnRanks(vision_plants.biases_summed_twice, TP, TWICE.format("tp")),
    "a bias of every rank": OnRanks(vision_plants.a_bias_of_every_rank, TP, FORWARD),
    "a slice for a sum": OnRanks(vision_plants.a_slice_for_a_sum, TP, LOST),
    "frames shared otherwise": OnRanks(vision_plants.frames_shared_otherwise, TP, FORWARD),
    "rows at other places": OnRanks(vision_plants.rows_at_other_places, TP, FORWARD),
    "images see each other": OnRanks(vision_plants.frames_see_each_other, TP, FORWARD),
    "shares of gradients not summed": OnRanks(vision_plants.shares_not_summed, TP,
        r"G1 \S*visual\S*: .*a sum over tp is missing"),
    "a table without gradient": OnRanks(vision_plants.table_of_zero_gradient, TP,
        r"G1 \S*visual\.pos_embed\.weight: .*\bit is zero\b"),
    "biases summed by each rank of cp": OnRanks(vision_plants.biases_summed_twice, CP, TWICE.format("cp")),
    "a slice for a sum over cp": OnRanks(vision_plants.a_slice_for_a_sum, CP, LOST),
    "rows at other places of cp": OnRanks(vision_plants.rows_at_other_places, CP, FORWARD),
    "replicas summed at the last": OnRanks(vision_plants.replicas_summed_at_the_last, BOTH, rf"RUN .*{NO_GRADIENT}",
        "the first", NO_GRADIENT),
    # Each rank checks the other's next collective first, so this is an error at once. Without `verify` gloo ends a rank
    # whose size differs, and `run_ranks` names where all were.
    "each by its own batch": OnRanks(vision_plants.each_by_its_own_batch, FSDP,
        r"RUN .*\bcollective \d+ of ranks \[0, 1\]: rank \d is at all_gather of \d+ bytes", "one rank",
        r"\brank[s ]*\[?\d\b.*\b(died without an error|waits at FSDP|waited|all_gather)\b"),
}  # fmt: skip
FEW = ("a slice for a sum", "images see each other", "shares of gradients not summed", "each by its own batch")
if not parts.ALL:
    RANKS = {name: RANKS[name] for name in FEW}
COMPARED = [name for name in RANKS if parts.ALL or name in ("a slice for a sum", "each by its own batch")]
AWAY = 1e-2  # least relative error of some gradient; the bound is 1e-9


def _case(bug: OnRanks) -> Case:
    return "qwen3_vl", bug.images, "all", "none"


@functools.cache
def _one_process(source: Path, case: Case, num: int) -> Any:
    """Run the case in one process, on the data of `num` data ranks."""
    return worlds.run(1, steps, source, {}, case, range(num))[0]


def _results(source: Path, group: Sequence[str]) -> dict[str, Any]:
    """Return for each bug of a group its error, or its steps, the steps without a bug, and those of one process."""
    bug, case = RANKS[group[0]], _case(RANKS[group[0]])
    act = functools.partial(steps, source, bug.mesh, case)
    cases = {name: functools.partial(acted, RANKS[name].plant, act) for name in group}
    if not bug.stops:
        alone = _one_process(source, case, bug.mesh.get("fsdp", 1) * bug.mesh.get("replicate", 1))
        answers = worlds.in_turn(world_of(bug.mesh), {**cases, CLEAN: act})
        return {name: (answers[name][0], answers[CLEAN][0], alone) for name in group}
    with pytest.raises(RankError) as error:
        worlds.in_turn(world_of(bug.mesh), cases, seconds=40)
    return {group[0]: str(error.value).replace("\n", " ")}


@pytest.fixture(scope="module")
def results(source: Source) -> Callable[[str], Any]:
    keys = {name: (RANKS[name].mesh, RANKS[name].images) for name in COMPARED}  # at most one of these ends its world
    return worlds.shared(keys, lambda group: _results(source("qwen3_vl"), group))


@pytest.mark.parametrize("name", COMPARED)
def test_ranks(results: Callable[[str], Any], name: str) -> None:
    """A bug that ends the run must do so in time, and say so."""
    if RANKS[name].stops:
        assert re.search(RANKS[name].stops, results(name)), results(name)
        return
    result, clean, alone = results(name)
    assert not differs(clean, alone)
    assert differs(result, alone)
    grads, expected = result[0][2], alone[0][2]
    assert max(off(grads[key], grad) for key, grad in expected.items()) > AWAY


def _findings(source: Path, group: Sequence[str]) -> dict[str, list[str]]:
    """Return the lines that verify prints for each bug."""
    mesh = RANKS[group[0]].mesh
    trial = seeing_trial("qwen3_vl", source, mesh)
    num = 3 if mesh == BOTH else 2  # of three micro-batches the last has no images
    trial = replace(trial, steps=1, draws=False, data=replace(trial.data, num=num))
    try:
        findings = trials.findings_in_turn(dict.fromkeys(group, trial), lambda name: planted(RANKS[name].plant))
    except RankError as error:
        return {name: [f"RUN {error}".replace("\n", " ")] for name in group}
    return {
        name: [str(finding) for row in ROWS for finding in findings[name] if finding.oracle == row] for name in group
    }


@pytest.fixture(scope="module")
def findings(source: Source) -> Callable[[str], list[str]]:
    keys = {name: (bug.mesh, name if bug.stops else "") for name, bug in RANKS.items()}
    return worlds.shared(keys, lambda group: _findings(source("qwen3_vl"), group))


@pytest.mark.parametrize("name", RANKS)
def test_verify_names_the_cause(findings: Callable[[str], list[str]], name: str) -> None:
    lines = findings(name)
    assert lines, "verify reports nothing"
    assert re.match(RANKS[name].first, lines[0]), lines[:3]
