"""The memory of a step: the simulation on the meta device equals what torch counts in a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
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
from meshwright.sharding import GATHERED, GRADIENTS, ShardingSpec
from meshwright.train.config_model import warn_of_memory
from tests import parts, tiny, trials

F32, BF16 = torch.float32, torch.bfloat16
TOKENS = 2048
ALLOWED = 0.02  # the profiler also counts data on the host
ALLOWED_OF = {"ep": 0.06, "selective": 0.06}  # a rank whose experts get more rows than others holds more
CASES = [
    *((name, {}, kind) for name in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, {}, "selective") for name in ("qwen3_moe", "qwen3_5")),
    *((name, dict(tp=2), "selective") for name in ("qwen3_moe", "qwen3")),
    *((name, dict(tp=2), kind) for name in ("qwen3_tied", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, dict(fsdp=2, ep=2), kind) for name in ("qwen3_moe", "qwen3_5_moe") for kind in ("none", "full")),
    *((name, dict(cp=2), "none") for name in ("qwen3", "qwen3_5")),
    *((name, dict(pp=2), kind) for name in ("qwen2", "qwen3_moe") for kind in ("none", "full")),
]


MIXED: dict[str, Any] = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def small(name: str) -> dict[str, Any]:
    """Return a model with one layer of each kind."""
    return tiny.of(name, **(MIXED if name.startswith("qwen3_5") and not parts.ALL else {}))


def case_id(case: Any) -> str:
    name, mesh, kind = case
    return f"{name}-{trials.named(mesh)}-{kind}"


def share_of_counted(config: Mapping[str, Any], mesh: Mapping[str, int], memory: mw.MemoryOptions, *rest: Any) -> float:
    """Divide the simulated bytes by those that torch counts."""
    request = Case(config, mesh, F32, memory, *rest)
    return sum(planned(request).values()) / counted(request)


@pytest.mark.parametrize("case", parts.every(7, CASES, 1), ids=case_id)
def test_simulation_equals_torch(case: tuple[str, Mapping[str, int], str]) -> None:
    name, mesh, kind = case
    allowed = max(ALLOWED, *(ALLOWED_OF.get(each, 0.0) for each in (kind, *mesh)))
    share = share_of_counted(small(name), mesh, mw.MemoryOptions(recompute=kind), TOKENS)
    assert share == pytest.approx(1, abs=allowed)


FEWER_BYTES_SENT = [
    ("qwen3_moe", dict(fsdp=2, ep=2), mw.MemoryOptions(token_once=True)),
    ("qwen3_5_moe", dict(tp=2, ep=2), mw.MemoryOptions("full", token_once=True)),
    ("qwen3", dict(fsdp=2), mw.MemoryOptions(narrow_grads=True)),
]


@pytest.mark.parametrize(("name", "mesh", "memory"), parts.every(3, FEWER_BYTES_SENT), ids=str)
def test_simulation_of_fewer_bytes_sent(name: str, mesh: dict[str, int], memory: mw.MemoryOptions) -> None:
    allowed = ALLOWED_OF["ep"] if "ep" in mesh else ALLOWED
    assert share_of_counted(tiny.of(name), mesh, memory, TOKENS) == pytest.approx(1, abs=allowed)


@pytest.mark.parametrize(("mesh", "mode"), parts.every(2, [({}, "head"), (dict(pp=2), "all")]), ids=str)
def test_simulation_of_an_mtp_head(mesh: dict[str, int], mode: str) -> None:
    memory = mw.MemoryOptions(recompute="full")
    assert share_of_counted(small("qwen3_5_moe"), mesh, memory, TOKENS, 2, mode) == pytest.approx(1, abs=ALLOWED)


LARGE = dict(vocab_size=4096, intermediate_size=512)
FIRST_BACKWARD = [
    ("qwen3", {}, "none", 256), ("qwen3", {}, "full", 64), ("qwen3", dict(pp=2), "none", 256),
    ("qwen3_moe", dict(fsdp=2), "none", 256), ("qwen3_moe", dict(fsdp=2), "full", 64),
    ("qwen3_tied", dict(pp=2), "none", 16), ("qwen3", dict(tp=2), "none", 512),
]  # fmt: skip


@pytest.mark.parametrize(("case", "num_batches"), parts.every(5, product(FIRST_BACKWARD, [1, 2])), ids=str)
def test_gradients_replace_activations(case: tuple[str, dict[str, int], Any, int], num_batches: int) -> None:
    """Gradients take as many bytes as activations where a model has many parameters for its tokens."""
    name, mesh, kind, tokens = case
    memory = mw.MemoryOptions(recompute=kind)
    assert share_of_counted(tiny.of(name, **LARGE), mesh, memory, tokens, num_batches) == pytest.approx(1, abs=0.03)


def test_two_kinds_of_layers_in_turn() -> None:
    """Late layers have gradients while early ones still hold activations."""
    num = 24 if parts.ALL else 8
    config = tiny.of("qwen3_moe", num_hidden_layers=num, mlp_only_layers=[*range(num // 2)], num_experts=64)
    assert share_of_counted(config, {}, mw.MemoryOptions(), 256, 1) == pytest.approx(1, abs=0.05)


def test_zero_bubble_counts_all_gradients() -> None:
    """Their operands are held until the weight gradients are computed."""
    recipe = Recipe(pipeline=mw.Pipeline("zero-bubble"))
    spec = Blueprint.of(tiny.of("qwen3", **LARGE), None, recipe).spec
    held = most_held(spec, Axes(pp=2), 0, replace(passing(num_batches=2), tokens=16))
    local = [param for stage in spec.stages(Axes(pp=2), 0) for unit in stage.units for param in unit.params]
    assert held[GRADIENTS] == 4 * sum(spec.table[name].numel for name in local)


# A few layers of each kind run; the others are extrapolated.


def each_alone(_: object, stage: Any, *_others: object) -> dict[object, list[int]]:
    return {number: [int(number)] for number in stage.module.layers}


@pytest.mark.parametrize("mesh", [{}, dict(pp=2)], ids=str)
def test_frozen_layers_hold_activations_for_earlier_gradients(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before the trained one hold nothing, though equal layers after it do."""
    spec = Blueprint.of(tiny.of("qwen3", num_hidden_layers=12)).spec
    for name, parameter in spec.module.named_parameters():
        parameter.requires_grad_(name.startswith("layers.7.mixer."))
    ranks, work = range(mesh.get("pp", 1)), passing(num_batches=2)
    held = [most_held(spec, Axes(**mesh), rank, work) for rank in ranks]
    monkeypatch.setattr(simulate, "_kinds", each_alone)
    assert held == [most_held(spec, Axes(**mesh), rank, work) for rank in ranks]


@pytest.mark.parametrize(
    ("name", "kind"), parts.every(4, product(["qwen3_moe", "qwen3_5", "qwen3"], ["none", "selective", "full"]))
)
def test_layers_of_a_kind_hold_equal_bytes(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extrapolated bytes equal those of a run of all layers, once all gradients exist."""
    more = dict(num_hidden_layers=6, mlp_only_layers=[1, 4], layer_types=["linear_attention", "full_attention"] * 3)
    config = tiny.of(name)
    spec, work = Blueprint.of({**config, **{k: v for k, v in more.items() if k in config}}).spec, passing(kind)
    several = replace(work, num_batches=2)
    first, second = (most_held(spec, Axes(tp=2), 0, each) for each in (work, several))
    monkeypatch.setattr(simulate, "_kinds", each_alone)
    assert most_held(spec, Axes(tp=2), 0, several) == second
    # the first backward depends on when each layer's gradients are made
    assert sum(most_held(spec, Axes(tp=2), 0, work).values()) == pytest.approx(sum(first.values()), rel=0.03)


def passing(kind: str = "none", num_batches: int = 1, device: str = "cuda") -> StepWork:
    return StepWork(256, num_batches, BF16, mw.MemoryOptions(recompute=kind), device)


# Devices that this machine lacks.

MESHES = [dict(fsdp=2, tp=2), dict(cp=2), dict(fsdp=2, ep=2), dict(pp=2), dict(fsdp=2, cp=2, tp=2, ep=4)]


def test_recomputation_saves_memory_of_gpus() -> None:
    names = ["qwen3", "qwen2", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]
    for name, sizes in product(names, MESHES) if parts.ALL else zip(names, MESHES, strict=True):
        spec = Blueprint.of(tiny.of(name)).spec
        held = {kind: held_by(spec, Axes(**sizes), passing(kind)) for kind in ("none", "selective", "full")}
        # a stage with one layer saves nothing
        assert 0 < held["full"] < 1.01 * held["selective"] < 1.02 * held["none"], (name, sizes, held)


def test_attention_kernels_of_gpus_hold_no_scores() -> None:
    """They hold operands and results."""
    T, heads, kv, K = 100, 8, 2, 16
    q, k, v = (torch.empty(T, n, K, dtype=BF16, device="meta", requires_grad=True) for n in (heads, kv, kv))
    with meta_kernels.planned_for("cuda"), Live([q, k, v]) as live:
        o = mw.ops.attention(q, k, v, mw.ops.documents([60, 40], "meta"))
        assert live.now == T * heads * (K * 2 + 4)
        o.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]  # type: ignore[union-attr]


def test_a_late_schedule_holds_operands_of_weight_gradients() -> None:
    """The last rank holds one micro-batch in 1F1B, and in zero bubble all with pending weight gradients."""
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


def test_simulation_does_not_run_compiled_layers() -> None:
    """A compiled method is bound to its layer, and would run it on its device."""
    plain, compiled = (Blueprint.of(tiny.of("qwen3")).spec for _ in range(2))
    for layer in compiled.module.layers.values():
        layer.run = lambda *_: pytest.fail("the layer itself ran")
    assert held_by(compiled, Axes(), passing()) == held_by(plain, Axes(), passing())


def held_by(spec: ShardingSpec, axes: Axes, work: StepWork, rank: int = 0) -> int:
    return sum(most_held(spec, axes, rank, work).values())


@pytest.mark.parametrize(("num_bytes", "warned"), [(10**9, False), (10**6, True)])
def test_a_run_warns_before_it_loads(
    num_bytes: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters fit, but its activations do not."""
    monkeypatch.setattr(logger, "propagate", True)
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = mw.train.config_of(
        model=str(source), out=str(tmp_path / "out"), data=[{"path": "a.jsonl"}], train={"length": 512}
    )
    memory = Memory(num_bytes, num_bytes, shared=True)
    mesh: Any = SimpleNamespace(rank=0, memory=memory, least_bytes=num_bytes)
    warn_of_memory(config, mesh)
    messages = [record.getMessage() for record in caplog.records if "probably fail" in record.getMessage()]
    assert len(messages) == warned
    assert all("activations" in each and "choose" in each for each in messages)


@pytest.mark.parametrize("pipeline", [mw.Pipeline("v"), mw.Pipeline(stages=2, hold=True), mw.Pipeline(hold=True)])
def test_held_gathers_of_a_pipeline_are_counted(pipeline: mw.Pipeline) -> None:
    """All gathers of all stages of a rank count at every moment."""
    held_pipeline = pipeline if pipeline.hold is not None else replace(pipeline, hold=True)
    blueprint = Blueprint.of(tiny.of("qwen3", num_hidden_layers=8)).with_options(pipeline=held_pipeline)
    axes = Axes(pp=2, fsdp=2)
    held = held_while_training(BF16, frozenset(blueprint.table.params))
    whole = {s.what: s.num_bytes for s in Need(blueprint.spec, axes, held).stored(0)}[GATHERED]
    assert whole <= most_held(blueprint.spec, axes, 0, passing("full", 4))[GATHERED] < 1.5 * whole


def test_offload_is_suggested_only_where_it_fits() -> None:
    blueprint = Blueprint.of(tiny.of("qwen3", num_hidden_layers=8))
    held, work = held_while_training(BF16, frozenset(blueprint.table.params)), passing()
    need = Need(blueprint.spec, Axes(), held, work)
    on_host = replace(work, memory=mw.MemoryOptions(offload=True))
    moved = Need(blueprint.spec, Axes(), replace(held, offload=True), on_host).stored()
    device = sum(s.num_bytes for s in moved if not s.host)
    assert device < sum(s.num_bytes for s in need.stored())
    assert "offload" in ways_out(need, Memory(device, 10**9, shared=False))
    assert "offload" not in ways_out(need, Memory(device - 1, 10**9, shared=False))


def test_no_warning_for_a_model_that_reads_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be simulated, which stops no run."""
    source = tiny.directory(tmp_path / "m", "qwen3")
    config = mw.train.config_of(model=str(source), out=str(tmp_path / "out"), data=[{"path": "a.jsonl"}])
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, tokens, *rest: (int(tokens.max()), forward(self, tokens, *rest))
    )
    mesh: Any = SimpleNamespace(rank=0, memory=Memory(10**6, 10**6, shared=True), least_bytes=10**6)
    warn_of_memory(config, mesh)
