"""Rows of which some are wanted several times: their copies, and the sums of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.norms import upcast


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
