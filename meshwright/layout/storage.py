"""The other half of the bill: the bytes that a rank holds in a step, whatever its data. Activations come on top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..mesh.axes import Axes
from .bill import Unit, padded
from .params import Table
from .rules import Rules, piece


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: of a parameter as stored, as computed with, and of one moment of the optimizer."""

    stored: int
    compute: int
    moment: int


@dataclass(frozen=True)
class Stored:
    what: str
    num_bytes: int
    host: bool = False  # in host memory, not on the device


def storage(
    units: Sequence[Unit], table: Table, rules: Rules, axes: Axes, rank: int, widths: Widths, *,
    trained: Container[str], offload: bool = False,
) -> list[Stored]:  # fmt: skip
    """`trained`: the parameters that have gradients and moments."""
    coords = axes.coords(rank)
    numel: Counter[tuple[str, bool]] = Counter()
    for param in table:
        num, host = piece(param, rules, axes, coords).numel, offload and not param.float32
        numel["parameters", host] += num
        for what in ("gradients", "moments") if param.name in trained else ():
            numel[what, host] += num
    width = {"parameters": widths.stored, "gradients": widths.stored, "moments": 2 * widths.moment}
    out = [Stored(what, num * width[what], host) for (what, host), num in numel.items()]
    out += _passing(units, table, rules, axes, rank, widths, trained, offload)
    return [s for s in out if s.num_bytes]


def _passing(
    units: Sequence[Unit], table: Table, rules: Rules, axes: Axes, rank: int, widths: Widths,
    trained: Container[str], offload: bool,
) -> list[Stored]:  # fmt: skip
    """What is gathered: the units that stay so, two of the others (one at work, one on its way); the gradients of one
    unit before and in its reduce-scatter; and those of all, which wait on the device for the last micro-batch where
    replicas are summed before they go to the host."""
    coords = axes.coords(rank)
    wrapped = [u for u in units if offload or prod(axes.sizes(("replicate", *u.shard))) > 1]
    learning = [replace(u, params=tuple(name for name in u.params if name in trained)) for u in wrapped]

    def mine(some: Sequence[Unit]) -> list[int]:
        return [padded(u, table, rules, axes, coords) for u in some]

    def whole(some: Sequence[Unit]) -> list[int]:
        return [num * prod(axes.sizes(u.shard)) for num, u in zip(mine(some), some, strict=True)]

    stay, pass_by = whole([u for u in wrapped if not u.again]), sorted(whole([u for u in wrapped if u.again]))[-2:]
    waiting = sum(mine(learning)) if offload and axes.replicate > 1 else 0
    return [
        Stored("gathered parameters", (sum(stay) + sum(pass_by)) * widths.compute),
        Stored("gradients on their way", max(whole(learning), default=0) * (widths.compute + widths.stored)),
        Stored("gradients of a replica", waiting * widths.stored),
    ]
