"""Differentiable collectives (all-gather, reduce-scatter, all-to-all) for doors, with the backward of each.

They are torch's functional collectives, because compilers, selective checkpointing and the recorder of `verify` can see
them. CPU ranks of one machine use those of the same names in mesh/local_collectives.py. Splits act on dim 0, which is
always the tokens. `at` is the name of the door, for errors about lost ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..watch import waiting_at
from .local_collectives import serves_named

_c10d = torch.ops._c10d_functional

# Every collective that Meshwright uses. Their results must not be read before `wait_tensor`.
OPS = [
    *(
        op.default
        for space in (_c10d, torch.ops.meshwright)
        for op in (space.all_gather_into_tensor, space.reduce_scatter_tensor, space.all_to_all_single)
    ),
    _c10d.wait_tensor.default,
]


class _Process:
    """Whether this process has compiled layers."""

    compiles_layers = False


def keep_traceable() -> None:
    """Use only torch's functional collectives from now on, because this process compiles layers.

    The choice holds for layers that run uncompiled too: another rank may run the same layer compiled, for another
    length of its tokens, and both must use the same connections.
    """
    _Process.compiles_layers = True


def _ops_for(group: str) -> Any:
    """Return the namespace of the collectives that serve a group."""
    return torch.ops.meshwright if not _Process.compiles_layers and serves_named(group) else _c10d


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """All-gather x along dim 0."""
    return _c10d.wait_tensor(_ops_for(group).all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Reduce-scatter x along dim 0, summing."""
    return _c10d.wait_tensor(_ops_for(group).reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def broadcast_each_(parts: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup, at: str) -> None:
    """Broadcast tensors in place, all at once, each from the rank given with it. All ranks pass the same ranks.

    They are sent as bytes, since gloo does not support float8.
    """
    with waiting_at(at):
        sent = [dist.broadcast(x.view(torch.uint8), rank, group=group, async_op=True) for x, rank in parts]
        for each in sent:
            each.wait()


def all_to_all(x: Tensor, outs: list[int], ins: list[int], group: str) -> Tensor:
    """All-to-all: send rows of `x` in pieces of `ins` to each rank; receive pieces of `outs`."""
    return _c10d.wait_tensor(start_all_to_all(x, outs, ins, group))


def start_all_to_all(x: Tensor, outs: list[int], ins: list[int], group: str) -> Tensor:
    """Start an all-to-all that nothing has waited for yet."""
    return _ops_for(group).all_to_all_single(x.contiguous(), outs, ins, group)


class AllGather(Function):
    """All-gather own tokens -> tokens of the group.

    Backward: reduce-scatter, since every rank has a gradient for all tokens of the group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str, at: str = "a door") -> Tensor:
        ctx.size, ctx.group, ctx.at = size, group, at
        with waiting_at(at, "forward"):
            return all_gather(x, size, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return reduce_scatter(d, ctx.size, ctx.group), None, None, None


class ReduceScatter(Function):
    """Reduce-scatter partial sums of the group's tokens -> own tokens. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str, at: str = "a door") -> Tensor:
        ctx.size, ctx.group, ctx.at = size, group, at
        with waiting_at(at, "forward"):
            return reduce_scatter(x, size, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return all_gather(d, ctx.size, ctx.group), None, None, None


class AllToAll(Function):
    """All-to-all of rows in uneven pieces. Backward: all-to-all with the pieces exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outs: list[int], ins: list[int], group: str, at: str = "a door") -> Tensor:
        ctx.outs, ctx.ins, ctx.group, ctx.at = outs, ins, group, at
        with waiting_at(at, "forward"):
            return all_to_all(x, outs, ins, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return all_to_all(d, ctx.ins, ctx.outs, ctx.group), None, None, None, None


class AsyncAllToAll:
    """An asynchronous all-to-all: it begins in one place, and ends where its rows are needed.

    It overlaps what runs in between. Backward mirrors it: it begins where forward ended, and ends where forward began,
    overlapping the gradients of what ran in between. A stream-level `wait_tensor` in the middle would serialise both.
    """

    def __init__(self, outs: list[int], ins: list[int], group: str, at: str) -> None:
        self.outs, self.ins, self.group, self.at = outs, ins, group, at
        self.gradient: Tensor | None = None  # in flight, between the backwards of `end` and `begin`

    def begin(self, x: Tensor) -> Tensor:
        """Start the all-to-all. The result must only be passed to `end`."""
        pending: Tensor = _Begin.apply(x, self)  # torch leaves apply untyped
        return pending

    def end(self, pending: Tensor) -> Tensor:
        """Wait for the rows."""
        ended: Tensor = _End.apply(pending, self)
        return ended


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        with waiting_at(transfer.at, "forward"):
            return start_all_to_all(x, transfer.outs, transfer.ins, transfer.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        pending, ctx.transfer.gradient = ctx.transfer.gradient, None
        with waiting_at(ctx.transfer.at, "backward"):
            return _c10d.wait_tensor(pending), None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        with waiting_at(transfer.at, "forward"):
            return _c10d.wait_tensor(pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        """Start the all-to-all of gradients and hand it to `_Begin.backward` through the `AsyncAllToAll`.

        Its rows differ from those of `pending` in forward, and autograd rejects a gradient of another shape.
        """
        transfer = ctx.transfer
        with waiting_at(transfer.at, "backward"):
            transfer.gradient = start_all_to_all(d, transfer.ins, transfer.outs, transfer.group)
        return d, None
