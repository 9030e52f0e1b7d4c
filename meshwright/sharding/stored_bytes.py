"""Bytes of parameters, gradients and optimizer state that a rank holds in a step, whatever its data.

This is the memory half of the bill. Activations depend on the data and are simulated (`memory/simulate.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod

from ..axes import Axes
from ..ops.codings import FP8, Coding
from .bill import gathered_bytes, padded
from .boxes import chunk
from .fp8_blocks import num_scales, quantised_once
from .fsdp_units import Unit
from .params import Param
from .rules import Piece, ShardingSpec, piece, place

GRADIENTS, STATE = "gradients", "moments"  # the second is the state of whatever optimizer
GATHERED, IN_FLIGHT, WHOLE = "gathered parameters", "gradients on their way", "whole gradients of the stages"
QUANTISED = "FP8 codes of weights"
HELD = (GATHERED, WHOLE)  # what grows if parameters are gathered, and gradients reduced, once a step


@dataclass(frozen=True)
class Widths:
    """Bytes of an element of a parameter: as stored, and as computed with."""

    stored: int
    compute: int


StateBytes = Callable[[Param, Sequence[int]], int]  # of all optimizer state of a piece, by its parameter and shape


@dataclass(frozen=True)
class Held:
    """Tensors that a rank holds besides the model: `trained` are the parameters with gradients and optimizer state.

    `narrow`: bytes per element of parameters that are stored narrower than the others. `numbers`: parameters that are
    stored and gathered as codes in 8 or 4 bits. `low`: parameters that are only gathered as codes, in FP8.
    """

    widths: Widths
    trained: Container[str]
    state_bytes: StateBytes
    offload: bool = False
    narrow: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, Coding] = field(default_factory=dict)
    low: Collection[str] = ()


@dataclass(frozen=True)
class Stored:
    """Bytes of one kind."""

    what: str
    num_bytes: int
    host: bool = False  # in host memory, not on the device


def storage(spec: ShardingSpec, axes: Axes, rank: int, held: Held) -> list[Stored]:
    """Return the bytes that a rank holds, by kind."""
    coords, widths = axes.coords(rank), held.widths
    num_bytes: Counter[tuple[str, bool]] = Counter()
    for param in spec.params(axes, rank):
        own_piece, host = piece(param, spec.rules, axes, coords), held.offload and param.in_fsdp
        num = own_piece.numel
        num_bytes["parameters", host] += _stored_bytes(own_piece, held)
        if param.name in held.trained:
            num_bytes[GRADIENTS, host] += num * widths.stored
            num_bytes[STATE, host] += held.state_bytes(param, own_piece.shape)
    out = [Stored(what, num, host) for (what, host), num in num_bytes.items()]
    return [s for s in (*out, *_passing(spec, axes, rank, held)) if s.num_bytes]


def _stored_bytes(own: Piece, held: Held) -> int:
    """Return the bytes of a stored piece."""
    name = own.param.name
    if name in held.numbers:
        return prod(held.numbers[name].stored(own.shape))
    return own.numel * held.narrow.get(name, held.widths.stored)


def narrow_bytes(spec: ShardingSpec, axes: Axes, unit: Unit, compute: int, stored: int) -> int:
    """Return the extra bytes per gradient element of a unit while gradients are sent in the compute dtype.

    One buffer to send and one to receive; the cast needs none where the gradient already has that dtype.
    """
    if not spec.sends_narrow(axes.pp) or prod(axes.sizes(unit.shard)) == 1:
        return 0
    return 2 * compute if compute < stored else compute


def _passing(spec: ShardingSpec, axes: Axes, rank: int, held: Held) -> Iterator[Stored]:
    """Yield what is held only for a while: gathered parameters and gradients in flight.

    The units that stay gathered and the two largest others are gathered at once, since FSDP prefetches one. A unit has
    its gradients before its reduce-scatter, and in a buffer for it. Where replicas are summed before gradients go to
    the host, gradients of all units wait on the device for the last micro-batch.
    """
    coords, widths = axes.coords(rank), held.widths
    units = [unit for stage in spec.stages(axes, rank) for unit in stage.units]
    wrapped = [u for u in units if held.offload or prod(axes.sizes(("replicate", *u.shard))) > 1]
    trained_units = [replace(u, params=tuple(name for name in u.params if name in held.trained)) for u in wrapped]

    def shard_sizes(some: Sequence[Unit]) -> list[int]:
        return [padded(u, spec, axes, coords) for u in some]

    def full_sizes(some: Sequence[Unit]) -> list[int]:
        return [num * prod(axes.sizes(u.shard)) for num, u in zip(shard_sizes(some), some, strict=True)]

    def gathered_as_codes(unit: Unit) -> Mapping[str, Coding]:
        """Return what is gathered as codes.

        A trained parameter with a single shard is copied, not gathered, and its copy has values.
        """
        return {**held.numbers, **(dict.fromkeys(held.low, FP8) if prod(axes.sizes(unit.shard)) > 1 else {})}

    def gathered(some: Sequence[Unit]) -> list[int]:
        own = [gathered_bytes(u, spec, axes, coords, widths.compute, gathered_as_codes(u)) for u in some]
        return [num * prod(axes.sizes(u.shard)) for num, u in zip(own, some, strict=True)]

    stay = gathered([u for u in wrapped if not u.again])
    prefetched = sorted(gathered([u for u in wrapped if u.again]))[-2:]
    waiting = sum(shard_sizes(trained_units)) if held.offload and axes.replicate > 1 else 0
    scales = sum(num_scales(u, spec, axes, coords, gathered_as_codes(u)) for u in trained_units) * widths.stored
    yield Stored(GATHERED, sum(stay) + sum(prefetched) + scales)
    once = sum(full_sizes(trained_units)) * widths.stored if spec.sums_once(axes.pp) else 0
    yield Stored(WHOLE, once)
    yield Stored(QUANTISED, sum(_quantised_bytes(unit, spec, axes, coords, held) for unit in units))
    wide = widths.compute + widths.stored
    in_flight = [
        num * (wide + narrow_bytes(spec, axes, u, widths.compute, widths.stored))
        for u, num in zip(trained_units, full_sizes(trained_units), strict=True)
    ]
    yield Stored(IN_FLIGHT, max(in_flight, default=0))
    yield Stored("gradients of a replica", waiting * widths.stored)


def _quantised_bytes(unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], held: Held) -> int:
    """Return the bytes of the codes that a rank keeps from the first matmul of a step to the last, of its own rows.

    They include the scales of whole matrices; scales of gathered weights count as gathered.
    """
    names = quantised_once(spec, axes, unit, held.trained)
    is_whole = prod(axes.sizes(unit.shard)) == 1
    scales = num_scales(unit, spec, axes, coords, names) * held.widths.stored if is_whole else 0
    return padded(replace(unit, params=names), spec, axes, coords) + scales


def extreme_ranks(spec: ShardingSpec, axes: Axes) -> list[int]:
    """Return a few ranks that include one that stores most and one that stores least, of each parameter and of all.

    The first rank of a position on pp has the first part of everything, and first parts are the largest (`chunk`), so
    it stores most.

    Call ranks similar if tp and ep give them cuts of the same sizes. Among similar ranks of a replica a later one comes
    later in the shards of every parameter, or at the same place, and shards never grow along their axis. So the last of
    similar ranks stores least. Cuts repeat every lcm(tp, ep) ranks, so these last ones are at the end.
    """
    cuts = {
        (param.dims[dim], axis) for param in spec.table for dim, axis in place(param, spec.rules, axes).split.items()
    }
    replica, period = axes.fsdp * axes.cp * axes.tp, lcm(axes.tp, axes.ep)
    last_alike: dict[tuple[int, ...], int] = {}
    for rank in range(replica - period, replica):
        coords = axes.coords(rank)
        ranges = (chunk(size, axes.size_of(axis), coords[axis]) for size, axis in sorted(cuts))
        last_alike[tuple(stop - start for start, stop in ranges)] = rank
    return sorted(first + rank for first in axes.group(0, ("pp",)) for rank in {0, *last_alike.values()})
