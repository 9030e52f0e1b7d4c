"""Which parameters have moments in 8 bits, and where the scales of these lie.

A block of codes is a part of a row of the declared matrix, so rows may be cut anywhere, and a cut of columns must fall
between two blocks. Scales are declared like a parameter of their own: a column for each block, cut as the matrix is. So
whatever places, writes or reads pieces does so with scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from ..axes import Axes
from ..errors import LayoutError
from ..ops.int8_state import BLOCK, SCALES, num_blocks
from .params import Param, Table, plain
from .rules import ShardingSpec, sizes_here, tp_sizes


def is_coded(param: Param) -> bool:
    """The same on every mesh: of a matrix with a whole block in each row. What is narrower would save little."""
    return bool(param.cols) and param.matrix[1] >= BLOCK


def coded_of(table: Table, trained: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in trained if is_coded(table[name]))


def scales_of(param: Param) -> Param:
    """The dim that a mesh may cut gives its name to the blocks."""
    name, cols = param.name + SCALES, param.matrix[1]
    blocks = {next(iter(param.cols)): num_blocks(cols)}
    shape = (*param.rows.values(), num_blocks(cols))
    return replace(param, name=name, cols=blocks, layouts=(plain(name, shape, len(param.rows)),), group="")


def with_scales(table: Table, coded: Iterable[str]) -> Table:
    scales = [scales_of(table[name]) for name in coded]
    return replace(table, params={**table.params, **{param.name: param for param in scales}})


def check_coded(spec: ShardingSpec, axes: Axes, coded: Iterable[str], instead: str) -> None:
    """Refuse a mesh that cuts a block. `instead`: what else would do."""
    coded = list(coded)
    misfit = _misfit(spec, axes.tp, coded)
    if misfit:
        choices = ", ".join(str(n) for n in tp_sizes(spec) if not _misfit(spec, n, coded))
        raise LayoutError(
            f"moments in 8 bits have blocks of {BLOCK} columns, but a rank has {misfit}, with tp={axes.tp}; choose tp "
            f"from {choices}, or {instead}"
        )


def _misfit(spec: ShardingSpec, tp: int, coded: Iterable[str]) -> str:
    """What a rank has instead of whole blocks, if anything."""
    for param in map(spec.table.__getitem__, coded):
        here = sizes_here(param, spec.rules, Axes(tp=tp))
        cut = [dim for dim in param.cols if here[dim] != param.cols[dim]]
        num_cols = prod(here[dim] for dim in param.cols)
        if cut and (num_cols % BLOCK or cut != [next(iter(param.cols))]):
            return f"{num_cols} of the {param.matrix[1]} columns of {param.name}"
    return ""
