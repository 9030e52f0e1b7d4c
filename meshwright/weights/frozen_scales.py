"""Keep frozen weights in 8 or 4 bits (LoRA, QLoRA, frozen parts): codes in uint8, with their grid of scales.

Codes take a quarter or an eighth of the memory of float32. Compute, export and checkpoints need values, which are
dequantised on demand, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from ..errors import LoadError
from ..log import progress
from ..ops import Grid
from ..ops.codings import Coding
from ..sharding import Box, Layout, Param, Piece
from .four_bits import matrices_of
from .read_plan import Read
from .reader import Reader
from .source import Source


def grid_of(param: Param, box: Box, layout: Layout, reader: Reader, coding: Coding) -> Grid:
    """Return the scales of a parameter after the cuts of tp and ep, for all rows, because FSDP gathers all rows.

    A stacked parameter (experts, fused gate and up) is made of several blocks, each with its own scales in the
    files. The grid stacks them and maps each row of the parameter to its row of scales.

    FSDP cuts rows anywhere, and after its all-gather the whole matrix is multiplied; so scales are kept for all rows,
    while codes are sharded. FP8 has one scale per 16384 elements. 4-bit formats have one per 16 to 64 elements, so
    these are stored in the rows; for all rows the grid keeps only one number per matrix, by which NVFP4 divides its
    scales.
    """
    num_rows = len(param.rows)
    if coding.scale is not None:
        matrices, divisors = matrices_of(reader, layout, param, box, coding)
        return Grid(divisors, matrices, torch.zeros(prod(box.shape[num_rows:]), dtype=torch.int64), coding)
    rows, scales, num_scale_rows = torch.zeros(box.shape[:num_rows], dtype=torch.int64), list[Tensor](), 0
    columns = torch.zeros(0, dtype=torch.int64)
    for block in layout.blocks:
        overlap = block.ours.meet(box)
        if overlap is not None:
            indices, block_scales = reader.scales_of(block, overlap)
            row_of_scales = indices.rows.reshape(indices.rows.shape[:num_rows])  # size 1 in every other dim
            rows[overlap.within(box).slices[:num_rows]] = row_of_scales + num_scale_rows
            columns = indices.columns.reshape(-1)  # equal for all blocks: each has whole rows
            scales.append(block_scales)
            num_scale_rows += len(block_scales)
    return Grid(torch.cat(scales), rows.view(-1), columns)


@dataclass(frozen=True, eq=False)
class Values(Mapping[str, Tensor]):
    """A mapping of stored tensors by parameter: live memory, or for frozen codes their dequantised values.

    `mw.export`, checkpoints and streaming read it like a dict of tensors and need not know which parameters are codes.
    It makes one dequantised copy at a time.
    """

    stored: Mapping[str, Tensor]
    grids: Mapping[str, Grid] = field(default_factory=dict)  # of the rows that are stored

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return self.grids[name].values(stored, torch.float32) if name in self.grids else stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def views(self, piece: Piece) -> Iterator[tuple[Box, Tensor | QuantisedView]]:
        """Yield the boxes of a piece with their stored values, as `Piece.views` does. Codes are dequantised when
        indexed."""
        stored, grid, num_rows = self.stored[piece.param.name], self.grids.get(piece.param.name), len(piece.param.rows)
        if grid is None:
            yield from piece.views(stored)
            return
        first_row = 0
        for box in piece.boxes:
            rows = slice(first_row, first_row + prod(box.shape[:num_rows]))
            yield box, QuantisedView(stored[rows], grid[rows], box.shape, num_rows)
            first_row = rows.stop

    def only(self, keep: Callable[[str], bool]) -> Values:
        """Return the parameters for which `keep(name)` is true."""
        return replace(self, stored={name: tensor for name, tensor in self.stored.items() if keep(name)})

    def with_tensors(self, more: Mapping[str, Tensor]) -> Values:
        """Return the mapping with more tensors."""
        return replace(self, stored={**self.stored, **more})

    @property
    def apart(self) -> tuple[dict[str, Tensor], Values]:
        """Return the writable tensors, and the frozen codes, which are read-only."""
        writable = {name: tensor for name, tensor in self.stored.items() if name not in self.grids}
        return writable, self.only(lambda name: name in self.grids)


@dataclass(frozen=True)
class QuantisedView:
    """Codes of whole rows as a box. Indexing it dequantises the selected rows."""

    codes: Tensor  # [rows, bytes]
    grid: Grid
    shape: tuple[int, ...]
    num_rows: int  # the first dims of the shape, which are rows

    def __getitem__(self, some: tuple[slice, ...]) -> Tensor:
        rows_shape, columns = self.shape[: self.num_rows], some[self.num_rows :]
        rows = torch.arange(len(self.codes), device=self.codes.device).view(rows_shape)[some[: self.num_rows]]
        flat = rows.reshape(-1)
        selected = replace(self.grid, rows=self.grid.rows.index_select(0, flat))
        values = selected.values(self.codes.index_select(0, flat), torch.float32)
        every: tuple[slice, ...] = (*(slice(None) for _ in rows.shape), *columns)
        return values.view(*rows.shape, *self.shape[self.num_rows :])[every]


def check_same(values: Values, rank: int, plan: Sequence[Read], source: Source) -> None:
    """Check that a source has the values of this rank's frozen weights that are stored as codes.

    These weights cannot take other values, so loading a different checkpoint must fail instead of skipping them.

    Values are compared after dequantising, so a checkpoint with other codes and scales but equal values is accepted.
    """
    total = sum(read.piece.numel for read in plan)
    label = f"compare what is frozen with {source.directory} on rank {rank}"
    with (
        Reader(source) as reader,
        progress(label, total, "elements", enabled=bool(plan) and rank == 0) as advance,
    ):
        for read in plan:
            name, values32 = read.piece.param.name, torch.empty(read.piece.shape, dtype=torch.float32, device="cpu")
            reader.fill(read.layout, read.piece, values32)
            own, grid = values[name].cpu(), values.grids[name].to(values32.device)
            if not _equal_with_nan(values32, own) and not _equal_with_nan(_quantised_as(grid, values32), own):
                bits = 8 if grid.coding.scale is None else 4
                raise LoadError(
                    f"{source.directory} has other values of {name}, which is frozen and kept in {bits} bits as the "
                    "model's files have it; load the model from there, or freeze the same parameters as that run did"
                )
            advance(read.piece.numel)
    source.check_unchanged(source.stamps)


def _quantised_as(grid: Grid, values: Tensor) -> Tensor:
    """Quantise values to 4 bits as loading does."""
    if grid.coding.scale is None:
        return values
    return grid.values(grid.coding.encode(values, grid.scales[grid.rows]), torch.float32)


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rows_of(piece: Piece, grid: Grid) -> Grid:
    """Return the scales of the rows that a rank stores."""
    return grid[piece.lo : piece.hi]
