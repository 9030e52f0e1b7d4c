"""Frozen matrices that stay as their files have them: numbers in 8 bits, with a grid of their scales beside them.

Who computes, exports or saves wants values. These are made when they are asked for, of one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import LoadError
from ..layout import Box, Layout, Param, Piece
from ..log import progress
from ..ops import Grid
from .load import Reader
from .read_plan import Read
from .runs import Checks
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

    def only(self, wanted: Callable[[str], bool]) -> Values:
        return replace(self, stored={name: tensor for name, tensor in self.stored.items() if wanted(name)})

    def beside(self, more: Mapping[str, Tensor]) -> Values:
        return replace(self, stored={**self.stored, **more})

    @property
    def apart(self) -> tuple[dict[str, Tensor], Values]:
        """What can be written into, and what cannot."""
        live = {name: tensor for name, tensor in self.stored.items() if name not in self.grids}
        return live, self.only(lambda name: name in self.grids)


def check_same(values: Values, rank: int, plan: Sequence[Read], source: Source, checks: Checks | None = None) -> None:
    """Frozen matrices cannot take other values: those that this rank finds in a source must be the same."""
    total = sum(read.piece.numel for read in plan)
    label = f"compare what is frozen with {source.directory} on rank {rank}"
    with (
        Reader(source, checks=checks) as reader,
        progress(label, total, "elements", enabled=bool(plan) and rank == 0) as advance,
    ):
        for read in plan:
            name, found = read.piece.param.name, torch.empty(read.piece.shape, dtype=torch.float32, device="cpu")
            reader.fill(read.layout, read.piece, found)
            if not torch.equal(found, values[name].cpu()):
                raise LoadError(
                    f"{source.directory} has other values of {name}, which is frozen and in 8 bits as the files of the "
                    "model have it; load the model from there, or train what was trained"
                )
            advance(read.piece.numel)
    source.check_unchanged(source.stamps)


def rows_of(piece: Piece, grid: Grid) -> Grid:
    """Of the rows that a rank stores."""
    return grid[piece.lo : piece.hi]
