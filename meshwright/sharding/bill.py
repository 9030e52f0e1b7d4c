"""The bill: every collective of a training step with its bytes, computed from declarations, with no device.

`plan` shows it, and oracle K1 of `verify` compares it with what the ranks really send. So it derives from the same
doors and units that run, but never from the code that runs them: it would repeat a mistake of that code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import nn

from ..axes import DATA_RANK, STAGE, Axes, Sum
from ..ops.codings import Coding
from .backward_reach import begins_in, part_of, passed
from .context_split import head_splits
from .doors import Dispatch, Door, Halo, Join, Lookup, ScatterVision, Swap, find_doors
from .expert_routes import CODES, COUNTS, ROWS, WEIGHTS, Hop, expected_rows, hops
from .fp8_blocks import SCALES, num_scales
from .fsdp_units import TOWER, Unit
from .params import matrix_shape
from .rules import ShardingSpec, cut, piece, place
from .schedules import RECEIVE, SEND, Transfer
from .stages import Stage, program_of, trained_from, transfer_name
from .vision_balance import Placed, route


@dataclass(frozen=True)
class Charge:
    """One kind of collective of a step. `num_bytes`: the larger of its two sides, on this rank.

    `what`: where a rank waits for it, a door or a reduction; for FSDP's collectives, the unit. `between`: the fewest
    and the most bytes, where routing decides and `num_bytes` is the expected value.
    """

    what: str
    op: str
    axes: tuple[str, ...]
    num_bytes: int
    count: int
    between: tuple[int, int] | None = None

    @staticmethod
    def of(declared: Sum, count: int = 1) -> Charge:
        """Charge for an all-reduce that is declared as a `Sum`."""
        return Charge(declared.name, "all_reduce", declared.axes, declared.num_bytes, count)


# For each micro-batch the frames of this data rank; None where no data rank has any, and the tower does not run.
ImageFrames = tuple[tuple[Placed, ...] | None, ...]


@dataclass(frozen=True)
class Work:
    """The size of a step. `tokens`: in one micro-batch of a data rank."""

    tokens: int
    num_batches: int
    compute_bytes: int = 2
    stored_bytes: int = 4
    images: ImageFrames = ()
    frozen: frozenset[str] = frozenset()  # names of parameters that are not trained
    numbers: Mapping[str, Coding] = field(default_factory=dict)  # of those that are all-gathered as codes
    # For each part in which gradients begin: how many collectives its backward has, by place and direction. Autograd
    # may start in the middle of a layer, which no declaration can tell; the engine counts on a meta copy.
    begins: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def num_seeing(self) -> int:
        """Count the micro-batches in which the tower runs."""
        return sum(frames is not None for frames in self.images)


def bill(spec: ShardingSpec, axes: Axes, rank: int, work: Work) -> list[Charge]:
    """Return what `rank` sends in one step. An axis of size 1 costs nothing."""
    coords, charges = axes.coords(rank), list[Charge]()
    stages = spec.stages(axes, rank)
    for stage in stages:
        passes = _passes(stage, spec, axes, work)
        charges += _doors(stage, axes, work, passes)
        charges += _experts(stage.module, spec, axes, work, passes)
        charges += _swaps(stage.module, spec, axes, coords, work, passes)
        charges += _inserts(stage.module, axes, rank, work, passes)
        charges += _halos(stage.module, axes, work, passes)
        charges += _lookups(stage.module, axes, work)
        for unit in stage.units:
            charges += _unit(unit, spec, axes, coords, work, passes)
    charges += [*_scales(stages, spec, axes, coords, work), *_transfers(spec, axes, coords, work)]
    charges += _last_sums(spec, axes, rank, work)
    return [c for c in charges if c.count and prod(axes.sizes(c.axes)) > 1]


@dataclass(frozen=True)
class _Passes:
    """Counts of the micro-batches in which a gradient comes to each part of a stage, or begins in it.

    `begun`: for a part in which it begins, how many collectives its backward has, by place and direction.
    """

    comes: Counter[str]
    begins: Counter[str]
    begun: Mapping[str, Mapping[str, int]]

    def of(self, part: str) -> int:
        """Count the micro-batches in which a gradient comes to a part."""
        return self.comes[part]

    def back(self, place: str, num: int = 1) -> int:
        """Count gradients sent at a place, where each full pass of backward sends `num` of them."""
        return self._sent(place, "backward", num)

    def again(self, place: str, num: int) -> int:
        """Count what is sent at a place once more, because activation checkpointing reruns its forward."""
        return self._sent(place, "forward", num)

    def _sent(self, place: str, direction: str, num: int) -> int:
        part = part_of(place)
        full = self.comes[part] - self.begins[part]
        return num * full + self.begins[part] * self.begun.get(part, {}).get(f"{place}, {direction}", 0)


def _passes(stage: Stage, spec: ShardingSpec, axes: Axes, work: Work) -> _Passes:
    """Count micro-batches with and without vision separately: the tower passes gradients only in those with vision."""
    trained, passes = spec.table.params.keys() - work.frozen, _Passes(Counter(), Counter(), work.begins)
    for with_images, num in ((True, work.num_seeing), (False, work.num_batches - work.num_seeing)):
        for part in passed(stage, spec, axes, trained, with_images=with_images):
            passes.comes[part] += num
        passes.begins[begins_in(stage, spec, axes, trained, with_images=with_images)] += num
    return passes


def _transfers(spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work) -> Iterator[Charge]:
    """Charge for activations to the next pipeline stage, and for gradients back.

    A rank sends its own tokens only: sequence parallelism divides them among tp ranks between blocks, so no tp rank
    sends the same data twice.
    """
    line = spec.line(axes.pp)
    if line.num_stages == 1:
        return
    num_bytes = work.tokens // (axes.cp * axes.tp) * spec.module.shape.stream_width * work.compute_bytes
    first = trained_from(spec.table, line, [*(spec.table.params.keys() - work.frozen)])
    steps = program_of(line, spec.recipe.pipeline.schedule, work.num_batches, first)[coords["pp"]]
    for kind, op in ((SEND, "send"), (RECEIVE, "recv")):
        directions = Counter(
            (step.way, step.stage) for step in steps if isinstance(step, Transfer) and step.kind == kind
        )
        for (way, stage), count in directions.items():
            yield Charge(transfer_name(way, stage), op, ("pp",), num_bytes, count)


def _doors(stage: Stage, axes: Axes, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Charge for tensor-parallel doors: per layer one all-gather and one reduce-scatter for each of mixer and MLP.

    That is Megatron's sequence parallelism (arXiv 2205.05198): the same bytes as its all-reduces, but norms and
    residuals hold only a rank's own tokens. Doors of one kind and width cost the same in every layer. `again`:
    checkpointing reruns the layer if backward comes there.
    """
    for name, door in find_doors(stage.module, Door):
        if not door.kind.forward:
            continue  # SHARE and OWN only slice
        item = work.stored_bytes if door.floats else work.compute_bytes
        num_bytes = work.tokens // axes.cp * door.width * item
        there, back = _times_passed(stage, name)
        forwards = there * work.num_batches + passes.again(name, door.again)
        yield Charge(name, door.kind.forward, (door.kind.axis,), num_bytes, forwards)
        yield Charge(name, door.kind.backward, (door.kind.axis,), num_bytes, passes.back(name, back))


def _times_passed(stage: Stage, name: str) -> tuple[int, int]:
    """Return how often a door is passed in a forward and in its backward. An MTP head looks tokens up a second time, in
    the stage that has it, and scores the vocabulary a second time."""
    mtp, in_trunk = stage.module.mtp, int(stage.number == 0)
    if mtp is not None and name.startswith("embed."):
        return in_trunk + 1, in_trunk + (not mtp.detached)
    return (2, 2) if mtp is not None and name in ("head.enter", "head.meet") else (1, 1)


def _experts(model: nn.Module, spec: ShardingSpec, axes: Axes, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Charge for expert parallelism's all-to-alls (GShard, arXiv 2006.16668): counts, routing weights, rows out and
    back.

    Without `token_once` the bytes of rows do not depend on routing: each rank sends every copy of a token somewhere.
    Copies for its own experts count too, as they pass through the same buffer.
    """
    tokens, token_once = work.tokens // (axes.cp * axes.tp), spec.recipe.memory.token_once
    for name, door in find_doors(model, Dispatch):
        copies, row_bytes = tokens * door.top_k, door.width * work.compute_bytes
        for hop in hops(name, door.num_experts, axes, token_once):
            weights, rows, codes = hop.at + WEIGHTS, hop.at + ROWS, hop.at + CODES
            counts = hop.num_experts + (hop.size * min(door.top_k, hop.num_here) if token_once else 0)
            num = work.num_batches + passes.again(hop.at + COUNTS, door.again)
            yield Charge(hop.at + COUNTS, "all_to_all", hop.axes, counts * 8, num)
            num = work.num_batches + passes.again(weights, door.again) + passes.back(weights)
            yield Charge(weights, "all_to_all", hop.axes, copies * work.stored_bytes, num)
            # A recomputed layer sends rows to their experts again, and back only if it needs the combined output.
            sent = 2 * work.num_batches + passes.again(rows, door.again + door.back_again) + passes.back(rows, 2)
            if not token_once:
                yield Charge(rows, "all_to_all", hop.axes, copies * row_bytes, sent)
                continue
            num = work.num_batches + passes.again(codes, door.again)
            yield Charge(codes, "all_to_all", hop.axes, copies * 8, num)
            least, likely, most = (n * row_bytes for n in _rows(hop, tokens, door.top_k))
            yield Charge(rows, "all_to_all", hop.axes, likely, sent, (least, most))


def _rows(hop: Hop, tokens: int, top_k: int) -> tuple[int, int, int]:
    """Return the fewest rows that a rank can send in a hop, the expected number, and the most.

    Within a node they come from tokens of all nodes, as many as the router sends there.
    """
    likely, num_nodes = expected_rows(tokens, top_k, hop.num_here * hop.places, hop.places), hop.places // hop.size
    least = tokens * -(-top_k // hop.num_here) if num_nodes == 1 else 0
    return least, likely, tokens * num_nodes * min(top_k, hop.size)


def _swaps(
    model: nn.Module, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work, passes: _Passes
) -> Iterator[Charge]:
    """Charge for context parallelism: head swaps (Ulysses, arXiv 2309.14509) and gathers between groups of swapping
    ranks.

    In a swap, each of some neighbours on cp gets its share of the heads of all their tokens, and returns the outputs.
    Over the other ranks of cp, `Join` all-gathers keys and values, or states of the delta net.
    """
    deal_of = head_splits(spec, axes, coords)
    for name, swap in find_doors(model, Swap):
        _, inner = axes.halves(deal_of[swap].parts)
        tokens = work.tokens // axes.cp * deal_of[swap].parts
        for at, width in zip((name, f"{name}, the way back"), swap.widths(deal_of[swap]), strict=True):
            num = work.num_batches + passes.again(at, swap.again) + passes.back(at)
            yield Charge(at, "all_to_all", (inner,), tokens * width * work.compute_bytes, num)
    for name, join in find_doors(model, Join):
        deal = deal_of[join.swap]
        outer, _ = axes.halves(deal.parts)
        item = work.stored_bytes if join.floats else work.compute_bytes
        elements = join.elements(deal, work.tokens // axes.cp * deal.parts)  # of one part
        num_bytes, forwards = axes.cp // deal.parts * elements * item, work.num_batches + passes.again(name, join.again)
        yield Charge(name, "all_gather", (outer,), num_bytes, forwards)
        yield Charge(name, "reduce_scatter", (outer,), num_bytes, passes.back(name) * join.has_gradient)


def _inserts(model: nn.Module, axes: Axes, rank: int, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Charge for the vision tower's all-to-all: rows of frames to the ranks of their tokens, per micro-batch."""
    num_ranks, index = prod(axes.sizes(DATA_RANK)), axes.group(rank, DATA_RANK).index(rank)
    for name, door in find_doors(model, ScatterVision):
        for frames in work.images:
            if frames is not None:
                exchange = route(frames, work.tokens, num_ranks, index, door.cost)
                for rows in (exchange.got, exchange.sent) if passes.back(name) else (exchange.got,):
                    yield Charge(name, "all_to_all", DATA_RANK, sum(rows) * door.width * work.compute_bytes, 1)


def _halos(model: nn.Module, axes: Axes, work: Work, passes: _Passes) -> Iterator[Charge]:
    """Charge for halos: the last rows of each rank's own tokens go to all ranks of its data rank."""
    num_ranks = prod(axes.sizes(DATA_RANK))
    for name, halo in find_doors(model, Halo):
        rows = num_ranks * min(halo.rows, work.tokens // num_ranks)
        num_bytes = rows * halo.width * work.compute_bytes
        yield Charge(name, "all_gather", DATA_RANK, num_bytes, work.num_batches + passes.again(name, halo.again))
        yield Charge(name, "reduce_scatter", DATA_RANK, num_bytes, passes.back(name))


def _lookups(model: nn.Module, axes: Axes, work: Work) -> Iterator[Charge]:
    """Charge for lookups in tables that are cut by rows: counts, row numbers, rows, and their gradients.

    Summed over ranks, bytes do not depend on the data: each rank asks for as many rows as its tokens need.
    """
    num_ranks, tokens = prod(axes.sizes(STAGE)), work.tokens // prod(axes.sizes(DATA_RANK))
    for name, door in find_doors(model, Lookup):
        asked = tokens * door.rows
        yield Charge(f"{name}, counts", "all_to_all", STAGE, num_ranks * 8, work.num_batches)
        yield Charge(f"{name}, row numbers", "all_to_all", STAGE, asked * 8, work.num_batches)
        back = work.num_batches * (door.parameter(name) not in work.frozen)
        yield Charge(name, "all_to_all", STAGE, asked * door.width * work.compute_bytes, work.num_batches + back)


def padded(unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], without: Collection[str] = ()) -> int:
    """Count the elements that each rank contributes when a unit is gathered: FSDP pads shards to equal size."""
    sizes = _padded_shapes(unit, spec, axes, coords)
    return sum(rows * columns for name, rows, columns in sizes if name not in without)


def _padded_shapes(
    unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int]
) -> Iterator[tuple[str, int, int]]:
    """Yield the rows and columns that each rank contributes of each parameter."""
    parts = prod(axes.sizes(unit.shard))
    for name in unit.params:
        param = spec.table[name]
        if param.in_fsdp:
            rows, *cols = matrix_shape(param, cut(param, place(param, spec.rules, axes), axes, coords).shape)
            yield name, -(-rows // parts), prod(cols)


def gathered_bytes(
    unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], compute_bytes: int,
    codings: Mapping[str, Coding],
) -> int:  # fmt: skip
    """Return the bytes that each rank contributes when a unit is gathered: codes in 8 or 4 bits as they are, the rest
    in the compute dtype.
    """
    return sum(
        rows * (codings[name].row_bytes(columns) if name in codings else columns * compute_bytes)
        for name, rows, columns in _padded_shapes(unit, spec, axes, coords)
    )


def _unit(
    unit: Unit, spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work, passes: _Passes
) -> Iterator[Charge]:
    """Charge for FSDP (arXiv 2304.11277): all-gathers of parameters, reduce-scatters of gradients, all-reduce over
    replicas.

    Frozen parameters are gathered but never reduced, and a second time only if a gradient passes through.
    """
    own_bytes = gathered_bytes(unit, spec, axes, coords, work.compute_bytes, work.numbers)
    num_shards = prod(axes.sizes(unit.shard))
    name, num_backward = unit.name or "root", passes.of(part_of(unit.name))
    # A last stage may look tokens up without a gradient, for an MTP head.
    trained = padded(unit, spec, axes, coords, work.frozen) if num_backward else 0
    num_batches = work.num_seeing if unit.name.startswith(TOWER) else work.num_batches
    gathers = min(num_batches, 1) if spec.gathers_once(axes.pp) else num_batches + unit.again * num_backward
    num_reduced = min(num_batches, 1) if spec.sums_once(axes.pp) else num_batches
    if own_bytes and num_batches:
        yield Charge(name, "all_gather", unit.shard, own_bytes * num_shards, gathers)
    if trained and num_batches:
        low_precision = spec.sends_narrow(axes.pp)
        # Low-precision gradients go by all-to-all and are added up in float32 at the receiver: a reduce-scatter in
        # bfloat16 would round after every addition.
        op, item = ("all_to_all", work.compute_bytes) if low_precision else ("reduce_scatter", work.stored_bytes)
        yield Charge(name, op, unit.shard, trained * num_shards * item, num_reduced)
        yield Charge(name, "all_reduce", ("replicate",), trained * work.stored_bytes, 1)


def _scales(
    stages: Sequence[Stage], spec: ShardingSpec, axes: Axes, coords: Mapping[str, int], work: Work
) -> Iterator[Charge]:
    """Charge for one all-reduce (MAX) a step of the block scales of what is trained and gathered in FP8.

    Frozen FP8 weights have constant scales.
    """
    trained_fp8, sizes = work.numbers.keys() - work.frozen, Counter[tuple[str, ...]]()
    for unit in (unit for stage in stages for unit in stage.units):
        sizes[unit.shard] += num_scales(unit, spec, axes, coords, trained_fp8)
    for shard, num in sizes.items():
        yield Charge(SCALES, "all_reduce", shard, num * work.stored_bytes, int(num > 0))


def _last_sums(spec: ShardingSpec, axes: Axes, rank: int, work: Work) -> Iterator[Charge]:
    """Charge for one flat all-reduce per set of axes: of gradients that have copies on them and are in no FSDP unit.

    The engine asks `axes_left_to_sum`. The bill must not: it would repeat a mistake of that code.
    """
    units = [unit for stage in spec.stages(axes, rank) for unit in stage.units]
    reduced_by_fsdp = {
        name: (*unit.shard, "replicate") for unit in units for name in unit.params if spec.table[name].in_fsdp
    }
    sizes: dict[tuple[str, ...], int] = {}
    for param in spec.params(axes, rank):
        copies = place(param, spec.rules, axes).copies
        live = tuple(a for a in copies if a not in reduced_by_fsdp.get(param.name, ()) and axes.size_of(a) > 1)
        unused = param.name.startswith(TOWER) and not work.num_seeing
        if live and not unused and param.name not in work.frozen:
            sizes[live] = sizes.get(live, 0) + piece(param, spec.rules, axes, axes.coords(rank)).numel
    for live, numel in sizes.items():
        yield Charge("the last sums of gradients", "all_reduce", live, numel * work.stored_bytes, 1)
