"""Frozen weights stored in FP8 or in 4 bits: codes with their scales, dequantised at each use (QLoRA, FP8 base models).

For weights that are not trained (LoRA, QLoRA, frozen parts): 1 byte per element, or 0.53 to 0.56. Nothing in this
module rounds to 8 or 4 bits. Between forward and backward only codes are kept, never values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .codings import FP8, Coding, wide
from .part_sizes import part_size

# Elements dequantised together: the float32 values and the expanded scales take 8 bytes per element.
_PART = part_size(__name__, "_PART", 1 << 22, small=301)


@dataclass(frozen=True)
class Grid:
    """The scale of each element of a matrix: `scales[rows[i], columns[j]]`.

    Indices instead of a block size: a rank may hold any rows of a matrix, from several blocks or merged files. In 4
    bits the scales of blocks are in the rows themselves, and `scales`, `[n, 1]`, holds their divisors.
    """

    scales: Tensor  # float32
    rows: Tensor  # the row of `scales` for each row; for several matrices, in the shape of their leading dims
    columns: Tensor
    coding: Coding = FP8

    def __getitem__(self, rows: slice | int) -> Grid:
        return replace(self, rows=self.rows[rows])

    def to(self, device: torch.device) -> Grid:
        return replace(self, scales=self.scales.to(device), rows=self.rows.to(device), columns=self.columns.to(device))

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise: codes times scales in float32, exactly as the file format defines, rounded once to `dtype`."""
        width = len(self.columns)
        out = torch.empty((*codes.shape[:-1], width), dtype=dtype, device=codes.device)
        flat, out_flat, rows = codes.reshape(-1, codes.shape[-1]), out.view(-1, width), self.rows.reshape(-1)
        step = max(1, _PART // max(1, width))
        # A simulation needs only one part: each has the same temporary memory.
        stop = min(step, len(flat)) if codes.device.type == "meta" else len(flat)
        for lo in range(0, stop, step):
            part = slice(lo, lo + step)
            out_flat[part] = self._decoded(flat[part], rows[part])
        return out

    def _decoded(self, codes: Tensor, rows: Tensor) -> Tensor:
        """Return the values of some rows in float32."""
        scales = self.scales.index_select(0, rows)
        if self.coding.scale is None:
            return wide(codes) * scales.index_select(1, self.columns)
        return self.coding.decode(codes, len(self.columns), scales)


@dataclass(frozen=True)
class FrozenWeight:
    """A matrix in 8 or 4 bits, or a stack of them, in place of a weight that gets no gradient.

    It offers the few tensor operations that models use on weights.
    """

    codes: Tensor  # uint8: FSDP would cast a floating point dtype, and gloo does not support float8
    grid: Grid

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], len(self.grid.columns)))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | int) -> FrozenWeight:
        return FrozenWeight(self.codes[rows], self.grid[rows])

    def __iter__(self) -> Iterator[FrozenWeight]:
        return (self[at] for at in range(len(self)))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> FrozenWeight:
        rows = self.grid.rows.unflatten(dim, sizes)
        return FrozenWeight(self.codes.unflatten(dim, sizes), replace(self.grid, rows=rows))

    def to(self, dtype: torch.dtype) -> Tensor:
        """Dequantise to `dtype`."""
        return self.grid.values(self.codes, dtype)


Weight = Tensor | FrozenWeight


def split_weights(weights: Sequence[Weight]) -> tuple[list[Tensor], list[Grid | None]]:
    """Split weights into tensors or codes for `ctx.save_for_backward`, and the grids to keep on ctx."""
    tensors = [weight.codes if isinstance(weight, FrozenWeight) else weight for weight in weights]
    return tensors, [weight.grid if isinstance(weight, FrozenWeight) else None for weight in weights]


def join_weights(tensors: Sequence[Tensor], grids: Sequence[Grid | None]) -> list[Weight]:
    """Put saved tensors and grids back together."""
    return [t if grid is None else FrozenWeight(t, grid) for t, grid in zip(tensors, grids, strict=True)]
