"""The bill: every collective of a training step, known from table, units and doors, with no device at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from ..mesh.axes import Axes
from .doors import Dispatch, Door, attributes
from .params import Table, matrix_shape
from .rules import Rules, cut, piece, place


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and freed together. `again`: gathered a second time, for backward."""

    name: str
    params: tuple[str, ...]
    expert: bool
    again: bool

    @property
    def shard(self) -> tuple[str, ...]:
        """The axes over which it is stored in shards."""
        return ("efsdp",) if self.expert else ("fsdp", "cp")


@dataclass(frozen=True)
class Charge:
    """One kind of collective of a step: `num_bytes` is the larger side of one of them on this rank. `what`: the place
    where a rank says that it stands then, as a door; of FSDP's the unit."""

    what: str
    op: str
    axes: tuple[str, ...]
    num_bytes: int
    count: int


@dataclass(frozen=True)
class Step:
    """The size of a step: `tokens` of one micro-batch of a data rank."""

    tokens: int
    num_batches: int
    compute_bytes: int = 2
    stored_bytes: int = 4


def units_of(model: nn.Module, gathered: Sequence[nn.Module], *, reshard: bool = True) -> list[Unit]:
    """Experts, then the units around them, then the root with what is left, as they are wrapped. Without `reshard`
    what forward has gathered stays until backward is done with it."""
    names = {module: name for name, module in model.named_modules()}
    experts = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in attributes(model, Dispatch)))
    taken: set[str] = set()
    units = []
    for name in [*experts, *(names[m] for m in gathered), ""]:
        inside = [n for n, _ in model.named_parameters() if n.startswith(f"{name}." if name else "") and n not in taken]
        taken.update(inside)
        last = name in ("", names[gathered[-1]])  # backward wants the last one first: it is kept
        units.append(Unit(name, tuple(inside), name in experts, again=reshard and not last))
    return units


def bill(
    model: nn.Module, units: Sequence[Unit], table: Table, rules: Rules, axes: Axes, rank: int, step: Step
) -> list[Charge]:
    """What `rank` pays for one step in which every parameter is trained; free of charge where an axis has size 1."""
    coords = axes.coords(rank)
    charges = [
        *_doors(model, axes, step),
        *(charge for unit in units for charge in _unit(unit, table, rules, axes, coords, step)),
        *_rest(units, table, rules, axes, coords, step),
    ]
    return [c for c in charges if c.count and prod(axes.sizes(c.axes)) > 1]


def _doors(model: nn.Module, axes: Axes, step: Step) -> Iterator[Charge]:
    """All doors of a kind and width cost the same, whatever layer they are in."""
    for name, door in attributes(model, Door):
        item = step.stored_bytes if door.floats else step.compute_bytes
        num_bytes = step.tokens // axes.cp * door.width * item
        yield Charge(name, door.kind.forward, (door.kind.axis,), num_bytes, (1 + door.again) * step.num_batches)
        yield Charge(name, door.kind.backward, (door.kind.axis,), num_bytes, step.num_batches)
    for name, dispatch in attributes(model, Dispatch):
        rows = step.tokens // (axes.cp * axes.tp) * dispatch.top_k
        forwards, rows_bytes = 1 + dispatch.again, rows * dispatch.width * step.compute_bytes
        counts_bytes = dispatch.num_experts * 8
        yield Charge(f"{name}, counts", "all_to_all", ("ep",), counts_bytes, forwards * step.num_batches)
        yield Charge(f"{name}, rows", "all_to_all", ("ep",), rows_bytes, (2 * forwards + 2) * step.num_batches)


def padded(unit: Unit, table: Table, rules: Rules, axes: Axes, coords: Mapping[str, int]) -> int:
    """Elements that each rank brings to a gathering: shards are made equal."""
    parts, num = prod(axes.sizes(unit.shard)), 0
    for name in unit.params:
        param = table[name]
        if not param.float32:
            rows, *cols = matrix_shape(param, cut(param, place(param, rules, axes), axes, coords).shape)
            num += -(-rows // parts) * prod(cols)
    return num


def _unit(
    unit: Unit, table: Table, rules: Rules, axes: Axes, coords: Mapping[str, int], step: Step
) -> Iterator[Charge]:
    mine, name, n = padded(unit, table, rules, axes, coords), unit.name or "root", step.num_batches
    if mine:
        whole = mine * prod(axes.sizes(unit.shard))
        yield Charge(name, "all_gather", unit.shard, whole * step.compute_bytes, n * (1 + unit.again))
        yield Charge(name, "reduce_scatter", unit.shard, whole * step.stored_bytes, n)
        yield Charge(name, "all_reduce", ("replicate",), mine * step.stored_bytes, 1)


def _rest(
    units: Sequence[Unit], table: Table, rules: Rules, axes: Axes, coords: Mapping[str, int], step: Step
) -> Iterator[Charge]:
    """One flat all-reduce for each set of axes that gradients are still to be summed over: those of a parameter's
    copies that no unit pays for. Not asked of what the engine itself asks: a mistake there would be in both."""
    paid = {name: (*unit.shard, "replicate") for unit in units for name in unit.params if not table[name].float32}
    sizes: dict[tuple[str, ...], int] = {}
    for param in table:
        copies = place(param, rules, axes).copies
        live = tuple(a for a in copies if a not in paid.get(param.name, ()) and axes.size_of(a) > 1)
        if live:
            sizes[live] = sizes.get(live, 0) + piece(param, rules, axes, coords).numel
    for live, numel in sizes.items():
        yield Charge("the last sums of gradients", "all_reduce", live, numel * step.stored_bytes, 1)
