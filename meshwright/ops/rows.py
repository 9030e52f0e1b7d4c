"""Permute tokens to rows sorted by expert and back (MoE dispatch and combine), with deterministic gradients.

index_add and scatter_add on a GPU add in any order, and in bfloat16 they round after each addition. Here all sums run
in a fixed order; the results are bitwise the same in every run.

Shapes: T tokens, k experts per token, N = k T rows, D width, E experts, R rows before copying, V rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .kernels import NARROW
from .kernels.trials import agrees
from .meta_kernels import kind_of
from .norms import at_least_float32, upcast


@dataclass(frozen=True)
class Rows:
    """Copies of tokens sorted by expert, each with its routing weight: what experts compute on.

    `counts_E`: rows of each expert, on the device; `counts`: the same on the host, where it is known there (None lets a
    grouped GEMM run without any wait). `back` combines the weighted outputs of experts into one row per token.
    """

    x_ND: Tensor
    weight_N: Tensor
    counts_E: Tensor
    counts: list[int] | None
    back: Callable[[Tensor], Tensor]


def by_expert(x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, num_experts: int) -> Rows:
    """Copy each token once for each of its experts, and sort the copies by expert."""
    expert_N = expert_Tk.flatten()
    order_N = expert_N.argsort(stable=True)  # stable: rows of an expert stay in the order of tokens, on every mesh
    back_N = order_N.argsort()
    return Rows(
        reordered(x_TD, order_N, back_N), weight_Tk.flatten().index_select(0, order_N),
        count_values(expert_N, num_experts), None,
        lambda y_ND: _Combine.apply(y_ND, order_N, back_N, expert_Tk.shape[1]),
    )  # fmt: skip


class _Combine(torch.autograd.Function):
    """Sum the k rows of each token.

    It keeps the permutation on ctx, not in saved tensors: activation checkpointing would recompute the layer up to
    here, with its all-to-alls, only to make the permutation again.
    """

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, order_N: Tensor, back_N: Tensor, k: int) -> Tensor:
        ctx.order_N, ctx.k = order_N, k
        return sum_rows(y_ND, back_N, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return d_TD.index_select(0, ctx.order_N // ctx.k), None, None, None


def sum_rows(y_ND: Tensor, at_N: Tensor, num: int) -> Tensor:
    """Sum `num` rows per token: those at `at_N`, where the indices of a token lie side by side. -> x_TD"""
    if num == 1 or not _has_kernel(y_ND, num):
        return _sum_rows(y_ND, at_N, num)
    if y_ND.is_meta:
        return y_ND.new_empty(len(at_N) // num, y_ND.shape[1])
    from .kernels import row_sums

    return row_sums.sum_rows(y_ND, at_N, num)


def _sum_rows(y_ND: Tensor, at_N: Tensor, num: int) -> Tensor:
    return y_ND.index_select(0, at_N).view(len(at_N) // num, num, y_ND.shape[1]).sum(1)


# Allowed error of a kernel, relative to the norm, where both sides round once to this dtype.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def _has_kernel(y_ND: Tensor, num: int) -> bool:
    """Return whether kernels/row_sums.py sums rows like these: on an accelerator where it agrees with the formula."""
    if kind_of(y_ND.device) == "cpu" or y_ND.dtype not in (*NARROW, torch.float32):
        return False

    def trial() -> tuple[list[Tensor], list[Tensor]]:
        from .kernels import row_sums

        noise = torch.Generator().manual_seed(0)
        some_ND = torch.randn(3 * num, y_ND.shape[1], generator=noise, device="cpu").to(y_ND.device, y_ND.dtype)
        at_N = torch.randperm(3 * num, generator=noise, device="cpu").to(y_ND.device)
        return [row_sums.sum_rows(some_ND, at_N, num)], [_sum_rows(some_ND, at_N, num)]

    kind = (y_ND.dtype, y_ND.shape[1], num)
    return y_ND.is_meta or agrees("row_sums", kind, y_ND.device, trial, ROUNDING[y_ND.dtype])


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate; a single part is returned without a copy, which torch would make."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


def count_values(number_N: Tensor, size: int) -> Tensor:
    """Count how often each number from 0 to `size - 1` occurs. Unlike bincount, it does not wait for the device."""
    return number_N.new_zeros(size).scatter_add_(0, number_N, torch.ones_like(number_N))


@dataclass(frozen=True)
class Copies:
    """A map that says how N rows are copies of R rows, and in which order to sum them.

    `of_N`: the original row of each copy. `in_turn_N`: the indices of the copies turn by turn: the first copy of every
    row, in the order of rows, then the second copy of each row that has one, and so on. `sizes`: the number of copies
    in each turn; every row has a first copy.
    """

    of_N: Tensor
    in_turn_N: Tensor
    sizes: list[int]


def runs(sorted_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each of the sorted numbers the index of its run of equal numbers, and its index within the run."""
    index_N = torch.arange(len(sorted_N), device=sorted_N.device)
    begins_N = (sorted_N != sorted_N.roll(1)) | (index_N == 0)
    if not len(sorted_N):
        return index_N, index_N
    return begins_N.cumsum(0) - 1, index_N - torch.where(begins_N, index_N, 0).cummax(0).values


def turns(of_N: Tensor) -> Tensor:
    """Return the turn of each copy: 0 for the first copy of its row, 1 for the second, and so on."""
    order_N = of_N.argsort(stable=True)
    return torch.empty_like(of_N).scatter_(0, order_N, runs(of_N[order_N])[1])


def copies_of(of_N: Tensor, turn_N: Tensor, sizes: list[int]) -> Copies:
    """Build `Copies` from `turn_N` (see `turns`) and `sizes`: how many rows have a first copy, a second one,
    and so on.
    """
    return Copies(of_N, (turn_N * max(sizes[0], 1) + of_N).argsort(), sizes)


def gather_copies(x_RD: Tensor, copies: Copies) -> Tensor:
    """Gather the original row of each copy; backward sums the copies."""
    y_ND: Tensor = _Copied.apply(x_RD, copies)  # torch leaves apply untyped
    return y_ND


def sum_copies(y_ND: Tensor, copies: Copies) -> Tensor:
    """Sum all copies of each row, in at least float32 and always in the same order."""
    x_RD: Tensor = _Summed.apply(y_ND, copies)
    return x_RD


class _Copied(torch.autograd.Function):
    """Gather in forward, ordered sum in backward."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, copies: Copies) -> Tensor:
        ctx.save_for_backward(copies.of_N, copies.in_turn_N)
        ctx.sizes = copies.sizes
        return x_RD.index_select(0, copies.of_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_ND: Tensor) -> tuple[Tensor, None]:
        of_N, in_turn_N = ctx.saved_tensors
        return _sum_copies(d_ND, Copies(of_N, in_turn_N, ctx.sizes)), None


class _Summed(torch.autograd.Function):
    """Ordered sum in forward, gather in backward.

    It keeps the indices on ctx, not in saved tensors: see `_Combine`.
    """

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, copies: Copies) -> Tensor:
        ctx.of_N = copies.of_N
        return _sum_copies(y_ND, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_RD: Tensor) -> tuple[Tensor, None]:
        return d_RD.index_select(0, ctx.of_N), None


def _sum_copies(y_ND: Tensor, copies: Copies) -> Tensor:
    """Sum copies turn by turn: within a turn every row occurs at most once, so index_add_ has nothing to reorder."""
    first_R, *others = copies.in_turn_N.split(copies.sizes)
    sum_RD = upcast(y_ND.index_select(0, first_R))
    for turn_N in others:
        sum_RD.index_add_(0, copies.of_N[turn_N], upcast(y_ND.index_select(0, turn_N)))
    return sum_RD.to(y_ND.dtype)


def lookup(table_VD: Tensor, row_T: Tensor) -> Tensor:
    """Look up the row of each token, an index from 0 to V-1. -> x_TD, in the table's dtype"""
    x_TD: Tensor = _Lookup.apply(table_VD, row_T)  # torch leaves apply untyped
    return x_TD


class _Lookup(torch.autograd.Function):
    """An embedding whose gradient is dense: nearly all zeros, and as large as the table."""

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(row_T)
        ctx.shape = table_VD.shape
        return table_VD[row_T]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, None]:
        """Sum tokens of the same row in a fixed order, in at least float32. On a CPU torch would sum in d's dtype."""
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
    """Repeat each row of x k times, copies side by side, and select the rows `order_N` of these N = k T. -> y_ND

    `back_N` is the inverse permutation.
    """
    y_ND: Tensor = _Reordered.apply(x_TD, order_N, back_N)  # torch leaves apply untyped
    return y_ND


class _Reordered(torch.autograd.Function):
    """Repeat and select rows. Backward sums the k gradients of a row in order, in float32; torch would add them in any
    order and round each time.
    """

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
        if len(d_ND) == ctx.num_tokens:
            return d_ND.index_select(0, back_N), None, None
        return sum_rows(d_ND, back_N, len(d_ND) // ctx.num_tokens), None, None
