"""Which ranks store most and least, found without a walk over all of them."""

from __future__ import annotations

from math import lcm

from ..axes import Axes
from .boxes import chunk
from .rules import ShardingSpec, place


def extreme_ranks(spec: ShardingSpec, axes: Axes) -> list[int]:
    """A few ranks, among which are one that stores most and one that stores least: of each parameter, and of all.

    Of the ranks of a place on pp the first has the first part of everything, and first parts are the largest (`chunk`),
    so it stores most.

    Call ranks alike if tp and ep give them cuts of the same sizes. Among alike ranks of a replica a later one stands
    later in the shards of every parameter, or at the same place, and shards never get larger along their axis. So the
    last of alike ranks stores least. Cuts repeat every lcm(tp, ep) ranks, so these last ones are at the end.
    """
    cuts = {
        (param.dims[dim], axis) for param in spec.table for dim, axis in place(param, spec.rules, axes).split.items()
    }
    replica, period = axes.fsdp * axes.cp * axes.tp, lcm(axes.tp, axes.ep)
    last: dict[tuple[int, ...], int] = {}
    for rank in range(replica - period, replica):
        coords = axes.coords(rank)
        ranges = (chunk(size, axes.size_of(axis), coords[axis]) for size, axis in sorted(cuts))
        last[tuple(stop - start for start, stop in ranges)] = rank
    return sorted(first + rank for first in axes.group(0, ("pp",)) for rank in {0, *last.values()})
