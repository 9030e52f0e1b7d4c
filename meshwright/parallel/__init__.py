"""Apply tensor, expert, context and data parallelism to a model: `distribute` is the one place that knows their order.

1. Tell the model its ranges (`Span`). Then for each pipeline stage of this rank:
2. cut every parameter to this rank's tp and ep shard;
3. arm the doors (tp, cp, ep, vision), and wrap layers for activation checkpointing and `torch.compile`;
4. hand what is left to FSDP2 (`fully_shard`), on the device or in host memory;
5. let FSDP all-gather in FP8 the weights that matmuls take in FP8.

The order matters. FSDP shards what it is given, so tp and ep must cut first (3-D parallelism in the order of
Megatron-LM, arXiv:2104.04473). Activation checkpointing must be inside the FSDP unit, so that one all-gather of
backward serves both the recomputed forward and the backward of a layer.

Parameters are cut as plain tensors, not as DTensors on a tp mesh. A DTensor would choose its own collectives:
`to_local()` without `grad_placements` silently drops the tp sum of a gradient (torchtitan#2387), a head-splitting view
of a strided shard loaded wrong weights (torchtitan#1483), and loaders hang in an implicit redistribute (VeOmni#642). In
Meshwright every collective inside a layer is a declared door.

DTensor also reorders costs: it gathered one activation two or three times per layer (torchtitan#3371), and a slice that
happens to cover a whole dim has no sharding rule (AReaL#1365).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..axes import DENSE, REPLICA, STAGE, TOKENS, Axes
from ..errors import LayoutError
from ..mesh import Mesh
from ..ops.codings import Coding, in_memory
from ..sharding import (
    ShardingSpec,
    Span,
    Stage,
    axes_left_to_sum,
    check_context,
    check_fp8,
    find_doors,
    gathered_in_fp8,
    head_splits,
    hops,
    pieces,
    shape_before_fsdp,
)
from . import context, expert, fsdp, lookup, recompute, tensor, vision_encoder
from .compiled import with_compiled
from .fp8_gather import Fp8Gather
from .fsdp import reset_after_forward
from .gradient_sums import finish
from .recompute import mark
from .run_step import Scores, run, run_forward

# The process groups that a step uses, apart from those of the final gradient all-reduces.
_AXES = (
    DENSE, TOKENS, ("pp",), ("pp", "cp"), ("tp",), ("cp",), ("cp", "tp"), ("ep",), ("replicate",), ("fsdp", "cp"),
    ("efsdp",), STAGE,
)  # fmt: skip


def distribute(
    spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, stored: Mapping[str, torch.dtype | Coding]
) -> tuple[tuple[Stage, ...], Fp8Gather]:
    """Turn a model on the meta device into this rank's shard of it, with uninitialised parameters.

    Return the pipeline stages of this rank, and the weights that FSDP all-gathers in FP8. `stored` is the dtype in
    which each parameter is stored (its master copy), or the coding of a frozen one in 8 or 4 bits.

    Starting from the meta device bounds host memory: a rank never allocates a parameter that it does not store. Loaders
    that build the whole model on each rank first need ranks x model of host memory (ms-swift#9980: 16 x 136 GB).
    """
    check_context(spec, mesh.axes)
    check_fp8(spec, mesh.axes)
    hops("", mesh.axes.ep, mesh.axes, spec.recipe.memory.token_once)  # refuses a node size that does not divide ep
    _make_groups(spec, mesh)
    _mark_fp8(spec)
    for span, start, stop in spans(spec, mesh.axes, mesh.rank):
        span.start, span.stop = start, stop
    stages = tuple(spec.stages(mesh.axes, mesh.rank))
    trained = {name for name in spec.table.params if spec.module.get_parameter(name).requires_grad}
    for stage in stages:
        _place(stage, spec, mesh, compute, stored)
        fsdp.prefetch_in_order(stage, spec, mesh.axes, trained)
    low = gathered_in_fp8(spec, trained, wide=spec.recipe.memory.gathers_wide)
    # FSDP pads lazily, in a copy. FP8 hooks and version counters belong to the tensor object, and a copy would lose
    # them.
    for stage in stages if low or any(isinstance(form, Coding) for form in stored.values()) else ():
        fsdp.pad_shards(stage.module)
    return stages, Fp8Gather(stages, spec, mesh, compute, low)


def _mark_fp8(spec: ShardingSpec) -> None:
    """Tell each module which of its matmuls run in FP8."""
    for name in spec.fp8:
        owner, _, last = name.rpartition(".")
        module = spec.module.get_submodule(owner)
        module.in_fp8 |= {last}


def _place(
    stage: Stage, spec: ShardingSpec, mesh: Mesh, compute: torch.dtype, stored: Mapping[str, torch.dtype | Coding]
) -> None:
    """Shard one pipeline stage: cut, arm, wrap, allocate. See the module's docstring for why in this order."""
    model, names, memory = stage.module, [name for name, _ in stage.module.named_parameters()], spec.recipe.memory
    _cut(names, spec, model, mesh, stored)
    tensor.arm(model, mesh)
    context.arm(spec, model, mesh)
    expert.arm(model, mesh, token_once=memory.token_once)
    vision_encoder.arm(model, mesh)
    lookup.arm(spec, model, mesh)
    recompute.arm(model, memory)
    apart = {model.get_parameter(name) for name in names if not spec.table[name].in_fsdp}
    options = fsdp.ShardOptions(compute, memory.offload, spec.sends_narrow(mesh.axes.pp))
    fsdp.shard(model, stage.units, apart, mesh, options)
    _allocate(model, mesh, memory.offload)
    _check_placed(names, spec, model, mesh, stored)


def _make_groups(spec: ShardingSpec, mesh: Mesh) -> None:
    """Create every process group that this rank will ever use.

    `new_group` is collective over the whole world. All ranks are at the same line only now; later, ranks of other
    stages and replicas run other code, and a lazily made group would deadlock.
    """
    mesh.process_group(REPLICA)
    mesh.host_groups(REPLICA)
    if mesh.axes.pp == mesh.axes.replicate == 1:
        return  # every rank runs the same step, so all of them reach the first use of each group together
    reduced_late = (axes_left_to_sum(param, spec.rules, mesh.axes) for param in spec.table)
    splits = head_splits(spec, mesh.axes, mesh.coords).values()
    halves = ((half,) for deal in splits for half in mesh.axes.halves(deal.parts))
    expert_axes = (hop.axes for hop in hops("", mesh.axes.ep, mesh.axes, spec.recipe.memory.token_once))
    live = (tuple(a for a in axes if mesh.axes.size_of(a) > 1) for axes in (*reduced_late, *halves, *expert_axes))
    for axes in dict.fromkeys((*_AXES, *live)):
        if axes:
            mesh.process_group(axes)


def _check_placed(
    names: Iterable[str], spec: ShardingSpec, model: nn.Module, mesh: Mesh, stored: Mapping[str, torch.dtype | Coding]
) -> None:
    """Check that FSDP2 stores the shape that the declaration says.

    FSDP2 pads and chunks by its own rule. For uneven strided shards that rule is known to differ from the expected one
    (pytorch#168134), so equality is asserted, not assumed.
    """
    expected = pieces(spec, mesh.axes, mesh.rank)
    for name in names:
        actual, (shape, _) = (
            tuple(local(model.get_parameter(name)).shape),
            in_memory(expected[name].shape, stored[name]),
        )
        if actual != shape:
            raise LayoutError(f"{name}: rank {mesh.rank} stores {actual}, but the table says {shape}")


def _cut(
    names: Iterable[str], spec: ShardingSpec, model: nn.Module, mesh: Mesh, stored: Mapping[str, torch.dtype | Coding]
) -> None:
    """Replace each parameter by an empty tensor of this rank's tp and ep shard, or of its rows of a table, still on the
    meta device."""
    for name in names:
        shape, dtype = in_memory(shape_before_fsdp(spec.table[name], spec.rules, mesh.axes, mesh.coords), stored[name])
        _replace_parameter(model, name, torch.empty(shape, device="meta", dtype=dtype))


def _replace_parameter(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by a tensor, and keep whether it is trained."""
    owner, _, last = name.rpartition(".")
    requires_grad = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=requires_grad))


def _allocate(model: nn.Module, mesh: Mesh, offload: bool) -> None:
    """Allocate the parameters: on the device, or on the host with `offload`.

    With offload FSDP copies its own shards to the device and leaves all other parameters where they are. So those go to
    the device at once.
    """
    model.to_empty(device=mesh.host if offload else mesh.device)
    for name, parameter in list(model.named_parameters()) if offload else ():
        if not isinstance(parameter, DTensor):
            _replace_parameter(model, name, torch.empty_like(parameter, device=mesh.device))


def spans(spec: ShardingSpec, axes: Axes, rank: int) -> Iterator[tuple[Span, int, int]]:
    """Yield each `Span` of the model with this rank's range of its dim."""
    for name, span in find_doors(spec.module, Span):
        yield span, *spec.rules.span(span.dim, span.size, axes, axes.coords(rank), name)


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter or gradient, without a copy. `to_local` would record an autograd node."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
