"""Frozen FP8 weights kept as their files have them: codes in uint8, with their grid of scales (for LoRA or frozen
parts).

Keeping codes takes a quarter of float32. Compute, export and checkpoints want values; they are dequantised on demand,
one parameter at a time.
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
from ..sharding import Box, Layout, Param, Piece
from .read_plan import Read
from .reader import Reader
from .source import Source


def grid_of(param: Param, box: Box, layout: Layout, reader: Reader) -> Grid:
    """Return the scales of a matrix: what tp and ep leave of a parameter, with all rows, because FSDP gathers all rows.

    A stacked parameter (experts, fused gate and up) is made of several blocks, each with its own scales in the
    files. The grid stacks them and maps each row of the parameter to its row of scales.

    FSDP cuts rows anywhere, and after its all-gather the whole matrix is multiplied; so scales are kept for all rows,
    while codes are sharded. Scales are 1/16384 of the elements.
    """
    num_rows = len(param.rows)
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
    """A mapping of stored tensors by parameter: live memory, or for frozen FP8 weights their dequantised values.

    `mw.export`, checkpoints and streaming read it like a dict of tensors and need not know which parameters are FP8.
    Only dequantised copies are made, one at a time.
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
        """Yield the boxes of a piece with their stored values, as `Piece.views` does. FP8 codes are dequantised when
        indexed."""
        stored, grid, num_rows = self.stored[piece.param.name], self.grids.get(piece.param.name), len(piece.param.rows)
        first_row = 0
        for box, view in piece.views(stored):
            if grid is None:
                yield box, view
                continue
            shape = box.shape
            num_rows_of_box = prod(shape[:num_rows])
            rows = grid.rows[first_row : first_row + num_rows_of_box].view(shape[:num_rows])
            yield box, QuantisedView(view, grid.scales, rows, grid.columns.view(shape[num_rows:]))
            first_row += num_rows_of_box

    def only(self, keep: Callable[[str], bool]) -> Values:
        """Return the parameters for which `keep(name)` is true."""
        return replace(self, stored={name: tensor for name, tensor in self.stored.items() if keep(name)})

    def with_tensors(self, more: Mapping[str, Tensor]) -> Values:
        """Return the mapping with more tensors."""
        return replace(self, stored={**self.stored, **more})

    @property
    def apart(self) -> tuple[dict[str, Tensor], Values]:
        """Return the tensors that can be written into, and the frozen FP8 ones that cannot."""
        writable = {name: tensor for name, tensor in self.stored.items() if name not in self.grids}
        return writable, self.only(lambda name: name in self.grids)


@dataclass(frozen=True)
class QuantisedView:
    """FP8 codes in the shape of a box. Indexing it dequantises the selected part."""

    codes: Tensor
    scales: Tensor
    rows: Tensor
    columns: Tensor

    def __getitem__(self, some: tuple[slice, ...]) -> Tensor:
        num_rows, codes = self.rows.dim(), self.codes[some]
        rows, columns = self.rows[some[:num_rows]].reshape(-1), self.columns[some[num_rows:]].reshape(-1)
        matrix = codes.reshape(len(rows), len(columns))
        return Grid(self.scales, rows, columns).values(matrix, torch.float32).view(codes.shape)


def check_same(values: Values, rank: int, plan: Sequence[Read], source: Source) -> None:
    """Check that a source has the values of the frozen FP8 weights of this rank.

    They cannot take other values, so loading a different checkpoint into the model must fail, not skip them.

    Compared value by value after dequantising, so a checkpoint with other codes and scales but equal values is
    accepted.
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
            if not _equal_with_nan(values32, values[name].cpu()):
                raise LoadError(
                    f"{source.directory} has other values of {name}, which is frozen and kept in 8 bits as the model's "
                    "files have it; load the model from there, or freeze the same parameters as that run did"
                )
            advance(read.piece.numel)
    source.check_unchanged(source.stamps)


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rows_of(piece: Piece, grid: Grid) -> Grid:
    """Return the scales of the rows that a rank stores."""
    return grid[piece.lo : piece.hi]
