"""Find which weights have FP8 matmuls, and whether a mesh leaves their 128 x 128 blocks whole.

A block that two ranks shared would get two scales, and the mesh would change the rounding. So such meshes are refused,
and results stay the same on every mesh that is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from math import prod

from ..axes import Axes
from ..errors import LayoutError
from ..ops.fp8_matmul import BLOCK
from .fsdp_units import Unit
from .params import Block, Param, matrix_shape
from .rules import ShardingSpec, cut, local_sizes, place, tp_sizes

SCALES = "the scales of what is gathered in 8 bits"  # the name of their all-reduce in errors and the bill
SEPARATE = ("half", "expert")  # dims that files spell as separate matrices, each with its own blocks


def gathered_in_fp8(spec: ShardingSpec, trained: Container[str], *, wide: bool = False) -> frozenset[str]:
    """Return the trained parameters that are all-gathered as FP8 codes, where they have several shards.

    `wide`: the run gathers values nevertheless.
    """
    return frozenset() if wide else frozenset(name for name in spec.fp8 if name in trained)


def quantised_once(spec: ShardingSpec, axes: Axes, unit: Unit, trained: Container[str]) -> tuple[str, ...]:
    """Return the trained weights of a unit that a rank quantises once a step. It holds their codes until the step ends.

    The others are quantised by each matmul: those that FSDP copies from the host, and those that it gathers as values.
    Frozen ones too: codes of a base that is not trained would take half as much memory again as the base.
    """
    memory = spec.recipe.memory
    by_matmuls = memory.gathers_wide if prod(axes.sizes(unit.shard)) > 1 else memory.offload
    return () if by_matmuls else tuple(name for name in unit.params if name in spec.fp8 and name in trained)


def num_scales(unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], low: Collection[str]) -> int:
    """Count the block scales of those parameters of a unit that are in `low`, as tp and ep cut them."""
    num = 0
    for name in unit.params:
        if name in low:
            param = spec.table[name]
            rows, cols = matrix_shape(param, cut(param, place(param, spec.rules, axes), axes, coords).shape)
            num += rows // BLOCK * (cols // BLOCK)
    return num


def check_fp8(spec: ShardingSpec, axes: Axes) -> None:
    """Refuse a mesh on which a rank would round other blocks than one process does, or only its share of a
    reduction.
    """
    misfits = _misfits(spec, axes.tp)
    if not misfits:
        return
    name, what = next(iter(misfits.items()))
    if axes.tp == 1 and len(misfits) == len(spec.fp8):
        raise LayoutError(
            f"fp8='block' needs matrices of whole {BLOCK} x {BLOCK} blocks, which no matrix of this model has; "
            "leave it out"
        )
    skipped = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", each) for each in misfits)
    fix = f"leave it out with fp8_skip={[*skipped]}"
    choices = ", ".join(str(n) for n in tp_sizes(spec) if not _misfits(spec, n))
    if choices:
        fix = f"choose tp from {choices}, or {fix}"
    where = f", with tp={axes.tp}" if axes.tp > 1 else ""
    raise LayoutError(
        f"fp8='block' needs whole {BLOCK} x {BLOCK} blocks, but a rank has {what} of {name}{where}; {fix}"
    )


def _misfits(spec: ShardingSpec, tp: int) -> dict[str, str]:
    """Return the parameters whose parts on some rank are not whole blocks, and what these parts are."""
    misfits, by_kind = dict[str, str](), dict[object, str]()
    for name, param in spec.table.params.items():
        if name in spec.fp8:
            forms = {block.ours.shape for layout in param.layouts for block in layout.blocks}
            kind = (*param.rows.items(), None, *param.cols.items(), frozenset(forms))
            if kind not in by_kind:
                by_kind[kind] = _misfit(param, spec, Axes(tp=tp))
            if by_kind[kind]:
                misfits[name] = by_kind[kind]
    return misfits


def _misfit(param: Param, spec: ShardingSpec, axes: Axes) -> str:
    split = spec.rules.split(param.dims, axes, param.name)
    shared = [dim for dim in param.dims if axes.tp > 1 and spec.rules.axis.get(dim) == "tp" and dim not in split]
    if shared:  # ranks hold partial sums of one gradient, and a sum of rounded parts is not the rounded sum
        return "only a share of the gradient"
    local = local_sizes(param, spec.rules, axes)
    cols = prod(local[dim] for dim in param.cols)
    if cols % BLOCK:
        return f"{cols} columns"
    rows = {_contiguous_rows(param, block, local) for layout in param.layouts for block in layout.blocks}
    return next((f"{each} rows" for each in sorted(rows) if each % BLOCK), "")


def _contiguous_rows(param: Param, block: Block, local: Mapping[str, int]) -> int:
    """Return how many rows of a rank are consecutive in a matrix of the file, at least."""
    rows = 1
    for at, (dim, size) in reversed(list(enumerate(param.rows.items()))):
        extent = block.ours.shape[at]
        if dim in SEPARATE:
            break
        rows *= local[dim] if extent == size else extent
        if extent < size:
            break
    return rows
