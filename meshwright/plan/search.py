"""Search the fastest meshes of N ranks on which a model fits.

More than a thousand meshes may be possible, too many for a memory simulation of each. So a search has three steps: drop
meshes whose lower bound exceeds the device (`least_memory`), order the rest by a quick estimate (`one_of_each_layer`),
and cost the fastest in full (`Figures`) until enough of them fit. It ends within a CPU minute, whether anything fits or
not.
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
from .least_memory import LeastMemory
from .mesh_checks import objections
from .one_of_each_layer import OneOfEachLayer, hold_options, one_of_each_layer, quick_estimate
from .step_time import Estimate, estimate

SECONDS_BETWEEN_LINES = 4.0  # of progress
_WORTH = 0.99  # more replicas take more memory, so they must be faster than this share of the step without them
_SPARE = 3  # candidates beyond those that are printed, since the quick estimate may order them a little wrong
_STOP = 28.0  # CPU seconds since a search began, after which it costs no more meshes
_STOP_OFFLOADED = 38.0  # the same with --offload, which is tried if nothing fits without it
_STOP_NEAREST = 45.0  # the same for the nearest mesh, if nothing fits at all
_QUICK_SHARE = 0.2  # share of quick estimates in the percentage of progress
_NEAREST = 8  # how many meshes are costed to find the nearest one


@dataclass(frozen=True)
class SearchRequest:
    """The options of a search. `device_name`: the text of `--device`. `recompute`: the modes that may be tried, the
    fastest first. `words`: the command without the options that a search chooses, to print it again with the
    choices."""

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
    """A mesh with its options, costed in full. `chosen_hold`: the `hold` that the search chose if the user left it
    open; else None."""

    figures: Figures
    chosen_hold: bool | None = None

    @cached_property
    def estimate(self) -> Estimate:
        """Return the time of a step."""
        return estimate(self.figures)

    @property
    def left_bytes(self) -> int:
        """Return the free bytes of the device; negative if the mesh does not fit."""
        assert self.figures.device is not None
        return self.figures.device - self.figures.most.device_bytes


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `best`: the meshes that fit, the fastest first. `nearest`: if none fits, the mesh that
    exceeds the device by least.

    `num_meshes`: how many meshes the model allows. `num_too_large`: those that cannot fit, however much they recompute.
    `num_in_full`: how many combinations of mesh and options were costed in full.
    """

    best: tuple[Candidate, ...]
    nearest: Candidate | None
    num_meshes: int
    num_too_large: int
    num_in_full: int


Say = Callable[[str], None]


@dataclass(frozen=True)
class Variant:
    """Options with which a mesh is tried. `hold`: None without a pipeline, or where a run decides it."""

    memory: MemoryOptions
    hold: bool | None = None


@dataclass(order=True)
class _Estimated:
    """A mesh and its options in the queue of a search, the fastest first by the quick estimate."""

    seconds: float
    number: int  # breaks ties: the mesh that was listed first
    cut: Cut = field(compare=False)
    variant: Variant = field(compare=False)


class Search:
    """One search. `say` gets a line of progress every few seconds."""

    def __init__(self, blueprint: Blueprint, request: SearchRequest, say: Say) -> None:
        self.blueprint, self.request, self.say = blueprint, request, say
        self.model: OneOfEachLayer = one_of_each_layer(blueprint)
        state_bytes = request.optimizer.least_bytes(blueprint.table, stored_dtype(COMPUTE))
        self.least = LeastMemory(blueprint, request.size.tokens, state_bytes)
        self.last, self.in_full = time.monotonic(), dict[tuple[Cut, Variant], Candidate]()
        self.began, self.done, self.best = time.process_time(), 0.0, list[Candidate]()

    def run(self) -> SearchResult:
        """Search with the user's options. If nothing fits, try `offload`; if that fails too, find the nearest mesh."""
        meshes, memory = self._meshes, self.blueprint.recipe.memory
        best = self.quickest(_STOP)
        if not best and not memory.offload and not self._once:
            offloaded = replace(memory, offload=True)
            self._cost_fastest(self._may_fit(meshes, offloaded), offloaded, _STOP_OFFLOADED)
            best = self._fastest()
        nearest = None if best else self._nearest(meshes)
        # It may fit after all, if time ran out among faster meshes that did not fit.
        if nearest is not None and nearest.figures.fits:
            best, nearest = [nearest], None
        num_too_large = len(meshes) - len(self._may_fit(meshes, memory))
        return SearchResult(tuple(best), nearest, len(meshes), num_too_large, len(self.in_full))

    def quickest(self, until: float) -> list[Candidate]:
        """Search with the user's options alone. `until`: stop at this many CPU seconds since the search began."""
        memory = self.blueprint.recipe.memory
        self._cost_fastest(self._may_fit(self._meshes, memory), memory, until)
        return self._fastest()

    @cached_property
    def _meshes(self) -> list[Cut]:
        """List all meshes that the model allows; raise if it allows none."""
        once = self.blueprint.recipe.memory.token_once
        meshes = [
            cut for cut in cuts(self.blueprint, self.request.size, self.request.optimizer) if divides(once, cut.axes.ep)
        ]
        if not meshes:
            raise MeshError(self._no_mesh())
        return meshes

    def _fastest(self) -> list[Candidate]:
        """Return the fastest of the candidates that fit, one of each mesh, as many as the user wants.

        Time may run out after a mesh has been costed with the variant of least memory, and before its faster ones.
        """
        fitting = [(cut, each) for (cut, _), each in self.in_full.items() if each.figures.fits]
        fitting.sort(key=lambda pair: pair[1].estimate.seconds)
        first_of = {cut: next(each for other, each in fitting if other == cut) for cut, _ in fitting}
        return [*first_of.values()][: self.request.top]

    def _may_fit(self, meshes: Sequence[Cut], memory: MemoryOptions) -> list[Cut]:
        """Drop the meshes that exceed the device even with the variant that needs the least memory."""
        return [cut for cut in meshes if self._least(cut, self._variants(cut, memory)[-1]) <= self.request.device]

    @property
    def _once(self) -> bool:
        """Return whether the user keeps parameters gathered or gradients unreduced, which excludes `offload`."""
        return self.blueprint.recipe.memory.gather_once or self.blueprint.recipe.memory.sum_once

    def _no_mesh(self) -> str:
        """Return the text of the error that no mesh is possible."""
        size = self.request.size
        return (
            f"no mesh of {size.num_ranks} ranks divides this model and {size.global_tokens} tokens of a step into "
            f"micro-batches of {size.tokens}; choose a number of ranks such as {1 << (size.num_ranks - 1).bit_length()}"
            ", other --tokens or other --global-tokens"
        )

    def _least(self, cut: Cut, variant: Variant) -> float:
        """Return a lower bound of the bytes that a rank stores."""
        return self.least.num_bytes(cut.axes, cut.num_batches, variant.memory, holds=_holds(cut, variant))

    def _cost_fastest(self, meshes: Sequence[Cut], memory: MemoryOptions, until: float) -> None:
        """Cost meshes in full, the fastest by the quick estimate first, until enough of them fit. `until`: stop at this
        many CPU seconds since the search began.

        A mesh enters the queue with its fastest variant only. If that does not fit, its variants with less memory
        follow, and are costed when no faster mesh is left.
        """
        # At most half of the time goes to quick estimates: a poor order of many meshes is worth less than a full cost.
        first = (self._estimated(n, cut, self._variants(cut, memory)[0], len(meshes)) for n, cut in enumerate(meshes))
        queue = _drop_slow_replicas([*takewhile(lambda _: self._seconds < until / 2, first)])
        heapify(queue)
        taken, num = set[Cut](), self.request.top + _SPARE
        while queue and len(self.best) < num and self._seconds < until:
            estimated = heappop(queue)
            self._report_progress(max(len(self.best) / num, self._seconds / _STOP_NEAREST))
            if estimated.cut in taken:
                continue
            if self._fits(estimated.cut, estimated.variant):
                taken.add(estimated.cut)
                self.best.append(self._in_full(estimated.cut, estimated.variant))
            else:
                for more in self._with_less_memory(estimated):
                    heappush(queue, more)

    @property
    def _seconds(self) -> float:
        """Return the CPU seconds since the search began."""
        return time.process_time() - self.began

    def _variants(self, cut: Cut, memory: MemoryOptions) -> list[Variant]:
        """List the variants of a mesh from the fastest to the one with the least memory.

        Variants that cannot fit are left out, except the last: it shows how far the mesh is from fitting.
        """
        pipeline = self.blueprint.recipe.pipeline
        is_open = cut.axes.pp > 1 and pipeline.hold is None and pipeline.schedule not in LATE
        kinds = [replace(memory, recompute=kind) for kind in self.request.recompute]
        variants = [Variant(kind, hold) for hold in ((True, False) if is_open else (pipeline.hold,)) for kind in kinds]
        return [each for each in variants[:-1] if self._least(cut, each) <= self.request.device] + variants[-1:]

    def _with_less_memory(self, estimated: _Estimated) -> Iterator[_Estimated]:
        """Yield the other variants of a mesh whose fastest one does not fit, unless even the smallest does not fit."""
        first, *others = self._variants(
            estimated.cut, replace(estimated.variant.memory, recompute=self.request.recompute[0])
        )
        if estimated.variant == first and others and self._fits(estimated.cut, others[-1]):
            for variant in others:
                yield self._estimated(estimated.number, estimated.cut, variant, 0)

    def _fits(self, cut: Cut, variant: Variant) -> bool:
        """Return whether a mesh fits, by everything that a plan counts."""
        return bool(self._in_full(cut, variant).figures.fits)

    def _estimated(self, number: int, cut: Cut, variant: Variant, num: int) -> _Estimated:
        """Estimate a mesh quickly. `num`: the number of all meshes, for the progress; 0: report none."""
        if num:
            self._report_progress(_QUICK_SHARE * number / num)
        mark(self.model.blueprint.module, variant.memory)
        memory = hold_options(variant.memory) if _holds(cut, variant) else variant.memory
        estimate = quick_estimate(self.model, cut.axes, self._work(cut), memory, self.request.cluster)
        return _Estimated(estimate.seconds, number, cut, variant)

    def _work(self, cut: Cut) -> Work:
        """Return the size of a step on a mesh."""
        return work_of(cut.axes, self.request.size.tokens, cut.num_batches)

    def _in_full(self, cut: Cut, variant: Variant) -> Candidate:
        """Cost a mesh in full, once."""
        request, key, pipeline = self.request, (cut, variant), self.blueprint.recipe.pipeline
        if key not in self.in_full:
            blueprint = self.blueprint.with_options(
                pipeline=replace(pipeline, hold=variant.hold), memory=variant.memory
            )
            figures = Figures(
                request.model, blueprint, cut.axes, self._work(cut), request.device, request.optimizer, request.cluster,
            )  # fmt: skip
            self.in_full[key] = Candidate(figures, chosen_hold=variant.hold if pipeline.hold is None else None)
        return self.in_full[key]

    def _nearest(self, meshes: Sequence[Cut]) -> Candidate:
        """Return the mesh that exceeds the device by least, with every option that saves memory.

        Only meshes that shard the model into the smallest parts are costed; among equal ones, those with the most tp
        and pp.
        """
        most = replace(self.blueprint.recipe.memory, recompute=self.request.recompute[-1], offload=not self._once)
        smallest = sorted(meshes, key=lambda cut: (self.least.elements(cut.axes), -cut.axes.tp * cut.axes.pp))
        first, *others = (self._in_full(cut, self._variants(cut, most)[-1]) for cut in smallest[:_NEAREST])
        for each in others:
            self._report_progress(self._seconds / _STOP_NEAREST)
            if self._seconds < _STOP_NEAREST and each.left_bytes > first.left_bytes:
                first = each
        return first

    def _report_progress(self, done: float) -> None:
        """Print a line every few seconds: the share of finished work, which never falls, and the best mesh so far."""
        self.done = max(self.done, min(done, 1.0))
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say(
                f"{self.done:.0%} done, {counted(len(self.in_full), 'mesh', 'meshes')} costed in full; {self._so_far}"
            )

    @property
    def _so_far(self) -> str:
        """Name the fastest mesh that fits so far."""
        if not self.best:
            return "none fits yet"
        best = min(self.best, key=lambda each: each.estimate.seconds)
        return f"the best so far: {best.figures.axes}, {best.estimate.seconds:.3g} s a step"


def _holds(cut: Cut, variant: Variant) -> bool:
    """Return whether a pipeline keeps parameters gathered. Where `hold` is None, the schedule needs it."""
    return cut.axes.pp > 1 and variant.hold is not False


def _drop_slow_replicas(estimated: Sequence[_Estimated]) -> list[_Estimated]:
    """Drop meshes with more replicas (HSDP) that are no faster than the same mesh with fewer, since they store more."""
    groups: dict[Axes, list[_Estimated]] = {}
    for each in sorted(estimated, key=lambda each: each.cut.axes.replicate):
        axes = each.cut.axes
        group = groups.setdefault(replace(axes, replicate=1, fsdp=axes.fsdp * axes.replicate), [])
        if not group or each.seconds < _WORTH * group[-1].seconds:
            group.append(each)
    return [each for group in groups.values() for each in group]


MOST_NODES = 4  # nodes of a replica, unless it is the only one: over more, all-gathers take about as long as over all
LEAST_TOKENS = 1024  # per cp rank: with fewer, the collectives of cp cost more than they save


@dataclass(frozen=True)
class Size:
    """The step that every mesh of a search must do. `tokens`: per micro-batch. `global_tokens`: per step, over all data
    ranks. A mesh with fewer data ranks accumulates gradients over more micro-batches."""

    num_ranks: int
    gpus_per_node: int
    tokens: int
    global_tokens: int


@dataclass(frozen=True)
class Cut:
    """A mesh, and the number of micro-batches that each data rank has in a step on it."""

    axes: Axes
    num_batches: int


def cuts(blueprint: Blueprint, size: Size, optimizer: Optimizer) -> list[Cut]:
    """List the meshes that are worth trying.

    tp stays within a node, since its collectives are exposed in every layer. cp leaves a rank enough tokens. Each of
    several replicas has one node or a few: with two or more replicas per node, gradients would still cross nodes. A
    pipeline has at least as many micro-batches as coordinates on pp, or the bubble would reach half of a step.
    """
    if size.global_tokens % size.tokens:
        raise ConfigError(
            f"--global-tokens {size.global_tokens} is not a multiple of the {size.tokens} tokens of a micro-batch; "
            f"choose {-(-size.global_tokens // size.tokens) * size.tokens}"
        )
    return list(_cuts(size, _allowed(blueprint, optimizer), blueprint.balance.num_experts))


def _allowed(blueprint: Blueprint, optimizer: Optimizer) -> Callable[..., bool]:
    """Return a function that checks whether the model allows some sizes of axes, and caches the answers.

    Axes are checked in small groups, since each axis restricts only a few other axes. That takes far fewer checks than
    there are meshes.
    """
    # The options of `ContextParallel` belong to cp, and a mesh without cp would be refused with them.
    plain = blueprint.with_options(context=ContextParallel())

    @cache
    def allowed(num_batches: int | None = None, **sizes: int) -> bool:
        return not objections(blueprint if "cp" in sizes else plain, sizes, num_batches, optimizer)

    return allowed


def _cuts(size: Size, allowed: Callable[..., bool], num_experts: int) -> Iterator[Cut]:
    """Yield the meshes, axis by axis from the outermost: pp, tp, cp, and then the data ranks."""
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
    """Yield the powers of two that cp may be on `num` ranks."""
    cp = 1
    while num % cp == 0 and (cp == 1 or size.tokens // cp >= LEAST_TOKENS):
        if size.tokens % (cp * tp) == 0 and allowed(cp=cp, tp=tp):
            yield cp
        cp *= 2


def _keeps_busy(pp: int, num_batches: int, allowed: Callable[..., bool]) -> bool:
    """Return whether a pipeline has enough micro-batches, and a number that its schedule takes."""
    # Schedules restrict only the number modulo pp (interleaved 1F1B), so one number with this remainder represents all.
    return pp == 1 or (num_batches >= pp and allowed(pp + num_batches % pp, pp=pp))


def _of_data_ranks(
    axes: Axes, num_batches: int, size: Size, allowed: Callable[..., bool], num_experts: int
) -> Iterator[Cut]:
    """Yield the ways to divide data ranks into replicas and shards, and the ranks of a replica into groups of ep."""
    for replicate in divisors(axes.fsdp):
        replica = axes.fsdp // replicate * axes.cp * axes.tp
        if replicate > 1 and not size.gpus_per_node <= replica <= MOST_NODES * size.gpus_per_node:
            continue
        for ep in divisors(replica) if num_experts else [1]:
            if ep == 1 or (num_experts % ep == 0 and allowed(fsdp=ep, ep=ep)):
                yield Cut(replace(axes, replicate=replicate, fsdp=axes.fsdp // replicate, ep=ep), num_batches)


def divisors(number: int) -> list[int]:
    """List the divisors of a number in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
