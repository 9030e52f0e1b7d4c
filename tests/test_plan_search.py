"""`meshwright plan --search` lists the quickest meshes that fit, or the nearest one if none fits."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.cli import main
from meshwright.parallel import mark
from meshwright.plan import Cluster, Figures, Search, objections, search, step_time, work_of
from meshwright.plan.figures import RankMemory
from meshwright.plan.least_memory import LeastMemory
from meshwright.plan.one_of_each_layer import hold_options, one_of_each_layer, quick_estimate
from meshwright.plan.search import (
    Candidate,
    Cut,
    SearchRequest,
    SearchResult,
    Size,
    Variant,
    _drop_slow_replicas,
    _Estimated,
    cuts,
)
from meshwright.plan.step_time import estimate
from meshwright.plan.terminal import command
from meshwright.recipe import ContextParallel, MemoryOptions, Pipeline, Recipe
from meshwright.sharding import Stored
from tests import parts, tiny
from tests.test_plan import QWEN3_30B_A3B, QWEN3_235B_A22B, planned
from tests.test_plan_pipeline import QWEN3_8B
from tests.words import words

Capture = pytest.CaptureFixture[str]
GB = 10**9
H100 = Cluster()
SHALLOW = {**QWEN3_30B_A3B, "num_hidden_layers": 4}
DENSE = {**QWEN3_8B, "num_hidden_layers": 2}


def written(path: Path, config: dict[str, Any]) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def request(num: int = 8, device: int = 80 * GB, tokens: int = 8192, **options: Any) -> SearchRequest:
    return SearchRequest("it", Size(num, 8, tokens, num * tokens), "H100", device, H100, **options)


def search_of(
    config: dict[str, Any], num: int, device: int, memory: MemoryOptions = MemoryOptions(), **options: Any
) -> SearchResult:
    blueprint = Blueprint.of(config, None, Recipe(memory=memory))
    return Search(blueprint, request(num, device, **options), lambda _: None).run()


MESHES = [
    dict(fsdp=8), dict(fsdp=4, tp=2), dict(replicate=2, fsdp=8, tp=2, ep=4), dict(fsdp=8, cp=2, ep=8), dict(tp=2, cp=4),
]  # fmt: skip


PRICED = [
    (kind, name)
    for name, kinds in {
        "qwen3_moe": ("none", "full"),
        "qwen3_5_moe": ("full", "none"),
        "qwen3_tied": ("none", "full"),
    }.items()
    for kind in kinds
]


@pytest.mark.parametrize(("kind", "name"), parts.every(2, PRICED))
def test_first_price_equals_estimate_of_all_layers(kind: str, name: str) -> None:
    """One layer of each kind is priced and multiplied. Only the last gradient reductions are left out."""
    blueprint = Blueprint.of(tiny.of(name))
    memory = MemoryOptions(kind, token_once=kind == "full", narrow_grads=kind == "full")
    model = one_of_each_layer(blueprint)
    assert sum(model.num.values()) == blueprint.table.num_layers
    for mesh in parts.every(2, MESHES, kind == "full"):
        axes = Axes(**mesh)
        figures = Figures("it", blueprint.with_options(memory=memory), axes, work_of(axes, None, 3), cluster=H100)
        mark(model.blueprint.module, memory)
        first = quick_estimate(model, axes, figures.work, memory, H100)
        assert first.seconds == pytest.approx(estimate(figures).seconds, rel=2e-2), mesh
        moved = {w.what: w.seconds for w in first.waits if not w.what.startswith("last")}
        assert moved == pytest.approx({w.what: w.seconds for w in estimate(figures).waits if w.what in moved}), mesh
        stored = sum(s.num_bytes for s in figures.most.stored if s.what in ("parameters", "gradients", "moments"))
        assert 16 * LeastMemory(blueprint, 8192, 4).elements(axes) <= stored, "float32, gradients and moments"


def test_first_price_of_a_pipeline_is_within_10_percent() -> None:
    blueprint = Blueprint.of(QWEN3_8B).with_options(pipeline=Pipeline(hold=True))
    for axes in (Axes(pp=4, fsdp=8), Axes(pp=2, fsdp=2, tp=4), Axes(pp=8, tp=4)):
        figures = Figures("it", blueprint, axes, work_of(axes, None, 32), 80 * GB, cluster=H100)
        first = quick_estimate(one_of_each_layer(blueprint), axes, figures.work, hold_options(MemoryOptions()), H100)
        assert first.seconds == pytest.approx(estimate(figures).seconds, rel=0.1), axes


def test_least_memory_is_a_lower_bound() -> None:
    """A search drops meshes whose lower bound does not fit. The bound must also be close."""
    blueprint = Blueprint.of(SHALLOW)
    least, shares = LeastMemory(blueprint, 8192, 4), dict[str, list[float]]()
    meshes = ((dict(fsdp=8), 1), (dict(cp=8, ep=8), 2), (dict(fsdp=2, tp=4, ep=8), 4))
    for (mesh, num), recompute in parts.every(4, product(meshes, ("none", "selective", "full"))):
        axes, memory = Axes(**mesh), MemoryOptions(recompute)
        figures = Figures("it", blueprint.with_options(memory=memory), axes, work_of(axes, 8192, num), cluster=H100)
        share = least.num_bytes(axes, num, memory, holds=False) / figures.most.device_bytes
        shares.setdefault(recompute, []).append(share)
    for num, hold in ((2, False), (6, True)):
        axes, piped = Axes(pp=2, fsdp=4), blueprint.with_options(pipeline=Pipeline(hold=hold))
        figures = Figures("it", piped, axes, work_of(axes, 8192, num), cluster=H100)
        shares["none"].append(least.num_bytes(axes, num, MemoryOptions(), holds=hold) / figures.most.device_bytes)
    assert all(0.25 < share <= 1 for of_kind in shares.values() for share in of_kind), shares
    assert min(shares["none"]) > 0.5, shares


def test_search_reports_progress_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SECONDS_BETWEEN_LINES", 0.0)
    lines = list[str]()
    result = Search(Blueprint.of(DENSE), request(2, 6 * GB, top=1), lines.append).run()
    shares = [int(line.partition("%")[0]) for line in lines]
    assert shares == sorted(shares)
    assert "none fits yet" in lines[0]
    last = words(r"^\d+% done", r"\d+ meshes costed in full", r"the best so far: tp=2, \S+ s a step")
    assert re.search(last, lines[-1]), lines[-1]
    assert result.num_in_full < 12, "meshes that cannot fit are not costed"


def test_a_plan_that_does_not_fit_suggests_a_mesh_of_equal_size(tmp_path: Path, capsys: Capture) -> None:
    at = written(tmp_path / "a.json", tiny.of("qwen3", num_hidden_layers=4, hidden_size=256, intermediate_size=512))
    more = ["--device", "380MB", "--tokens", "16384"]
    code, out, _ = planned(capsys, at, "--mesh", "fsdp=4", *more)
    chosen = re.search(r"choose (--mesh .*?) \(the same 4 ranks\)", " ".join(out.split()))
    assert code == 1
    assert chosen, out
    code, out, _ = planned(capsys, at, *chosen[1].split(), *more)
    assert code == 0, out


def test_candidate_meshes() -> None:
    """16 ranks in nodes of 4 take a model of 12 layers, 2 kv heads, 4 heads and 8 experts."""
    config = tiny.of("qwen3_moe", num_hidden_layers=12)
    blueprint = Blueprint.of(config)
    size = Size(16, 4, 4096, 16 * 4096)
    candidates = cuts(blueprint, size, mw.AdamW())
    assert all(objections(blueprint, asdict(cut.axes), cut.num_batches) == [] for cut in candidates)
    assert {cut.axes.pp for cut in candidates} == {1, 2, 4, 8}
    assert {cut.axes.ep for cut in candidates} == {1, 2, 4, 8}
    assert {cut.axes.tp for cut in candidates} == {1, 2, 4}
    three = cuts(Blueprint.of(tiny.of("qwen3")), Size(3, 8, 4096, 3 * 4096), mw.AdamW())
    assert {str(cut.axes) for cut in three} == {"fsdp=3"}, "two layers, four heads; cp is a power of two"


def test_first_result_is_the_quickest_of_all_meshes() -> None:
    """All possible meshes are costed in full. None that fits is quicker than the first result."""
    config = tiny.of("qwen3", num_hidden_layers=4, hidden_size=512, intermediate_size=512)
    blueprint = Blueprint.of(config)
    every = [
        Figures("it", blueprint, cut.axes, work_of(cut.axes, 8192, cut.num_batches), 10**9, cluster=H100)
        for cut in cuts(blueprint, Size(4, 8, 8192, 4 * 8192), mw.AdamW())
    ]
    device = sorted(figures.most.num_bytes for figures in every)[len(every) // 2]  # half of them fit
    quickest = min(estimate(each).seconds for each in every if each.most.num_bytes <= device)
    result = search_of(config, 4, device)
    best = [candidate.estimate.seconds for candidate in result.best]
    assert len(best) == 5
    assert best == sorted(best)
    assert best[0] <= 1.01 * quickest, "replicas that are quicker by less are not worth their memory"
    assert all(candidate.figures.fits and candidate.left_bytes >= 0 for candidate in result.best)
    assert result.num_meshes == len(every)


def test_search_offloads_only_where_nothing_else_fits() -> None:
    assert not any(c.figures.memory.offload for c in search_of(DENSE, 2, 70 * GB, top=1).best)
    result = search_of(DENSE, 2, 5 * GB, top=1)
    assert result.best
    assert all(c.figures.memory.offload for c in result.best)
    assert result.num_too_large == result.num_meshes


def test_search_counts_activations_as_stored_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a mesh that recomputes fits the activations that the test adds."""
    config, known = tiny.of("qwen3"), vars(Figures)["memories"].func
    activations = {"none": 60_000_000, "selective": 40_000_000, "full": 2_000_000}

    def memories(self: Figures) -> list[RankMemory]:
        more = Stored("activations", activations[self.memory.recompute])
        return [replace(m, stored=(*(s for s in m.stored if s.what != more.what), more)) for m in known(self)]

    monkeypatch.setattr(Figures, "memories", property(memories))
    monkeypatch.setattr(step_time, "HOST", dict.fromkeys(activations, (0.0, 0.0)))
    assert {c.figures.memory.recompute for c in search_of(config, 2, 50_000_000, top=1).best} == {"selective"}
    monkeypatch.undo()
    monkeypatch.setattr(Figures, "memories", property(memories))
    [first] = search_of(config, 2, 50_000_000, top=1).best
    assert first.figures.memory.recompute == "full", "full recomputation takes the host less time than selective"


def test_search_results_equal_their_plans(tmp_path: Path, capsys: Capture) -> None:
    """`meshwright plan` with the printed command gives the same bytes and the same time."""
    at = written(tmp_path / "8b.json", {**QWEN3_8B, "num_hidden_layers": 4})
    more = [
        "--sea=8",
        "--top",
        "2",
        "--device",
        "H100",
        "--tokens",
        "4096",
        "--state-dtype",
        "bfloat16",
        "--between",
        "25",
    ]
    more += ["--json", "--offl"]
    code, out, _ = planned(capsys, at, *more)
    assert code == 0
    result = json.loads(out)
    assert (result["ranks"], result["global_tokens"], len(result["best"])) == (8, 8 * 4096, 2)
    for best in result["best"]:
        program, *arguments = shlex.split(best["command"])
        assert program == "meshwright"
        assert main([*arguments, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["estimate"] == best["estimate"]
        assert plan["memory"][0]["bytes"] == best["bytes"]
        assert plan["mesh"] == best["mesh"]
        assert plan["savings"] == best["savings"]
    seconds = [best["estimate"]["seconds"] for best in result["best"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("columns", parts.every(2, [80, 120]))
def test_table_fits_the_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.json", SHALLOW)
    options = ["--global-tokens", "1048576", "--top", "3"]
    code, out, _ = planned(capsys, "a.json", "--search", "8", "--device", "H100", *options)
    assert code == 0
    *text, last = out.rstrip().splitlines()
    assert max(map(len, text)) <= columns
    assert last.startswith("  meshwright plan a.json --device H100 --mesh ")
    text_of_table = " ".join(out.split())
    expected = [
        "a.json on 8 ranks of H100", "1,048,576 tokens a step", "meshes possible", "FSDP +bubble",
        r"[1-3] .*micro-batch",
        r"waits \d+% of a step for|hardly waits", "than (in )?the first|as fast as",
        "Estimated for nodes of 8",
    ]  # fmt: skip
    assert re.search(words(*expected), text_of_table), text_of_table
    assert len(re.findall(r"^ \d \w+=", out, re.MULTILINE)) == 3


def test_search_names_the_nearest_mesh_where_none_fits(tmp_path: Path, capsys: Capture) -> None:
    at = written(tmp_path / "a.json", DENSE)
    code, out, _ = planned(capsys, at, "--search", "2", "--device", "100MB", "--top", "1")
    message = " ".join(out.split())
    assert code == 1
    expected = [
        "none fits 100 MB",
        r"The nearest is .*offload=True",
        "which is .* too much, most of it",
        "To fit, choose",
    ]
    assert re.search(words(*expected), message), message


REFUSED = [
    (["--search", "8", "--device", "H100", "--global-tokens", "9000"], r"9000 is not a multiple of the 8192\b.*16384$"),
    (["--search", "5", "--device", "H100", "--global-tokens", "8192"], r"no mesh of 5 ranks\b.*such as 8\b"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_search_refuses_other_options(capsys: Capture, options: list[str], message: str) -> None:
    code, out, err = planned(capsys, "tiny-qwen3", *options)
    assert (code, out) == (2, "")
    assert re.search(message, " ".join(err.split())), err


def test_search_keeps_the_requested_schedule() -> None:
    config = tiny.of("qwen3", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096)
    blueprint = Blueprint.of(config).with_options(pipeline=Pipeline("v"))
    result = Search(blueprint, request(4, top=2), lambda _: None).run()
    schedules = {(c.figures.axes.pp > 1, c.figures.blueprint.recipe.pipeline.schedule) for c in result.best}
    assert schedules == {(True, "v"), (False, "1f1b")}


def test_command_states_the_chosen_hold() -> None:
    axes = Axes(pp=2, fsdp=4)
    blueprint = Blueprint.of(QWEN3_8B, None, Recipe(memory=MemoryOptions("full")))
    figures = Figures("a model", blueprint, axes, work_of(axes, None, 2), cluster=H100)
    mesh = "meshwright plan 'a model' --mesh pp=2,fsdp=4 --tokens 8192 --micro-batches 2 --recompute full"
    for hold, option in ((None, ""), (True, " --hold"), (False, " --no-hold")):
        line = command(Candidate(figures, hold), request(words=("meshwright", "plan", "a model")))
        assert line == mesh + option


def test_context_options_restrict_the_search_to_cp() -> None:
    blueprint = Blueprint.of(QWEN3_8B).with_options(context=ContextParallel(attention=2))
    candidates = cuts(blueprint, Size(8, 8, 8192, 64 * 8192), mw.AdamW())
    assert {cut.axes.cp for cut in candidates} == {2, 4, 8}
    assert {cut.axes.pp for cut in candidates} > {1, 2}


@pytest.mark.slow
@parts.IN_MATRIX
@pytest.mark.timeout(600)  # others may use the machine
def test_searches_end_within_a_minute_of_a_cpu() -> None:
    """Hardly any mesh fits 64 ranks, and the search costs many in full."""
    results = []
    for num, tokens, limit in ((1024, 8192, 60), (64, 32768, 40)):
        began, asked = time.process_time(), request(num, tokens=tokens, top=5)
        results.append(Search(Blueprint.of(QWEN3_235B_A22B), asked, lambda _: None).run())
        assert time.process_time() - began < limit
        assert results[-1].best, "a few where the machine is slow: a search ends after half a minute"
    assert results[0].num_meshes > 1000
    assert str(results[1].best[0].figures.axes) == "fsdp=16 cp=4 ep=2"


@pytest.mark.parametrize(("seconds", "kept"), [(1.0, [1]), (0.98, [1, 2]), (0.995, [1])])
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_more_replicas_must_be_faster(order: tuple[int, int], seconds: float, kept: list[int]) -> None:
    """Whichever mesh is listed first; another tp is another mesh."""
    made = {1: _Estimated(1.0, 0, Cut(Axes(fsdp=8), 1), Variant(MemoryOptions()))}
    made[2] = replace(made[1], seconds=seconds, cut=Cut(Axes(replicate=2, fsdp=4), 1))
    other = replace(made[1], seconds=9.0, cut=Cut(Axes(replicate=2, fsdp=2, tp=2), 1))
    left = _drop_slow_replicas([made[order[0]], other, made[order[1]]])
    assert sorted(each.cut.axes.replicate for each in left if each is not other) == kept
    assert any(each is other for each in left)
