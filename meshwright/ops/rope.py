"""Rotary position embedding, one- and three-dimensional, over all or part of a head, also scaled to longer contexts."""

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
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """A frequency is divided by `factor` if it turns at most `low` times over the context, kept from `high` turns on,
    and mixed between them: the more turns, the more of it is kept."""

    factor: float
    context: int  # tokens, before scaling
    low: float
    high: float


@dataclass(frozen=True)
class YarnScaling:
    """As `Llama3Scaling`, but the mix changes evenly from frequency to frequency (https://arxiv.org/abs/2309.00071)."""

    factor: float
    context: int  # tokens, before scaling
    low: float = 1.0
    high: float = 32.0
    truncate: bool = True  # the mix begins and ends at whole frequencies


@dataclass(frozen=True)
class Rotary:
    """How heads are rotated: the first `dim` dims of each, frequency r of them by `theta**(-2r/dim)` a position."""

    dim: int
    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    attention: float = 1.0  # what cosines and sines are multiplied by


def rope_tables(
    positions_T: Tensor,
    rotary: Rotary,
    dtype: torch.dtype = torch.float32,
    sections: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim/2] in at least float32.

    positions are [T], or [T, 3] (time, height, width) with `sections`, the interleaved `mrope_section`.
    """
    device = positions_T.device
    freq_R = rope_frequencies(rotary, torch.promote_types(dtype, torch.float32), device)
    if positions_T.dim() == 2:
        positions_TR = positions_T[:, _axes(rotary.dim // 2, sections, device)]
    else:
        positions_TR = positions_T[:, None]
    angles_TR = positions_TR.to(freq_R.dtype) * freq_R
    return angles_TR.cos() * rotary.attention, angles_TR.sin() * rotary.attention


def rope_frequencies(rotary: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The angle of one position, [dim/2]."""
    freq_R = 1.0 / rotary.theta ** (torch.arange(0, rotary.dim, 2, device=device).to(dtype) / rotary.dim)
    if rotary.scaling is None:
        return freq_R
    share_R = _scaled_share(rotary, freq_R)
    return freq_R * (1 - share_R) + freq_R / rotary.scaling.factor * share_R


def _scaled_share(rotary: Rotary, freq_R: Tensor) -> Tensor:
    """How much of each frequency is divided by the factor, from 0 to 1."""
    scaling = rotary.scaling
    if isinstance(scaling, Llama3Scaling):
        turns_R = scaling.context / (2 * math.pi / freq_R)
        return 1 - ((turns_R - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    if isinstance(scaling, YarnScaling):
        first, last = _mixed(scaling, rotary.dim, rotary.theta)
        r = torch.arange(len(freq_R), device=freq_R.device).to(freq_R.dtype)
        return ((r - first) / (last - first)).clamp(0, 1)
    return torch.ones_like(freq_R)


def _mixed(scaling: YarnScaling, dim: int, theta: float) -> tuple[float, float]:
    """YaRN keeps the frequencies up to `first`, scales those from `last` on, and mixes those between them.

    As in transformers, `last` may be beyond the last frequency. It is below 0 if the fastest frequency turns less than
    `low` times over the context: then none is scaled.
    """
    first, last = (
        dim * math.log(scaling.context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.high, scaling.low)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    return first, last if last != first else last + 0.001


def _axes(num_freqs: int, sections: tuple[int, int, int] | None, device: torch.device) -> Tensor:
    """For each frequency the axis it turns with: time, but height at 1, 4, 7 ... and width at 2, 5, 8 ..."""
    if sections is None or sum(sections) != num_freqs:
        raise ValueError(f"positions [T, 3] need sections whose sum is dim/2={num_freqs}, not {sections}")
    r = torch.arange(num_freqs, device=device)
    height_R = (r % 3 == 1) & (r < 3 * sections[1])
    width_R = (r % 3 == 2) & (r < 3 * sections[2])
    return height_R.long() + 2 * width_R.long()


def rotate(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate-half on the first 2R of the K dims; the others pass. In x.dtype, rounded once."""
    y_THK: Tensor = _Rotate.apply(x_THK, cos_TR, sin_TR)  # torch leaves apply untyped
    return y_THK


class _Rotate(torch.autograd.Function):
    """Keeps the tables alone: its gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        return _turned(x_THK, cos_TR, sin_TR)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return _turned(d_THK, cos_TR, -sin_TR), None, None


@fused
def _turned(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_freqs, cos, sin = cos_TR.shape[-1], upcast(cos_TR)[:, None], upcast(sin_TR)[:, None]
    x, rest = upcast(x_THK[..., : 2 * num_freqs]), x_THK[..., 2 * num_freqs :]
    y = x * torch.cat([cos, cos], dim=-1)
    y[..., :num_freqs].addcmul_(x[..., num_freqs:], sin, value=-1)
    y[..., num_freqs:].addcmul_(x[..., :num_freqs], sin)
    return torch.cat([y.to(x_THK.dtype), rest], dim=-1) if rest.shape[-1] else y.to(x_THK.dtype)
