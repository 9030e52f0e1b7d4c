"""Norms and the elementwise products that go with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import fused
from .meta_kernels import kind_of


def at_least_float32(x: Tensor) -> torch.dtype:
    """Never exactly float32, so that everything also runs in float64."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    return x.to(at_least_float32(x))


def _rstd(x: Tensor, eps: float) -> Tensor:
    """One over the root mean square of a wide x."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """RMSNorm over the last dim, in x.dtype.

    Plain (Qwen2, Qwen3): round to x.dtype, then times weight. Zero-centred (Qwen3.5): times 1 + weight, formed in
    float32 because bf16 would lose a small weight beside the 1, then round.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, zero_centred)  # torch leaves apply untyped
    return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x as it came, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        y, rstd = _normed(x, weight, eps, zero_centred)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centred = zero_centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, d_weight = _norm_gradients(d, *ctx.saved_tensors, ctx.zero_centred)
        return dx, d_weight, None, None


@fused
def _normed(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> tuple[Tensor, ...]:
    wide = upcast(x)
    rstd = _rstd(wide, eps)
    unit = wide * rstd
    if zero_centred:
        return unit.mul_(1 + upcast(weight.to(x.dtype))).to(x.dtype), rstd
    return unit.to(x.dtype).mul_(weight.to(x.dtype)), rstd


@fused
def _norm_gradients(d: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, zero_centred: bool) -> tuple[Tensor, ...]:
    d, unit, factor = upcast(d), upcast(x) * rstd, upcast(weight.to(x.dtype)) + float(zero_centred)
    each = d * unit
    d_weight = each.flatten(0, -2).sum(0)
    share = (each @ factor)[..., None] / x.shape[-1]
    d_unit = torch.mul(d, factor, out=each)  # in its place: a fresh block costs as much as the product
    dx = d_unit.addcmul_(unit, share, value=-1).mul_(rstd)
    return dx.to(x.dtype), d_weight.to(weight.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dim, in x.dtype. torch's kernel for CPUs sums the gradients of weight and bias over the
    rows in bfloat16, which loses 7% of them in 4,000 rows: it gets wide values."""
    wide = upcast(x) if kind_of(x.device) == "cpu" else x
    weight, bias = (each.to(x.dtype).to(wide.dtype) for each in (weight, bias))
    return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The delta net's norm, in x.dtype: weight (plain, not zero-centred) * rms_norm(x) * silu(gate)."""
    y: Tensor = _GatedNorm.apply(x, gate, weight, eps)
    return y


class _GatedNorm(torch.autograd.Function):
    """Keeps x and the gate as they came, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _normed_behind_gate(x, gate, weight, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        return *_gated_norm_gradients(d, *ctx.saved_tensors), None


@fused
def _normed_behind_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    wide = upcast(x)
    rstd = _rstd(wide, eps)
    return (weight * (wide * rstd).to(x.dtype) * F.silu(upcast(gate))).to(x.dtype), rstd


@fused
def _gated_norm_gradients(d: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
    """With s = sigmoid(gate), silu(gate) is gate * s, and its derivative s + gate * s * (1 - s)."""
    d, unit, wide_gate, factor = upcast(d), upcast(x) * rstd, upcast(gate), upcast(weight)
    share = wide_gate.sigmoid()
    silu = wide_gate * share
    each = d * unit
    d_gate = each * factor * (share + silu * (1 - share))
    each = each * silu
    d_weight = each.flatten(0, -2).sum(0)
    d_unit = d * factor * silu
    dx = (d_unit - unit * (each * factor).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype)


def swiglu(gate_up: Tensor, weight_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up of `[..., gate | up]`. Not upcast: both kernels compute in float32 inside. `weight_N`: a factor
    for each row."""
    y: Tensor = _SwiGLU.apply(gate_up) if weight_N is None else _WeightedSwiGLU.apply(gate_up, weight_N)
    return y


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone, and writes its gradient in one piece."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _gate_gradients(d, gate_up)


class _WeightedSwiGLU(torch.autograd.Function):
    """It keeps no product beside its input, neither with the weights nor without."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight_N: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight_N)
        return _weighted(gate_up, weight_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        return _weighted_gradients(d, *ctx.saved_tensors)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _through_gate(d: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, -1)
    d_up.copy_(F.silu(gate)).mul_(d)
    d_gate.copy_(torch.ops.aten.silu_backward(d * up, gate))
    return d_gate_up


_gated, _gate_gradients = fused(_gate), fused(_through_gate)


@fused
def _weighted(gate_up: Tensor, weight_N: Tensor) -> Tensor:
    return _gate(gate_up).mul_(weight_N[:, None].to(gate_up.dtype))


@fused
def _weighted_gradients(d: Tensor, gate_up: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    d_weight = _gate(gate_up).mul_(d).sum(-1, dtype=weight_N.dtype)
    return _through_gate(d * weight_N[:, None].to(d.dtype), gate_up), d_weight
