"""The only place that knows the order in which parallelisms compose.

1. cut every parameter to what tp and ep give this rank; 2. tell the model its ranges; 3. arm the doors, and let layers
recompute; 4. store what is left in shards (FSDP2), on the device or in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..axes import Axes
from ..errors import LayoutError
from ..layout import ShardingSpec, Span, check_context, chunk, cut, find, matrix_shape, pieces, place
from ..mesh import Mesh
from ..models import Decoder
from . import context, expert, fsdp, recompute, tensor
from .fsdp import reset_after_forward
from .passes import Scores, run, run_forward
from .savings import Savings
from .sums import finish


def distribute(
    spec: ShardingSpec,
    model: Decoder,
    mesh: Mesh,
    compute: torch.dtype,
    stored: Mapping[str, torch.dtype],
    savings: Savings,
) -> None:
    """Turn a model on the meta device into this rank's part of it, with uninitialised parameters. `stored`: the dtype
    of each."""
    check_context(spec, mesh.axes)
    _cut(spec, model, mesh, stored)
    for span, start, stop in spans(spec, mesh.axes, mesh.rank):
        span.start, span.stop = start, stop
    tensor.arm(model, mesh)
    context.arm(spec, model, mesh)
    expert.arm(model, mesh)
    recompute.arm(model, savings)
    exact = {model.get_parameter(p.name) for p in spec.table if p.float32}
    fsdp.shard(model, spec.units, exact, mesh, compute, offload=savings.offload)
    _give_memory(model, mesh, savings.offload)
    _check_placed(spec, model, mesh)


def _check_placed(spec: ShardingSpec, model: nn.Module, mesh: Mesh) -> None:
    """FSDP and the table must cut alike."""
    for name, piece in pieces(spec, mesh.axes, mesh.rank).items():
        stored = tuple(local(model.get_parameter(name)).shape)
        if stored != piece.shape:
            raise LayoutError(f"{name}: rank {mesh.rank} stores {stored}, but the table says {piece.shape}")


def _cut(spec: ShardingSpec, model: nn.Module, mesh: Mesh, stored: Mapping[str, torch.dtype]) -> None:
    for param in spec.table:
        box = cut(param, place(param, spec.rules, mesh.axes), mesh.axes, mesh.coords)
        _put(model, param.name, torch.empty(matrix_shape(param, box.shape), device="meta", dtype=stored[param.name]))


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
    """What this rank stores of a parameter (or of a gradient), sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_grad(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)
