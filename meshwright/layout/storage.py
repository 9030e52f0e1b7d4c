"""The other half of the bill: the bytes that a rank holds in a step, whatever its data. Activations come on top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
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
    """What is gathered: the units that stay so, two of the others (one at work, one on its way); and the gradients of
    one unit before and in its reduce-scatter."""
    coords = axes.coords(rank)
    whole = {
        unit.name: padded(unit, table, rules, axes, coords) * prod(axes.sizes(unit.shard))
        for unit in units
        if offload or prod(axes.sizes(unit.shard)) > 1
    }
    stay = [whole[u.name] for u in units if u.name in whole and not u.again]
    pass_by = sorted((whole[u.name] for u in units if u.name in whole and u.again), reverse=True)[:2]
    learn = [whole[u.name] for u in units if u.name in whole and any(name in trained for name in u.params)]
    return [
        Stored("gathered parameters", (sum(stay) + sum(pass_by)) * widths.compute),
        Stored("gradients on their way", max(learn, default=0) * (widths.compute + widths.stored)),
    ]
