"""Whether a run fits into memory, worked out before any is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import MeshError, counted
from ..mesh import Memory
from ..recipe import LATE, Pipeline
from ..sharding import GRADIENTS, HELD, Held, ShardingSpec, Stored, Widths, gathered_low, storage
from .simulate import Known, Passing, most_held

_MOST = 4096  # the largest fsdp that is tried as a way out


@dataclass(frozen=True)
class Need:
    """What a run needs of the memory of each rank."""

    spec: ShardingSpec
    axes: Axes
    held: Held
    passing: Passing | None = None  # None: activations are not counted
    _fullest: dict[int, dict[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: Known = field(default_factory=dict, init=False, repr=False, compare=False)

    def stored(self, rank: int | None = None) -> list[Stored]:
        """By default of the rank that stores most: the first of a place on pp."""
        ranks = self.axes.group(0, ("pp",)) if rank is None else (rank,)
        return max(map(self._of_rank, ranks), key=lambda stored: sum(s.num_bytes for s in stored))

    def _of_rank(self, rank: int) -> list[Stored]:
        """What comes and goes is that of the fullest moment, if it is known what passes; else the most that there is
        of each kind, whenever that is."""
        most = storage(self.spec, self.axes, rank, self.held)
        if self.passing is None:
            return most
        now = dict(self._at_fullest(self.axes.coords(rank)["pp"]))
        gradients = now.pop(GRADIENTS)  # of the first rank of its place: others may store less
        kept = [
            replace(each, num_bytes=min(gradients, each.num_bytes))
            if each.what == GRADIENTS and not each.host
            else each
            for each in most
            if each.what not in now
        ]
        return kept + [Stored(what, num_bytes) for what, num_bytes in now.items() if num_bytes]

    def _at_fullest(self, place: int) -> dict[str, int]:
        """What passes through the ranks of a place is about the same, and most on the first."""
        assert self.passing is not None
        if place not in self._fullest:
            first = self.axes.group(0, ("pp",))[place]
            self._fullest[place] = most_held(self.spec, self.axes, first, self.passing, self._known)
        return self._fullest[place]


def widths_of(compute: torch.dtype, state: torch.dtype | None = None) -> Widths:
    """Of moments that are not in 8 bits."""
    stored = torch.promote_types(compute, torch.float32)
    moment = stored if state in (None, torch.uint8) else state
    return Widths(stored.itemsize, compute.itemsize, moment.itemsize)


def with_hold(blueprint: Blueprint, axes: Axes, compute: torch.dtype, device_bytes: int) -> Blueprint:
    """Decide whether a pipeline holds what it gathers, where its options leave that open: by the least memory that any
    rank has. Without pipeline stages, drop the options of a pipeline."""
    pipeline, memory = blueprint.recipe.pipeline, blueprint.recipe.memory
    if axes.pp == 1:
        return blueprint.with_options(pipeline=Pipeline())
    blueprint.recipe.check_schedule()
    if pipeline.hold is not None:
        return blueprint
    held = blueprint.with_options(pipeline=replace(pipeline, hold=True))
    trained = frozenset(blueprint.table.params)
    low = gathered_low(held.spec, trained, wide=memory.gathers_wide)
    stored = Need(held.spec, axes, Held(widths_of(compute), trained, memory.offload, low=low)).stored()
    once = sum(each.num_bytes for each in stored if each.what in HELD)
    if pipeline.schedule in LATE or 3 * once < device_bytes:
        return held
    return blueprint.with_options(pipeline=replace(pipeline, hold=False))


def refuse_too_large(need: Need, memory: Memory) -> None:
    """Before the first step nobody knows how many tokens will come, so activations are not counted: what is refused
    cannot run, and what is not may still fail."""
    if not fits(need.stored(), memory):
        raise MeshError(too_large(need, memory))


def too_large(need: Need, memory: Memory) -> str:
    """By how much, and what would do."""
    stored = need.stored()
    parts = ", ".join(f"{s.what} {_gb(s.num_bytes)}{' on the host' if s.host else ''}" for s in stored)
    return (
        f"{need.axes} does not fit: a rank needs {_gb(sum(s.num_bytes for s in stored))} ({parts}) and has "
        f"{_gb(memory.device_bytes)}{'' if memory.shared else f', and {_gb(memory.host_bytes)} on the host'}; "
        f"{ways_out(need, memory)}"
    )


def fits(stored: Sequence[Stored], memory: Memory) -> bool:
    host, device = (sum(s.num_bytes for s in stored if s.host == at) for at in (True, False))
    if memory.shared:
        return host + device <= memory.host_bytes
    return device <= memory.device_bytes and host <= memory.host_bytes


def ways_out(need: Need, memory: Memory) -> str:
    found = choices(need, memory)
    return "choose " + " or ".join(found) if found else f"no fsdp up to {_MOST} would do: choose more memory"


def choices(need: Need, memory: Memory) -> list[str]:
    """The smallest fsdp that would do, full recomputation and host memory, each if it would do alone."""
    found, enough = list[str](), _enough(need, memory)
    if enough is not None:
        found.append(f"fsdp={enough.fsdp} ({counted(enough.world, 'rank')})")
    passing = need.passing
    if passing is not None and passing.memory.recompute != "full":
        light = replace(need, passing=replace(passing, memory=replace(passing.memory, recompute="full")))
        found += ['MemoryOptions(recompute="full")'] if fits(light.stored(), memory) else []
    offloaded = _offloaded(need)
    if offloaded is not None and fits(offloaded.stored(), memory):
        host = sum(s.num_bytes for s in offloaded.stored() if s.host)
        found.append(f"MemoryOptions(offload=True), which takes {_gb(host)} on the host for each rank")
    return found


def _enough(need: Need, memory: Memory) -> Axes | None:
    """The mesh with the smallest fsdp that would do. Each is looked at only if the largest does."""
    sizes = [need.axes.fsdp << n for n in range(1, 13) if need.axes.fsdp << n <= _MOST]
    larger = [replace(need, axes=replace(need.axes, fsdp=size)) for size in sizes]
    if not larger or not fits(larger[-1].stored(), memory):
        return None
    return next(each.axes for each in larger if fits(each.stored(), memory))


def _offloaded(need: Need) -> Need | None:
    """What is kept for all micro-batches cannot lie on the host."""
    options, passing = need.spec.recipe.memory, need.passing
    if need.held.offload or options.gather_once or options.sum_once:
        return None
    moved = None if passing is None else replace(passing, memory=replace(passing.memory, offload=True))
    return replace(need, held=replace(need.held, offload=True), passing=moved)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
