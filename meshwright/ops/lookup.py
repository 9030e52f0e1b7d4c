"""Rows of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.memory import fresh


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
        (row_T,) = ctx.saved_tensors
        zeros_VD = fresh(d_TD.new_empty(ctx.shape)).zero_()
        return zeros_VD.index_put_((row_T,), d_TD, accumulate=True), None  # in a fixed order, where index_add_ has none
