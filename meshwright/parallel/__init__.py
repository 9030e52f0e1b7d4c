"""The only place that knows the order in which parallelisms compose.

1. cut every parameter to what tp and ep give this rank; 2. tell the model its ranges; 3. arm the doors;
4. store what is left in shards (FSDP2), on the device or in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..layout import Rules, Span, Table, Unit, attributes, cut, matrix_shape, place
from ..mesh import Axes, Mesh
from . import expert, fsdp, tensor
from .fsdp import expect_last, rest
from .sums import finish

__all__ = ["distribute", "expect_last", "finish", "local", "local_grad", "rest", "spans"]


def distribute(
    model: nn.Module, units: list[Unit], table: Table, rules: Rules, mesh: Mesh, compute: torch.dtype, *, offload: bool
) -> None:
    """Turn a model on the meta device into this rank's part of it, with uninitialised parameters."""
    _cut(model, table, rules, mesh, torch.promote_types(compute, torch.float32))
    for span, start, stop in spans(model, rules, mesh.axes, mesh.rank):
        span.start, span.stop = start, stop
    tensor.arm(model, mesh)
    expert.arm(model, mesh)
    exact = {model.get_parameter(p.name) for p in table if p.float32}
    fsdp.shard(model, units, exact, mesh, compute, torch.promote_types(compute, torch.float32), offload=offload)
    _give_memory(model, mesh, offload)


def _cut(model: nn.Module, table: Table, rules: Rules, mesh: Mesh, stored: torch.dtype) -> None:
    for param in table:
        box = cut(param, place(param, rules, mesh.axes), mesh.axes, mesh.coords)
        _put(model, param.name, torch.empty(matrix_shape(param, box.shape), device="meta", dtype=stored))


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """In the place of a parameter; trained or frozen like it."""
    owner, _, last = name.rpartition(".")
    trained = model.get_parameter(name).requires_grad
    setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=trained))


def _give_memory(model: nn.Module, mesh: Mesh, offload: bool) -> None:
    """On the device; with `offload` on the host, but for what FSDP does not bring to the device."""
    model.to_empty(device=mesh.host if offload else mesh.device)
    for name, parameter in list(model.named_parameters()) if offload else ():
        if not isinstance(parameter, DTensor):
            _put(model, name, torch.empty_like(parameter, device=mesh.device))


def spans(model: nn.Module, rules: Rules, axes: Axes, rank: int) -> Iterator[tuple[Span, int, int]]:
    """What a rank works on of each dim that the model asks for; never nothing."""
    for name, span in attributes(model, Span):
        start, stop = rules.span(span.dim, span.size, axes, axes.coords(rank), name)
        if start == stop:
            raise LayoutError(f"{name}: rank {rank} of {axes} is left without any of {span.size} {span.dim}")
        yield span, start, stop


def local(parameter: Tensor) -> Tensor:
    """What this rank stores of a parameter (or of a gradient), sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_grad(parameter: Tensor) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)
