"""Decide whether a run fits into device and host memory, before anything is allocated.

Model state of mixed-precision Adam is 4 + 4 + 4 bytes per parameter in float32 (master weight and two moments), plus a
gradient, divided by the shards (ZeRO, arXiv:1910.02054, section 3). Other buffers vary over a step: gathered units,
unreduced gradients, activations. Their peaks do not coincide, so a sum of their maxima would refuse runs that fit;
`simulate` finds the peak of the sum.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import MeshError, counted
from ..mesh import Memory
from ..optim import AdamW, Optimizer
from ..recipe import LATE, Pipeline
from ..sharding import GRADIENTS, HELD, Held, ShardingSpec, Stored, Widths, gathered_in_fp8, storage
from .simulate import ActivationCache, StepWork, most_held

_MOST = 4096  # the largest fsdp that an error may suggest


@dataclass(frozen=True)
class Need:
    """The bytes that a run needs on each rank. Without `passing` (the micro-batch), activations are not counted.

    Results of the simulation are kept, because an error asks for many variants of the same mesh.
    """

    spec: ShardingSpec
    axes: Axes
    held: Held
    passing: StepWork | None = None  # None: activations are not counted
    _peak: dict[int, dict[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _cache: ActivationCache = field(default_factory=dict, init=False, repr=False, compare=False)

    def stored(self, rank: int | None = None) -> list[Stored]:
        """Return the bytes by kind of a rank; by default, of the rank that needs most (a first rank of a pipeline
        stage)."""
        # Ranks of one stage store shards of the same parameters, and rank 0 of each gets the larger part of uneven
        # ones.
        ranks = self.axes.group(0, ("pp",)) if rank is None else (rank,)
        return max(map(self._bytes_of_rank, ranks), key=lambda stored: sum(s.num_bytes for s in stored))

    def _bytes_of_rank(self, rank: int) -> list[Stored]:
        """Return the bytes of a rank, with transient buffers as at the peak of the step.

        Without a known micro-batch there is no peak, and each buffer counts at its own maximum.
        """
        upper_bound = storage(self.spec, self.axes, rank, self.held)
        if self.passing is None:
            return upper_bound
        at_peak = dict(self._peak_of_stage(self.axes.coords(rank)["pp"]))
        gradients = at_peak.pop(GRADIENTS)  # simulated on the first rank of the stage; this rank may store less
        kept = [
            replace(each, num_bytes=min(gradients, each.num_bytes))
            if each.what == GRADIENTS and not each.host
            else each
            for each in upper_bound
            if each.what not in at_peak
        ]
        return kept + [Stored(what, num_bytes) for what, num_bytes in at_peak.items() if num_bytes]

    def _peak_of_stage(self, pp_position: int) -> dict[str, int]:
        """Simulate the first rank of a pipeline stage, once. The other ranks of the stage hold about as much, and never
        more."""
        assert self.passing is not None
        if pp_position not in self._peak:
            first = self.axes.group(0, ("pp",))[pp_position]
            self._peak[pp_position] = most_held(self.spec, self.axes, first, self.passing, self._cache)
        return self._peak[pp_position]


def stored_dtype(compute: torch.dtype) -> torch.dtype:
    """Return the dtype of trained parameters, as stored: mixed precision keeps float32 masters."""
    return torch.promote_types(compute, torch.float32)


def widths_of(compute: torch.dtype) -> Widths:
    return Widths(stored_dtype(compute).itemsize, compute.itemsize)


def held_while_training(
    compute: torch.dtype, trained: Container[str], optimizer: Optimizer = AdamW(), **more: Any
) -> Held:
    """Return the `Held` of a run in which `optimizer` trains the parameters `trained`. `more`: its other fields."""
    state_bytes = partial(optimizer.state_bytes, stored_dtype(compute))
    return Held(widths_of(compute), trained, state_bytes, **more)


def with_hold(blueprint: Blueprint, axes: Axes, compute: torch.dtype, device_bytes: int) -> Blueprint:
    """Choose `hold` of a pipeline (keep parameters gathered for the whole step) by the smallest memory of any rank.

    `hold` saves an all-gather per micro-batch and stage (ZeRO-2 instead of ZeRO-3). It is chosen if gathered parameters
    and unreduced gradients take less than a third of the device. Without a pipeline it does not apply.
    """
    pipeline, memory = blueprint.recipe.pipeline, blueprint.recipe.memory
    if axes.pp == 1:
        return blueprint.with_options(pipeline=Pipeline())
    blueprint.recipe.check_schedule()
    if pipeline.hold is not None:
        return blueprint
    keep_gathered = blueprint.with_options(pipeline=replace(pipeline, hold=True))
    trained = frozenset(blueprint.trained())
    fp8_weights = gathered_in_fp8(keep_gathered.spec, trained, wide=memory.gathers_wide)
    held = held_while_training(compute, trained, offload=memory.offload, low=fp8_weights)
    stored = Need(keep_gathered.spec, axes, held).stored()
    once = sum(each.num_bytes for each in stored if each.what in HELD)
    # Zero-bubble schedules refuse hold=False (`Recipe.check_schedule`). For other schedules, one third leaves room for
    # optimizer state and activations, whose size is unknown at load.
    if pipeline.schedule in LATE or 3 * once < device_bytes:
        return keep_gathered
    return blueprint.with_options(pipeline=replace(pipeline, hold=False))


def refuse_too_large(need: Need, memory: Memory) -> None:
    """Raise `MeshError` if the model state alone does not fit.

    Before the first step the number of tokens is unknown, so activations are not counted. A refused run cannot work;
    one that passes may still run out of memory later.
    """
    if not fits(need.stored(), memory):
        raise MeshError(too_large(need, memory))


def too_large(need: Need, memory: Memory) -> str:
    """Return the error text: how much is missing, by kind, and what would fit."""
    stored = need.stored()
    parts = ", ".join(f"{s.what} {_gb(s.num_bytes)}{' on the host' if s.host else ''}" for s in stored)
    return (
        f"{need.axes} does not fit: a rank needs {_gb(sum(s.num_bytes for s in stored))} ({parts}) and has "
        f"{_gb(memory.device_bytes)}{'' if memory.shared else f', and {_gb(memory.host_bytes)} on the host'}; "
        f"{ways_out(need, memory)}"
    )


def fits(stored: Sequence[Stored], memory: Memory) -> bool:
    """Return whether the bytes fit. On a host that shares its memory with the device (CPU ranks) both sums count
    together."""
    host, device = (sum(s.num_bytes for s in stored if s.host == at) for at in (True, False))
    if memory.shared:
        return host + device <= memory.host_bytes
    return device <= memory.device_bytes and host <= memory.host_bytes


def ways_out(need: Need, memory: Memory) -> str:
    """Return advice that fits, as the end of an error text."""
    options = choices(need, memory)
    return "choose " + " or ".join(options) if options else f"no fsdp up to {_MOST} would do: choose more memory"


def choices(need: Need, memory: Memory) -> list[str]:
    """List options that would each fit: the smallest fsdp, full recompute, CPU offload.

    The same simulation checks each suggestion, so it does fit.
    """
    options, mesh = list[str](), _smallest_mesh(need, memory)
    if mesh is not None:
        options.append(f"fsdp={mesh.fsdp} ({counted(mesh.world, 'rank')})")
    passing = need.passing
    if passing is not None and passing.memory.recompute != "full":
        recomputed = replace(need, passing=replace(passing, memory=replace(passing.memory, recompute="full")))
        options += ['MemoryOptions(recompute="full")'] if fits(recomputed.stored(), memory) else []
    offloaded = _with_offload(need)
    if offloaded is not None and fits(offloaded.stored(), memory):
        host = sum(s.num_bytes for s in offloaded.stored() if s.host)
        options.append(f"MemoryOptions(offload=True), which takes {_gb(host)} on the host for each rank")
    return options


def _smallest_mesh(need: Need, memory: Memory) -> Axes | None:
    """Return the mesh with the smallest fsdp that fits. The largest is tried first: if that does not fit, none does."""
    # Try doublings only: users can get these meshes easily, and 12 checks are enough.
    sizes = [need.axes.fsdp << n for n in range(1, 13) if need.axes.fsdp << n <= _MOST]
    larger = [replace(need, axes=replace(need.axes, fsdp=size)) for size in sizes]
    if not larger or not fits(larger[-1].stored(), memory):
        return None
    return next(each.axes for each in larger if fits(each.stored(), memory))


def _with_offload(need: Need) -> Need | None:
    """Return the need with CPU offload, or None where offload is refused (`gather_once` and `sum_once` keep the whole
    model on the device)."""
    options, passing = need.spec.recipe.memory, need.passing
    if need.held.offload or options.gather_once or options.sum_once:
        return None
    moved = None if passing is None else replace(passing, memory=replace(passing.memory, offload=True))
    return replace(need, held=replace(need.held, offload=True), passing=moved)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
