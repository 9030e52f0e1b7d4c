"""The bill: every collective of a training step, worked out from table, units and doors, with no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn

from ..axes import DATA_RANK, Axes, Sum
from .backward_reach import begins_in, part_of, passed
from .context_split import deals
from .doors import Dispatch, Door, Insert, Join, Swap, find
from .expert_routes import CODES, COUNTS, ROWS, WEIGHTS, Hop, hops, likely_rows
from .fp8_blocks import SCALES, num_scales
from .fsdp_units import TOWER, Unit
from .params import matrix_shape
from .rules import ShardingSpec, cut, piece, place
from .schedules import RECEIVE, SEND, Transfer
from .stages import Stage, program_of, trained_from, transfer_name
from .vision_balance import Placed, route


@dataclass(frozen=True)
class Charge:
    """One kind of collective of a step. `num_bytes`: the larger side of one of them, on this rank.

    `what` is the place where a rank waits for it: a door or a sum; for FSDP's collectives, the unit. `between`: the
    least and the most bytes, where the router decides and `num_bytes` are likely.
    """

    what: str
    op: str
    axes: tuple[str, ...]
    num_bytes: int
    count: int
    between: tuple[int, int] | None = None

    @staticmethod
    def of(declared: Sum, count: int = 1) -> Charge:
        return Charge(declared.name, "all_reduce", declared.axes, declared.num_bytes, count)


Pictures = tuple[tuple[Placed, ...] | None, ...]


@dataclass(frozen=True)
class Work:
    """The size of a step. `tokens`: in one micro-batch of a data rank."""

    tokens: int
    num_batches: int
    compute_bytes: int = 2
    stored_bytes: int = 4
    # Of each micro-batch the frames of this data rank; None where nobody has any, and the tower does not run.
    pictures: Pictures = ()
    frozen: frozenset[str] = frozenset()  # names of parameters that are not trained
    numbers: frozenset[str] = frozenset()  # names of those that are gathered as 8-bit numbers
    # Of each part in which gradients begin, how often backward sends something there, by place and direction.
    begins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def num_seeing(self) -> int:
        """In how many micro-batches the tower runs."""
        return sum(frames is not None for frames in self.pictures)


def bill(spec: ShardingSpec, axes: Axes, rank: int, work: Work) -> list[Charge]:
    """What `rank` pays for one step. An axis of size 1 costs nothing."""
    coords, charges = axes.coords(rank), list[Charge]()
    stages = spec.stages(axes, rank)
    for stage in stages:
        passes = _passes(stage, spec, axes, work)
        charges += _doors(stage.module, axes, work, passes)
        charges += _experts(stage.module, spec, axes, work, passes)
        charges += _swaps(stage.module, spec, axes, coords, work, passes)
        charges += _inserts(stage.module, axes, rank, work, passes)
        for unit in stage.units:
            charges += _unit(unit, spec, axes, coords, work, passes)
    charges += [*_scales(stages, spec, axes, coords, work), *_transfers(spec, axes, coords, work)]
    charges += _last_sums(spec, axes, rank, work)
    return [c for c in charges if c.count and prod(axes.sizes(c.axes)) > 1]


@dataclass(frozen=True)
class _Passes:
    """In how many micro-batches a gradient comes to each part of a stage, and in how many of these it begins there.
    `begun`: of a part in which it begins, how often backward sends something, by place and direction."""

    comes: Counter[str]
    begins: Counter[str]
    begun: Mapping[str, Mapping[str, int]]

    def of(self, part: str) -> int:
        return self.comes[part]

    def back(self, place: str, num: int = 1) -> int:
        """How often backward sends a gradient at a place, where each of its passes does so `num` times."""
        return self._sent(place, "backward", num)

    def again(self, place: str, num: int) -> int:
        """How often it sends there what forward has sent, because it runs a layer again."""
        return self._sent(place, "forward", num)

    def _sent(self, place: str, direction: str, num: int) -> int:
        part = part_of(place)
        through = self.comes[part] - self.begins[part]
        return num * through + self.begins[part] * self.begun.get(part, {}).get(f"{place}, {direction}", 0)


def _passes(stage: Stage, spec: ShardingSpec, axes: Axes, work: Work) -> _Passes:
    trained, found = spec.table.params.keys() - work.frozen, _Passes(Counter(), Counter(), work.begins)
    for pictures, num in ((True, work.num_seeing), (False, work.num_batches - work.num_seeing)):
        for part in passed(stage, spec, axes, trained, pictures=pictures):
            found.comes[part] += num
        found.begins[begins_in(stage, spec, axes, trained, pictures=pictures)] += num
    return found


def _transfers(spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work) -> Iterator[Charge]:
    """What neighbouring stages send each other: the tokens of a rank, there and, as a gradient, back."""
    line = spec.line(axes.pp)
    if line.num_stages == 1:
        return
    num_bytes = work.tokens // (axes.cp * axes.tp) * spec.module.shape.width * work.compute_bytes
    first = trained_from(spec.table, line, [*(spec.table.params.keys() - work.frozen)])
    steps = program_of(line, spec.recipe.pipeline.schedule, work.num_batches, first)[coords["pp"]]
    for kind, op in ((SEND, "send"), (RECEIVE, "recv")):
        ways = Counter((step.way, step.stage) for step in steps if isinstance(step, Transfer) and step.kind == kind)
        for (way, stage), count in ways.items():
            yield Charge(transfer_name(way, stage), op, ("pp",), num_bytes, count)


def _doors(model: nn.Module, axes: Axes, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Doors of one kind and width cost the same, whatever layer they are in. `again`: if backward comes there."""
    for name, door in find(model, Door):
        if not door.kind.forward:
            continue  # it sends nothing
        item = work.stored_bytes if door.floats else work.compute_bytes
        num_bytes = work.tokens // axes.cp * door.width * item
        forwards = work.num_batches + passes.again(name, door.again)
        yield Charge(name, door.kind.forward, (door.kind.axis,), num_bytes, forwards)
        yield Charge(name, door.kind.backward, (door.kind.axis,), num_bytes, passes.back(name))


def _experts(model: nn.Module, spec: ShardingSpec, axes: Axes, work: Work, passes: _Passes) -> Iterator[Charge]:
    tokens, once = work.tokens // (axes.cp * axes.tp), spec.recipe.memory.token_once
    for name, door in find(model, Dispatch):
        copies, row_bytes = tokens * door.top_k, door.width * work.compute_bytes
        for hop in hops(name, door.num_experts, axes, once):
            weights, rows, codes = hop.at + WEIGHTS, hop.at + ROWS, hop.at + CODES
            counts = hop.num_experts + (hop.size * min(door.top_k, hop.num_here) if once else 0)
            num = work.num_batches + passes.again(hop.at + COUNTS, door.again)
            yield Charge(hop.at + COUNTS, "all_to_all", hop.axes, counts * 8, num)
            num = work.num_batches + passes.again(weights, door.again) + passes.back(weights)
            yield Charge(weights, "all_to_all", hop.axes, copies * work.stored_bytes, num)
            # A layer that backward runs again sends rows to their experts again, but not back.
            sent = 2 * work.num_batches + passes.again(rows, door.again) + passes.back(rows, 2)
            if not once:
                yield Charge(rows, "all_to_all", hop.axes, copies * row_bytes, sent)
                continue
            num = work.num_batches + passes.again(codes, door.again)
            yield Charge(codes, "all_to_all", hop.axes, copies * 8, num)
            least, likely, most = (n * row_bytes for n in _rows(hop, tokens, door.top_k))
            yield Charge(rows, "all_to_all", hop.axes, likely, sent, (least, most))


def _rows(hop: Hop, tokens: int, top_k: int) -> tuple[int, int, int]:
    """The fewest rows that a rank can send in a hop, those that are likely, and the most. In a node they are of tokens
    of all nodes, as many as the router sends there."""
    likely, num_nodes = likely_rows(tokens, top_k, hop.num_here * hop.places, hop.places), hop.places // hop.size
    least = tokens * -(-top_k // hop.num_here) if num_nodes == 1 else 0
    return least, likely, tokens * num_nodes * min(top_k, hop.size)


def _swaps(
    model: nn.Module, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work, passes: _Passes
) -> Iterator[Charge]:
    """Each of some neighbours on cp gets its share of the heads of their tokens, and gives them back. Over the others
    goes what joins their parts of the stream."""
    dealt = deals(spec, axes, coords)
    for name, swap in find(model, Swap):
        _, inner = axes.halves(dealt[swap].parts)
        tokens = work.tokens // axes.cp * dealt[swap].parts
        for at, width in zip((name, f"{name}, the way back"), swap.widths(dealt[swap]), strict=True):
            num = work.num_batches + passes.again(at, swap.again) + passes.back(at)
            yield Charge(at, "all_to_all", (inner,), tokens * width * work.compute_bytes, num)
    for name, join in find(model, Join):
        deal = dealt[join.swap]
        outer, _ = axes.halves(deal.parts)
        item = work.stored_bytes if join.floats else work.compute_bytes
        elements = join.elements(deal, work.tokens // axes.cp * deal.parts)  # of one part
        num_bytes, forwards = axes.cp // deal.parts * elements * item, work.num_batches + passes.again(name, join.again)
        yield Charge(name, "all_gather", (outer,), num_bytes, forwards)
        yield Charge(name, "reduce_scatter", (outer,), num_bytes, passes.back(name))


def _inserts(model: nn.Module, axes: Axes, rank: int, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Rows of frames go to the ranks of their tokens, and gradients back, for each micro-batch as many as it has."""
    parts, at = prod(axes.sizes(DATA_RANK)), axes.group(rank, DATA_RANK).index(rank)
    for name, door in find(model, Insert):
        for frames in work.pictures:
            if frames is not None:
                way = route(frames, work.tokens, parts, at, door.cost)
                for rows in (way.got, way.sent) if passes.back(name) else (way.got,):
                    yield Charge(name, "all_to_all", DATA_RANK, sum(rows) * door.width * work.compute_bytes, 1)


def padded(unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], without: Collection[str] = ()) -> int:
    """Elements that each rank brings when a unit is gathered: FSDP pads shards to equal size."""
    parts, num = prod(axes.sizes(unit.shard)), 0
    for name in unit.params:
        param = spec.table[name]
        if not param.float32 and name not in without:
            rows, *cols = matrix_shape(param, cut(param, place(param, spec.rules, axes), axes, coords).shape)
            num += -(-rows // parts) * prod(cols)
    return num


def gathered_bytes(
    unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], compute_bytes: int, numbers: Collection[str]
) -> int:
    """What each rank brings when a unit is gathered: in the dtype of products, but for numbers in 8 bits."""
    wide = padded(unit, spec, axes, coords, numbers)
    return wide * compute_bytes + padded(unit, spec, axes, coords) - wide


def _unit(
    unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work, passes: _Passes
) -> Iterator[Charge]:
    """What is frozen is gathered alone, a second time only for a gradient that comes through."""
    mine = gathered_bytes(unit, spec, axes, coords, work.compute_bytes, work.numbers)
    parts = prod(axes.sizes(unit.shard))
    learns, name = padded(unit, spec, axes, coords, work.frozen), unit.name or "root"
    seen = work.num_seeing if unit.name.startswith(TOWER) else work.num_batches
    back = passes.of(part_of(unit.name))
    gathers = min(seen, 1) if spec.gathers_once(axes.pp) else seen + unit.again * back
    sums = min(seen, 1) if spec.sums_once(axes.pp) else seen
    if mine and seen:
        yield Charge(name, "all_gather", unit.shard, mine * parts, gathers)
    if learns and seen:
        narrow = spec.sends_narrow(axes.pp)
        op, item = ("all_to_all", work.compute_bytes) if narrow else ("reduce_scatter", work.stored_bytes)
        yield Charge(name, op, unit.shard, learns * parts * item, sums)
        yield Charge(name, "all_reduce", ("replicate",), learns * work.stored_bytes, 1)


def _scales(
    stages: Sequence[Stage], spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work
) -> Iterator[Charge]:
    """Before a step ranks find the scales of what is trained and gathered as numbers. Frozen numbers have theirs."""
    low, sizes = work.numbers - work.frozen, Counter[tuple[str, ...]]()
    for unit in (unit for stage in stages for unit in stage.units):
        sizes[unit.shard] += num_scales(unit, spec, axes, coords, low)
    for shard, num in sizes.items():
        yield Charge(SCALES, "all_reduce", shard, num * work.stored_bytes, int(num > 0))


def _last_sums(spec: ShardingSpec, axes: Axes, rank: int, work: Work) -> Iterator[Charge]:
    """One flat all-reduce for each set of axes. It sums what has copies there and is in no unit that sums over them.

    The engine asks `axes_left_to_sum`. The bill must not: it would repeat a mistake that is made there.
    """
    units = [unit for stage in spec.stages(axes, rank) for unit in stage.units]
    paid = {name: (*unit.shard, "replicate") for unit in units for name in unit.params if not spec.table[name].float32}
    sizes: dict[tuple[str, ...], int] = {}
    for param in spec.params(axes, rank):
        copies = place(param, spec.rules, axes).copies
        live = tuple(a for a in copies if a not in paid.get(param.name, ()) and axes.size_of(a) > 1)
        unused = param.name.startswith(TOWER) and not work.num_seeing
        if live and not unused and param.name not in work.frozen:
            sizes[live] = sizes.get(live, 0) + piece(param, spec.rules, axes, axes.coords(rank)).numel
    for live, numel in sizes.items():
        yield Charge("the last sums of gradients", "all_reduce", live, numel * work.stored_bytes, 1)
