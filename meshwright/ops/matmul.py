"""Linear layers: matmuls in the dtype that is fast on this machine, several weights in one GEMM, FP8, deferred dW."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .deferred_weight_grads import deferred, is_deferring
from .fp8_matmul import Matrix, concat_weights, fp8_linear
from .fp8_storage import FrozenWeight, Weight, join_weights, split_weights
from .fp8_tensor import Blocks, Fp8, Quantised
from .kernels import uncompiled
from .meta_kernels import kind_of


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to multiply x in: x's own, but float32 for bfloat16 on a CPU without bfloat16 instructions.

    There, torch's bfloat16 matmul takes up to 100 times as long.
    """
    slow = x.dtype == torch.bfloat16 and kind_of(x.device) == "cpu" and not _cpu_has_bf16()
    return torch.float32 if slow else x.dtype


@cache
def _cpu_has_bf16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, *, fp8: Fp8 = False) -> Tensor:
    """Return x @ weight.T + bias in x.dtype. `fp8`: quantise both operands in blocks first (ops/fp8_matmul.py)."""
    if matmul_dtype(x) == x.dtype and not is_deferring() and not fp8 and isinstance(weight, Tensor):
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return linears(x, [weight], None if bias is None else [bias], fp8=fp8)[0]


def linears(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None, *, fp8: Fp8 = False
) -> tuple[Tensor, ...]:
    """Apply `linear` to the same x with each of the weights, as one GEMM: small GEMMs are slow.

    Weights may be codes in 8 or 4 bits, mixed with plain ones; each part of the result is a view.
    """
    bias = None if biases is None else torch.cat([b.to(x.dtype) for b in biases])
    run = _frozen_linears if any(isinstance(weight, FrozenWeight) for weight in weights) else _Linears.apply
    y: Tensor = run(x, bias, fp8, *weights)  # torch leaves apply untyped
    return y.split([len(w) for w in weights], -1)


@uncompiled  # torch.compile accepts only tensors as operands of an autograd.Function
def _frozen_linears(x: Tensor, bias: Tensor | None, fp8: Fp8, *weights: Weight) -> Tensor:
    """Run `_Linears` with weights that are codes in 8 or 4 bits."""
    y: Tensor = _Linears.apply(x, bias, fp8, *weights)
    return y


def operand(weight: Weight, x: Tensor) -> Tensor:
    """Return a parameter as it enters a matmul with x: rounded to x.dtype, then widened to the matmul's dtype; or in
    FP8.
    """
    if isinstance(weight, Quantised):
        return weight
    # Rounding first keeps the result the same on machines with and without bfloat16 matmuls.
    return weight.to(x.dtype).to(matmul_dtype(x))


class _Linears(torch.autograd.Function):
    """A linear layer with several weights that saves its operands uncast and separate.

    F.linear on `torch.cat(weights)` would save the concatenated copy, and the cast operands: each copy is as large as
    the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, fp8: Fp8, *weights: Weight) -> Tensor:
        tensors, ctx.grids = split_weights(weights)
        ctx.save_for_backward(x, *tensors)
        ctx.fp8, ctx.weights = fp8, weights if is_deferring() else ()
        weight = _concatenated(weights, x, fp8)
        if fp8 or isinstance(weight, Blocks):
            y = fp8_linear(x, weight)
            return (y if bias is None else y + bias).to(x.dtype)
        compute_dtype = matmul_dtype(x)
        return F.linear(x.to(compute_dtype), weight, None if bias is None else bias.to(compute_dtype)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        weights = join_weights(tensors, ctx.grids)
        compute_dtype, (need_x, need_bias, _, *need_weights) = matmul_dtype(x), ctx.needs_input_grad
        d_bias = d.flatten(0, -2).sum(0) if need_bias else None
        dx = _of_input(d, _concatenated(weights, x, ctx.fp8), x, ctx.fp8) if need_x else None
        d = d.to(compute_dtype)
        if not any(need_weights):
            return dx, d_bias, None, *(None for _ in weights)
        rows_and_dtypes = [(len(w), w.dtype if isinstance(w, Tensor) else None) for w in weights]

        def gradients() -> list[Tensor | None]:
            dw = (d.flatten(0, -2).mT @ x.flatten(0, -2).to(compute_dtype)).split([rows for rows, _ in rows_and_dtypes])
            return [
                None if dtype is None else part.to(dtype) for part, (_, dtype) in zip(dw, rows_and_dtypes, strict=True)
            ]

        if deferred(ctx.weights, gradients):
            return dx, d_bias, None, *(None for _ in weights)
        return dx, d_bias, None, *gradients()


def _of_input(d: Tensor, weight: Matrix, x: Tensor, fp8: Fp8) -> Tensor:
    """Return the gradient of the input."""
    if fp8 or isinstance(weight, Blocks):
        return fp8_linear(d, weight.mT).to(x.dtype)
    return (d.to(weight.dtype) @ weight).to(x.dtype)


def _concatenated(weights: Sequence[Weight], x: Tensor, fp8: Fp8) -> Matrix:
    """Concatenate the weights by rows, ready for a matmul with x; a single one is not copied.

    FP8 blocks take the place of a weight that is already quantised.
    """
    before: Sequence[Blocks | None] = [None for _ in weights] if isinstance(fp8, bool) else fp8
    operands: list[Matrix] = [
        operand(w, x) if blocks is None else blocks for w, blocks in zip(weights, before, strict=True)
    ]
    return operands[0] if len(operands) == 1 else concat_weights(operands)
