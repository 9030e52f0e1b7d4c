"""What a step holds beside parameters: what is found on the meta device is what torch counts in a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from bench.memory import Case, counted, planned
from bench.scale import QWEN3_5_397B
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.log import logger
from meshwright.memory import simulate
from meshwright.memory.budget import Need, held_while_training, ways_out
from meshwright.memory.simulate import Live, StepWork, most_held
from meshwright.mesh import Memory
from meshwright.models import Decoder
from meshwright.ops import meta_kernels
from meshwright.recipe import Recipe
from meshwright.sharding import GATHERED, GRADIENTS, IN_FLIGHT, ShardingSpec
from meshwright.train.config_model import warn_of_memory
from tests import parts, seeing, tiny, trials

F32, BF16 = torch.float32, torch.bfloat16
TOKENS = 2048
ALLOWED = 0.02  # the profiler counts what the host makes of data too
ALLOWED_OF = {"ep": 0.06, "selective": 0.06}  # a rank whose experts are sent more rows than others holds more
CASES = [
    *((name, {}, kind) for name in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, {}, "selective") for name in ("qwen3_moe", "qwen3_5")),
    *((name, dict(tp=2), "selective") for name in ("qwen3_moe", "qwen3")),
    *((name, dict(tp=2), kind) for name in ("qwen3_tied", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, dict(fsdp=2, ep=2), kind) for name in ("qwen3_moe", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, dict(cp=2), "none") for name in ("qwen3", "qwen3_5")),
    *((name, dict(pp=2), kind) for name in ("qwen2", "qwen3_moe") for kind in ("none", "full")),
]


def case_id(case: Any) -> str:
    name, mesh, kind = case
    return f"{name}-{trials.named(mesh)}-{kind}"


@pytest.mark.parametrize("case", parts.every(5, CASES), ids=case_id)
def test_what_torch_counts(case: tuple[str, Mapping[str, int], str]) -> None:
    name, mesh, kind = case
    case = Case(tiny.of(name), mesh, F32, mw.MemoryOptions(recompute=kind), TOKENS)
    due = sum(planned(case).values())
    allowed = max(ALLOWED, *(ALLOWED_OF.get(each, 0.0) for each in (kind, *mesh)))
    assert due / counted(case) == pytest.approx(1, abs=allowed)


SENT = [
    ("qwen3_moe", dict(fsdp=2, ep=2), mw.MemoryOptions(token_once=True)),
    ("qwen3_5_moe", dict(tp=2, ep=2), mw.MemoryOptions("full", token_once=True)),
    ("qwen3", dict(fsdp=2), mw.MemoryOptions(narrow_grads=True)),
]


@pytest.mark.parametrize(("name", "mesh", "memory"), SENT, ids=str)
def test_what_torch_counts_where_less_is_sent(name: str, mesh: dict[str, int], memory: mw.MemoryOptions) -> None:
    case = Case(tiny.of(name), mesh, F32, memory, TOKENS)
    allowed = ALLOWED_OF["ep"] if "ep" in mesh else ALLOWED
    assert sum(planned(case).values()) / counted(case) == pytest.approx(1, abs=allowed)


LARGE = dict(vocab_size=4096, intermediate_size=512)
COME = [
    ("qwen3", {}, "none", 256), ("qwen3", {}, "full", 64), ("qwen3_moe", dict(fsdp=2), "none", 256),
    ("qwen3", dict(pp=2), "none", 256), ("qwen3_moe", dict(fsdp=2), "full", 64), ("qwen3", dict(tp=2), "none", 512),
    ("qwen3_tied", dict(pp=2), "none", 16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "kind", "tokens"), parts.every(3, COME), ids=str)
@pytest.mark.parametrize("num_batches", [1, 2])
def test_gradients_come_while_activations_go(
    name: str, mesh: dict[str, int], kind: Any, tokens: int, num_batches: int
) -> None:
    """Of models with many parameters for their tokens, whose gradients take as much."""
    case = Case(tiny.of(name, **LARGE), mesh, F32, mw.MemoryOptions(recompute=kind), tokens, num_batches)
    due, found = planned(case), counted(case)
    assert sum(due.values()) / found == pytest.approx(1, abs=0.03)


def test_kinds_of_layers_that_stand_apart() -> None:
    """Those behind have their gradients while those in front still keep what they want for backward."""
    config = tiny.of("qwen3_moe", num_hidden_layers=24, mlp_only_layers=[*range(12)], num_experts=64)
    case = Case(config, {}, F32, mw.MemoryOptions(), 256, 1)
    assert sum(planned(case).values()) / counted(case) == pytest.approx(1, abs=0.05)


def test_where_gradients_of_weights_come_late_all_are_counted() -> None:
    """What they are made of is there until then."""
    recipe = Recipe(pipeline=mw.Pipeline("zero-bubble"))
    spec = Blueprint.of(tiny.of("qwen3", **LARGE), None, recipe).spec
    held = most_held(spec, Axes(pp=2), 0, replace(passing(num_batches=2), tokens=16))
    mine = [param for stage in spec.stages(Axes(pp=2), 0) for unit in stage.units for param in unit.params]
    assert held[GRADIENTS] == 4 * sum(spec.table[name].numel for name in mine)


def test_a_tower_has_gradients_too() -> None:
    blueprint = Blueprint.of(seeing.of("qwen3_vl"), None, Recipe(tower=True))
    held = held_while_training(BF16, frozenset(blueprint.table.params))
    all_at_once, fullest = (
        sum(s.num_bytes for s in Need(blueprint.spec, Axes(), held, each).stored())
        for each in (None, replace(passing(), tokens=16))
    )
    assert all_at_once <= fullest


def test_all_gradients_are_there_in_a_second_micro_batch() -> None:
    blueprint = Blueprint.of(tiny.of("qwen3", **LARGE))
    held = held_while_training(BF16, frozenset(blueprint.table.params))
    first, second = (
        {s.what: s.num_bytes for s in Need(blueprint.spec, Axes(), held, passing(num_batches=num)).stored()}
        for num in (1, 2)
    )
    assert second[GRADIENTS] == 4 * sum(param.numel for param in blueprint.table)
    assert first[GRADIENTS] < second[GRADIENTS]
    assert sum(first.values()) < sum(second.values())


# A few layers of each kind run. The others are added.


def each_alone(_: object, stage: Any, _reached: object) -> dict[object, list[int]]:
    return {number: [int(number)] for number in stage.module.layers}


@pytest.mark.parametrize("mesh", [{}, dict(pp=2)], ids=str)
def test_frozen_layers_keep_what_a_gradient_asks_for(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before what is trained keep nothing, though those behind it have the same in them."""
    spec = Blueprint.of(tiny.of("qwen3", num_hidden_layers=12)).spec
    for name, parameter in spec.module.named_parameters():
        parameter.requires_grad_(name.startswith("layers.7.mixer."))
    ranks, work = range(mesh.get("pp", 1)), passing(num_batches=2)
    held = [most_held(spec, Axes(**mesh), rank, work) for rank in ranks]
    monkeypatch.setattr(simulate, "_kinds", each_alone)
    assert held == [most_held(spec, Axes(**mesh), rank, work) for rank in ranks]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5"])
def test_layers_of_a_kind_hold_the_same(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is to the byte what it is where all layers run, once all gradients are there."""
    more = dict(num_hidden_layers=6, mlp_only_layers=[1, 4], layer_types=["linear_attention", "full_attention"] * 3)
    config = tiny.of(name)
    spec, work = Blueprint.of({**config, **{k: v for k, v in more.items() if k in config}}).spec, passing(kind)
    several = replace(work, num_batches=2)
    first, found = (most_held(spec, Axes(tp=2), 0, each) for each in (work, several))
    monkeypatch.setattr(simulate, "_kinds", each_alone)
    assert most_held(spec, Axes(tp=2), 0, several) == found
    # in the first backward it matters when each layer's gradients come
    assert sum(most_held(spec, Axes(tp=2), 0, work).values()) == pytest.approx(sum(first.values()), rel=0.03)


def passing(kind: str = "none", num_batches: int = 1, device: str = "cuda") -> StepWork:
    return StepWork(256, num_batches, BF16, mw.MemoryOptions(recompute=kind), device)


def test_what_is_freed_is_not_held() -> None:
    known = torch.empty(100, device="meta")
    with Live([known]) as live:
        a = known + 1
        b = a * 2
        assert live.now == 800
        view = b.view(10, 10)
        del a, b
        assert live.now == 400, "a view holds what it looks at"
        del view
        known.mul_(2)
        assert (live.now, live.most.total) == (0, 800)


# Devices that are not here.

MESHES = [dict(fsdp=2, tp=2), dict(cp=2), dict(fsdp=2, ep=2), dict(pp=2), dict(fsdp=2, cp=2, tp=2, ep=4)]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_a_gpu_is_planned_for_on_any_mesh(name: str) -> None:
    for sizes in MESHES:
        spec = Blueprint.of(tiny.of(name)).spec
        held = {kind: held_by(spec, Axes(**sizes), passing(kind)) for kind in ("none", "selective", "full")}
        # of a stage with one layer they save nothing
        assert 0 < held["full"] < 1.01 * held["selective"] < 1.02 * held["none"], (sizes, held)


def test_its_kernels_hold_no_scores() -> None:
    """Of attention they keep operands and results, of the delta rule operands and a system for each chunk."""
    T, heads, kv, K = 100, 8, 2, 16
    q, k, v = (torch.empty(T, n, K, dtype=BF16, device="meta", requires_grad=True) for n in (heads, kv, kv))
    with meta_kernels.planned_for("cuda"), Live([q, k, v]) as live:
        o = mw.ops.attention(q, k, v, mw.ops.documents([60, 40], "meta"))
        assert live.now == T * heads * (K * 2 + 4)
        o.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]  # type: ignore[union-attr]


def test_a_late_schedule_holds_what_gradients_of_weights_need() -> None:
    """The last rank holds one micro-batch in 1F1B, and in zero bubble those whose weight gradients wait."""
    spec = Blueprint.of(tiny.of("qwen3", num_hidden_layers=4)).spec
    work = passing(num_batches=4)
    for rank in (0, 1):
        held = {
            name: held_by(replace(spec, recipe=Recipe(pipeline=mw.Pipeline(name))), Axes(pp=2), work, rank)
            for name in ("1f1b", "zero-bubble")
        }
        one = held_by(spec, Axes(pp=2), passing(), rank)
        assert one < held["1f1b"] <= held["zero-bubble"], (rank, one, held)
    assert held["1f1b"] < held["zero-bubble"], held


def test_a_rank_of_16384_is_planned_in_a_second() -> None:
    spec, began = Blueprint.of(QWEN3_5_397B).spec, time.process_time()
    held = held_by(spec, Axes(fsdp=256, tp=8, ep=64, pp=8), StepWork(8192, 16))
    assert time.process_time() - began < 2
    assert 10**9 < held < 10**12


def test_a_model_that_is_armed_is_planned_as_one_that_is_not() -> None:
    """What is compiled is bound to its layers, and would run these: on their device, and not on paper."""
    fresh, armed = (Blueprint.of(tiny.of("qwen3")).spec for _ in range(2))
    for layer in armed.module.layers.values():
        layer.run = lambda *_: pytest.fail("the layer itself ran")
    assert held_by(armed, Axes(), passing()) == held_by(fresh, Axes(), passing())


def held_by(spec: ShardingSpec, axes: Axes, work: StepWork, rank: int = 0) -> int:
    return sum(most_held(spec, axes, rank, work).values())


def test_it_is_part_of_what_a_rank_needs() -> None:
    blueprint, axes = Blueprint.of(tiny.of("qwen3")), Axes(fsdp=2)
    held = held_while_training(BF16, frozenset(blueprint.table.params))
    most, need = (
        {s.what: s.num_bytes for s in Need(blueprint.spec, axes, held, w).stored()} for w in (None, passing())
    )
    fullest = most_held(blueprint.spec, axes, 0, passing())
    gradients = {GRADIENTS: fullest[GRADIENTS]}
    assert need == {what: most[what] for what in ("parameters", "moments")} | gradients | {
        k: v for k, v in fullest.items() if v
    }
    assert fullest[GRADIENTS] <= most[GRADIENTS]
    assert all(fullest.get(what, 0) <= most[what] for what in (GATHERED, IN_FLIGHT)), "at once there is less"


@pytest.mark.parametrize(("num_bytes", "warned"), [(10**9, False), (10**6, True)])
def test_a_run_is_warned_before_it_loads(
    num_bytes: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters would do, and what passes through them would not."""
    monkeypatch.setattr(logger, "propagate", True)
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = mw.train.config_of(
        model=str(source), out=str(tmp_path / "out"), data=[{"path": "a.jsonl"}], train={"length": 512}
    )
    memory = Memory(num_bytes, num_bytes, shared=True)
    mesh: Any = SimpleNamespace(rank=0, memory=memory, least_bytes=num_bytes)
    warn_of_memory(config, mesh)
    told = [record.getMessage() for record in caplog.records if "probably fail" in record.getMessage()]
    assert len(told) == warned
    assert all("activations" in each and "choose" in each for each in told)
    for changed in (dict(train="*norm*"), dict(dtype="float32"), dict(compiled=True)):  # of which nothing is planned
        caplog.clear()
        warn_of_memory(config.model_copy(update={"train": config.train.model_copy(update=changed)}), mesh)
        assert not caplog.records


@pytest.mark.parametrize("pipeline", [mw.Pipeline("v"), mw.Pipeline(stages=2, hold=True), mw.Pipeline(hold=True)])
def test_what_a_pipeline_holds_is_there_at_every_moment(pipeline: mw.Pipeline) -> None:
    """Of all stages of the rank: no less than all that they gather."""
    blueprint, axes = (
        Blueprint.of(tiny.of("qwen3", num_hidden_layers=8)).with_options(pipeline=pipeline),
        Axes(pp=2, fsdp=2),
    )
    if pipeline.hold is None:
        blueprint = blueprint.with_options(pipeline=replace(pipeline, hold=True))
    held = held_while_training(BF16, frozenset(blueprint.table.params))
    whole = {s.what: s.num_bytes for s in Need(blueprint.spec, axes, held).stored(0)}[GATHERED]
    assert whole <= most_held(blueprint.spec, axes, 0, passing("full", 4))[GATHERED] < 1.5 * whole


def test_offload_is_a_way_out_by_its_own_figures() -> None:
    blueprint = Blueprint.of(tiny.of("qwen3", num_hidden_layers=8))
    held, work = held_while_training(BF16, frozenset(blueprint.table.params)), passing()
    need = Need(blueprint.spec, Axes(), held, work)
    on_host = replace(work, memory=mw.MemoryOptions(offload=True))
    moved = Need(blueprint.spec, Axes(), replace(held, offload=True), on_host).stored()
    device = sum(s.num_bytes for s in moved if not s.host)
    assert device < sum(s.num_bytes for s in need.stored())
    assert "offload" in ways_out(need, Memory(device, 10**9, shared=False))
    assert "offload" not in ways_out(need, Memory(device - 1, 10**9, shared=False))


def test_a_model_that_reads_values_is_not_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of it before it runs, and that stops no run."""
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = mw.train.config_of(model=str(source), out=str(tmp_path / "out"), data=[{"path": "a.jsonl"}])
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, tokens, *rest: (int(tokens.max()), forward(self, tokens, *rest))
    )
    mesh: Any = SimpleNamespace(rank=0, memory=Memory(10**6, 10**6, shared=True), least_bytes=10**6)
    warn_of_memory(config, mesh)
