"""Matrix products, in the dtype in which this machine makes them fast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def product_dtype(x: Tensor) -> torch.dtype:
    """x's own; but float32 for bf16 on a CPU that has no such instructions: there, it takes up to 100 times as long."""
    slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _cpu_has_bf16()
    return torch.float32 if slow else x.dtype


@cache
def _cpu_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in x.dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    if product_dtype(x) == x.dtype:
        return F.linear(x, weight.to(x.dtype), bias)
    y: Tensor = _WiderLinear.apply(x, weight)  # torch leaves apply untyped
    return y if bias is None else y + bias


def operand(weight: Tensor, x: Tensor) -> Tensor:
    """A parameter as it meets x in a product: rounded to x.dtype, then as wide as the product."""
    return weight.to(x.dtype).to(product_dtype(x))


class _WiderLinear(torch.autograd.Function):
    """Operands as they are kept for backward, not their wide copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = product_dtype(x)
        return F.linear(x.to(wide), operand(weight, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide, (need_x, need_weight) = product_dtype(x), ctx.needs_input_grad
        d = d.to(wide)
        dx = (d @ operand(weight, x)).to(x.dtype) if need_x else None
        dw = (d.flatten(0, -2).mT @ x.flatten(0, -2).to(wide)).to(weight.dtype) if need_weight else None
        return dx, dw
