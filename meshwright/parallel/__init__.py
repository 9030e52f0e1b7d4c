"""The only place that knows the order in which parallelisms compose.

1. tell the model its ranges; then for each pipeline stage of this rank: 2. cut every parameter to what tp and ep give;
3. arm the doors, and let layers recompute; 4. store what is left in shards (FSDP2), on the device or in host memory;
5. have FSDP gather in 8 bits what products take in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..axes import DENSE, REPLICA, TOKENS, Axes
from ..errors import LayoutError
from ..mesh import Mesh
from ..sharding import (
    ShardingSpec,
    Span,
    Stage,
    axes_left_to_sum,
    check_context,
    check_fp8,
    cut,
    deals,
    find,
    gathered_low,
    hops,
    matrix_shape,
    pieces,
    place,
)
from . import context, expert, fsdp, recompute, tensor, vision_encoder
from .fp8_gather import LowGathers
from .fsdp import reset_after_forward
from .gradient_sums import finish
from .recompute import mark
from .run_step import Scores, run, run_forward

_AXES = (  # between which ranks meet in a step, beside the last sums
    DENSE, TOKENS, ("pp",), ("pp", "cp"), ("tp",), ("cp",), ("cp", "tp"), ("ep",), ("replicate",), ("fsdp", "cp"),
    ("efsdp",),
)  # fmt: skip


def distribute(
    spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, stored: Mapping[str, torch.dtype]
) -> tuple[tuple[Stage, ...], LowGathers]:
    """Turn a model on the meta device into this rank's part of it, with uninitialised parameters: its pipeline stages,
    and what is gathered in 8 bits. `stored`: the dtype of each parameter."""
    check_context(spec, mesh.axes)
    check_fp8(spec, mesh.axes)
    hops("", mesh.axes.ep, mesh.axes, spec.recipe.memory.token_once)  # refuses nodes that do not divide ep
    _make_groups(spec, mesh)
    _tell_fp8(spec)
    for span, start, stop in spans(spec, mesh.axes, mesh.rank):
        span.start, span.stop = start, stop
    stages = tuple(spec.stages(mesh.axes, mesh.rank))
    trained = {name for name in spec.table.params if spec.module.get_parameter(name).requires_grad}
    for stage in stages:
        _place(stage, spec, mesh, compute, stored)
        fsdp.prefetch_in_order(stage, spec, mesh.axes, trained)
    low = gathered_low(spec, trained, wide=spec.recipe.memory.gathers_wide)
    for stage in stages if low or torch.uint8 in stored.values() else ():
        fsdp.pad_shards(stage.module)
    return stages, LowGathers(stages, spec, mesh, compute, low)


def _tell_fp8(spec: ShardingSpec) -> None:
    """Tell each module which of its products are in 8 bits."""
    for name in spec.fp8:
        owner, _, last = name.rpartition(".")
        module = spec.module.get_submodule(owner)
        module.in_fp8 |= {last}


def _place(
    stage: Stage, spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, stored: Mapping[str, torch.dtype]
) -> None:
    model, names, memory = stage.module, [name for name, _ in stage.module.named_parameters()], spec.recipe.memory
    _cut(names, spec, model, mesh, stored)
    tensor.arm(model, mesh)
    context.arm(spec, model, mesh)
    expert.arm(model, mesh, token_once=memory.token_once)
    vision_encoder.arm(model, mesh)
    recompute.arm(model, memory)
    exact = {model.get_parameter(name) for name in names if spec.table[name].float32}
    ways = fsdp.Ways(compute, memory.offload, spec.sends_narrow(mesh.axes.pp))
    fsdp.shard(model, stage.units, exact, mesh, ways)
    _give_memory(model, mesh, memory.offload)
    _check_placed(names, spec, model, mesh)


def _make_groups(spec: ShardingSpec, mesh: Mesh) -> None:
    """All ranks make a group together, so all are made now: later, ranks of other stages or replicas are elsewhere."""
    mesh.process_group(REPLICA)
    mesh.host_groups(REPLICA)
    if mesh.axes.pp == mesh.axes.replicate == 1:
        return  # its ranks come to each of the others together
    late = (axes_left_to_sum(param, spec.rules, mesh.axes) for param in spec.table)
    dealt = deals(spec, mesh.axes, mesh.coords).values()
    halves = ((half,) for deal in dealt for half in mesh.axes.halves(deal.parts))
    way = (hop.axes for hop in hops("", mesh.axes.ep, mesh.axes, spec.recipe.memory.token_once))
    live = (tuple(a for a in axes if mesh.axes.size_of(a) > 1) for axes in (*late, *halves, *way))
    for axes in dict.fromkeys((*_AXES, *live)):
        if axes:
            mesh.process_group(axes)


def _check_placed(names: Iterable[str], spec: ShardingSpec, model: nn.Module, mesh: Mesh) -> None:
    """FSDP and the table must cut alike."""
    held = pieces(spec, mesh.axes, mesh.rank)
    for name in names:
        stored = tuple(local(model.get_parameter(name)).shape)
        if stored != held[name].shape:
            raise LayoutError(f"{name}: rank {mesh.rank} stores {stored}, but the table says {held[name].shape}")


def _cut(
    names: Iterable[str], spec: ShardingSpec, model: nn.Module, mesh: Mesh, stored: Mapping[str, torch.dtype]
) -> None:
    for name in names:
        param = spec.table[name]
        box = cut(param, place(param, spec.rules, mesh.axes), mesh.axes, mesh.coords)
        _put(model, name, torch.empty(matrix_shape(param, box.shape), device="meta", dtype=stored[name]))


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter, trained or frozen like it."""
    owner, _, last = name.rpartition(".")
    trained = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=trained))


def _give_memory(model: nn.Module, mesh: Mesh, offload: bool) -> None:
    """On the device. With `offload` on the host, except what FSDP would not bring to the device."""
    model.to_empty(device=mesh.host if offload else mesh.device)
    for name, parameter in list(model.named_parameters()) if offload else ():
        if not isinstance(parameter, DTensor):
            _put(model, name, torch.empty_like(parameter, device=mesh.device))


def spans(spec: ShardingSpec, axes: Axes, rank: int) -> Iterator[tuple[Span, int, int]]:
    """The part of each dim on which a rank works, where the model must know it."""
    for name, span in find(spec.module, Span):
        yield span, *spec.rules.span(span.dim, span.size, axes, axes.coords(rank), name)


def local(parameter: Tensor) -> Tensor:
    """What this rank stores of a parameter (or of a gradient): its memory. `to_local` would note a derivative."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
