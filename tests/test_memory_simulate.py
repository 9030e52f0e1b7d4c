"""The simulated memory of a step: FSDP's buffers, the bytes of live tensors, and the peak over a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.memory import simulate
from meshwright.memory.budget import Need
from meshwright.memory.fsdp_buffers import FsdpBuffers
from meshwright.memory.meta_model import FakeMesh, MetaKernels, _grouped_mm, _is_fresh, _is_meta, _shapes, _written
from meshwright.memory.simulate import ACTIVATIONS, Activations, Live, Peak, StepWork, _grads, _Trial, most_held
from meshwright.recipe import MemoryOptions, Pipeline
from meshwright.sharding import GATHERED, GRADIENTS, IN_FLIGHT, Stored, Unit, piece
from tests import tiny

aten = torch.ops.aten


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_a_peak_with_bytes_of_other_stages() -> None:
    peak = Peak(100, {GATHERED: 10, GRADIENTS: 20, IN_FLIGHT: 3})
    assert peak.plus(7) == Peak(107, peak.parts)
    assert peak.with_gathered(4, 5) == Peak(105, {**peak.parts, GATHERED: 15})
    assert peak.with_gathered(30, 5) == Peak(125, {**peak.parts, GATHERED: 35})
    assert peak.with_grads(8) == Peak(108, {**peak.parts, GRADIENTS: 28})
    assert Peak(9).with_gathered(2, 1).with_grads(4) == Peak(16, {GATHERED: 3, GRADIENTS: 4})


def test_peaks_with_gradients_and_without() -> None:
    """Later micro-batches add their gradients themselves; bytes that skipped layers freed lower only the first peak."""
    live = Live([])
    live.add(GATHERED, 50)
    live.add(GATHERED, -20)
    live.add(GRADIENTS, 100)
    assert live.most == Peak(50, {GATHERED: 50, GRADIENTS: 0})
    assert live.first == Peak(130, {GATHERED: 30, GRADIENTS: 100})
    live.skipped_freed = 60
    live.add(IN_FLIGHT, 40)
    assert live.most == Peak(70, {GATHERED: 30, GRADIENTS: 0, IN_FLIGHT: 40})
    assert live.first.total == 130
    live.add(IN_FLIGHT, 21)
    assert live.first == Peak(131, {GATHERED: 30, GRADIENTS: 100, IN_FLIGHT: 61})
    live.add(IN_FLIGHT, -61)
    assert live.pop_peak().total == 91
    assert live.most == Peak(30, {GATHERED: 30, GRADIENTS: 0, IN_FLIGHT: 0})
    assert live.passing == 0


def test_live_bytes_are_those_of_storages() -> None:
    """Views and in-place operations share memory; a parameter is stored already; a tensor is freed when it dies."""
    weight = meta(11)
    live = Live([weight])
    with live:
        live.add(GATHERED, 1000)
        x = meta(3, 5)
        y = x + 1
        assert live.passing == 2 * 60
        z = x.view(-1).add_(1)
        z.mul_(2)
        weight.view(-1)
        assert live.passing == 2 * 60
        del y
        assert live.passing == 60
        del x
        assert live.passing == 60, "a view keeps the memory"
        del z
        assert (live.passing, live.now) == (0, 1000)
        again = meta(2, 3) * 2, meta(2, 3) * 2  # the second is derived from the first
        assert live.passing == 2 * 24
        del again
        for _ in range(50):  # torch reuses the addresses of storages
            x = meta(3)
            assert live.passing == 12
            del x
    assert live.pop_peak().total >= 1000 + 2 * 60


@pytest.mark.parametrize(
    ("func", "written", "fresh"),
    [
        (aten.mul_.Tensor, "self", False),
        (aten.add.out, "out", False),
        (aten.mul.Tensor, None, True),
        (aten.mm.default, None, True),
        (aten.t.default, None, False),  # a view
        (aten.t_.default, None, False),  # in place, but another shape
        (aten.resize_.default, None, False),
        (aten.max.dim, None, False),  # two results
        (aten.unbind.int, None, False),  # a list
        (aten.sym_size.int, None, False),  # a number
    ],
    ids=str,
)
def test_kinds_of_operations(func: Any, written: str | None, fresh: bool) -> None:
    assert (_written(func), _is_fresh(func)) == (written, fresh)


def test_keys_of_arguments_tell_apart_what_changes_the_result() -> None:
    x = meta(2, 3)
    others = [meta(3, 2), meta(3, 2).t(), meta(2, 3, dtype=torch.bfloat16), torch.empty(2, 3), [x], (x,), (x, x)]
    values = [x, *others, 1, 1.0, True, "1", None, [1], (1,)]
    assert len({_shapes(value) for value in values}) == len(values)
    assert _shapes([x, 1]) == _shapes([meta(2, 3), 1])
    assert [_is_meta(each) for each in (x, meta(0), torch.empty(2), [x], 1)] == [True, False, False, False, False]


def test_replaced_kernels() -> None:
    offs = torch.zeros(4, dtype=torch.int32, device="meta")
    assert _grouped_mm(meta(7, 3), meta(4, 3, 5), offs).shape == (7, 5)
    assert _grouped_mm(meta(7, 3), meta(3, 5), offs).shape == (4, 7, 5)
    x = meta(6)
    with MetaKernels():
        y = torch.ops._c10d_functional.wait_tensor(x)
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata


A, B, C = (Unit(name, (f"{name}.w",), False, again) for name, again in (("a", True), ("b", True), ("c", False)))


class Bytes:
    """The bytes of units a, b and c (gathered 10, 200 and 3000; reduced 1, 20 and 300), and every change of them."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, int]] = []
        sizes = {A: (10, 1), B: (200, 20), C: (3000, 300)}
        self.buffers = FsdpBuffers(torch.nn.Module(), sizes, {"a.w": 5, "b.w": 6, "alone": 7}, self._add)

    def _add(self, what: str, num_bytes: int) -> None:
        self.changes.append((what, num_bytes))

    def of(self, action: Any, *args: Any) -> list[tuple[str, int]]:
        self.changes.clear()
        action(*args)
        return [*self.changes]


def gathered(*changes: int) -> list[tuple[str, int]]:
    return [(GATHERED, change) for change in changes]


def test_buffers_of_fsdp_in_forward_and_backward() -> None:
    """Forward frees a flat buffer when the next unit has arrived. Backward prefetches the unit before."""
    counted = Bytes()
    buffers, no_grad = counted.buffers, torch.zeros(1)
    assert counted.of(buffers._before_forward, A) == gathered(10, 10)
    assert counted.of(buffers._after_forward, A, no_grad) == gathered(-10)
    assert counted.of(buffers._before_forward, B) == gathered(200, -10, 200)
    assert counted.of(buffers._before_forward, B) == []
    assert counted.of(buffers._after_forward, B, (no_grad,)) == gathered(-200)
    assert counted.of(buffers._before_forward, C) == gathered(3000, -200, 3000)
    assert counted.of(buffers._after_forward, C, no_grad) == [], "it stays gathered for backward"
    assert counted.of(buffers.free_old_flat) == gathered(-3000)
    assert counted.of(buffers.free_old_flat) == []
    assert counted.of(buffers._before_backward, C) == gathered(200), "b is prefetched"
    assert counted.of(buffers._before_backward, C) == []
    assert counted.of(buffers._before_backward, B) == gathered(200, -200, 10)
    assert counted.of(buffers._after_forward, B, no_grad) == [], "a recompute leaves it gathered"
    assert counted.of(buffers._before_backward, A) == gathered(10, -10)


def test_buffers_of_gradients() -> None:
    """A unit is reduced when all of its gradients exist, and frees the buffer of the unit before."""
    counted = Bytes()
    buffers, parameter = counted.buffers, torch.nn.Parameter(torch.zeros(1))

    def grad(unit: Unit, num: int) -> list[tuple[str, int]]:
        parameter.grad = torch.zeros(1)
        changes = counted.of(buffers._on_grad, unit, num, parameter)
        assert parameter.grad is None
        return changes

    counted.of(buffers._before_backward, B)
    assert grad(B, 2) == []
    assert grad(B, 2) == [(GATHERED, -200), (IN_FLIGHT, 20), (GRADIENTS, 6)]
    assert grad(A, 1) == [(IN_FLIGHT, -20), (IN_FLIGHT, 1), (GRADIENTS, 5)]
    assert grad(C, 1) == [(IN_FLIGHT, -1), (IN_FLIGHT, 300), (GRADIENTS, 0)]
    assert grad(B, 2) == [], "of another micro-batch"
    parameter.grad = torch.zeros(1)
    assert counted.of(buffers._on_plain_grad, "alone", parameter) == [(GRADIENTS, 7)]
    assert parameter.grad is None
    assert counted.of(buffers._on_plain_grad, "another", parameter) == [(GRADIENTS, 0)]


def test_hooks_reach_the_buffers() -> None:
    """A unit with a trained and a frozen parameter, and a parameter that FSDP ignores."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(3, 1, bias=False)})
    cast(Any, model["a"]).bias.requires_grad_(False)
    unit, changes = Unit("a", ("a.weight", "a.bias"), False, True), list[tuple[str, int]]()
    sizes = {"a.weight": 6, "b.weight": 3}
    buffers = FsdpBuffers(model, {unit: (10, 1)}, sizes, lambda *change: changes.append(change))
    buffers.watch()
    out = model["b"](model["a"](torch.zeros(1, 2)))
    assert changes == gathered(10, 10, -10)
    buffers.free_old_flat()
    changes.clear()
    out.sum().backward()
    assert (GRADIENTS, 3) in changes
    changes.remove((GRADIENTS, 3))  # at any time: no unit waits for it
    assert changes == [*gathered(10, 10, -10, -10), (IN_FLIGHT, 1), (GRADIENTS, 6)]


def test_gradients_of_a_rank() -> None:
    """The bytes are float32, of the rank's own part; offload leaves only those that FSDP ignores."""
    spec = Blueprint.of(tiny.of("qwen3_5_moe")).spec
    mesh = FakeMesh(Axes(fsdp=2, tp=2), 3)
    [stage] = spec.stages(mesh.axes, 3)
    grads = _grads(spec, stage, cast(Any, mesh), StepWork(8))
    assert grads == {p.name: 4 * piece(p, spec.rules, mesh.axes, mesh.coords).numel for p in spec.table}
    offloaded = _grads(spec, stage, cast(Any, mesh), StepWork(8, memory=MemoryOptions(offload=True)))
    assert offloaded == {name: grads[name] for name in grads if not spec.table[name].in_fsdp}
    assert _grads(spec, stage, cast(Any, mesh), StepWork(8, compute=torch.float64)) == {
        n: 2 * b for n, b in grads.items()
    }
    assert offloaded
    frozen = next(iter(grads))
    stage.module.get_parameter(frozen).requires_grad_(False)
    assert _grads(spec, stage, cast(Any, mesh), StepWork(8)).keys() == grads.keys() - {frozen}


def test_layers_of_one_kind_hold_equal_memory() -> None:
    """Kinds differ in shape, in what is trained, in precision, and in whether a gradient passes through."""
    layers = {str(number): torch.nn.Linear(3, 2, device="meta") for number in range(8)}
    layers["2"] = torch.nn.Linear(4, 2, device="meta")
    layers["3"].bias.requires_grad_(False)
    spec, stage = fake(fp8={"layers.4.weight"}), fake(module=fake(layers=layers))
    passes = {f"layers.{number}" for number in range(8) if number != 6}
    kinds = simulate._kinds(spec, stage, passes, {"layers.5.weight": torch.bfloat16})
    assert [*kinds.values()] == [[0, 1, 7], [2], [3], [4], [5], [6]]


def test_skipped_layers_are_placed_where_they_cost_most() -> None:
    """Layers 4 and 5 run. Skipped layers 0 and 2 are like 5, and 1 is like 4."""
    trial: Any = object.__new__(_Trial)
    trial.model, trial.skipped = fake(layers={"4": None, "5": None}), {0: 5, 1: 4, 2: 5}
    trial.layer_bytes = [100, 130, 150]  # layer 4 keeps 30, layer 5 keeps 20
    trial.grads = {"layers.4.w": 1, "layers.5.w": 25, "layers.5.v": 4, "layers.50.w": 999, "head": 7}
    trial._account_for_skipped()
    assert trial.kept == 20 + 30 + 20
    # From the back: 2 adds 29 - 20, 1 adds 1 - 30, 0 adds 29 - 20. So only layer 2 comes before.
    assert trial.at_layer == {2: (20, 29), 0: (50, 30)}
    trial.live = Live([])
    for number in (2, 1, 0):
        trial._on_backward(number)
    assert (trial.live.skipped_freed, trial.live.parts[GRADIENTS]) == (70, 59)
    trial.skipped = {1: 4, 2: 5}
    trial._account_for_skipped()
    assert trial.at_layer == {2: (20, 29), 0: (30, 1)}, "backward reaches the later layer first"
    trial.layer_bytes = [100, 130, 120]  # tables that layer 5 frees at the end
    trial._account_for_skipped()
    assert trial.kept == 30


def stage_of(kept: int, forward: int, backward: int, first: int, **more: int) -> Activations:
    return Activations(kept, Peak(forward), Peak(backward), Peak(first), **more)


@pytest.mark.parametrize(
    ("stage", "num_batches", "peak"),
    [
        # F0 F1 B0 F2 B1 B2: before B0 two micro-batches are kept, in the first backward without gradients.
        (stage_of(10, 12, 15, 40, grads=7), 3, (0, 50)),
        (stage_of(10, 12, 35, 16, grads=7), 3, (7, 45)),  # B1: gradients exist, and the third micro-batch is kept
        (stage_of(10, 90, 15, 16, grads=7), 2, (0, 100)),  # F1: one micro-batch is kept
        (stage_of(10, 90, 15, 16, grads=7), 3, (7, 100)),  # F2: gradients of B0 exist
        (stage_of(10, 12, 35, 16, grads=7), 1, (0, 16)),  # only a first backward
    ],
)
def test_peak_over_a_schedule(
    stage: Activations, num_batches: int, peak: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of two, 1F1B; `peak`: gradients, activations."""
    monkeypatch.setattr(simulate, "_activations", lambda *_: stage)
    spec = Blueprint.of(tiny.of("qwen3")).with_options(pipeline=Pipeline(hold=False)).spec
    held = most_held(spec, Axes(pp=2), 0, StepWork(8, num_batches))
    assert held == {GRADIENTS: peak[0], GATHERED: 0, IN_FLIGHT: 0, ACTIVATIONS: peak[1]}


def test_split_backwards_free_activations_with_the_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "_activations", lambda *_: stage_of(10, 12, 15, 15))
    spec = Blueprint.of(tiny.of("qwen3")).with_options(pipeline=Pipeline("zero-bubble", hold=True)).spec
    peaks = [most_held(spec, Axes(pp=2), 0, StepWork(8, num))[ACTIVATIONS] for num in (9, 18)]
    assert peaks[0] == peaks[1] < 9 * 10


@pytest.mark.parametrize(("hold", "gathered_bytes"), [(True, 5), (False, 0)])
def test_held_parameters_count_in_every_action(
    hold: bool, gathered_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_activations", lambda *_: stage_of(10, 12, 15, 40, grads=7, stays=5 * hold))
    spec = Blueprint.of(tiny.of("qwen3")).with_options(pipeline=Pipeline(hold=hold)).spec
    held = most_held(spec, Axes(pp=2), 1, StepWork(8, 3))
    assert held == {GRADIENTS: 0, GATHERED: gathered_bytes, IN_FLIGHT: 0, ACTIVATIONS: 40}


def key_of(
    layers: Mapping[int, str], *, again: bool = True, carried: bool = True, embed: Any = None, head: Any = None
) -> object:
    module = fake(embed=embed, head=head, layers={str(number): None for number in layers})
    stage = fake(module=module, units=[fake(again=again)])
    kinds: dict[object, list[int]] = {}
    for number, kind in layers.items():
        kinds.setdefault(kind, []).append(number)
    return simulate._cache_key(stage, kinds, carried=carried)


def test_stages_share_a_simulation_only_if_they_hold_equal_memory() -> None:
    plain = key_of({0: "x", 1: "y"})
    assert plain == key_of({6: "x", 7: "y"})
    layers = {0: "x", 1: "y"}
    others = [
        *map(key_of, [{0: "y", 1: "x"}, {0: "x", 1: "x"}, {**layers, 2: "x"}, {0: "x", 1: "x", 2: "y"}, {}]),
        *(key_of(layers, **more) for more in (dict(again=False), dict(carried=False), dict(embed=1), dict(head=1))),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_bytes_of_a_rank_with_the_peak_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation runs once for each place on pp, on its first rank; gradients are at most those of the rank."""
    asked: list[int] = []
    stored = {0: 70, 1: 50, 2: 900, 3: 90}

    def peak(_: Any, __: Any, rank: int, *more: Any) -> dict[str, int]:
        asked.append(rank)
        return {GRADIENTS: 60, GATHERED: 5 + rank, IN_FLIGHT: 0, ACTIVATIONS: 2}

    def upper(_: Any, __: Any, rank: int, *more: Any) -> list[Stored]:
        kinds = [Stored("parameters", 100), Stored(GRADIENTS, stored[rank]), Stored(GRADIENTS, 80, host=True)]
        return [*kinds, Stored(GATHERED, 10**6), Stored(IN_FLIGHT, 10**6)]

    monkeypatch.setattr("meshwright.memory.budget.most_held", peak)
    monkeypatch.setattr("meshwright.memory.budget.storage", upper)
    need = Need(fake(), Axes(pp=2, fsdp=2), fake(), StepWork(8))
    fixed = [Stored("parameters", 100)]
    for rank, grads, gathered_bytes in ((1, 50, 5), (0, 60, 5), (3, 60, 7)):
        kept = [Stored(GRADIENTS, grads), Stored(GRADIENTS, 80, host=True)]
        assert need.stored(rank) == [*fixed, *kept, Stored(GATHERED, gathered_bytes), Stored(ACTIVATIONS, 2)]
    assert asked == [0, 2]
    assert need.stored() == need.stored(2)
    assert Need(fake(), Axes(), fake()).stored(3) == upper(None, None, 3)
