"""Rotary position embedding, one- and three-dimensional, over all or part of a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.norms import upcast


def rope_tables(
    positions_T: Tensor,
    dim: int,
    theta: float,
    dtype: torch.dtype = torch.float32,
    sections: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim/2] in at least float32.

    positions are [T], or [3, T] (time, height, width) with `sections`, the interleaved `mrope_section`.
    """
    work = torch.promote_types(dtype, torch.float32)
    device = positions_T.device
    inv_freq_R = 1.0 / theta ** (torch.arange(0, dim, 2, device=device).to(work) / dim)
    if positions_T.dim() == 2:
        positions_TR = positions_T[_axes(dim // 2, sections, device)].T
    else:
        positions_TR = positions_T[:, None]
    angles_TR = positions_TR.to(work) * inv_freq_R
    return angles_TR.cos(), angles_TR.sin()


def _axes(num_freqs: int, sections: tuple[int, int, int] | None, device: torch.device) -> Tensor:
    """For each frequency the axis it turns with: time, but height at 1, 4, 7 ... and width at 2, 5, 8 ..."""
    if sections is None or sum(sections) != num_freqs:
        raise ValueError(f"positions [3, T] need sections whose sum is dim/2={num_freqs}, not {sections}")
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


def _turned(x_THK: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_freqs, cos, sin = cos_TR.shape[-1], upcast(cos_TR)[:, None], upcast(sin_TR)[:, None]
    x, rest = upcast(x_THK[..., : 2 * num_freqs]), x_THK[..., 2 * num_freqs :]
    y = x * torch.cat([cos, cos], dim=-1)
    y[..., :num_freqs].addcmul_(x[..., num_freqs:], sin, value=-1)
    y[..., num_freqs:].addcmul_(x[..., :num_freqs], sin)
    return torch.cat([y.to(x_THK.dtype), rest], dim=-1) if rest.shape[-1] else y.to(x_THK.dtype)
