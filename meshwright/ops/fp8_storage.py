"""Frozen matrices that stay in 8 bits: their numbers, and scales beside them. Values are made at each use.

Nothing is rounded to such numbers here. What is kept from forward to backward are the numbers, never their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .part_sizes import part_size

FORM = torch.float8_e4m3fn
# elements of which values are made together: scales of each, and wide values, take memory
_PART = part_size(__name__, "_PART", 1 << 22, small=301)
_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(FORM).to(torch.float32)  # by code


@dataclass(frozen=True)
class Grid:
    """The scale of each element of a matrix: `scales[rows[i], columns[j]]`."""

    scales: Tensor  # float32
    rows: Tensor  # a number for each row; of several matrices, in the shape of their leading dims
    columns: Tensor

    def __getitem__(self, some: slice | int) -> Grid:
        return replace(self, rows=self.rows[some])

    def to(self, device: torch.device) -> Grid:
        return Grid(self.scales.to(device), self.rows.to(device), self.columns.to(device))

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Exactly what a file says in float32, rounded once."""
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        flat, into, rows = codes.reshape(-1, codes.shape[-1]), out.view(-1, out.shape[-1]), self.rows.reshape(-1)
        at_a_time = max(1, _PART // max(1, codes.shape[-1]))
        for lo in range(0, len(flat), at_a_time):
            some = slice(lo, lo + at_a_time)
            scales = self.scales.index_select(0, rows[some]).index_select(1, self.columns)
            into[some] = wide(flat[some]) * scales
        return out


@dataclass(frozen=True)
class Numbers:
    """A matrix, or several, in the place of a weight that gets no gradient."""

    codes: Tensor  # uint8: FSDP would cast floating point numbers, and gloo sends none of 8 bits
    grid: Grid

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, some: slice | int) -> Numbers:
        return Numbers(self.codes[some], self.grid[some])

    def __iter__(self) -> Iterator[Numbers]:
        return (self[at] for at in range(len(self)))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Numbers:
        rows = self.grid.rows.unflatten(dim, sizes)
        return Numbers(self.codes.unflatten(dim, sizes), replace(self.grid, rows=rows))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Values."""
        return self.grid.values(self.codes, dtype)


Weight = Tensor | Numbers


def kept(weights: Sequence[Weight]) -> tuple[list[Tensor], list[Grid | None]]:
    """What backward needs of weights: tensors to save, and grids beside them."""
    tensors = [weight.codes if isinstance(weight, Numbers) else weight for weight in weights]
    return tensors, [weight.grid if isinstance(weight, Numbers) else None for weight in weights]


def restored(tensors: Sequence[Tensor], grids: Sequence[Grid | None]) -> list[Weight]:
    """The weights again."""
    return [t if grid is None else Numbers(t, grid) for t, grid in zip(tensors, grids, strict=True)]


def wide(codes: Tensor) -> Tensor:
    """In float32. On a CPU a table is three times as fast as torch's conversion."""
    flat = codes.contiguous().view(-1).view(torch.uint8)
    if codes.device.type != "cpu":
        return flat.view(FORM).to(torch.float32).view(codes.shape)
    return _VALUES.index_select(0, flat.int()).view(codes.shape)
