"""Norms and the elementwise products that go with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """x in at least float32: never exactly float32, so that everything also runs in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square, in at least float32."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """RMSNorm over the last dim, in x.dtype.

    Plain (Qwen2, Qwen3): round to x.dtype, then times weight. Zero-centred (Qwen3.5): times 1 + weight, formed in
    float32 because bf16 would lose a small weight beside the 1, then round.
    """
    if zero_centred:
        return (_unit(x, eps) * (1 + upcast(weight))).to(x.dtype)
    return (weight * _unit(x, eps).to(x.dtype)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The delta net's norm, in x.dtype: weight (plain, not zero-centred) * rms_norm(x) * silu(gate)."""
    return (weight * _unit(x, eps).to(x.dtype) * F.silu(upcast(gate))).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Not upcast: both kernels compute in float32 inside, and float32 copies would be saved."""
    return F.silu(gate) * up
