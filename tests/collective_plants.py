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
from tests.plants import Patch


def gathered_twice(patch: Patch) -> None:
    real = tensor._collective

    def twice(door: Any, size: int, group: str, at: str) -> Callable[[Tensor], Tensor]:
        arm = real(door, size, group, at)

        def enter(x: Tensor) -> Tensor:
            collectives.all_gather(x.detach(), size, group)
            return arm(x)

        return enter if door.kind is tensor.ENTER else arm

    patch.setattr(tensor, "_collective", twice)


def in_another_dtype(patch: Patch) -> None:
    real = collectives.reduce_scatter
    patch.setattr(collectives, "reduce_scatter", lambda x, size, group: real(x.float(), size, group).to(x.dtype))


def one_rank_skips(patch: Patch) -> None:
    real = parallel.finish
    patch.setattr(parallel, "finish", lambda grads, mesh: real(grads, mesh) if mesh.rank == 0 else None)


def one_rank_does_more(patch: Patch) -> None:
    real = parallel.finish

    def more(grads: Any, mesh: Any) -> None:
        real(grads, mesh)
        if mesh.rank == 1:
            mesh.gather_rows(torch.zeros(1), ("fsdp",))

    patch.setattr(parallel, "finish", more)


def other_order(patch: Patch) -> None:
    """One rank reduces where the other gathers."""
    real = parallel.finish

    def two_kinds(grads: Any, mesh: Any) -> None:
        real(grads, mesh)
        zero, over = torch.zeros(1), ("fsdp",)
        both = [lambda: mesh.all_reduce_(zero, Sum("a sum", over)), lambda: mesh.gather_rows(zero, over)]
        for each in both[:: 1 if mesh.rank == 0 else -1]:
            each()

    patch.setattr(parallel, "finish", two_kinds)
