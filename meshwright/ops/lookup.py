"""Rows of a table, and rows in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.memory import fresh
from meshwright.ops.norms import at_least_float32, upcast


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
        d_table_VD = fresh(d_TD.new_empty(ctx.shape)).zero_()
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
