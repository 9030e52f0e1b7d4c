"""The differentiable collectives that doors use. Each states its forward and its backward.

They are functional collectives of torch, because compilers, selective checkpointing and the recorder of `verify` see
those. Splits act on dim 0, which is always the tokens. `at` is the name of the door, for errors about lost ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..watch import waiting_at

_c10d = torch.ops._c10d_functional

# All of them; what they return is not ready before `wait_tensor`.
OPS = [
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
    _c10d.wait_tensor.default,
]


def gather(x: Tensor, size: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group))


def scatter_sum(x: Tensor, size: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def exchange(x: Tensor, outs: list[int], ins: list[int], group: str) -> Tensor:
    """Rows of `x` in pieces of `ins` to each rank; pieces of `outs` come back."""
    return _c10d.wait_tensor(begun(x, outs, ins, group))


def begun(x: Tensor, outs: list[int], ins: list[int], group: str) -> Tensor:
    """An exchange that nobody has waited for yet."""
    return _c10d.all_to_all_single(x.contiguous(), outs, ins, group)


class Gather(Function):
    """Own tokens -> the tokens of the group. Backward: sum of everybody's gradients, own tokens kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str, at: str = "a door") -> Tensor:
        ctx.size, ctx.group, ctx.at = size, group, at
        with waiting_at(at, "forward"):
            return gather(x, size, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return scatter_sum(d, ctx.size, ctx.group), None, None, None


class ScatterSum(Function):
    """Partial sums of the group's tokens -> own tokens, summed. Backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str, at: str = "a door") -> Tensor:
        ctx.size, ctx.group, ctx.at = size, group, at
        with waiting_at(at, "forward"):
            return scatter_sum(x, size, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return gather(d, ctx.size, ctx.group), None, None, None


class Exchange(Function):
    """All-to-all of rows in uneven pieces. Backward: the same, the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outs: list[int], ins: list[int], group: str, at: str = "a door") -> Tensor:
        ctx.outs, ctx.ins, ctx.group, ctx.at = outs, ins, group, at
        with waiting_at(at, "forward"):
            return exchange(x, outs, ins, group)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None, None]:
        with waiting_at(ctx.at, "backward"):
            return exchange(d, ctx.ins, ctx.outs, ctx.group), None, None, None, None


class Travel:
    """Rows on their way: an exchange that is begun in one place and ended where they are wanted, beside whatever is
    computed between the two. Backward begins it where forward has ended it, beside the gradients of that.
    """

    def __init__(self, outs: list[int], ins: list[int], group: str, at: str) -> None:
        self.outs, self.ins, self.group, self.at = outs, ins, group, at
        self.gradient: Tensor | None = None  # on its way too

    def begin(self, x: Tensor) -> Tensor:
        """What it returns is for `end` alone."""
        begun: Tensor = _Begin.apply(x, self)  # torch leaves apply untyped
        return begun

    def end(self, begun: Tensor) -> Tensor:
        ended: Tensor = _End.apply(begun, self)
        return ended


class _Begin(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        with waiting_at(travel.at, "forward"):
            return begun(x, travel.outs, travel.ins, travel.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        begun, ctx.travel.gradient = ctx.travel.gradient, None
        with waiting_at(ctx.travel.at, "backward"):
            return _c10d.wait_tensor(begun), None


class _End(Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        with waiting_at(travel.at, "forward"):
            return _c10d.wait_tensor(begun)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        """What is begun has other rows than `begun`, which autograd does not let pass: it goes with the travel."""
        travel = ctx.travel
        with waiting_at(travel.at, "backward"):
            travel.gradient = begun(d, travel.ins, travel.outs, travel.group)
        return d, None
