"""Where dims go: from declarations, rules and a mesh to the piece of every parameter that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import Tensor

from ..errors import LayoutError
from ..mesh.axes import DENSE, EXPERT, Axes
from .boxes import Box, chunk, interval
from .params import Param, Table, matrix_shape


@dataclass(frozen=True)
class Rules:
    """Which mesh axis splits which dim.

    `whole`: dims that stay whole where the axis does not divide them (kv heads under a large tp: each rank keeps all
    of them and slices in forward). `uneven`: dims whose last piece may be shorter. Every other dim must divide.
    """

    axis: Mapping[str, str] = field(
        default_factory=lambda: {
            "heads": "tp",
            "kv": "tp",
            "key": "tp",  # key heads of the delta net, each with its value heads
            "ffn": "tp",
            "vocab": "tp",
            "expert": "ep",
        }
    )
    whole: frozenset[str] = frozenset({"kv"})
    uneven: frozenset[str] = frozenset({"vocab"})

    def split(self, dims: Mapping[str, int], axes: Axes, what: str) -> dict[str, str]:
        """The dims of `dims` that are split on this mesh, each with its axis; an error where that cannot be."""
        out = {}
        for dim, size in dims.items():
            axis = self.axis.get(dim)
            parts = axes.size_of(axis) if axis else 1
            if axis is None or parts == 1 or (size % parts and dim in self.whole):
                continue
            if size % parts and dim not in self.uneven:
                choices = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
                raise LayoutError(
                    f"{axis}={parts} does not divide {size} {dim} of {what}; choose {axis} from {choices}"
                )
            out[dim] = axis
        return out

    def span(self, dim: str, size: int, axes: Axes, coords: Mapping[str, int], what: str) -> tuple[int, int]:
        """This rank's range of a dim."""
        axis = self.split({dim: size}, axes, what).get(dim)
        return (0, size) if axis is None else chunk(size, axes.size_of(axis), coords[axis])


@dataclass(frozen=True)
class Placement:
    """On which axes a parameter is cut, stored in shards, and repeated: every axis but pp does one of the three."""

    split: Mapping[str, str]  # dim -> axis
    shard: tuple[str, ...]  # FSDP: the rows of the local matrix
    copies: tuple[str, ...]  # equal on all; gradients summed over them


def place(param: Param, rules: Rules, axes: Axes) -> Placement:
    """Experts live on the expert view of the ranks, all else on the dense one; float32 parameters in no shards."""
    split = rules.split(param.dims, axes, param.name)
    expert = any(rules.axis.get(dim) == "ep" for dim in param.dims)
    view = EXPERT if expert else DENSE
    shard: tuple[str, ...] = ("efsdp",) if expert else ("fsdp", "cp")
    cuts = list(split.values())
    if len(set(cuts)) < len(cuts) or not set(cuts) <= set(view) - set(shard) - {"pp", "replicate"}:
        raise LayoutError(
            f"{param.name}: the rules cut {' and '.join(f'{d} by {a}' for d, a in split.items())}; "
            "an axis cuts one dim of a parameter, and experts are cut by ep alone"
        )
    shard = () if param.float32 else shard
    return Placement(split, shard, tuple(a for a in view[1:] if a not in cuts and a not in shard))


def summed_by_fsdp(param: Param, placement: Placement) -> tuple[str, ...]:
    """The axes over which FSDP sums a gradient: none, where a parameter is kept from it."""
    return () if param.float32 else ("replicate", *placement.shard)


def missing(param: Param, rules: Rules, axes: Axes) -> tuple[str, ...]:
    """The axes over which FSDP does not sum a gradient: what is left to sum when backward is over."""
    placement = place(param, rules, axes)
    return tuple(a for a in placement.copies if a not in summed_by_fsdp(param, placement))


@dataclass(frozen=True)
class Piece:
    """What one rank stores: rows `lo..hi` of the matrix of `box` (its cut by tp or ep)."""

    param: Param
    box: Box
    lo: int
    hi: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.hi - self.lo, *matrix_shape(self.param, self.box.shape)[1:])

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the parameter that the stored rows are, in the order of the rows."""
        num_rows = len(self.param.rows)
        rows = Box(self.box.start[:num_rows], self.box.stop[:num_rows])
        cols = (self.box.start[num_rows:], self.box.stop[num_rows:])
        return tuple(Box(b.start + cols[0], b.stop + cols[1]) for b in interval(rows, self.lo, self.hi))

    def views(self, stored: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Each box with the view of the stored tensor that holds it, in the shape of the box."""
        at = 0
        for box in self.boxes:
            num = prod(box.shape[: len(self.param.rows)])
            yield box, stored[at : at + num].view(box.shape)
            at += num

    @property
    def numel(self) -> int:
        return prod(self.shape)


def pieces(table: Table, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> dict[str, Piece]:
    """The piece of every parameter that this rank's stage holds, by name; pieces may be empty."""
    return {
        param.name: piece(param, rules, axes, coords)
        for param in table
        if coords["pp"] in table.stages(param.name, axes.pp)
    }


def piece(param: Param, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> Piece:
    placement = place(param, rules, axes)
    box = cut(param, placement, axes, coords)
    rows = matrix_shape(param, box.shape)[0]
    lo, hi = chunk(rows, prod(axes.sizes(placement.shard)), _index(placement.shard, axes, coords))
    return Piece(param, box, lo, hi)


def owns(table: Table, name: str, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> bool:
    """Every element has one owner: the first of its holders. Owners count it in the norm and export it."""
    copies = place(table[name], rules, axes).copies
    return coords["pp"] == table.stages(name, axes.pp)[0] and all(coords[a] == 0 for a in copies)


def cut(param: Param, placement: Placement, axes: Axes, coords: Mapping[str, int]) -> Box:
    """The box that tp or ep gives to this rank, before it is stored in shards."""
    ranges = [(0, size) for size in param.shape]
    for at, dim in enumerate(param.dims):
        if dim in placement.split:
            axis = placement.split[dim]
            ranges[at] = chunk(param.dims[dim], axes.size_of(axis), coords[axis])
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def _index(shard: tuple[str, ...], axes: Axes, coords: Mapping[str, int]) -> int:
    at = 0
    for axis in shard:
        at = at * axes.size_of(axis) + coords[axis]
    return at
