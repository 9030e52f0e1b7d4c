"""Sharding rules: from declared dims and a mesh to the piece of every parameter that a rank holds.

Two cuts follow each other. tp or ep cuts named dims (Megatron, arXiv 1909.08053: heads and ffn by columns, then rows).
FSDP (ZeRO-3, arXiv 1910.02054) then cuts the rows of what is left of the matrix. Each axis does one thing to a
parameter: it cuts it, shards it, or holds copies. Gradients are summed over shards and copies. There is no other rule,
and no loss scaling by any axis size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import DENSE, ENDS, EXPERT, STAGE, Axes
from ..errors import LayoutError
from ..recipe import Recipe
from .boxes import Box, check_tiling, chunk, interval
from .params import Param, Table, matrix_shape
from .stage_map import Line
from .stages import Stage, line_of, stages_of, stages_of_param


@dataclass(frozen=True)
class Rules:
    """The rules that say which mesh axis cuts which dim.

    `whole`: dims that stay whole where the axis does not divide them (kv heads with a large tp: each rank keeps all of
    them and slices in forward). `uneven`: dims whose last piece may be shorter. Every other dim must divide.
    """

    axis: Mapping[str, str] = field(
        # `key`: key heads of the delta net, each with its value heads.
        default_factory=lambda: {**dict.fromkeys(("heads", "kv", "key", "ffn", "vocab"), "tp"), "expert": "ep"}
    )
    whole: frozenset[str] = frozenset({"kv"})
    uneven: frozenset[str] = frozenset({"vocab"})

    def split(self, dims: Mapping[str, int], axes: Axes, what: str) -> dict[str, str]:
        """Return the dims that are cut on this mesh, each with its axis. Refuse what does not divide."""
        out = {}
        for dim, size in dims.items():
            axis = self.axis.get(dim)
            parts = axes.size_of(axis) if axis else 1
            if axis is None or parts == 1 or (size % parts and dim in self.whole):
                continue
            if size % parts and dim not in self.uneven:
                choices = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
                raise LayoutError(
                    f"{axis}={parts} does not divide {dim}={size} of {what}; choose {axis} from {choices}"
                )
            out[dim] = axis
        return out

    def span(self, dim: str, size: int, axes: Axes, coords: Mapping[str, int], what: str) -> tuple[int, int]:
        """Return this rank's range of a dim, which must not be empty."""
        axis = self.split_to_all({dim: size}, axes, what).get(dim)
        return (0, size) if axis is None else chunk(size, axes.size_of(axis), coords[axis])

    def split_to_all(self, dims: Mapping[str, int], axes: Axes, what: str) -> dict[str, str]:
        """Return `split`, but refuse a mesh that leaves a rank without any of a dim.

        It raises on every rank, not just on the empty one: otherwise the others would go on and hang.
        """
        out = self.split(dims, axes, what)
        for dim, axis in out.items():
            size, parts = dims[dim], axes.size_of(axis)
            if not _reaches_all(size, parts):
                choices = ", ".join(str(n) for n in range(1, min(size, 2 * parts) + 1) if _reaches_all(size, n))
                raise LayoutError(
                    f"{axis}={parts} leaves a rank without any of {dim}={size} of {what}; choose {axis} from {choices}"
                )
        return out


def _reaches_all(size: int, parts: int) -> bool:
    """Return whether the last of `parts` gets something."""
    return chunk(size, parts, parts - 1)[0] < size


@dataclass(frozen=True)
class ShardingSpec:
    """A model with the rules of a run. Pieces, bytes and collectives follow from it for any mesh."""

    table: Table
    rules: Rules
    module: Any = field(default_factory=nn.Module)  # a models.Decoder: its doors, and the parts that stages are
    recipe: Recipe = Recipe()
    fp8: frozenset[str] = frozenset()  # parameters whose matmuls are in FP8
    _lines: dict[int, Line] = field(default_factory=dict, init=False, repr=False, compare=False)
    _stages: dict[int, tuple[Stage, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def fp8_left_out(self) -> list[str]:
        """Return the parameters that could have FP8 matmuls but do not, in a run with FP8."""
        return [param.name for param in self.table if param.low and param.name not in self.fp8] if self.fp8 else []

    def line(self, pp: int) -> Line:
        """Return where the stages end on `pp` ranks, and which rank holds which."""
        if pp not in self._lines:
            self._lines[pp] = line_of(self.table, self.module, pp, self.recipe.pipeline)
        return self._lines[pp]

    def stages(self, axes: Axes, rank: int) -> list[Stage]:
        """Return the stages that a rank holds."""
        line = self.line(axes.pp)
        if axes.pp not in self._stages:
            self._stages[axes.pp] = stages_of(
                self.module, line, reshard=self.recipe.memory.reshard and not self.gathers_once(axes.pp)
            )
        return [self._stages[axes.pp][number] for number in line.stages_of(axes.coords(rank)["pp"])]

    def holds(self, pp: int) -> bool:
        """Return whether units are gathered and reduced once a step because the pipeline holds them
        (`Pipeline.hold`)."""
        return pp > 1 and bool(self.recipe.pipeline.hold)

    def gathers_once(self, pp: int) -> bool:
        """Return whether parameters are gathered once a step."""
        return self.recipe.memory.gather_once or self.holds(pp)

    def sums_once(self, pp: int) -> bool:
        """Return whether gradients are reduced once a step."""
        return self.recipe.memory.sum_once or self.holds(pp)

    def sends_narrow(self, pp: int) -> bool:
        """Return whether gradients are sent in the compute dtype.

        Never after several micro-batches were accumulated: bfloat16 would round away what float32 has added up.
        """
        return self.recipe.memory.narrow_grads and not self.sums_once(pp)

    def places(self, param: Param, axes: Axes) -> set[int]:
        """Return the positions on the axis pp that hold a parameter."""
        line = self.line(axes.pp)
        return {line.rank_of(stage) for stage in stages_of_param(param, line)}

    def with_table(self, table: Table, pp: int) -> ShardingSpec:
        """Return the spec with another table. Its parameters keep their places: additions do not move the ends of
        stages.
        """
        out = replace(self, table=table)
        out._lines[pp] = self.line(pp)
        return out

    def params(self, axes: Axes, rank: int) -> list[Param]:
        """Return the parameters of which a rank holds a piece, which may be empty."""
        at = axes.coords(rank)["pp"]
        return [param for param in self.table if at in self.places(param, axes)]


def local_sizes(param: Param, rules: Rules, axes: Axes) -> dict[str, int]:
    """Return the sizes of a parameter's dims on a rank; the last uneven piece may be smaller."""
    split = rules.split(param.dims, axes, param.name)
    return {dim: size // axes.size_of(split[dim]) if dim in split else size for dim, size in param.dims.items()}


def consecutive_columns(param: Param, rules: Rules, axes: Axes) -> int:
    """Return how many columns of a rank are consecutive in a row of the whole matrix, at least."""
    local, num = local_sizes(param, rules, axes), 1
    for dim, size in reversed([*param.cols.items()]):
        num *= local[dim]
        if local[dim] < size:
            break
    return num


def tp_sizes(spec: ShardingSpec) -> list[int]:
    """Return the sizes of tp that divide every dim that must divide."""
    rules = spec.rules
    exempt = rules.whole | rules.uneven
    sizes = {
        size for p in spec.table for dim, size in p.dims.items() if rules.axis.get(dim) == "tp" and dim not in exempt
    }
    common = gcd(*sizes)
    return [n for n in range(1, common + 1) if common % n == 0]


@dataclass(frozen=True)
class Placement:
    """The role of each axis for a parameter: cut a dim of it, shard its rows, or hold copies."""

    split: Mapping[str, str]  # dim -> axis
    shard: tuple[str, ...]  # FSDP: the rows of the local matrix
    copies: tuple[str, ...]  # values are equal on all; gradients are summed over them


def place(param: Param, rules: Rules, axes: Axes) -> Placement:
    """Place a parameter: experts on the expert view of the ranks, all else on the dense one.

    float32 parameters (decay rates, gates) are few and small; they stay out of FSDP, which would cast them. The rows of
    a table are spread over the ranks of a stage: a row has one holder in each replica, and there a complete gradient.
    """
    if param.by_rows:
        return Placement({}, STAGE, ("replicate",))
    split = rules.split(param.dims, axes, param.name)
    expert = any(rules.axis.get(dim) == "ep" for dim in param.dims)
    mesh_view = EXPERT if expert else DENSE
    shard: tuple[str, ...] = ("efsdp",) if expert else ("fsdp", "cp")
    cutting = list(split.values())
    if len(set(cutting)) < len(cutting) or not set(cutting) <= set(mesh_view) - set(shard) - {"pp", "replicate"}:
        raise LayoutError(
            f"{param.name}: the rules cut {' and '.join(f'{d} by {a}' for d, a in split.items())}; "
            "an axis cuts one dim of a parameter, and experts are cut by ep alone"
        )
    shard = () if param.float32 else shard
    stages = (ENDS,) if param.both_ends else ()
    return Placement(split, shard, (*stages, *(a for a in mesh_view[1:] if a not in cutting and a not in shard)))


def summed_by_fsdp(param: Param, placement: Placement) -> tuple[str, ...]:
    """Return the axes over which FSDP sums a gradient: none for a parameter that is kept out of it."""
    return ("replicate", *placement.shard) if param.in_fsdp else ()


def axes_left_to_sum(param: Param, rules: Rules, axes: Axes) -> tuple[str, ...]:
    """Return the axes over which a gradient is still to be summed after backward, because FSDP does not.

    Between blocks every rank of fsdp x cp x tp has its own tokens, so its gradient is a partial sum over those. A
    norm's weight under tp is the classical trap: each rank sees other tokens, and forgetting this all-reduce
    (Megatron's sequence_parallel flag) trains silently wrong.
    """
    placement = place(param, rules, axes)
    return tuple(a for a in placement.copies if a not in summed_by_fsdp(param, placement))


@dataclass(frozen=True)
class Piece:
    """The part that one rank stores: rows `lo..hi` of the matrix of `box`, which is its cut by tp or ep."""

    param: Param
    box: Box
    lo: int
    hi: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.hi - self.lo, *matrix_shape(self.param, self.box.shape)[1:])

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes of the parameter that the stored rows make up, in the order of the rows."""
        num_rows = len(self.param.rows)
        rows = Box(self.box.start[:num_rows], self.box.stop[:num_rows])
        cols = (self.box.start[num_rows:], self.box.stop[num_rows:])
        return tuple(Box(b.start + cols[0], b.stop + cols[1]) for b in interval(rows, self.lo, self.hi))

    def views(self, stored: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield each box with the view of the stored tensor that holds it, in the shape of the box."""
        at = 0
        for box in self.boxes:
            num = prod(box.shape[: len(self.param.rows)])
            yield box, stored[at : at + num].view(box.shape)
            at += num

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def first_col(self) -> int:
        """Return the first column, in the matrix of the whole parameter, if the columns are contiguous in it."""
        at = 0
        for start, size in zip(self.box.start[len(self.param.rows) :], self.param.cols.values(), strict=True):
            at = at * size + start
        return at

    def row_numbers(self, device: torch.device) -> Tensor:
        """Return the indices of the stored rows in the matrix of the whole parameter."""
        num_dims = len(self.param.rows)
        numbers = torch.arange(self.param.matrix[0], device=device).view(*self.param.rows.values())
        return torch.cat([numbers[box.slices[:num_dims]].reshape(-1) for box in self.boxes])


def pieces(spec: ShardingSpec, axes: Axes, rank: int) -> dict[str, Piece]:
    """Return the piece of every parameter that the stages of a rank hold, by name. A piece may be empty."""
    coords = axes.coords(rank)
    return {param.name: piece(param, spec.rules, axes, coords) for param in spec.params(axes, rank)}


def owned(spec: ShardingSpec, axes: Axes, rank: int) -> dict[str, Piece]:
    """Return the pieces that this rank counts in the gradient norm and exports: every element has one owner."""
    held = pieces(spec, axes, rank)
    return {name: piece for name, piece in held.items() if holders(piece.param, spec.rules, axes, rank)[0] == rank}


def piece(param: Param, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> Piece:
    """Return the piece of a parameter at some coordinates."""
    placement = place(param, rules, axes)
    box = cut(param, placement, axes, coords)
    rows = matrix_shape(param, box.shape)[0]
    lo, hi = chunk(rows, prod(axes.sizes(placement.shard)), _index(placement.shard, axes, coords))
    return Piece(param, box, lo, hi)


def shape_before_fsdp(param: Param, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> tuple[int, ...]:
    """Return the local shape of a parameter that FSDP shards or, if it is kept out of FSDP, as it is stored."""
    own = piece(param, rules, axes, coords)
    return matrix_shape(param, own.box.shape) if param.in_fsdp else own.shape


def rows_to_write(param: Param, rules: Rules, axes: Axes, rank: int) -> Piece:
    """Return what a rank writes into files: some rows with all their columns, since files are row-major.

    Ranks that hold the same rows, or other columns of them, divide these rows among themselves: all of them write.
    """
    placement = place(param, rules, axes)
    held = piece(param, rules, axes, axes.coords(rank))
    sharing = axes.group(rank, (*placement.copies, *column_axes(param, placement)))
    lo, hi = chunk(held.hi - held.lo, len(sharing), sharing.index(rank))
    num_rows = len(param.rows)
    box = Box((*held.box.start[:num_rows], *(0 for _ in param.cols)),
              (*held.box.stop[:num_rows], *param.cols.values()))  # fmt: skip
    return Piece(param, box, held.lo + lo, held.lo + hi)


def check_rows_to_write(param: Param, spec: ShardingSpec, axes: Axes) -> None:
    """Raise unless the rows that all ranks write tile the parameter."""
    positions = spec.places(param, axes)
    ranks = [rank for rank in range(axes.world) if axes.coords(rank)["pp"] in positions]
    boxes = [box for rank in ranks for box in rows_to_write(param, spec.rules, axes, rank).boxes]
    check_tiling(boxes, param.shape, f"what the ranks write of {param.name} on {axes}")


def column_axes(param: Param, placement: Placement) -> tuple[str, ...]:
    """Return the axes that cut its columns."""
    return tuple(axis for dim, axis in placement.split.items() if dim in param.cols)


def holders(param: Param, rules: Rules, axes: Axes, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same elements of a parameter as `rank`, itself included; the first is their owner.

    After backward each of them has a partial sum of the gradient, or all have the same sum.
    """
    return axes.group(rank, place(param, rules, axes).copies)


def cut(param: Param, placement: Placement, axes: Axes, coords: Mapping[str, int]) -> Box:
    """Return the box that tp or ep gives to a rank, before FSDP shards it."""
    ranges = [(0, size) for size in param.shape]
    for at, dim in enumerate(param.dims):
        if dim in placement.split:
            axis = placement.split[dim]
            ranges[at] = chunk(param.dims[dim], axes.size_of(axis), coords[axis])
    return Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def _index(shard: tuple[str, ...], axes: Axes, coords: Mapping[str, int]) -> int:
    """Return the index of a rank among the shards, the first axis being the outermost."""
    at = 0
    for axis in shard:
        at = at * axes.size_of(axis) + coords[axis]
    return at
