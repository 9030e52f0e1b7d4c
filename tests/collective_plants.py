"""Bugs of collectives: one too many, in another dtype, or not the same on all ranks. See tests/plants.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright import parallel
from meshwright.axes import Sum
from meshwright.mesh import collectives
from meshwright.parallel import tensor
from tests.plants import around


@around(tensor, "_collective")
def gathered_twice(real: Any, door: Any, size: int, group: str, at: str) -> Callable[[Tensor], Tensor]:
    arm: Callable[[Tensor], Tensor] = real(door, size, group, at)

    def enter(x: Tensor) -> Tensor:
        collectives.all_gather(x.detach(), size, group)
        return arm(x)

    return enter if door.kind is tensor.ENTER else arm


@around(collectives, "reduce_scatter")
def in_another_dtype(real: Any, x: Tensor, size: int, group: str) -> Tensor:
    return real(x.float(), size, group).to(x.dtype)


@around(parallel, "finish")
def one_rank_skips(real: Any, grads: Any, mesh: Any) -> None:
    if mesh.rank == 0:
        real(grads, mesh)


@around(parallel, "finish")
def one_rank_does_more(real: Any, grads: Any, mesh: Any) -> None:
    real(grads, mesh)
    if mesh.rank == 1:
        mesh.gather_rows(torch.zeros(1), ("fsdp",))


@around(parallel, "finish")
def other_order(real: Any, grads: Any, mesh: Any) -> None:
    """Reduce on one rank where the other gathers."""
    real(grads, mesh)
    zero, over = torch.zeros(1), ("fsdp",)
    both = [lambda: mesh.all_reduce_(zero, Sum("a sum", over)), lambda: mesh.gather_rows(zero, over)]
    for each in both[:: 1 if mesh.rank == 0 else -1]:
        each()
