"""The way of tokens to rows sorted by expert, and back to a sum for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.lookup import reordered


@dataclass(frozen=True)
class Rows:
    """Copies of tokens, sorted by expert, each with its weight; how many each expert has, on the device and, if it is
    known there, on the host. `back` makes of what experts return, weighted, a sum for each token."""

    x_ND: Tensor
    weight_N: Tensor
    counts_E: Tensor
    counts: list[int] | None
    back: Callable[[Tensor], Tensor]


def by_expert(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, num_experts: int) -> Rows:
    """A copy of each token for each of its experts."""
    expert_N = expert_Tk.flatten()
    order_N = expert_N.argsort(stable=True)  # by expert; within one, by token
    back_N = order_N.argsort()
    return Rows(
        reordered(x_TD, order_N, back_N), weight_Tk.flatten().index_select(0, order_N), counted(expert_N, num_experts),
        None, lambda y_ND: _Sums.apply(y_ND, order_N, back_N, expert_Tk.shape[1]),
    )  # fmt: skip


class _Sums(torch.autograd.Function):
    """Of the k rows of each token. It holds their order itself: to make it again, a layer would run all that is before
    it again, exchanges too."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, order_N: Tensor, back_N: Tensor, k: int) -> Tensor:
        ctx.order_N, ctx.k = order_N, k
        return y_ND.index_select(0, back_N).view(len(y_ND) // k, k, y_ND.shape[1]).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return d_TD.index_select(0, ctx.order_N // ctx.k), None, None, None


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch copies where there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def counted(number_N: Tensor, size: int) -> Tensor:
    """How often each number from 0 to `size - 1` is there."""
    return number_N.new_zeros(size).scatter_add_(0, number_N, torch.ones_like(number_N))
