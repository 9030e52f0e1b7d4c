"""Frozen weights stored in FP8: codes with a grid of scales, dequantised at each use.

For a base model that is not trained (LoRA-like runs, a frozen part): one byte an element, exactly as the FP8 files of
the hub have them. Nothing in this module rounds to FP8. Between forward and backward only codes are kept, never values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .part_sizes import part_size

FORM = torch.float8_e4m3fn
# Elements dequantised together: the float32 values and the expanded scales take 8 bytes an element.
_PART = part_size(__name__, "_PART", 1 << 22, small=301)
_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(FORM).to(torch.float32)  # the value of each code


@dataclass(frozen=True)
class Grid:
    """The scale of each element of a matrix: `scales[rows[i], columns[j]]`.

    Indices instead of a block size: a rank may hold any rows of a matrix, from several blocks or merged files.
    """

    scales: Tensor  # float32
    rows: Tensor  # for each row its row of `scales`; for several matrices, in the shape of their leading dims
    columns: Tensor

    def __getitem__(self, rows: slice | int) -> Grid:
        return replace(self, rows=self.rows[rows])

    def to(self, device: torch.device) -> Grid:
        return Grid(self.scales.to(device), self.rows.to(device), self.columns.to(device))

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise: codes times scales in float32, exactly as the file means them, rounded once to `dtype`."""
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        flat, out_flat, rows = codes.reshape(-1, codes.shape[-1]), out.view(-1, out.shape[-1]), self.rows.reshape(-1)
        step = max(1, _PART // max(1, codes.shape[-1]))
        for lo in range(0, len(flat), step):
            part = slice(lo, lo + step)
            scales = self.scales.index_select(0, rows[part]).index_select(1, self.columns)
            out_flat[part] = wide(flat[part]) * scales
        return out


@dataclass(frozen=True)
class Fp8Weight:
    """A quantised matrix, or a stack of them, in place of a weight that gets no gradient.

    It offers the few tensor operations that models use on weights.
    """

    codes: Tensor  # uint8: FSDP would cast a floating point dtype, and gloo does not support float8
    grid: Grid

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | int) -> Fp8Weight:
        return Fp8Weight(self.codes[rows], self.grid[rows])

    def __iter__(self) -> Iterator[Fp8Weight]:
        return (self[at] for at in range(len(self)))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Fp8Weight:
        rows = self.grid.rows.unflatten(dim, sizes)
        return Fp8Weight(self.codes.unflatten(dim, sizes), replace(self.grid, rows=rows))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Dequantise to `dtype`."""
        return self.grid.values(self.codes, dtype)


Weight = Tensor | Fp8Weight


def split_weights(weights: Sequence[Weight]) -> tuple[list[Tensor], list[Grid | None]]:
    """Split weights into what `ctx.save_for_backward` takes (tensors, or codes) and the grids to keep on ctx."""
    tensors = [weight.codes if isinstance(weight, Fp8Weight) else weight for weight in weights]
    return tensors, [weight.grid if isinstance(weight, Fp8Weight) else None for weight in weights]


def join_weights(tensors: Sequence[Tensor], grids: Sequence[Grid | None]) -> list[Weight]:
    """Put saved tensors and grids back together."""
    return [t if grid is None else Fp8Weight(t, grid) for t, grid in zip(tensors, grids, strict=True)]


def wide(codes: Tensor) -> Tensor:
    """Convert FP8 codes to float32. On a CPU a table lookup is three times as fast as torch's conversion."""
    flat = codes.contiguous().view(-1).view(torch.uint8)
    if codes.device.type != "cpu":
        return flat.view(FORM).to(torch.float32).view(codes.shape)
    return _VALUES.index_select(0, flat.int()).view(codes.shape)
