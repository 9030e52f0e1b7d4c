"""Every bug of tests/vision_plants.py is found by the comparison that is meant to find it, and by how far.

What a tower computes is compared with transformers in float32, what ranks do with one process in float64. The figures
are shares of what is allowed: above 1 something is wrong. Beside each group stands what nothing is planted in.
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
from tests.test_vision import Said, otherwise_placed, ours, shares, theirs
from tests.test_vision_meshes import Case, differs, off, seen_by, steps
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
    "pictures of a size exchanged": (vision_plants.pictures_of_a_size_exchanged, "rows 0"),
    "features a layer late": (vision_plants.features_a_layer_late, "logits"),
    "features reversed": (vision_plants.features_reversed, "logits"),
    "places count patches": (vision_plants.positions_count_patches, "logits"),
    "time counts frames": (vision_plants.time_counts_frames, "logits"),
    "a table without gradient": (vision_plants.table_of_zero_gradient, "gradients"),
    "words of places are trained": (vision_plants.places_train_their_word, "the words of places"),
}
FEATURES = ("features a layer late", "features reversed")  # which Qwen3.5 has not
BY_FAMILY = {"qwen3_vl": [*NUMBERS], "qwen3_5": [name for name in NUMBERS if name not in FEATURES]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    at = tmp_path_factory.mktemp("seeing")
    return functools.cache(lambda family: seeing.directory(at / family, family))


def acted(plant: Plant, act: Callable[[], Any]) -> Any:
    with planted(plant):
        return act()


@pytest.fixture(scope="module")
def found_in(source: Source) -> Callable[[str], dict[str, dict[str, float]]]:
    """By family and bug: how far off each comparison is. What nothing is planted in comes last."""

    def run(family: str) -> dict[str, dict[str, float]]:
        act = functools.partial(ours, source(family))
        cases = {name: functools.partial(acted, NUMBERS[name][0], act) for name in BY_FAMILY[family]}
        answers: dict[str, list[Said]] = worlds.in_turn(1, {**cases, CLEAN: act})
        peer = theirs(family)
        return {name: shares(mine, peer) for name, (mine,) in answers.items()}

    return functools.cache(run)


def _marks(family: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if family != "qwen3_vl" else []


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(family, name, marks=_marks(family)) for family, names in BY_FAMILY.items() for name in names],
)
def test_numbers(found_in: Callable[[str], dict[str, dict[str, float]]], family: str, name: str) -> None:
    found, meant = found_in(family)[name], NUMBERS[name][1]
    assert found[meant] > MARGIN, found


@pytest.mark.parametrize("family", [pytest.param(family, marks=_marks(family)) for family in BY_FAMILY])
def test_numbers_without_a_bug(found_in: Callable[[str], dict[str, dict[str, float]]], family: str) -> None:
    """Half of what is allowed is left for rounding on other machines."""
    assert max(found_in(family)[CLEAN].values()) < 0.5


PLACED: dict[str, tuple[Plant, str]] = {  # and the document in which it shows
    "places count patches": (vision_plants.positions_count_patches, "beyond the table"),
    "time counts frames": (vision_plants.time_counts_frames, "a video"),
    "places run over documents": (vision_plants.positions_run_over_documents, ", "),
}


@pytest.mark.parametrize("name", PLACED)
def test_positions(name: str) -> None:
    """Documents that go on where the last one ended look right alone, and RoPE hides it from the logits."""
    plant, where = PLACED[name]
    wrong = {case for case, num in acted(plant, otherwise_placed).items() if num}
    assert any(where in case for case in wrong), wrong


@dataclass(frozen=True)
class OnRanks:
    """`first`: the first finding of the oracles, or what is said where no rank gets to the end. `seen`: who has
    pictures. `stops`: what one process is not compared with, since the ranks end in an error."""

    plant: Plant
    mesh: dict[str, int]
    first: str
    seen: str = "all"
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
    "pictures see each other": OnRanks(vision_plants.frames_see_each_other, TP, FORWARD),
    "shares of gradients not summed": OnRanks(
        vision_plants.shares_not_summed, TP, r"G1 \S*visual\S*: .*a sum over tp is missing"
    ),
    "a table without gradient": OnRanks(
        vision_plants.table_of_zero_gradient, TP, r"G1 \S*visual\.pos_embed\.weight: .*\bit is zero\b"
    ),
    "biases summed by each rank of cp": OnRanks(vision_plants.biases_summed_twice, CP, TWICE.format("cp")),
    "a slice for a sum over cp": OnRanks(vision_plants.a_slice_for_a_sum, CP, LOST),
    "rows at other places of cp": OnRanks(vision_plants.rows_at_other_places, CP, FORWARD),
    "replicas summed at the last": OnRanks(
        vision_plants.replicas_summed_at_the_last, BOTH, rf"RUN .*{NO_GRADIENT}", "the first", NO_GRADIENT
    ),
    # Each rank asks the other for its next collective before it goes there, so this is an error at once. Without
    # `verify` gloo ends a rank where the sizes of the two differ, and `run_ranks` says where all were.
    "each by its own batch": OnRanks(
        vision_plants.each_by_its_own_batch, FSDP,
        r"RUN .*\bcollective \d+ of ranks \[0, 1\]: rank \d is at all_gather of \d+ bytes", "one rank",
        r"\brank[s ]*\[?\d\b.*\b(died without an error|waits at FSDP|waited|all_gather)\b",
    ),
}  # fmt: skip
LATER = {"a table without gradient", "each by its own batch", *(name for name, bug in RANKS.items() if bug.mesh == CP)}
AWAY = 1e-2  # of the norm of some gradient, at least, where 1e-9 is allowed


def _case(bug: OnRanks) -> Case:
    return "qwen3_vl", bug.seen, "all", "none"


def _groups() -> list[list[str]]:
    """Bugs of one mesh share a world. Of those that end it there is one a mesh."""
    of_mesh: dict[str, list[str]] = {}
    for name, bug in RANKS.items():
        of_mesh.setdefault(f"{bug.mesh} {bug.seen} {name in LATER}", []).append(name)
    return [*of_mesh.values()]


@functools.cache
def _one_process(source: Path, case: Case, num: int) -> Any:
    """On the data of so many data ranks."""
    return worlds.run(1, steps, source, {}, case, range(num))[0]


def _gone(source: Path, group: Sequence[str]) -> dict[str, Any]:
    """Two steps of each bug of a group, or the error; what nothing is planted in; and one process."""
    bug, case = RANKS[group[0]], _case(RANKS[group[0]])
    act = functools.partial(steps, source, bug.mesh, case)
    cases = {name: functools.partial(acted, RANKS[name].plant, act) for name in group}
    alone = _one_process(source, case, bug.mesh.get("fsdp", 1) * bug.mesh.get("replicate", 1))
    if not bug.stops:
        found = worlds.in_turn(world_of(bug.mesh), {**cases, CLEAN: act})
        return {name: (found[name][0], found[CLEAN][0], alone) for name in group}
    clean = worlds.run(world_of(bug.mesh), act)[0]
    try:
        worlds.in_turn(world_of(bug.mesh), cases, seconds=40)
        said = CLEAN
    except RankError as error:
        said = str(error).replace("\n", " ")
    return {group[0]: (said, clean, alone)}


@pytest.fixture(scope="module")
def gone(source: Source) -> Callable[[str], Any]:
    return worlds.Shared(_groups(), lambda group: _gone(source("qwen3_vl"), group))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATER)) for n in RANKS])
def test_ranks(gone: Callable[[str], Any], name: str) -> None:
    """Two steps in float64. A bug that ends the run must do so in time, and say so."""
    found, clean, alone = gone(name)
    assert not differs(clean, alone)
    if RANKS[name].stops:
        assert re.search(RANKS[name].stops, found), found
        return
    assert differs(found, alone)
    first, due = found[0][2], alone[0][2]
    assert max(off(first[key], grad) for key, grad in due.items()) > AWAY


def _lines(source: Path, name: str) -> list[str]:
    """What the oracles print of it."""
    bug = RANKS[name]
    tried = replace(seen_by("qwen3_vl", source, bug.mesh), steps=1, draws=False)
    try:
        found = trials.findings_in_turn({name: tried}, lambda _: planted(bug.plant))[name]
    except RankError as error:
        return [f"RUN {error}".replace("\n", " ")]
    return [str(finding) for row in ROWS for finding in found if finding.oracle == row]


NAMED = ("each by its own batch", "pictures see each other", "shares of gradients not summed")  # others: slow, in CI
TOLD = [name for name, bug in RANKS.items() if bug.mesh != CP or parts.ALL]  # the plants of cp are those of tp


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in NAMED)) for n in TOLD])
def test_the_cause_is_named(source: Source, name: str) -> None:
    """By the oracles of `verify`, on its data."""
    lines = _lines(source("qwen3_vl"), name)
    assert lines, "nothing was found"
    assert re.match(RANKS[name].first, lines[0]), lines[:3]
