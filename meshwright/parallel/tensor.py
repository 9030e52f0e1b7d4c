"""Tensor and sequence parallelism: a door between a rank's own tokens and those of its tp group gets its collective."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..mesh import Mesh
from ..mesh.collectives import AllGather, AllToAll, ReduceScatter
from ..sharding import ENTER, LEAVE, MEET, Door, find_doors


def arm(model: nn.Module, mesh: Mesh) -> None:
    size = mesh.axes.tp
    if size == 1:
        return
    group = mesh.name_of(("tp",))
    for name, door in find_doors(model, Door):
        if door.kind.axis == "tp":
            door.armed = _collective(door, size, group, name)


def _collective(door: Door, size: int, group: str, name: str) -> Callable[[Tensor], Tensor]:
    def at() -> str:  # a compiler must not see the name: it would make a graph for every layer
        return "a door" if torch.compiler.is_compiling() else name

    def enter(x: Tensor) -> Tensor:
        return AllGather.apply(x, size, group, at())

    def leave(x: Tensor) -> Tensor:
        return ReduceScatter.apply(x, size, group, at())

    def meet(x: Tensor) -> Tensor:
        even = [x.shape[0] // size] * size
        return AllToAll.apply(x, even, even, group, at())

    return {ENTER: enter, LEAVE: leave, MEET: meet}[door.kind]
