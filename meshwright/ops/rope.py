"""Rotary position embedding, one- and three-dimensional, over all or part of a head."""

from __future__ import annotations

import torch
from torch import Tensor

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
    num_freqs = cos_TR.shape[-1]
    a, b, rest = x_THK.split([num_freqs, num_freqs, x_THK.shape[-1] - 2 * num_freqs], dim=-1)
    a, b, cos, sin = upcast(a), upcast(b), upcast(cos_TR)[:, None], upcast(sin_TR)[:, None]
    return torch.cat([(a * cos - b * sin).to(x_THK.dtype), (b * cos + a * sin).to(x_THK.dtype), rest], dim=-1)
