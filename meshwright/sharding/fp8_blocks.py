"""Which products are in 8 bits, and whether a mesh leaves their blocks whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from math import prod

from ..axes import Axes
from ..errors import LayoutError
from ..ops.fp8_matmul import BLOCK
from .fsdp_units import Unit
from .params import Block, Param, matrix_shape
from .rules import ShardingSpec, cut, place, sizes_here, tp_sizes

SCALES = "the scales of what is gathered in 8 bits"  # what errors and the bill call their all-reduce
APART = ("half", "expert")  # dims whose indices are matrices of their own in files: each has its own blocks


def gathered_low(spec: ShardingSpec, trained: Container[str], *, wide: bool = False) -> frozenset[str]:
    """The trained parameters that are gathered as 8-bit numbers, where they are stored in several shards. `wide`: the
    run gathers values all the same."""
    return frozenset() if wide else frozenset(name for name in spec.fp8 if name in trained)


def num_scales(unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], low: Collection[str]) -> int:
    """Of those parameters of a unit that are among `low`, as tp and ep cut them."""
    num = 0
    for name in unit.params:
        if name in low:
            param = spec.table[name]
            rows, cols = matrix_shape(param, cut(param, place(param, spec.rules, axes), axes, coords).shape)
            num += rows // BLOCK * (cols // BLOCK)
    return num


def check_fp8(spec: ShardingSpec, axes: Axes) -> None:
    """Refuse a mesh on which a rank rounds other blocks than one process does, or only its share of a sum."""
    found = _misfits(spec, axes.tp)
    if not found:
        return
    name, what = next(iter(found.items()))
    if axes.tp == 1 and len(found) == len(spec.fp8):
        raise LayoutError(
            f"fp8='block' rounds whole blocks of {BLOCK} x {BLOCK}, which no matrix of this model has; leave it out"
        )
    skipped = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", each) for each in found)
    out = f"leave it out with fp8_skip={[*skipped]}"
    choices = ", ".join(str(n) for n in tp_sizes(spec) if not _misfits(spec, n))
    if choices:
        out = f"choose tp from {choices}, or {out}"
    where = f", with tp={axes.tp}" if axes.tp > 1 else ""
    raise LayoutError(
        f"fp8='block' rounds whole blocks of {BLOCK} x {BLOCK}, but a rank has {what} of {name}{where}; {out}"
    )


def _misfits(spec: ShardingSpec, tp: int) -> dict[str, str]:
    """The parameters of which a rank has something else than whole blocks, and what it has."""
    found, known = dict[str, str](), dict[object, str]()
    for name, param in spec.table.params.items():
        if name in spec.fp8:
            forms = {block.ours.shape for layout in param.layouts for block in layout.blocks}
            kind = (*param.rows.items(), None, *param.cols.items(), frozenset(forms))
            if kind not in known:
                known[kind] = _misfit(param, spec, Axes(tp=tp))
            if known[kind]:
                found[name] = known[kind]
    return found


def _misfit(param: Param, spec: ShardingSpec, axes: Axes) -> str:
    split = spec.rules.split(param.dims, axes, param.name)
    shared = [dim for dim in param.dims if axes.tp > 1 and spec.rules.axis.get(dim) == "tp" and dim not in split]
    if shared:  # several ranks have parts of one gradient, and rounded parts are not the rounded sum
        return "only a share of the gradient"
    here = sizes_here(param, spec.rules, axes)
    cols = prod(here[dim] for dim in param.cols)
    if cols % BLOCK:
        return f"{cols} columns"
    rows = {_run(param, block, here) for layout in param.layouts for block in layout.blocks}
    return next((f"{each} rows" for each in sorted(rows) if each % BLOCK), "")


def _run(param: Param, block: Block, here: Mapping[str, int]) -> int:
    """How many rows of a rank stand one after the other in a matrix of the file, at least."""
    rows = 1
    for at, (dim, size) in reversed(list(enumerate(param.rows.items()))):
        extent = block.ours.shape[at]
        if dim in APART:
            break
        rows *= here[dim] if extent == size else extent
        if extent < size:
            break
    return rows
