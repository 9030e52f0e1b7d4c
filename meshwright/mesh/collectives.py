"""The differentiable collectives that doors use. Each states its forward and its backward.

They are functional collectives of torch, because compilers, selective checkpointing and the recorder of `verify` see
those. Splits act on dim 0, which is always the tokens. `at` is the name of the door, for errors about lost ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

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
    return _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), outs, ins, group))


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
