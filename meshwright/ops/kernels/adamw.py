"""AdamW (arXiv 1711.05101) in one pass: clips gradients as it reads them, and writes the weights for matmuls too.

The formula is `AdamW.plain_update` of optim/adamw.py, after `_apply` of engine/engine.py has clipped the gradients.
Clipping reads and writes every gradient, 8 bytes per parameter in float32, and each forward casts the float32 weights,
6 bytes. Here both are part of the update, which moves 28 bytes, and 2 more for the cast copy.

The norm stays on the device: where it is not finite nothing is written, so no host has to wait for it before the update
is queued.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 1024  # elements that a program updates
_NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["norm"])
def _adamw(
    weight, grad, mean, square, copy, norm, size, max_norm, lr, kept, beta1, rest1, beta2, rest2, correction1,
    correction2, eps, COPIES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Update B elements. `kept` is 1 - lr * weight_decay, `rest` 1 - beta, and `correction` 1 - beta**step."""
    total = tl.load(norm).to(tl.float64)
    if tl.abs(total) < float("inf"):  # NaN is not
        factor = tl.where(total > max_norm, max_norm / total, 1.0).to(tl.float32)
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        inside = at < size
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        m = beta1 * tl.load(mean + at, mask=inside, other=0.0).to(tl.float32) + rest1 * g
        v = beta2 * tl.load(square + at, mask=inside, other=0.0).to(tl.float32) + rest2 * g * g
        change = tl.div_rn(m, correction1) / (tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
        w = tl.load(weight + at, mask=inside, other=0.0) * kept - lr * change
        tl.store(weight + at, w, mask=inside)
        tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
        tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)
        if COPIES:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Update:
    """The numbers of one update. `step` is 1 in the first; `weight_decay` is 0 for norms and biases."""

    lr: float
    step: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float  # infinite: no clipping


@dataclass(frozen=True)
class Slice:
    """Dense tensors of one shape: a float32 weight, its gradient and moments, and its copy for matmuls, if any."""

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None = None


def update(part: Slice, norm: Tensor, numbers: Update) -> None:
    """Update a slice in place, with gradients clipped to `max_norm`. `norm` is that of all gradients, on the device.

    Where it is not finite, nothing is written.
    """
    (beta1, beta2), lr, size = numbers.betas, float(numbers.lr), part.weight.numel()
    if size:
        launch(
            _adamw, (triton.cdiv(size, _BLOCK),), part.weight, part.grad, part.mean, part.square,
            part.weight if part.copy is None else part.copy, norm, size, float(numbers.max_norm), lr,
            1 - lr * numbers.weight_decay, float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2,
            1.0 - beta1**numbers.step, 1.0 - beta2**numbers.step, float(numbers.eps), part.copy is not None, _BLOCK,
            num_warps=_NUM_WARPS,
        )  # fmt: skip


_FLOATS = ("max_norm", "lr", "kept", "beta1", "rest1", "beta2", "rest2", "correction1", "correction2", "eps")
_TYPES = {"weight": "*fp32", "copy": "*bf16", "norm": "*fp64", "size": "i32", **dict.fromkeys(_FLOATS, "fp32")}
# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [
    (
        _adamw, {**_TYPES, "grad": grad, "mean": state, "square": state}, {"COPIES": copies, "B": _BLOCK},
        {"num_warps": _NUM_WARPS},
    )
    for grad, state, copies in (("*fp32", "*fp32", False), ("*fp32", "*fp32", True), ("*bf16", "*bf16", True))
]  # fmt: skip
