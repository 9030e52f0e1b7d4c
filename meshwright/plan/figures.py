"""The figures of a model on a mesh: what each rank stores, what a step sends, and whether it fits. No process runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from ..axes import DENSE, EXPERT, Axes
from ..blueprint import Blueprint
from ..engine.step_bill import engine_bill
from ..errors import ConfigError
from ..memory.budget import Need, choices, fits, held_while_training, widths_of, with_hold
from ..memory.simulate import StepWork
from ..mesh import Memory
from ..optim import AdamW, Optimizer
from ..parallel import mark
from ..recipe import MemoryOptions
from ..sharding import GRADIENTS, Action, Charge, Stored, Work, extreme_ranks, gathered_in_fp8, program_of
from ..sharding.schedules import Orders
from .devices import Cluster

TOKENS = 8192  # of a micro-batch of a data rank, where none are given
COMPUTE = torch.bfloat16  # as `mw.load` has it
ON_HOST = " on the host"


def work_of(axes: Axes, tokens: int | None, num_batches: int) -> Work:
    """The size of a step. What divides a micro-batch between ranks must divide it evenly."""
    share, wanted = axes.cp * axes.tp, tokens or TOKENS
    fit = -(-wanted // share) * share
    if tokens is not None and tokens != fit:
        raise ConfigError(f"--tokens {tokens} does not divide into cp*tp={share}; choose {fit}")
    widths = widths_of(COMPUTE)
    return Work(fit, num_batches, widths.compute, widths.stored)


@dataclass(frozen=True)
class RankMemory:
    rank: int
    stored: tuple[Stored, ...]

    @property
    def num_bytes(self) -> int:
        return sum(s.num_bytes for s in self.stored)

    @property
    def parts(self) -> dict[str, int]:
        """By what they are, and where."""
        return {s.what + ON_HOST * s.host: s.num_bytes for s in self.stored}

    @property
    def host_bytes(self) -> int:
        return sum(s.num_bytes for s in self.stored if s.host)

    @property
    def device_bytes(self) -> int:
        return self.num_bytes - self.host_bytes


@dataclass(frozen=True)
class Traffic:
    """What a step sends over some axes by one operation."""

    over: str
    num_ranks: int  # in a group
    op: str
    count: int
    num_bytes: int
    axes: tuple[str, ...]  # of more than one rank


@dataclass(frozen=True, eq=False)
class Figures:
    """`device`: the bytes of a device, where one was named. `optimizer`: as `mw.Engine` takes it. `cluster`: where a
    step is to be timed."""

    model: str  # as the user names it
    blueprint: Blueprint
    axes: Axes
    work: Work
    device: int | None = None
    optimizer: Optimizer = AdamW()
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """What is left open of the pipeline is decided as `mw.load` decides it. A device of unknown size holds
        nothing."""
        settled = with_hold(self.blueprint, self.axes, COMPUTE, self.device or 0)
        object.__setattr__(self, "blueprint", settled)
        object.__setattr__(self, "work", replace(self.work, numbers=self.gathered_in_fp8))

    @property
    def memory(self) -> MemoryOptions:
        return self.blueprint.recipe.memory

    @property
    def name(self) -> str:
        """Of the directory, where the user gave a path."""
        directory = self.blueprint.directory
        return directory.resolve().name if directory and Path(self.model).exists() else self.model

    @property
    def live(self) -> list[str]:
        """The axes of more than one rank. Those of experts do nothing for a model without experts."""
        views = (*DENSE, *EXPERT) if self.blueprint.balance.num_experts else DENSE
        return [axis for axis in dict.fromkeys(views) if self.axes.size_of(axis) > 1]

    @cached_property
    def orders(self) -> Orders:
        """What each place on pp does in a step, in its order."""
        line, spec = self.blueprint.spec.line(self.axes.pp), self.blueprint.spec
        program = program_of(line, spec.recipe.pipeline.schedule, self.work.num_batches, 0)
        return [[action for action in steps if isinstance(action, Action)] for steps in program]

    @property
    def router_aux(self) -> str:
        """The default, where it can be."""
        return "previous" if self.axes.pp > 1 else "pooled"

    @property
    def gathered_in_fp8(self) -> frozenset[str]:
        return gathered_in_fp8(self.blueprint.spec, self.blueprint.table.params, wide=self.memory.gathers_wide)

    @cached_property
    def need(self) -> Need:
        """What `Model.need` says of a model that is trained as a whole."""
        trained, offload = frozenset(self.blueprint.table.params), self.memory.offload
        held = held_while_training(COMPUTE, trained, self.optimizer, offload=offload, low=self.gathered_in_fp8)
        return Need(self.blueprint.spec, self.axes, held, self.passing)

    @property
    def passing(self) -> StepWork | None:
        """None of a model that has memory already: a sketch is made of one that is only drawn."""
        if not next(self.blueprint.module.parameters()).is_meta:
            return None
        return StepWork(self.work.tokens, self.work.num_batches, COMPUTE, self.memory)

    @property
    def num_parameters(self) -> int:
        return sum(param.numel for param in self.blueprint.table)

    @cached_property
    def extremes(self) -> list[int]:
        return extreme_ranks(self.blueprint.spec, self.axes)

    @cached_property
    def memories(self) -> list[RankMemory]:
        """The rank that stores most, and behind it the one that stores least, if that is less."""
        found = [RankMemory(rank, tuple(self.need.stored(rank))) for rank in self.extremes]
        most, least = (choose(found, key=lambda m: m.num_bytes) for choose in (max, min))
        return [most, least] if least.num_bytes < most.num_bytes else [most]

    @property
    def most(self) -> RankMemory:
        return self.memories[0]

    @cached_property
    def gradients(self) -> int:
        """Bytes on the device of the rank that stores most, once all are there. At its fullest moment fewer may be."""
        every = replace(self.need, passing=None).stored(self.most.rank)
        return sum(each.num_bytes for each in every if each.what == GRADIENTS and not each.host)

    @property
    def fits(self) -> bool | None:
        """None: no device was named."""
        return None if self.device is None else fits(self.most.stored, _memory(self.device))

    @cached_property
    def choices(self) -> list[str]:
        """Name options that would make a plan fit that does not."""
        assert self.device is not None
        return choices(self.need, _memory(self.device))

    @cached_property
    def sender(self) -> int:
        """The rank that pays most. The first of a place on pp has the largest part of all that its stages hold."""
        return max(self.axes.group(0, ("pp",)), key=lambda rank: sum(c.count * c.num_bytes for c in self.bill(rank)))

    @cached_property
    def charges(self) -> list[Charge]:
        return self.bill(self.sender)

    def bill(self, rank: int) -> list[Charge]:
        mark(self.blueprint.module, self.memory)
        return engine_bill(self.blueprint, self.axes, rank, self.work, self.router_aux, self.optimizer)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """By axes, those together that have the same ranks, and by operation."""
        sums: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for charge in self.charges:
            live = tuple(a for a in charge.axes if self.axes.size_of(a) > 1)
            total = sums.setdefault((live, charge.op), [0, 0])
            total[0] += charge.count
            total[1] += charge.count * charge.num_bytes
        order = list(dict.fromkeys(live for live, _ in sums))
        rows = sorted(sums.items(), key=lambda row: order.index(row[0][0]))
        return [
            Traffic(live_axes(live, self.axes), prod(self.axes.sizes(live)), op, count, num_bytes, live)
            for (live, op), (count, num_bytes) in rows
        ]


def _memory(device: int) -> Memory:
    """Of the host nothing is known here: what would lie there is said in words."""
    return Memory(device, sys.maxsize, shared=False)


def live_axes(over: Iterable[str], axes: Axes) -> str:
    return " ".join(f"{a}={axes.size_of(a)}" for a in over if axes.size_of(a) > 1) or "-"
