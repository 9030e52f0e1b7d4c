"""Whole rows of every parameter on the ranks that write them.

A file holds rows one after the other. Where tp cuts columns, each rank has a strip of every row, far too short to be
written alone. So the ranks that hold the strips of the same rows exchange them: each gets some rows whole. All else is
written by those who hold it, and travels nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Param, Piece, ShardingSpec, across, piece, place, written
from ..mesh import Mesh
from ..mesh.collectives import exchange
from ..ops.part_sizes import part_size
from ..watch import waiting_at
from .streaming import StoredModel

_WINDOW_BYTES = part_size(__name__, "_WINDOW_BYTES", 16 << 20, small=2001)  # of rows that a rank gets whole at a time


def whole_rows(stored_model: StoredModel, *, keep: bool = False) -> Iterator[tuple[Piece, Tensor]]:
    """Pieces of whole rows, with what they hold. Over all ranks they tile every parameter once.

    With `keep` they are on the host and the caller's to keep; otherwise they may be live memory. Every rank must run
    through it to the end: ranks of tp exchange rows within it.
    """
    spec, mesh = stored_model.spec, stored_model.mesh
    for param in spec.table:
        if param.name in stored_model.stored:
            stored = stored_model.stored[param.name].detach()
            for rows, values in _rows_of(param, spec, mesh, stored):
                live = keep and values.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
                yield rows, values.to("cpu", copy=live) if keep else values


def _rows_of(param: Param, spec: ShardingSpec, mesh: Mesh, stored: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    axes = across(param, place(param, spec.rules, mesh.axes))
    held = piece(param, spec.rules, mesh.axes, mesh.coords)
    if mesh.size_of(axes) == 1:
        mine = written(param, spec.rules, mesh.axes, mesh.rank)
        yield mine, stored[mine.lo - held.lo : mine.hi - held.lo]
        return
    ranks = mesh.axes.group(mesh.rank, axes)
    strips = [piece(param, spec.rules, mesh.axes, mesh.axes.coords(rank)) for rank in ranks]
    rows = [written(param, spec.rules, mesh.axes, rank) for rank in ranks]
    at_a_time = max(1, _WINDOW_BYTES // (param.matrix[1] * stored.element_size()))
    for done in range(0, max(each.hi - each.lo for each in rows), at_a_time):
        now = [_window(each, done, at_a_time) for each in rows]
        me = ranks.index(mesh.rank)
        sent = torch.cat([stored[each.lo - held.lo : each.hi - held.lo].flatten() for each in now])
        num_rows = now[me].hi - now[me].lo
        outs, ins = [num_rows * s.shape[1] for s in strips], [(w.hi - w.lo) * held.shape[1] for w in now]
        with waiting_at(f"the exchange of rows of {param.name}"):
            got = exchange(sent, outs, ins, mesh.name_of(axes))
        yield now[me], _side_by_side(now[me], strips, got.split(outs))


def _window(rows: Piece, first: int, num: int) -> Piece:
    lo = min(rows.lo + first, rows.hi)
    return replace(rows, lo=lo, hi=min(lo + num, rows.hi))


def _side_by_side(rows: Piece, strips: list[Piece], parts: tuple[Tensor, ...]) -> Tensor:
    """The columns of all strips, in their places."""
    first = len(rows.param.rows)
    num_rows, cols = rows.hi - rows.lo, tuple(rows.param.cols.values())
    whole = parts[0].new_empty((num_rows, *cols))
    for strip, part in zip(strips, parts, strict=True):
        into = whole[(slice(None), *strip.box.slices[first:])]
        into.copy_(part.view(into.shape))
    return whole.view(rows.shape)
