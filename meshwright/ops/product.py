"""Matrix products, in the dtype in which this machine makes them fast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.late import is_late, left_for_later


def product_dtype(x: Tensor) -> torch.dtype:
    """x's own; but float32 for bf16 on a CPU that has no such instructions: there, it takes up to 100 times as long."""
    slow = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _cpu_has_bf16()
    return torch.float32 if slow else x.dtype


@cache
def _cpu_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in x.dtype."""
    if product_dtype(x) == x.dtype and not is_late():
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return linears(x, [weight], None if bias is None else [bias])[0]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """`linear` of the same x with each of the weights, as one product: small ones are slow."""
    bias = None if biases is None else torch.cat([b.to(x.dtype) for b in biases])
    y: Tensor = _Linears.apply(x, bias, *weights)  # torch leaves apply untyped
    return y.split([len(w) for w in weights], -1)


def operand(weight: Tensor, x: Tensor) -> Tensor:
    """A parameter as it meets x in a product: rounded to x.dtype, then as wide as the product."""
    return weight.to(x.dtype).to(product_dtype(x))


class _Linears(torch.autograd.Function):
    """Keeps its operands as they came: neither their joined copy nor wide ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.weights = weights if is_late() else ()
        wide = product_dtype(x)
        return F.linear(x.to(wide), _joined(weights, x), None if bias is None else bias.to(wide)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wide, (need_x, need_bias, *need_weights) = product_dtype(x), ctx.needs_input_grad
        d_bias = d.flatten(0, -2).sum(0) if need_bias else None
        d = d.to(wide)
        dx = (d @ _joined(weights, x)).to(x.dtype) if need_x else None
        if not any(need_weights):
            return dx, d_bias, *(None for _ in weights)
        kinds = [(len(w), w.dtype) for w in weights]

        def gradients() -> list[Tensor]:
            dw = (d.flatten(0, -2).mT @ x.flatten(0, -2).to(wide)).split([rows for rows, _ in kinds])
            return [part.to(dtype) for part, (_, dtype) in zip(dw, kinds, strict=True)]

        if left_for_later(ctx.weights, gradients):
            return dx, d_bias, *(None for _ in weights)
        return dx, d_bias, *gradients()


def _joined(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    return operand(weights[0], x) if len(weights) == 1 else torch.cat([operand(w, x) for w in weights])
