"""Tensor parallelism with sequence parallelism (Megatron-LM): all-gather and reduce-scatter of tokens at doors.

Megatron-LM's column- and row-parallel linear layers (arXiv:1909.08053), with the residual stream split along the
sequence (arXiv:2205.05198). A layer starts with `enter`, an all-gather of tokens, and ends with `leave`, a
reduce-scatter of partial sums; each is the backward of the other. They send as many bytes as Megatron's two
all-reduces, and norms, residuals and their activations are split by tp too.

A door is declared where the layer is written, so no list of module names has to match the model (a plan keyed by class
or attribute name misses a renamed norm, DeepSpeed#8306).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..mesh import Mesh
from ..mesh.collectives import AllGather, AllToAll, ReduceScatter
from ..sharding import ENTER, LEAVE, MEET, OWN, Door, find_doors


def arm(model: nn.Module, mesh: Mesh) -> None:
    """Give every tp door of the model its collective. Without tp a door is the identity."""
    size = mesh.axes.tp
    if size == 1:
        return
    group = mesh.name_of(("tp",))
    for name, door in find_doors(model, Door):
        if door.kind.axis == "tp":
            own = partial(_own_tokens, size=size, part=mesh.coords["tp"])
            door.armed = own if door.kind == OWN else _collective(door, size, group, name)


def _own_tokens(x_T: Tensor, size: int, part: int) -> Tensor:
    """Return own tokens of a tensor that every rank of the tp group has whole: nothing is sent."""
    return x_T.chunk(size)[part]


def _collective(door: Door, size: int, group: str, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of a door. Shapes: enter `[T/tp, D] -> [T, D]`, leave `[T, D] -> [T/tp, D]`, meet `[T, V/tp]
    -> [T/tp, V]` as tp slices."""

    def at() -> str:
        # The name would be a constant of a compiled graph: one graph per layer instead of one for all.
        return "a tensor parallel door" if torch.compiler.is_compiling() else name

    def enter(x: Tensor) -> Tensor:
        return AllGather.apply(x, size, group, at())

    def leave(x: Tensor) -> Tensor:
        return ReduceScatter.apply(x, size, group, at())

    def meet(x: Tensor) -> Tensor:
        even = [x.shape[0] // size] * size
        return AllToAll.apply(x, even, even, group, at())

    return {ENTER: enter, LEAVE: leave, MEET: meet}[door.kind]
