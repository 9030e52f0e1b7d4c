"""The quickest meshes of so many ranks on which a model fits.

Those that may fit, by the least that they take, are priced. The best of them are then costed in full, the quickest
first, until enough fit or a minute of a CPU is nearly over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import takewhile

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import ConfigError, MeshError, counted
from ..memory.budget import stored_dtype
from ..optim import AdamW, Optimizer
from ..parallel import mark
from ..recipe import LATE, RECOMPUTE, ContextParallel, MemoryOptions
from ..sharding import Work, divides
from .devices import Cluster
from .figures import COMPUTE, Figures, work_of
from .least_memory import Least
from .mesh_checks import objections
from .one_of_each_layer import Thin, first_price, held, thin
from .step_time import Estimate, estimate

SECONDS_BETWEEN_LINES = 4.0
_WORTH = 0.99  # of a step: what is not quicker by more than that is as quick
_MORE = 3  # that are costed than are told
_LONG = 28.0  # seconds of a CPU, after which a search tells what it has found
_LONGER = 38.0  # the same with --offload, where nothing else fits
_LONGEST = 45.0  # the same of the nearest, where nothing fits
_PRICES = 0.2  # of the work, for the share that is done
_NEAREST = 8  # of those that do not fit, how many are looked at


@dataclass(frozen=True)
class Asked:
    """A request to search meshes for a blueprint. `device_name`: as the user gave it. `recompute`: the
    kinds that may be tried, the quickest first. `words`: of the command, without what a search chooses."""

    model: str
    size: Size
    device_name: str
    device: int
    cluster: Cluster
    recompute: tuple[str, ...] = RECOMPUTE
    optimizer: Optimizer = AdamW()
    top: int = 5
    words: tuple[str, ...] = ("meshwright", "plan")


@dataclass(frozen=True, eq=False)
class Candidate:
    """`chosen_hold`: what a search has chosen of a pipeline that leaves it open."""

    figures: Figures
    chosen_hold: bool | None = None

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.figures)

    @property
    def left_bytes(self) -> int:
        """Of the device; below 0, what is too much."""
        assert self.figures.device is not None
        return self.figures.device - self.figures.most.device_bytes


@dataclass(frozen=True)
class SearchResult:
    """`best`: those that fit, the quickest first. `nearest`: if none does, the one that is too large by least.
    `num_meshes`: that the model allows, of which `num_too_large` cannot fit whatever they recompute."""

    best: tuple[Candidate, ...]
    nearest: Candidate | None
    num_meshes: int
    num_too_large: int
    num_in_full: int


Say = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How a mesh is gone about. `hold`: of its pipeline, None where a run decides it or has none."""

    memory: MemoryOptions
    hold: bool | None = None


@dataclass(order=True)
class _Priced:
    seconds: float
    number: int  # of equal ones the first
    cut: Cut = field(compare=False)
    way: Way = field(compare=False)


class Search:
    """One search. `say` hears how far it is, now and then."""

    def __init__(self, blueprint: Blueprint, asked: Asked, say: Say) -> None:
        self.blueprint, self.asked, self.say = blueprint, asked, say
        self.model: Thin = thin(blueprint)
        state_bytes = asked.optimizer.least_bytes(blueprint.table, stored_dtype(COMPUTE))
        self.least = Least(blueprint, asked.size.tokens, state_bytes)
        self.last, self.in_full = time.monotonic(), dict[tuple[Cut, Way], Candidate]()
        self.began, self.done, self.best = time.process_time(), 0.0, list[Candidate]()

    def run(self) -> SearchResult:
        tried, memory = self._tried, self.blueprint.recipe.memory
        best = self.quickest(_LONG)
        if not best and not memory.offload and not self._once:
            offloaded = replace(memory, offload=True)
            self._look(self._may_fit(tried, offloaded), offloaded, _LONGER)
            best = self._told()
        nearest = None if best else self._nearest(tried)
        if nearest is not None and nearest.figures.fits:  # too many of those that are quicker did not
            best, nearest = [nearest], None
        num_too_large = len(tried) - len(self._may_fit(tried, memory))
        return SearchResult(tuple(best), nearest, len(tried), num_too_large, len(self.in_full))

    def quickest(self, until: float) -> list[Candidate]:
        """Look with the options that are asked for alone. `until`: seconds of a CPU since the search began."""
        memory = self.blueprint.recipe.memory
        self._look(self._may_fit(self._tried, memory), memory, until)
        return self._told()

    @cached_property
    def _tried(self) -> list[Cut]:
        """All meshes that can be."""
        once = self.blueprint.recipe.memory.token_once
        tried = [
            cut for cut in cuts(self.blueprint, self.asked.size, self.asked.optimizer) if divides(once, cut.axes.ep)
        ]
        if not tried:
            raise MeshError(self._none())
        return tried

    def _told(self) -> list[Candidate]:
        return sorted(self.best, key=lambda each: each.estimate.seconds)[: self.asked.top]

    def _may_fit(self, tried: Sequence[Cut], memory: MemoryOptions) -> list[Cut]:
        return [cut for cut in tried if self._least(cut, self._ways(cut, memory)[-1]) <= self.asked.device]

    @property
    def _once(self) -> bool:
        """What stays gathered cannot lie on the host."""
        return self.blueprint.recipe.memory.gather_once or self.blueprint.recipe.memory.sum_once

    def _none(self) -> str:
        size = self.asked.size
        return (
            f"no mesh of {size.num_ranks} ranks divides this model and {size.global_tokens} tokens of a step into "
            f"micro-batches of {size.tokens}; choose a number of ranks such as {1 << (size.num_ranks - 1).bit_length()}"
            ", other --tokens or other --global-tokens"
        )

    def _least(self, cut: Cut, way: Way) -> float:
        """Return the bytes that a rank stores at least."""
        return self.least.num_bytes(cut.axes, cut.num_batches, way.memory, holds=_holds(cut, way))

    def _look(self, tried: Sequence[Cut], memory: MemoryOptions, until: float) -> None:
        """Look for the best, a few more than are wanted, since a first price may be a little off. `until`: seconds of a
        CPU since the search began."""
        first = (self._priced(n, cut, self._ways(cut, memory)[0], len(tried)) for n, cut in enumerate(tried))
        queue = _apart([*takewhile(lambda _: self._seconds < until / 2, first)])
        heapify(queue)
        taken, num = set[Cut](), self.asked.top + _MORE
        while queue and len(self.best) < num and self._seconds < until:
            priced = heappop(queue)
            self._tell(max(len(self.best) / num, self._seconds / _LONGEST))
            if priced.cut in taken:
                continue
            if self._fits(priced.cut, priced.way):
                taken.add(priced.cut)
                self.best.append(self._in_full(priced.cut, priced.way))
            else:
                for more in self._smaller(priced):
                    heappush(queue, more)

    @property
    def _seconds(self) -> float:
        """Return the CPU seconds since the search began."""
        return time.process_time() - self.began

    def _ways(self, cut: Cut, memory: MemoryOptions) -> list[Way]:
        """The quickest first, and last the one that takes the least memory. What cannot fit is left out."""
        pipeline = self.blueprint.recipe.pipeline
        is_open = cut.axes.pp > 1 and pipeline.hold is None and pipeline.schedule not in LATE
        kinds = [replace(memory, recompute=kind) for kind in self.asked.recompute]
        ways = [Way(kind, hold) for hold in ((True, False) if is_open else (pipeline.hold,)) for kind in kinds]
        return [way for way in ways[:-1] if self._least(cut, way) <= self.asked.device] + ways[-1:]

    def _smaller(self, priced: _Priced) -> Iterator[_Priced]:
        """The same mesh in the ways that take less memory, unless even the least does not fit."""
        first, *others = self._ways(priced.cut, replace(priced.way.memory, recompute=self.asked.recompute[0]))
        if priced.way == first and others and self._fits(priced.cut, others[-1]):
            for way in others:
                yield self._priced(priced.number, priced.cut, way, 0)

    def _fits(self, cut: Cut, way: Way) -> bool:
        """Whatever `Figures` counts among what a rank stores counts here."""
        return bool(self._in_full(cut, way).figures.fits)

    def _priced(self, number: int, cut: Cut, way: Way, num: int) -> _Priced:
        if num:
            self._tell(_PRICES * number / num)
        mark(self.model.blueprint.module, way.memory)
        memory = held(way.memory) if _holds(cut, way) else way.memory
        found = first_price(self.model, cut.axes, self._work(cut), memory, self.asked.cluster)
        return _Priced(found.seconds, number, cut, way)

    def _work(self, cut: Cut) -> Work:
        return work_of(cut.axes, self.asked.size.tokens, cut.num_batches)

    def _in_full(self, cut: Cut, way: Way) -> Candidate:
        asked, key, pipeline = self.asked, (cut, way), self.blueprint.recipe.pipeline
        if key not in self.in_full:
            blueprint = self.blueprint.with_options(pipeline=replace(pipeline, hold=way.hold), memory=way.memory)
            figures = Figures(
                asked.model, blueprint, cut.axes, self._work(cut), asked.device, asked.optimizer, asked.cluster,
            )  # fmt: skip
            self.in_full[key] = Candidate(figures, chosen_hold=way.hold if pipeline.hold is None else None)
        return self.in_full[key]

    def _nearest(self, tried: Sequence[Cut]) -> Candidate:
        """Look with all that saves memory, among the meshes that cut a model into the smallest parts."""
        most = replace(self.blueprint.recipe.memory, recompute=self.asked.recompute[-1], offload=not self._once)
        smallest = sorted(tried, key=lambda cut: (self.least.elements(cut.axes), -cut.axes.tp * cut.axes.pp))
        first, *others = (self._in_full(cut, self._ways(cut, most)[-1]) for cut in smallest[:_NEAREST])
        for each in others:
            self._tell(self._seconds / _LONGEST)
            if self._seconds < _LONGEST and each.left_bytes > first.left_bytes:
                first = each
        return first

    def _tell(self, done: float) -> None:
        """Say now and then what share is done, which never falls, and what is best so far."""
        self.done = max(self.done, min(done, 1.0))
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say(
                f"{self.done:.0%} done, {counted(len(self.in_full), 'mesh', 'meshes')} costed in full; {self._so_far}"
            )

    @property
    def _so_far(self) -> str:
        if not self.best:
            return "none fits yet"
        best = min(self.best, key=lambda each: each.estimate.seconds)
        return f"the best so far: {best.figures.axes}, {best.estimate.seconds:.3g} s a step"


def _holds(cut: Cut, way: Way) -> bool:
    return cut.axes.pp > 1 and way.hold is not False


def _apart(priced: Sequence[_Priced]) -> list[_Priced]:
    """Of meshes that differ only in their replicas, those with more replicas must be worth the memory they take."""
    kept: dict[Axes, list[_Priced]] = {}
    for each in sorted(priced, key=lambda each: each.cut.axes.replicate):
        axes = each.cut.axes
        alike = kept.setdefault(replace(axes, replicate=1, fsdp=axes.fsdp * axes.replicate), [])
        if not alike or each.seconds < _WORTH * alike[-1].seconds:
            alike.append(each)
    return [each for alike in kept.values() for each in alike]


MOST_NODES = 4  # of a replica, where there are several: gathers among more take no less time than among all
LEAST_TOKENS = 1024  # of a rank of cp: fewer would not be worth its exchanges


@dataclass(frozen=True)
class Size:
    """What all meshes have in common. `tokens`: of a micro-batch. `global_tokens`: of a step, over all data ranks."""

    num_ranks: int
    gpus_per_node: int
    tokens: int
    global_tokens: int


@dataclass(frozen=True)
class Cut:
    """A mesh, and the micro-batches of a step on it."""

    axes: Axes
    num_batches: int


def cuts(blueprint: Blueprint, size: Size, optimizer: Optimizer) -> list[Cut]:
    """tp stays within a node, and cp leaves a rank enough tokens. A replica, where there are several, is one node or a
    few: a part of a node would send sums between nodes all the same. A pipeline gets as many micro-batches as it has
    places, at least."""
    if size.global_tokens % size.tokens:
        raise ConfigError(
            f"--global-tokens {size.global_tokens} is no multiple of the {size.tokens} tokens of a micro-batch; choose "
            f"{-(-size.global_tokens // size.tokens) * size.tokens}"
        )
    return list(_cuts(size, _allowed(blueprint, optimizer), blueprint.balance.num_experts))


def _allowed(blueprint: Blueprint, optimizer: Optimizer) -> Callable[..., bool]:
    """Whether a model takes sizes of axes. Each is asked once: what one axis does depends on few others. How mixers
    come to other tokens (`ContextParallel`) is asked with cp alone, which it is of."""
    plain = blueprint.with_options(context=ContextParallel())

    @cache
    def allowed(num_batches: int | None = None, **sizes: int) -> bool:
        return not objections(blueprint if "cp" in sizes else plain, sizes, num_batches, optimizer)

    return allowed


def _cuts(size: Size, allowed: Callable[..., bool], num_experts: int) -> Iterator[Cut]:
    places = [pp for pp in divisors(size.num_ranks) if pp == 1 or allowed(pp=pp)]
    tps = [tp for tp in divisors(min(size.num_ranks, size.gpus_per_node)) if size.num_ranks % tp == 0]
    streams = size.global_tokens // size.tokens
    for pp in places:
        for tp in (tp for tp in tps if size.num_ranks // pp % tp == 0):
            for cp in _cps(size.num_ranks // (pp * tp), tp, size, allowed):
                num = size.num_ranks // (pp * tp * cp)  # data ranks
                if streams % num == 0 and _keeps_busy(pp, streams // num, allowed):
                    yield from _of_data_ranks(Axes(pp, 1, num, cp, tp), streams // num, size, allowed, num_experts)


def _cps(num: int, tp: int, size: Size, allowed: Callable[..., bool]) -> Iterator[int]:
    cp = 1
    while num % cp == 0 and (cp == 1 or size.tokens // cp >= LEAST_TOKENS):
        if size.tokens % (cp * tp) == 0 and allowed(cp=cp, tp=tp):
            yield cp
        cp *= 2


def _keeps_busy(pp: int, num_batches: int, allowed: Callable[..., bool]) -> bool:
    return pp == 1 or (num_batches >= pp and allowed(pp + num_batches % pp, pp=pp))  # schedules ask for the rest alone


def _of_data_ranks(
    axes: Axes, num_batches: int, size: Size, allowed: Callable[..., bool], num_experts: int
) -> Iterator[Cut]:
    """Data ranks are replicas, or hold a replica together; experts lie in groups of its ranks."""
    for replicate in divisors(axes.fsdp):
        replica = axes.fsdp // replicate * axes.cp * axes.tp
        if replicate > 1 and not size.gpus_per_node <= replica <= MOST_NODES * size.gpus_per_node:
            continue
        for ep in divisors(replica) if num_experts else [1]:
            if ep == 1 or (num_experts % ep == 0 and allowed(fsdp=ep, ep=ep)):
                yield Cut(replace(axes, replicate=replicate, fsdp=axes.fsdp // replicate, ep=ep), num_batches)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
