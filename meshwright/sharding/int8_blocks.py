"""Which parameters have 8-bit optimizer state, and how the scales of its blocks are sharded.

A block covers 256 columns of one row of the declared matrix. So a cut by rows never splits one, and a cut by columns
must fall between two. Scales are declared like a parameter of their own, with a column for each block, and are cut as
the matrix is: whatever places, writes or reads pieces handles scales without special cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from ..axes import Axes
from ..errors import LayoutError
from ..ops.int8_state import BLOCK, SCALES, num_blocks
from .params import Param, Table, plain
from .rules import ShardingSpec, local_sizes, tp_sizes


def is_coded(param: Param) -> bool:
    """Tell whether a parameter has 8-bit state, on every mesh alike: a matrix with a whole block in each row.

    Narrower ones, and vectors, would save little.
    """
    return bool(param.cols) and param.matrix[1] >= BLOCK


def coded_of(table: Table, trained: Iterable[str]) -> tuple[str, ...]:
    """Return the trained parameters with 8-bit state."""
    return tuple(name for name in trained if is_coded(table[name]))


def scales_of(param: Param) -> Param:
    """Declare the scales of a parameter. The first column dim, which a mesh may cut, becomes the dim of the blocks."""
    name, cols = param.name + SCALES, param.matrix[1]
    blocks = {next(iter(param.cols)): num_blocks(cols)}
    shape = (*param.rows.values(), num_blocks(cols))
    return replace(param, name=name, cols=blocks, layouts=(plain(name, shape, len(param.rows)),), group="")


def with_scales(table: Table, coded: Iterable[str]) -> Table:
    """Add the scales to a table."""
    scales = [scales_of(table[name]) for name in coded]
    return replace(table, params={**table.params, **{param.name: param for param in scales}})


def check_coded(spec: ShardingSpec, axes: Axes, coded: Iterable[str], instead: str) -> None:
    """Refuse a mesh that cuts a block. `instead`: another fix, for the message."""
    coded = list(coded)
    misfit = _misfit(spec, axes.tp, coded)
    if misfit:
        choices = ", ".join(str(n) for n in tp_sizes(spec) if not _misfit(spec, n, coded))
        raise LayoutError(
            f"8-bit optimizer state has blocks of {BLOCK} columns, but with tp={axes.tp} a rank has {misfit}; "
            f"choose tp from {choices}, or {instead}"
        )


def _misfit(spec: ShardingSpec, tp: int, coded: Iterable[str]) -> str:
    """Describe what a rank has instead of whole blocks; empty if it has whole ones."""
    for param in map(spec.table.__getitem__, coded):
        local = local_sizes(param, spec.rules, Axes(tp=tp))
        cut_dims = [dim for dim in param.cols if local[dim] != param.cols[dim]]
        num_cols = prod(local[dim] for dim in param.cols)
        if cut_dims and (num_cols % BLOCK or cut_dims != [next(iter(param.cols))]):
            return f"{num_cols} of the {param.matrix[1]} columns of {param.name}"
    return ""
