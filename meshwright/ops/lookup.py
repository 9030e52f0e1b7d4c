"""Rows of a table."""

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
