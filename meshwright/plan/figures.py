"""Compute the figures of a plan: memory per rank, collectives of a step, and whether it fits. No process runs.

`Figures` computes each of them once and on demand. The terminal, JSON, the page and the search all read the same
object, so they cannot disagree.
"""

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
from ..engine.gradient_start import begun_backward
from ..engine.step_bill import engine_bill
from ..errors import ConfigError
from ..memory.budget import Need, choices, fits, held_while_training, stored_dtype, widths_of, with_hold
from ..memory.simulate import StepWork
from ..mesh import Memory
from ..ops.codings import FP8, Coding
from ..optim import AdamW, Optimizer
from ..parallel import mark
from ..recipe import MemoryOptions
from ..sharding import GRADIENTS, Action, Charge, Stored, Work, extreme_ranks, gathered_in_fp8, program_of
from ..sharding.schedules import Orders
from .devices import Cluster

TOKENS = 8192  # the default of --tokens: tokens per micro-batch of a data rank
COMPUTE = torch.bfloat16  # the compute dtype; the default of `mw.load`
ON_HOST = " on the host"  # the suffix of the kinds that an offloading rank keeps in host memory


def work_of(axes: Axes, tokens: int | None, num_batches: int) -> Work:
    """Return the size of a step. Refuse `--tokens` that cp and sequence parallelism cannot split evenly.

    The default is rounded up instead, so that every mesh has a plan.
    """
    share, wanted = axes.cp * axes.tp, tokens or TOKENS
    fit = -(-wanted // share) * share
    if tokens is not None and tokens != fit:
        raise ConfigError(f"--tokens {tokens} does not divide into cp*tp={share}; choose {fit}")
    widths = widths_of(COMPUTE)
    return Work(fit, num_batches, widths.compute, widths.stored)


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank stores at its peak, by kind."""

    rank: int
    stored: tuple[Stored, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes on device and host together."""
        return sum(s.num_bytes for s in self.stored)

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes by kind; a kind in host memory has the suffix " on the host"."""
        return {s.what + ON_HOST * s.host: s.num_bytes for s in self.stored}

    @property
    def host_bytes(self) -> int:
        """Return the bytes in host memory, where `offload` puts them."""
        return sum(s.num_bytes for s in self.stored if s.host)

    @property
    def device_bytes(self) -> int:
        """Return the bytes in device memory, which decide whether a rank fits."""
        return self.num_bytes - self.host_bytes


@dataclass(frozen=True)
class Traffic:
    """The collectives of one operation over the same axes, summed over a step of one rank."""

    over: str
    num_ranks: int  # in each group
    op: str
    count: int
    num_bytes: int
    axes: tuple[str, ...]  # only those of more than one rank


@dataclass(frozen=True, eq=False)
class Figures:
    """A model on a mesh, and every figure of its plan.

    `device`: the bytes of a device; None if none was named, and then nothing says whether a rank fits. `optimizer`: as
    `mw.Engine` takes it. `cluster`: the devices and links for estimates of time; None if nothing is to be timed.

    Two figures are equal only if they are the same object (`eq=False`), so that results can be cached by figures.
    """

    model: str  # the name that the user passed
    blueprint: Blueprint
    axes: Axes
    work: Work
    device: int | None = None
    optimizer: Optimizer = AdamW()
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        """Decide `hold` of the pipeline if the user left it open, with the function that `mw.load` calls."""
        # A device of unknown size counts as 0 bytes, so hold=True is chosen only where the schedule needs it.
        blueprint = with_hold(self.blueprint, self.axes, COMPUTE, self.device or 0)
        object.__setattr__(self, "blueprint", blueprint)
        work = replace(self.work, numbers={**dict.fromkeys(self.gathered_in_fp8, FP8), **self.codings})
        if self.has_frozen and not work.frozen:  # a loaded model was counted before it was sharded
            # With adapters, gradients begin in the middle of a layer, and on only one rank of the pipeline.
            if next(blueprint.module.parameters()).is_meta:
                blueprint.mark(self.trained)
            frozen = frozenset(blueprint.table.params) - self.trained
            begins = begun_backward(blueprint.spec, self.axes, 0, COMPUTE, self.trained)
            work = replace(work, frozen=frozen, begins=begins)
        object.__setattr__(self, "work", work)

    @property
    def memory(self) -> MemoryOptions:
        """Return the options that trade memory for time, as `mw.load` takes them."""
        return self.blueprint.recipe.memory

    @property
    def name(self) -> str:
        """Return the title of a page: the name of the directory if the user passed a path, else the model as passed."""
        directory = self.blueprint.directory
        return directory.resolve().name if directory and Path(self.model).exists() else self.model

    @property
    def live(self) -> list[str]:
        """List the axes of more than one rank; those of experts only if the model has experts."""
        views = (*DENSE, *EXPERT) if self.blueprint.balance.num_experts else DENSE
        return [axis for axis in dict.fromkeys(views) if self.axes.size_of(axis) > 1]

    @cached_property
    def orders(self) -> Orders:
        """Return the actions of each coordinate on pp in a step, in the order in which it runs them."""
        line, spec = self.blueprint.spec.line(self.axes.pp), self.blueprint.spec
        program = program_of(line, spec.recipe.pipeline.schedule, self.work.num_batches, 0)
        return [[action for action in steps if isinstance(action, Action)] for steps in program]

    @property
    def router_aux(self) -> str:
        """Return the aux loss that the bill counts: the default, except that a pipeline refuses "pooled"."""
        return "previous" if self.axes.pp > 1 else "pooled"

    @property
    def gathered_in_fp8(self) -> frozenset[str]:
        """Return the names of the weights whose all-gather sends 8-bit codes."""
        return gathered_in_fp8(self.blueprint.spec, self.trained, wide=self.memory.gathers_wide)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Return the names of the trained parameters."""
        return frozenset(self.blueprint.trained())

    @property
    def update_operations(self) -> int:
        """Return the operations of the optimizer's matmuls for which a step waits."""
        spec, axes = self.blueprint.spec, self.axes
        trained = [param for param in spec.params(axes, self.sender) if param.name in self.trained]
        return self.optimizer.operations(trained, spec.rules, axes, self.sender)

    @property
    def has_frozen(self) -> bool:
        """Return whether parameters are frozen: the base of adapters, an n-gram table, or parameters without a
        gradient."""
        return len(self.trained) < len(self.blueprint.table.params)

    @cached_property
    def frozen_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which the values of each frozen parameter are stored: the dtype of its files."""
        if not self.has_frozen:
            return {}
        dtypes = self.blueprint.stored_dtypes(COMPUTE, self.trained)
        return {name: dtype for name, dtype in dtypes.items() if name not in self.trained}

    @cached_property
    def codings(self) -> dict[str, Coding]:
        """Return the codings of the frozen matrices that are stored in 8 or 4 bits."""
        return self.blueprint.codings(self.trained, self.axes) if self.has_frozen else {}

    def stored_form(self, name: str) -> torch.dtype | Coding:
        """Return the dtype or coding in which a parameter is stored: float32 if it is trained."""
        return self.codings.get(name) or self.frozen_dtypes.get(name, stored_dtype(COMPUTE))

    @property
    def left_wide(self) -> list[str]:
        """Return the frozen matrices that are stored as values although other frozen matrices are in 4 bits."""
        return self.blueprint.left_wide(self.trained, self.axes) if self.has_frozen else []

    @cached_property
    def need(self) -> Need:
        """Return the memory that a run needs if it trains every parameter, or the adapters, as `Model.need` computes
        it."""
        blueprint, offload = self.blueprint, self.memory.offload
        narrow = {name: dtype.itemsize for name, dtype in self.frozen_dtypes.items()}
        held = held_while_training(
            COMPUTE, self.trained, self.optimizer, offload=offload, narrow=narrow, numbers=self.codings,
            low=self.gathered_in_fp8,
        )  # fmt: skip
        return Need(blueprint.spec, self.axes, held, self.passing)

    @property
    def passing(self) -> StepWork | None:
        """Return the micro-batch whose activations are simulated; None for a model that was loaded already.

        The simulation takes only models on the meta device, which hold no memory.
        """
        if not next(self.blueprint.module.parameters()).is_meta:
            return None
        frozen: dict[str, torch.dtype | Coding] = {**self.frozen_dtypes, **self.codings}
        return StepWork(self.work.tokens, self.work.num_batches, COMPUTE, self.memory, frozen=frozen)

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(param.numel for param in self.blueprint.table)

    @cached_property
    def extremes(self) -> list[int]:
        """Return a few ranks that include those that store most and least, so that no plan visits every rank."""
        return extreme_ranks(self.blueprint.spec, self.axes)

    @cached_property
    def memories(self) -> list[RankMemory]:
        """Return the rank that stores most, followed by the one that stores least if they differ."""
        ranks = [RankMemory(rank, tuple(self.need.stored(rank))) for rank in self.extremes]
        most, least = (choose(ranks, key=lambda m: m.num_bytes) for choose in (max, min))
        return [most, least] if least.num_bytes < most.num_bytes else [most]

    @property
    def by_kind(self) -> list[dict[str, int]]:
        """Return the bytes of `memories` by kind. A kind that only one of the two ranks stores is 0 for the other."""
        kinds = dict.fromkeys(what for memory in self.memories for what in memory.parts)
        return [{what: memory.parts.get(what, 0) for what in kinds} for memory in self.memories]

    @property
    def most(self) -> RankMemory:
        """Return the rank that stores most."""
        return self.memories[0]

    @cached_property
    def gradients(self) -> int:
        """Return the bytes of all gradients on the device of the rank that stores most.

        At the peak fewer may exist: in the first micro-batch gradients appear while activations are freed.
        """
        every = replace(self.need, passing=None).stored(self.most.rank)
        return sum(each.num_bytes for each in every if each.what == GRADIENTS and not each.host)

    @property
    def fits(self) -> bool | None:
        """Return whether the rank that stores most fits the device; None if no device was named."""
        return None if self.device is None else fits(self.most.stored, _memory(self.device))

    @cached_property
    def choices(self) -> list[str]:
        """List options, each of which alone would make the plan fit."""
        assert self.device is not None
        return choices(self.need, _memory(self.device))

    @cached_property
    def sender(self) -> int:
        """Return the rank whose collectives have the most bytes.

        The first rank of a coordinate on pp has the largest part of everything that its stages hold, so only these are
        compared.
        """
        return max(self.axes.group(0, ("pp",)), key=lambda rank: sum(c.count * c.num_bytes for c in self.bill(rank)))

    @cached_property
    def charges(self) -> list[Charge]:
        """Return the bill of the rank that sends most."""
        return self.bill(self.sender)

    def bill(self, rank: int) -> list[Charge]:
        """Return the collectives of a rank in a step."""
        # Blueprints with other options share this module, and the bill reads the options from it.
        mark(self.blueprint.module, self.memory)
        return engine_bill(self.blueprint, self.axes, rank, self.work, self.router_aux, self.optimizer)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Return the charges summed by axes and operation. Axes of size 1 are left out."""
        totals: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for charge in self.charges:
            live = tuple(a for a in charge.axes if self.axes.size_of(a) > 1)
            total = totals.setdefault((live, charge.op), [0, 0])
            total[0] += charge.count
            total[1] += charge.count * charge.num_bytes
        order = list(dict.fromkeys(live for live, _ in totals))
        rows = sorted(totals.items(), key=lambda row: order.index(row[0][0]))
        return [
            Traffic(live_axes(live, self.axes), prod(self.axes.sizes(live)), op, count, num_bytes, live)
            for (live, op), (count, num_bytes) in rows
        ]


def _memory(device: int) -> Memory:
    """Return a device with unlimited host memory: the plan shows what lies on the host, but does not know its size."""
    return Memory(device, sys.maxsize, shared=False)


def live_axes(over: Iterable[str], axes: Axes) -> str:
    """Spell the axes of more than one rank with their sizes, as `fsdp=2 tp=4`; `-` if none has."""
    return " ".join(f"{a}={axes.size_of(a)}" for a in over if axes.size_of(a) > 1) or "-"
