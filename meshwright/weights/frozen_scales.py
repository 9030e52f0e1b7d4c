"""Frozen matrices that stay as their files have them: numbers in 8 bits, with a grid of their scales beside them.

Who computes, exports or saves wants values. These are made when they are asked for, of one parameter at a time.
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
    """Of the matrix of a box, which is what tp and ep leave of a parameter: FSDP gathers all of its rows."""
    num_rows = len(param.rows)
    rows, tables, first = torch.zeros(box.shape[:num_rows], dtype=torch.int64), list[Tensor](), 0
    columns = torch.zeros(0, dtype=torch.int64)
    for block in layout.blocks:
        common = block.ours.meet(box)
        if common is not None:
            places, table = reader.scales_of(block, common)
            at = places.rows.reshape(places.rows.shape[:num_rows])  # it has one element in each other dim
            rows[common.within(box).slices[:num_rows]] = at + first
            columns = places.columns.reshape(-1)  # the same of all blocks, which have whole rows
            tables.append(table)
            first += len(table)
    return Grid(torch.cat(tables), rows.view(-1), columns)


@dataclass(frozen=True, eq=False)
class Values(Mapping[str, Tensor]):
    """What is stored of parameters: live memory. Of those in 8 bits, which have a grid, values that are made anew."""

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
        """What is stored of a parameter, as `piece.views` gives it; of numbers, values of what is asked for."""
        stored, grid, num_rows = self.stored[piece.param.name], self.grids.get(piece.param.name), len(piece.param.rows)
        at = 0
        for box, view in piece.views(stored):
            if grid is None:
                yield box, view
                continue
            shape = box.shape
            num = prod(shape[:num_rows])
            rows = grid.rows[at : at + num].view(shape[:num_rows])
            yield box, QuantisedView(view, grid.scales, rows, grid.columns.view(shape[num_rows:]))
            at += num

    def only(self, wanted: Callable[[str], bool]) -> Values:
        return replace(self, stored={name: tensor for name, tensor in self.stored.items() if wanted(name)})

    def beside(self, more: Mapping[str, Tensor]) -> Values:
        return replace(self, stored={**self.stored, **more})

    @property
    def apart(self) -> tuple[dict[str, Tensor], Values]:
        """What can be written into, and what cannot."""
        live = {name: tensor for name, tensor in self.stored.items() if name not in self.grids}
        return live, self.only(lambda name: name in self.grids)


@dataclass(frozen=True)
class QuantisedView:
    """Numbers in the shape of a box, and the row and column of scales that they have."""

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
    """Frozen matrices cannot take other values: those that this rank finds in a source must be the same."""
    total = sum(read.piece.numel for read in plan)
    label = f"compare what is frozen with {source.directory} on rank {rank}"
    with (
        Reader(source) as reader,
        progress(label, total, "elements", enabled=bool(plan) and rank == 0) as advance,
    ):
        for read in plan:
            name, found = read.piece.param.name, torch.empty(read.piece.shape, dtype=torch.float32, device="cpu")
            reader.fill(read.layout, read.piece, found)
            if not _same(found, values[name].cpu()):
                raise LoadError(
                    f"{source.directory} has other values of {name}, which is frozen and in 8 bits as the files of the "
                    "model have it; load the model from there, or train what was trained"
                )
            advance(read.piece.numel)
    source.check_unchanged(source.stamps)


def _same(a: Tensor, b: Tensor) -> bool:
    """NaN is NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rows_of(piece: Piece, grid: Grid) -> Grid:
    """Of the rows that a rank stores."""
    return grid[piece.lo : piece.hi]
