"""Rotary position embedding (RoPE, arXiv 2104.09864): full or partial, M-RoPE in 3D, linear / Llama 3 / YaRN scaling.

Head dims are rotated in pairs (r, r + R) by the angle position * theta**(-2r/dim), where dim = 2R is the number of
rotated dims. Shapes: T tokens, R frequencies, H heads, K head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import fused
from .norms import upcast


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): divide every frequency by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: divide slow frequencies by `factor`, keep fast ones, interpolate between.

    A frequency counts as slow if it turns at most `low` times over the original context, and as fast from `high` turns
    on.
    """

    factor: float
    context: int  # tokens, before scaling
    low: float
    high: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): like `Llama3Scaling`, but the interpolation is linear in the index of the frequency."""

    factor: float
    context: int  # tokens, before scaling
    low: float = 1.0
    high: float = 32.0
    truncate: bool = True  # round the ends of the interpolated range to whole indices


@dataclass(frozen=True)
class Rotary:
    """The rotation of heads: the first `dim` dims of each, frequency r by `theta**(-2r/dim)` a position."""

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    attention: float = 1.0  # factor of cosines and sines: YaRN's temperature of the attention logits, as its root


def rope_tables(
    positions_T: Tensor,
    rotary: Rotary,
    dtype: torch.dtype = torch.float32,
    sections: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [T, dim/2], in at least float32: bfloat16 cannot even count positions beyond 256.

    `positions` are [T], or [T, 3] (time, height, width) for M-RoPE, with `sections`, the interleaved `mrope_section`.
    """
    device = positions_T.device
    freq_R = rope_frequencies(rotary, torch.promote_types(dtype, torch.float32), device)
    if positions_T.dim() == 2:
        positions_TR = positions_T[:, _axis_of_frequency(rotary.dim // 2, sections, device)]
    else:
        positions_TR = positions_T[:, None]
    angles_TR = positions_TR.to(freq_R.dtype) * freq_R
    return angles_TR.cos() * rotary.attention, angles_TR.sin() * rotary.attention


def rope_frequencies(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle that one position adds, [dim/2]."""
    freq_R = 1.0 / rotary.theta ** (torch.arange(0, rotary.dim, 2, device=device).to(dtype) / rotary.dim)
    if rotary.scaling is None:
        return freq_R
    fraction_R = _scaled_fraction(rotary, freq_R)
    return freq_R * (1 - fraction_R) + freq_R / rotary.scaling.factor * fraction_R


def _scaled_fraction(rotary: Rotary, freq_R: Tensor) -> Tensor:
    """Return the fraction of each frequency that is divided by the factor, from 0 to 1."""
    scaling = rotary.scaling
    if isinstance(scaling, Llama3Scaling):
        turns_R = scaling.context / (2 * math.pi / freq_R)
        return 1 - ((turns_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    if isinstance(scaling, YarnScaling):
        first, last = _yarn_range(scaling, rotary.dim, rotary.theta)
        r = torch.arange(len(freq_R), device=freq_R.device).to(freq_R.dtype)
        return ((r - first) / (last - first)).clamp(0, 1)
    return torch.ones_like(freq_R)


def _yarn_range(scaling: YarnScaling, dim: int, theta: float) -> tuple[float, float]:
    """Return the range of indices over which YaRN interpolates: frequencies up to `first` are kept, those from `last`
    on are scaled.

    As in transformers, `last` may be beyond the last index. It is below 0 if even the fastest frequency turns less than
    `low` times over the context; then none is scaled.
    """
    first, last = (
        dim * math.log(scaling.context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.high, scaling.low)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return first, last if last != first else last + 0.001  # as transformers: avoids a division by 0


def _axis_of_frequency(num_freqs: int, sections: tuple[int, int, int] | None, device: torch.device) -> Tensor:
    """Return the axis of each frequency: height at 1, 4, 7 ..., width at 2, 5, 8 ..., and time elsewhere.

    Interleaving gives each axis fast and slow frequencies. Qwen2-VL (arXiv 2409.12191) cuts them into three blocks
    instead, which leaves time only the fastest ones.
    """
    if sections is None or sum(sections) != num_freqs:
        raise ValueError(f"positions [T, 3] need sections whose sum is dim/2={num_freqs}, not {sections}")
    r = torch.arange(num_freqs, device=device)
    height_R = (r % 3 == 1) & (r < 3 * sections[1])
    width_R = (r % 3 == 2) & (r < 3 * sections[2])
    return height_R.long() + 2 * width_R.long()


def rotate(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R of the K dims in pairs (r, r + R), as GPT-NeoX and Hugging Face do; the other dims pass
    through.

    The result has x.dtype and is rounded once. Meta's Llama pairs (2r, 2r + 1) instead; its files on the hub are
    permuted.
    """
    y_THK: Tensor = _Rotate.apply(x_THK, cos_TR, sin_TR)  # torch leaves apply untyped
    return y_THK


class _Rotate(torch.autograd.Function):
    """A rotation that saves only the tables: its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _rotated(x_THK, cos_TR, sin_TR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _rotated(d_THK, cos_TR, -sin_TR), None, None


@fused
def _rotated(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_freqs, cos, sin = cos_TR.shape[-1], upcast(cos_TR)[:, None], upcast(sin_TR)[:, None]
    x, rest = upcast(x_THK[..., : 2 * num_freqs]), x_THK[..., 2 * num_freqs :]
    y = x * torch.cat([cos, cos], dim=-1)
    y[..., :num_freqs].addcmul_(x[..., num_freqs:], sin, value=-1)
    y[..., num_freqs:].addcmul_(x[..., :num_freqs], sin)
    return torch.cat([y.to(x_THK.dtype), rest], dim=-1) if rest.shape[-1] else y.to(x_THK.dtype)
