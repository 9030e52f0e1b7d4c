"""The meta copy of a rank's stage: forms of parameters, FSDP's units, which layers run, and when gradients count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.memory import simulate
from meshwright.memory.fsdp_buffers import FsdpBuffers, sharded_units
from meshwright.memory.meta_model import FakeMesh, MetaKernels, Seen, _add_grid, _forms, forward, meta_copy
from meshwright.memory.simulate import ACTIVATIONS, Activations, Peak, StepWork, _Trial, most_held
from meshwright.ops.codings import FP8, NF4
from meshwright.ops.meta_kernels import kind_of
from meshwright.parallel.expert import dispatch
from meshwright.parallel.expert_dedup import dispatch_once
from meshwright.plan.resolve_model import TINY
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import GATHERED, GRADIENTS, Dispatch, Door, Span, Swap, Unit, find_doors
from tests import tiny

BF16, F32 = torch.bfloat16, torch.float32
EXPERTS, HEAD = "layers.1.mlp.experts", "head"


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def in_fp8(**memory: Any) -> Any:
    """Return the model of 131 x 256 embeddings and 4 experts of 256 x 128."""
    return Blueprint.of(TINY["tiny-qwen3-moe-fp8"], None, Recipe(fp8="block", memory=MemoryOptions(**memory))).spec


def sizes_of(spec: Any, axes: Axes, compute: torch.dtype = BF16, **frozen: Any) -> dict[str, tuple[int, int]]:
    [stage] = spec.stages(axes, 0)
    seen = Seen(compute, spec.recipe.memory, {name.replace("__", "."): form for name, form in frozen.items()})
    return {
        unit.name: size
        for unit, size in sharded_units(spec, stage.units, axes, axes.coords(0), seen).items()
        if size[0]
    }


ROWS = 44 * 256 * 3  # of the embedding on three ranks, with padding
OF_EXPERTS = (342 * 256 + 342 * 128) * 3


def test_bytes_of_units_on_three_shards() -> None:
    """All shards count, padded. Matrices whose matmuls are in FP8 arrive as codes, the rest in the compute dtype."""
    sizes = sizes_of(in_fp8(), Axes(fsdp=3))
    assert (sizes["embed"], sizes[EXPERTS]) == ((2 * ROWS, 4 * ROWS), (OF_EXPERTS, 4 * OF_EXPERTS))
    assert sizes_of(in_fp8(), Axes(fsdp=3), F32)["embed"] == (4 * ROWS, 4 * ROWS)
    assert sizes_of(in_fp8(), Axes(fsdp=3), torch.float64)["embed"] == (8 * ROWS, 8 * ROWS)
    wide = sizes_of(in_fp8(offload=True), Axes(fsdp=3))
    assert wide[EXPERTS] == (2 * OF_EXPERTS, 4 * OF_EXPERTS), "a copy from the host loses the codes"


def test_bytes_of_units_on_replicas() -> None:
    """One shard needs no all-gather of codes. A model on one rank is wrapped for offload alone."""
    numel = 4 * 256 * 128 * 3
    sizes = sizes_of(in_fp8(), Axes(replicate=2))
    assert (sizes["embed"], sizes[EXPERTS]) == ((2 * 131 * 256, 4 * 131 * 256), (2 * numel, 4 * numel))
    assert sizes_of(in_fp8(), Axes(tp=2)) == {EXPERTS: (numel, 4 * numel)}, "ranks of tp shard experts alone"
    assert sizes_of(in_fp8(offload=True), Axes())["embed"] == sizes["embed"]


def test_bytes_of_units_with_narrow_gradients_and_frozen_codes() -> None:
    """Two buffers in the compute dtype come on top where it is narrower than float32, on shards only."""
    narrow = in_fp8(narrow_grads=True)
    narrow_sizes = (
        sizes_of(narrow, Axes(fsdp=3)),
        sizes_of(narrow, Axes(fsdp=3), F32),
        sizes_of(narrow, Axes(replicate=2)),
    )
    assert [each["embed"][1] for each in narrow_sizes] == [8 * ROWS, 8 * ROWS, 4 * 131 * 256]
    codes = sizes_of(in_fp8(), Axes(fsdp=3), embed__weight=NF4, head__weight=F32)
    assert codes["embed"][0] == 3 * 44 * (256 // 2 + 256 // 64 * 4)
    assert codes[HEAD][0] == 2 * (ROWS + 3 * 86), "with the norm of 256"


def test_units_leave_out_what_fsdp_ignores() -> None:
    spec, axes = Blueprint.of(tiny.of("qwen3_5_moe")).spec, Axes(fsdp=2)
    [stage] = spec.stages(axes, 0)
    units = sharded_units(spec, stage.units, axes, axes.coords(0), Seen(BF16, MemoryOptions()))
    names = {name for unit in units for name in unit.params}
    assert names == {param.name for param in spec.table if param.in_fsdp} < {*spec.table.params}


def test_options_of_a_meta_copy_are_those_of_the_run() -> None:
    spec, axes = in_fp8(), Axes(fsdp=2, ep=2)
    [stage] = spec.stages(axes, 1)
    for memory, runs, sends in (
        (MemoryOptions("full", token_once=True), True, dispatch_once), (MemoryOptions(), False, dispatch),
    ):  # fmt: skip
        model: Any = meta_copy(spec, stage, FakeMesh(axes, 1), Seen(BF16, memory), [1])
        assert hasattr(model.layers["1"].run, "__self__") != runs, "recompute wraps the method"
        assert [cast(Any, door.armed).func for _, door in find_doors(model, Dispatch)] == [sends]


def test_a_gathered_unit_is_not_prefetched_again() -> None:
    """A unit that stayed gathered after forward needs no buffer, and its gradients belong to one micro-batch."""
    first, second = (Unit(name, (f"{name}.w",), False, again) for name, again in (("a", False), ("b", True)))
    changes = list[tuple[str, int]]()
    buffers = FsdpBuffers(
        torch.nn.Module(), {first: (10, 1), second: (200, 20)}, {}, lambda *change: changes.append(change)
    )
    buffers._before_forward(first)
    buffers._after_forward(first, torch.zeros(1))
    changes.clear()
    buffers._before_backward(second)
    assert changes == [(GATHERED, 200), (GATHERED, 200), (GATHERED, -200)]


@pytest.mark.parametrize(
    ("mesh", "offload", "trained", "frozen", "own"),
    [
        (dict(fsdp=2), False, BF16, BF16, F32),
        (dict(replicate=2), False, BF16, BF16, F32),  # FSDP wraps replicas too
        (dict(cp=2), False, BF16, BF16, F32),
        (dict(tp=2), False, F32, BF16, F32),
        ({}, True, BF16, BF16, F32),
    ],
)
def test_forms_in_which_a_forward_sees_parameters(
    mesh: dict[str, int], offload: bool, trained: torch.dtype, frozen: torch.dtype, own: torch.dtype
) -> None:
    """FSDP gathers the compute dtype. Codes and what FSDP ignores stay as they are stored."""
    spec = Blueprint.of(tiny.of("qwen3_5_moe")).spec
    [stage] = spec.stages(Axes(**mesh), 0)
    kept: dict[str, Any] = {"embed.weight": BF16, "head.weight": FP8}
    forms = dict(_forms(spec, stage, Axes(**mesh), Seen(BF16, MemoryOptions(offload=offload), kept)))
    ignored = {param.name for param in spec.table if not param.in_fsdp}
    assert {forms[name] for name in ignored} == {own}
    assert {forms.pop(name) for name in kept} == {frozen, FP8}
    by_experts: dict[bool, set[object]] = {True: set(), False: set()}
    for name in forms.keys() - ignored:
        by_experts["experts." in name].add(forms[name])
    assert by_experts == {True: {BF16}, False: {trained}}, "ranks of tp shard experts"


def test_a_meta_copy_is_that_of_its_rank() -> None:
    """The second rank of tp, with a frozen parameter, FP8 matmuls, and an embedding in the compute dtype."""
    spec, axes = in_fp8(), Axes(tp=2, fsdp=2)
    [stage] = spec.stages(axes, 1)
    stage.module.get_parameter("embed.weight").requires_grad_(False)
    model = meta_copy(spec, stage, FakeMesh(axes, 1), Seen(BF16, MemoryOptions()), [0])
    params = dict(model.named_parameters())
    assert (params["embed.weight"].requires_grad, params["head.weight"].requires_grad) == (False, True)
    assert {(p.device.type, p.dtype) for p in params.values()} == {("meta", BF16)}
    assert not any(name.startswith("layers.1.") for name in params)
    assert tuple(params["layers.0.mlp.down.weight"].shape) == (256, 128)
    assert cast(Any, model.embed).compute == BF16
    fp8 = {name for name, module in model.named_modules() for _ in getattr(module, "in_fp8", ())}
    assert fp8 == {name.rpartition(".")[0] for name in spec.fp8 if name.startswith("layers.0.")}
    spans = [(span.size, span.start, span.stop) for _, span in find_doors(model, Span)]
    assert {*spans} == {(2, 1, 2), (131, 66, 131)}
    assert all(span.start == 0 for _, span in find_doors(spec.module, Span)), "the original stays whole"


@pytest.mark.parametrize(("form", "tp", "columns"), [(FP8, 1, 256), (FP8, 2, 128), (NF4, 1, 256), (NF4, 2, 128)])
def test_scales_of_codes_on_the_meta_device(form: Any, tp: int, columns: int) -> None:
    """Columns of a rank follow from the bytes of its rows; 4-bit codes have their scales in the row."""
    spec, name = in_fp8(), "layers.0.mlp.down.weight"
    stored = torch.empty(256, form.row_bytes(256) // tp, dtype=torch.uint8, device="meta")
    _add_grid(spec.module, name, spec.table[name], stored, form)
    grid: Any = spec.module.get_submodule("layers.0.mlp.down").grids.pop("weight")
    expected = (1, 1) if form is NF4 else (1, columns)
    assert (tuple(grid.scales.shape), len(grid.rows), len(grid.columns)) == (expected, 256, columns)
    assert grid.coding is form


def trial_with(grads: dict[str, int], made: int) -> Activations:
    """Run a trial whose forward keeps one tensor of 4 bytes, and whose backward counts `made` bytes of gradients."""
    trial = _Trial(fake(parameters=list, layers={}, head=None), Axes(), BF16, {}, grads, carried=False)
    weight = torch.zeros(1, requires_grad=True)
    weight.register_hook(lambda _: trial.live.add(GRADIENTS, made))
    trial._forward = lambda _: weight * 2  # type: ignore[method-assign, assignment]
    return trial.run(8, fake(watch=lambda: None, free_old_flat=lambda: None), 500)


def test_gradients_of_the_vision_tower_count_at_the_end() -> None:
    """It is not in the meta copy. Only the first backward counts gradients; bytes that stay gathered are in all."""
    result = trial_with({"tower.w": 1000, "layers.0.w": 300}, 300)
    assert result.first.parts == {GATHERED: 500, GRADIENTS: 1300}
    assert result.backward.parts[GRADIENTS] == result.forward.parts.get(GRADIENTS, 0) == 0
    assert result.forward.parts[GATHERED] == 500


def test_the_last_layers_of_a_kind_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped layers come before those that run: the last three of each kind run, the last one stands for the rest."""
    seen: dict[str, Any] = {}

    def copied(*args: Any) -> Any:
        seen["numbers"] = args[-1]
        return torch.nn.ModuleDict({"ran": torch.nn.Linear(1, 1)})

    class Trial:
        def __init__(self, *args: Any, carried: bool) -> None:
            seen.update(skipped=args[3], carried=carried, live=0)
            self.live = fake(add=None)

        def run(self, tokens: int, buffers: Any, stay: int) -> Activations:
            seen.update(tokens=tokens, kind=kind_of(torch.device("meta")), stay=stay, units=[*buffers._units])
            return Activations(1, Peak(), Peak(), Peak())

    ran, skipped, freed = (Unit(name, (), False, again) for name, again in (("ran", False), ("x", False), ("y", True)))
    monkeypatch.setattr(simulate, "meta_copy", copied)
    monkeypatch.setattr(simulate, "sharded_units", lambda *_: {ran: (3, 0), skipped: (50, 0), freed: (700, 0)})
    monkeypatch.setattr(simulate, "_grads", lambda *_: {"a": 4, "b": 9})
    monkeypatch.setattr(simulate, "_first", lambda *_: 2)
    monkeypatch.setattr(simulate, "_Trial", Trial)
    kinds: Any = {"k": [0, 2, 3, 5, 8], "l": [1], "m": [4, 6, 7, 9]}
    for number, carried in ((2, False), (3, True)):
        mesh: Any = FakeMesh(Axes(), 0)
        made = simulate._activations(fake(), fake(units=[], number=number), mesh, StepWork(8, kind="xpu"), kinds)
        assert seen["kind"] == "xpu", "kernels are those of the planned device"
        assert (seen["numbers"], seen["skipped"]) == ([1, 3, 5, 6, 7, 8, 9], {0: 8, 2: 8, 4: 9})
        assert (seen["carried"], seen["stay"], seen["units"]) == (carried, 50, [ran])
        assert (made.stays, made.grads) == (53, 13)


def peak_of(stage: Activations, monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, num: int, **recipe: Any) -> Any:
    monkeypatch.setattr(simulate, "_activations", lambda *_: stage)
    spec = Blueprint.of(tiny.of("qwen3"), None, Recipe(pipeline=pipeline, **recipe)).spec
    for name, parameter in spec.module.named_parameters():
        parameter.requires_grad_(not recipe or name.startswith(("layers.1.", "head.")))
    held = most_held(spec, Axes(pp=2), 0, StepWork(8, num))
    return held[GRADIENTS], held[ACTIVATIONS]


def stage_of(kept: int, forward: int, backward: int, first: int, **more: int) -> Activations:
    return Activations(kept, Peak(forward), Peak(backward), Peak(first), **more)


def test_gradients_exist_in_the_first_split_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights are deferred, so which of them exist is unknown: all are counted."""
    stage = stage_of(10, 12, 15, 40, grads=7)
    assert peak_of(stage, monkeypatch, Pipeline("zero-bubble", hold=True), 1) == (7, 15)
    assert peak_of(stage, monkeypatch, Pipeline(hold=True), 1) == (0, 40)


def test_a_stage_without_backward_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage is frozen."""
    assert peak_of(stage_of(10, 12, 15, 40, grads=7), monkeypatch, Pipeline(hold=True), 3, train=["layers.1.*"]) == (
        0,
        12,
    )


@pytest.mark.parametrize(
    ("mesh", "offload", "wrapped"),
    [({}, False, False), ({}, True, True), (dict(tp=2), False, False), (dict(replicate=2), False, True),
     (dict(fsdp=2), False, True), (dict(cp=2), False, True)],
    ids=str,
)  # fmt: skip
def test_the_simulation_has_buffers_for_what_fsdp_wraps(mesh: dict[str, int], offload: bool, wrapped: bool) -> None:
    """FSDP wraps a unit that it shards, one that it only replicates, and one that it offloads."""
    spec, axes = Blueprint.of(tiny.of("qwen3")).spec, Axes(**mesh)
    units = spec.stages(axes, 0)[0].units
    seen = Seen(torch.bfloat16, MemoryOptions(offload=offload))
    assert len(sharded_units(spec, units, axes, axes.coords(0), seen)) == wrapped * len(units)


def test_gradients_reach_the_mtp_head_and_the_layers() -> None:
    """Both scores go backward, as in a step."""
    spec, axes = Blueprint.of(tiny.of("qwen3_5_moe"), None, Recipe(mtp="all")).spec, Axes(cp=2, tp=2)
    [stage] = spec.stages(axes, 0)
    model = meta_copy(spec, stage, FakeMesh(axes, 0), Seen(F32, MemoryOptions()), [0])
    with MetaKernels():
        forward(model, axes, 16).sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not without
    assert any(".mtp." in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(("carried", "compute"), [(True, BF16), (False, F32)])
def test_a_stage_without_embedding_takes_its_part_of_the_stream(
    carried: bool, compute: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the compute dtype. A gradient goes back only if the stage before needs one."""
    given: list[Any] = []
    monkeypatch.setattr(simulate, "forward", lambda *args: given.append(args) or torch.zeros(3))
    model = fake(parameters=list, embed=None, head=True, shape=fake(stream_width=7))
    trial = _Trial(model, Axes(cp=2, tp=3), compute, {}, {}, carried=carried)
    trial._forward(24)
    [(_, axes, num_tokens, x_TD)] = given
    assert (axes, num_tokens) == (Axes(cp=2, tp=3), 24)
    assert (tuple(x_TD.shape), x_TD.dtype, x_TD.requires_grad) == ((4, 7), compute, carried)


@pytest.mark.parametrize(
    ("name", "mesh", "doors"),
    [
        ("qwen3_5_moe", dict(tp=2), [Door]), ("qwen3_5_moe", dict(cp=2), [Door, Swap]),
        ("qwen3_moe", dict(fsdp=2, ep=2), [Dispatch]), ("qwen3_moe", {}, []),
    ],
)  # fmt: skip
def test_doors_of_a_meta_copy_are_armed(name: str, mesh: dict[str, int], doors: list[Any]) -> None:
    spec, axes = Blueprint.of(tiny.of(name)).spec, Axes(**mesh)
    [stage] = spec.stages(axes, 0)
    model = meta_copy(spec, stage, FakeMesh(axes, 0), Seen(BF16, MemoryOptions()), [0, 1])
    for kind in (Door, Swap, Dispatch):
        armed = [door.armed is not None for _, door in find_doors(model, kind)]
        assert any(armed) == (kind in doors), kind
        assert all(door.armed is None for _, door in find_doors(spec.module, kind)), "the original is not"
