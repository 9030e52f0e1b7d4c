"""Frames: pictures, and slices of videos in time, as patches that lie end to end.

A frame of h x w patches has them in blocks of 2 x 2, row by row, and so within a block: four neighbours become one
token. Frames do not see each other, as documents do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .documents import Documents, documents
from .host_memory import sent
from .norms import at_least_float32
from .rope import Rotary, rope_frequencies
from .rows import lookup

MERGED = 2  # patches of a side that become one token


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Frames:
    """`sizes`: height and width in patches, on the host. `row_P`, `col_P`: where in its frame each patch is."""

    sizes: tuple[tuple[int, int], ...]
    docs: Documents
    row_P: Tensor
    col_P: Tensor

    def of_each_patch(self, numbers: Sequence[int]) -> Tensor:
        """Of each patch the number that its frame has."""
        lengths = torch.tensor(self.docs.lengths, dtype=torch.int64, device="cpu")
        each = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        return sent(each.repeat_interleave(lengths), self.row_P.device)


def frames(sizes: Sequence[tuple[int, int]], device: torch.device | str) -> Frames:
    for height, width in sizes:
        if height < MERGED or width < MERGED or height % MERGED or width % MERGED:
            raise ValueError(f"a frame has {height} x {width} patches; both must be even, and at least {MERGED}")
    places = [_places(*size) for size in sizes]
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    row_P, col_P = (sent(torch.cat([none, *(each[at] for each in places)]), device) for at in (0, 1))
    return Frames(tuple(sizes), documents([h * w for h, w in sizes], device), row_P, col_P)


def _places(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch of a frame, in their order."""
    row_HW, col_HW = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    row_P, col_P = (
        x.view(height // MERGED, MERGED, width // MERGED, MERGED).transpose(1, 2).reshape(-1) for x in (row_HW, col_HW)
    )
    return row_P, col_P


def resampled(table_SE: Tensor, these: Frames, like: Tensor) -> Tensor:
    """What a square table of positions says of each patch: the corners of the table are those of the frame, and between
    its places it is bilinear. Rounded once, to the dtype of `like`. -> x_PE"""
    side, dtype = round(len(table_SE) ** 0.5), at_least_float32(like)
    row, col = (
        _taps(at_P, these.of_each_patch([size[axis] for size in these.sizes]), side, dtype)
        for axis, at_P in enumerate((these.row_P, these.col_P))
    )
    at_4P = torch.stack([row_P * side + col_P for row_P, _ in row for col_P, _ in col])
    share_4P = torch.stack([of_row_P * of_col_P for _, of_row_P in row for _, of_col_P in col])
    taps_4PE = lookup(table_SE.to(like.dtype), at_4P.flatten()).to(dtype).view(*at_4P.shape, table_SE.shape[1])
    return (taps_4PE * share_4P[..., None]).sum(0).to(like.dtype)


def _taps(at_P: Tensor, size_P: Tensor, side: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Along one axis, the two places of the table that a patch lies between, and how much of each it takes."""
    place_P = at_P.to(dtype) * (side - 1) / (size_P - 1).clamp(min=1).to(dtype)
    low_P = place_P.floor()
    share_P = place_P - low_P
    low_P = low_P.long()
    return [(low_P, 1 - share_P), ((low_P + 1).clamp(max=side - 1), share_P)]


def frame_tables(these: Frames, head: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, head/2], for `rotate`: half of the angles turn with the row, half with the column."""
    freq = rope_frequencies(Rotary(head // 2, theta), torch.promote_types(dtype, torch.float32), these.row_P.device)
    angles = torch.cat([at_P[:, None].to(freq.dtype) * freq for at_P in (these.row_P, these.col_P)], -1)
    return angles.cos(), angles.sin()
