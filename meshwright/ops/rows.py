"""The way of tokens to rows sorted by expert, and back to a sum for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .norms import at_least_float32, upcast


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


@dataclass(frozen=True)
class Copies:
    """`of_N`: of which row each of N copies is. `in_turn_N`: the numbers of the copies in another order: the first of
    every row, in the order of rows, then the second ones of the rows that have one, and so on. `sizes`: how many there
    are of each; every row has a first."""

    of_N: Tensor
    in_turn_N: Tensor
    sizes: list[int]


def runs(sorted_N: Tensor) -> tuple[Tensor, Tensor]:
    """Of numbers in their order: in which run of equal ones each is, and at which place in it."""
    place_N = torch.arange(len(sorted_N), device=sorted_N.device)
    begins_N = (sorted_N != sorted_N.roll(1)) | (place_N == 0)
    if not len(sorted_N):
        return place_N, place_N
    return begins_N.cumsum(0) - 1, place_N - torch.where(begins_N, place_N, 0).cummax(0).values


def turns(of_N: Tensor) -> Tensor:
    """Which copy of its row each one is: 0 for the first."""
    order_N = of_N.argsort(stable=True)
    return torch.empty_like(of_N).scatter_(0, order_N, runs(of_N[order_N])[1])


def copies_of(of_N: Tensor, turn_N: Tensor, sizes: list[int]) -> Copies:
    """`turn_N`: as `turns` finds them. `sizes`: how many rows have a first copy, a second one, and so on."""
    return Copies(of_N, (turn_N * max(sizes[0], 1) + of_N).argsort(), sizes)


def copied(x_RD: Tensor, copies: Copies) -> Tensor:
    y_ND: Tensor = _Copied.apply(x_RD, copies)  # torch leaves apply untyped
    return y_ND


def summed(y_ND: Tensor, copies: Copies) -> Tensor:
    """The sum of all copies of a row, in at least float32 and always in the same order."""
    x_RD: Tensor = _Summed.apply(y_ND, copies)
    return x_RD


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.of_N, copies.in_turn_N)
        ctx.sizes = copies.sizes
        return x_RD.index_select(0, copies.of_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_ND: Tensor) -> tuple[Tensor, None]:
        of_N, in_turn_N = ctx.saved_tensors
        return _sum(d_ND, Copies(of_N, in_turn_N, ctx.sizes)), None


class _Summed(torch.autograd.Function):
    """It holds the numbers of its rows itself: to make them again, a layer would run what is before it again."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, copies: Copies) -> Tensor:
        ctx.of_N = copies.of_N
        return _sum(y_ND, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor, None]:
        return d_RD.index_select(0, ctx.of_N), None


def _sum(y_ND: Tensor, copies: Copies) -> Tensor:
    first_R, *others = copies.in_turn_N.split(copies.sizes)
    sum_RD = upcast(y_ND.index_select(0, first_R))
    for some in others:  # each row is in it once, so it is no matter which of them comes first
        sum_RD.index_add_(0, copies.of_N[some], upcast(y_ND.index_select(0, some)))
    return sum_RD.to(y_ND.dtype)


def lookup(table_VD: Tensor, row_T: Tensor) -> Tensor:
    """The row of each token, each from 0 to V-1. -> x_TD, in the table's dtype"""
    x_TD: Tensor = _Lookup.apply(table_VD, row_T)  # torch leaves apply untyped
    return x_TD


class _Lookup(torch.autograd.Function):
    """Its gradient is nearly all zeros, and as large as the table."""

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        ctx.shape = table_VD.shape
        return table_VD[row_T]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, None]:
        """Tokens of the same row are summed in a fixed order, in at least float32; on a CPU torch sums in d's dtype."""
        (row_T,) = ctx.saved_tensors
        if d_TD.device.type != "cpu":
            return torch.ops.aten.embedding_dense_backward(d_TD, row_T, ctx.shape[0], -1, False), None
        used_U, which_T = row_T.unique(return_inverse=True)
        zeros_UD = d_TD.new_zeros(len(used_U), ctx.shape[1], dtype=at_least_float32(d_TD))
        sum_UD = zeros_UD.index_add_(0, which_T, upcast(d_TD))
        d_table_VD = d_TD.new_zeros(ctx.shape)
        d_table_VD[used_U] = sum_UD.to(d_TD.dtype)
        return d_table_VD, None


def reordered(x_TD: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Each row of x k times, one copy next to the other, and of these N = k T the rows `order_N`. `back_N` undoes the
    order. -> y_ND"""
    y_ND: Tensor = _Reordered.apply(x_TD, order_N, back_N)  # torch leaves apply untyped
    return y_ND


class _Reordered(torch.autograd.Function):
    """Gradients of one row are summed in order, in float32; torch adds them in any order, and rounds each time."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.num_tokens = len(x_TD)
        k = len(order_N) // max(len(x_TD), 1)
        return x_TD.index_select(0, order_N // k if k > 1 else order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_ND: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        d_ND = d_ND.index_select(0, back_N)
        same = len(d_ND) == ctx.num_tokens
        return (d_ND if same else d_ND.view(ctx.num_tokens, -1, d_ND.shape[1]).sum(1)), None, None
