"""Frames of a vision tower: images and slices of videos, as patches packed end to end (NaViT, arXiv 2307.06304).

The h x w patches of a frame come in blocks of 2 x 2, block row by block row, and row by row within a block: the tower
later merges these four neighbours into one token. Frames do not attend to each other, just as documents do not, so
varlen attention serves both. Shapes: P patches, E width of the tower, S entries of the position table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .documents import Documents, documents
from .host_memory import to_device
from .norms import at_least_float32
from .rope import Rotary, rope_frequencies
from .rows import lookup

MERGED = 2  # patches per side that are merged into one token


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Frames:
    """Sizes and patch coordinates of packed frames.

    `sizes`: height and width in patches, on the host. `row_P`, `col_P`: the coordinates of each patch in its frame.
    """

    sizes: tuple[tuple[int, int], ...]
    docs: Documents
    row_P: Tensor
    col_P: Tensor

    def of_each_patch(self, numbers: Sequence[int]) -> Tensor:
        """Repeat a number of each frame for each of its patches."""
        lengths = torch.tensor(self.docs.lengths, dtype=torch.int64, device="cpu")
        per_frame = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        return to_device(per_frame.repeat_interleave(lengths), self.row_P.device)


def frames(sizes: Sequence[tuple[int, int]], device: torch.device | str) -> Frames:
    """Lay out frames of these heights and widths in patches."""
    for height, width in sizes:
        if height < MERGED or width < MERGED or height % MERGED or width % MERGED:
            raise ValueError(f"a frame has {height} x {width} patches; both must be even, and at least {MERGED}")
    coordinates = [_places(*size) for size in sizes]
    empty = torch.empty(0, dtype=torch.int64, device="cpu")
    row_P, col_P = (to_device(torch.cat([empty, *(each[at] for each in coordinates)]), device) for at in (0, 1))
    return Frames(tuple(sizes), documents([h * w for h, w in sizes], device), row_P, col_P)


def _places(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch of a frame, in the order of the blocks."""
    row_HW, col_HW = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    row_P, col_P = (
        x.view(height // MERGED, MERGED, width // MERGED, MERGED).transpose(1, 2).reshape(-1) for x in (row_HW, col_HW)
    )
    return row_P, col_P


def interpolated(table_SE: Tensor, these: Frames, like: Tensor) -> Tensor:
    """Interpolate a square table of position embeddings to the size of each frame, bilinearly with aligned corners. ->
    x_PE

    The result is rounded once, to the dtype of `like`.
    """
    side, dtype = round(len(table_SE) ** 0.5), at_least_float32(like)
    row, col = (
        _taps(at_P, these.of_each_patch([size[axis] for size in these.sizes]), side, dtype)
        for axis, at_P in enumerate((these.row_P, these.col_P))
    )
    at_4P = torch.stack([row_P * side + col_P for row_P, _ in row for col_P, _ in col])
    weight_4P = torch.stack([row_weight_P * col_weight_P for _, row_weight_P in row for _, col_weight_P in col])
    taps_4PE = lookup(table_SE.to(like.dtype), at_4P.flatten()).to(dtype).view(*at_4P.shape, table_SE.shape[1])
    return (taps_4PE * weight_4P[..., None]).sum(0).to(like.dtype)


def _taps(at_P: Tensor, size_P: Tensor, side: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return along one axis the two table indices that a patch lies between, and the weight of each."""
    position_P = at_P.to(dtype) * (side - 1) / (size_P - 1).clamp(min=1).to(dtype)
    low_P = position_P.floor()
    fraction_P = position_P - low_P
    low_P = low_P.long()
    return [(low_P, 1 - fraction_P), ((low_P + 1).clamp(max=side - 1), fraction_P)]


def frame_tables(these: Frames, head: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [P, head/2] for `rotate`: half of the angles turn with the row, half with the
    column.
    """
    freq = rope_frequencies(Rotary(head // 2, theta), torch.promote_types(dtype, torch.float32), these.row_P.device)
    angles = torch.cat([at_P[:, None].to(freq.dtype) * freq for at_P in (these.row_P, these.col_P)], -1)
    return angles.cos(), angles.sin()
