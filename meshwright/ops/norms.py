"""RMSNorm (arXiv 1910.07467), LayerNorm, gated RMSNorm and SwiGLU (arXiv 2002.05202), with hand-written backwards.

Each saves its inputs uncast, and at most one float32 per row. Autograd over the formula would keep several float32
copies of the activations, which is most of what a layer saves in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import fused
from .meta_kernels import kind_of


def at_least_float32(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64 inputs, so that everything also runs in float64 for exact comparisons."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Cast x to at least float32."""
    return x.to(at_least_float32(x))


def _rstd(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) of each row."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """Normalise the last dim by its root mean square, in x.dtype.

    Plain (Qwen2, Qwen3): round to x.dtype, then multiply by the weight, in the order in which transformers rounds.
    Zero-centred (Qwen3.5): multiply by 1 + weight, formed in float32 because bfloat16 would lose a small weight next to
    the 1, then round.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centred)  # torch leaves apply untyped
    return y


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves x uncast, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        y, rstd = _rms_norm_forward(x, weight, eps, zero_centred)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centred = zero_centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, d_weight = _rms_norm_backward(d, *ctx.saved_tensors, ctx.zero_centred)
        return dx, d_weight, None, None


@fused
def _rms_norm_forward(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> tuple[Tensor, ...]:
    wide = upcast(x)
    rstd = _rstd(wide, eps)
    normed = wide * rstd
    if zero_centred:
        return normed.mul_(1 + upcast(weight.to(x.dtype))).to(x.dtype), rstd
    return normed.to(x.dtype).mul_(weight.to(x.dtype)), rstd


@fused
def _rms_norm_backward(d: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centred: bool) -> tuple[Tensor, ...]:
    """Return dx = rstd (d w - n mean(d w n)) and dw = sum over rows of d n, for n = x rstd."""
    d, normed, factor = upcast(d), upcast(x) * rstd, upcast(weight.to(x.dtype)) + float(zero_centred)
    d_times_normed = d * normed
    d_weight = d_times_normed.flatten(0, -2).sum(0)
    projection = (d_times_normed @ factor)[..., None] / x.shape[-1]
    d_unit = torch.mul(d, factor, out=d_times_normed)  # in place: allocating costs as much as multiplying
    dx = d_unit.addcmul_(normed, projection, value=-1).mul_(rstd)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Apply LayerNorm over the last dim, in x.dtype.

    On a CPU torch sums the gradients of weight and bias over the rows in bfloat16, which loses 7% of them in 4,000
    rows. So torch gets float32 there.
    """
    wide = upcast(x) if kind_of(x.device) == "cpu" else x
    weight, bias = (each.to(x.dtype).to(wide.dtype) for each in (weight, bias))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    """Return weight * rms_norm(x) * silu(gate) in x.dtype, or with sigmoid(gate): the output norm of Gated DeltaNet.

    The weight is plain, not zero-centred, and the norm comes before the gate (Mamba 2 has the gate first).
    """
    y: Tensor = _GatedNorm.apply(x, gate, weight, eps, activation == "sigmoid")
    return y


class _GatedNorm(torch.autograd.Function):
    """Gated RMSNorm that saves x and the gate uncast, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool) -> Tensor:
        y, rstd = _gated_norm_forward(x, gate, weight, eps, is_sigmoid)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.is_sigmoid = is_sigmoid
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return *_gated_norm_backward(d, *ctx.saved_tensors, ctx.is_sigmoid), None, None


@fused
def _gated_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, is_sigmoid: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = upcast(x)
    rstd = _rstd(wide, eps)
    opened = upcast(gate).sigmoid() if is_sigmoid else F.silu(upcast(gate))
    return (weight * (wide * rstd).to(x.dtype) * opened).to(x.dtype), rstd


@fused
def _gated_norm_backward(
    d: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor, is_sigmoid: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of x, gate and weight.

    With s = sigmoid(gate): silu(gate) = gate * s, and its derivative is s + gate * s * (1 - s).
    """
    d, normed, wide_gate, factor = upcast(d), upcast(x) * rstd, upcast(gate), upcast(weight)
    sigmoid = wide_gate.sigmoid()
    opened = sigmoid if is_sigmoid else wide_gate * sigmoid
    d_times_normed = d * normed
    slope = opened * (1 - sigmoid) if is_sigmoid else sigmoid + opened * (1 - sigmoid)
    d_gate = d_times_normed * factor * slope
    d_times_normed = d_times_normed * opened
    d_weight = d_times_normed.flatten(0, -2).sum(0)
    d_unit = d * factor * opened
    dx = (d_unit - normed * (d_times_normed * factor).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype)


def swiglu(gate_up: Tensor, weight_N: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up of `[..., gate | up]`, times the row's `weight_N` if given.

    It is not upcast: torch's silu kernels compute in float32 inside, and round once.
    """
    y: Tensor = _SwiGLU.apply(gate_up) if weight_N is None else _WeightedSwiGLU.apply(gate_up, weight_N)
    return y


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that saves only its input, and writes the gradients of gate and up into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu_forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _swiglu_backward(d, gate_up)


class _WeightedSwiGLU(torch.autograd.Function):
    """SwiGLU with a factor for each row (the routing weight of an expert). It does not save a product with the
    factor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight_N: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight_N)
        return _weighted_swiglu_forward(gate_up, weight_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        return _weighted_swiglu_backward(d, *ctx.saved_tensors)


def _swiglu_formula(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _swiglu_gradient_formula(d: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of [gate | up], in place of any temporary of that size."""
    gate, up = gate_up.chunk(2, -1)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    d_up.copy_(F.silu(gate)).mul_(d)
    d_gate.copy_(torch.ops.aten.silu_backward(d * up, gate))
    return d_gate_up


_swiglu_forward, _swiglu_backward = fused(_swiglu_formula), fused(_swiglu_gradient_formula)


@fused
def _weighted_swiglu_forward(gate_up: Tensor, weight_N: Tensor) -> Tensor:
    return _swiglu_formula(gate_up).mul_(weight_N[:, None].to(gate_up.dtype))


@fused
def _weighted_swiglu_backward(d: Tensor, gate_up: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    d_weight = _swiglu_formula(gate_up).mul_(d).sum(-1, dtype=weight_N.dtype)
    return _swiglu_gradient_formula(d * weight_N[:, None].to(d.dtype), gate_up), d_weight
