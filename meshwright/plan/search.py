"""The quickest meshes of so many ranks on which a model fits. All are priced, and the best are reckoned in full."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

import torch

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.activations import ACTIVATIONS
from ..engine.fit import widths_of
from ..errors import MeshError, counted
from ..layout import Work, coded_of
from ..parallel import Savings, mark
from .candidates import Cut, Size, cuts
from .devices import Cluster
from .figures import COMPUTE, Figures, work_of
from .price import Thin, first_price, least_bytes, thin
from .times import Estimate, estimate

SECONDS_BETWEEN_LINES = 4.0
_MOST_IN_FULL = 60  # meshes
_WORTH = 0.99  # of a step: what is not quicker by more than that is as quick
_MORE = 3  # that are reckoned than are told
_LONG = 30.0  # seconds of a CPU, after which a search tells what it has found
_NEAREST = 8  # of those that do not fit, how many are looked at


@dataclass(frozen=True)
class Asked:
    """`device_name`: as the user gave it. `recompute`: the kinds that may be tried, the quickest first.
    `words`: of the command, without what a search chooses."""

    model: str
    size: Size
    device_name: str
    device: int
    cluster: Cluster
    savings: Savings = Savings()
    recompute: tuple[str, ...] = ("none", "selective", "full")
    state_dtype: torch.dtype | None = None
    head: str = "lm"
    top: int = 5
    words: tuple[str, ...] = ("meshwright", "plan")


@dataclass(frozen=True, eq=False)
class Candidate:
    figures: Figures

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.figures)

    @property
    def left_bytes(self) -> int:
        """Of the device; below 0, what is too much."""
        assert self.figures.device is not None
        return self.figures.device - self.figures.most.device_bytes


@dataclass(frozen=True)
class Found:
    """`best`: those that fit, the quickest first. `nearest`: if none does, the one that is too large by least.
    `num_meshes`: that the model allows, of which `num_too_large` cannot fit whatever they recompute."""

    best: tuple[Candidate, ...]
    nearest: Candidate | None
    num_meshes: int
    num_too_large: int
    num_in_full: int


Say = Callable[[str], None]


@dataclass(order=True)
class _Priced:
    seconds: float
    number: int  # of equal ones the first
    cut: Cut = field(compare=False)
    savings: Savings = field(compare=False)


class Search:
    """One search. `say` hears how far it is, now and then."""

    def __init__(self, blueprint: Blueprint, asked: Asked, say: Say) -> None:
        self.blueprint, self.asked, self.say = blueprint, asked, say
        self.model: Thin = thin(blueprint)
        self.coded = coded_of(blueprint.table, blueprint.table.params) if asked.state_dtype == torch.uint8 else ()
        self.passing = dict[tuple[object, ...], int]()  # the least activations of meshes that were reckoned
        self.last, self.in_full = time.monotonic(), dict[tuple[Cut, Savings], Candidate]()

    def run(self) -> Found:
        tried = cuts(self.blueprint, self.asked.size, self.coded)
        if not tried:
            raise MeshError(self._none())
        small = [cut for cut in tried if self.asked.savings.offload or self._least(cut) <= self.asked.device]
        best = self._best(small, self.asked.savings)
        if not best and not self.asked.savings.offload and not self._once:
            best = self._best(tried, replace(self.asked.savings, offload=True))
        nearest = None if best else self._nearest(tried)
        return Found(tuple(best), nearest, len(tried), len(tried) - len(small), len(self.in_full))

    @property
    def _once(self) -> bool:
        """What stays gathered cannot lie on the host."""
        return self.asked.savings.gather_once or self.asked.savings.sum_once

    def _none(self) -> str:
        size = self.asked.size
        return (
            f"no mesh of {size.num_ranks} ranks divides this model and {size.global_tokens} tokens of a step into "
            f"micro-batches of {size.tokens}; choose a number of ranks such as {1 << (size.num_ranks - 1).bit_length()}"
            ", other --tokens or other --global-tokens"
        )

    def _least(self, cut: Cut) -> float:
        moment = 1.0 if self.coded else widths_of(COMPUTE, self.asked.state_dtype).moment
        return least_bytes(self.model, cut.axes, moment)

    def _best(self, tried: Sequence[Cut], savings: Savings) -> list[Candidate]:
        """A few more than are wanted, since a first price may be a little off."""
        first = replace(savings, recompute=self.asked.recompute[0])
        mark(self.model.blueprint.module, first)
        queue = _apart([self._priced(number, cut, first, len(tried)) for number, cut in enumerate(tried)])
        heapify(queue)
        found, taken, began = list[Candidate](), set[Cut](), time.process_time()
        num, until = self.asked.top + _MORE, len(self.in_full) + _MOST_IN_FULL
        while queue and len(found) < num and len(self.in_full) < until:
            priced = heappop(queue)
            if priced.cut in taken:
                continue
            if self._fits(priced.cut, priced.savings):
                taken.add(priced.cut)
                found.append(self._in_full(priced.cut, priced.savings))
            else:
                for more in self._smaller(priced):
                    heappush(queue, more)
            if found and time.process_time() - began > _LONG:
                break
        return sorted(found, key=lambda each: each.estimate.seconds)[: self.asked.top]

    def _smaller(self, priced: _Priced) -> Iterator[_Priced]:
        """The same mesh with what recomputes more, unless even the most does not fit."""
        first, *others = self.asked.recompute
        if priced.savings.recompute != first or not others:
            return
        if self._fits(priced.cut, replace(priced.savings, recompute=others[-1])):
            for kind in others:
                savings = replace(priced.savings, recompute=kind)
                mark(self.model.blueprint.module, savings)
                yield self._priced(priced.number, priced.cut, savings, 0)

    def _fits(self, cut: Cut, savings: Savings) -> bool:
        """Activations depend on few of the axes. Where they are known of one mesh, they rule out others at once."""
        axes = cut.axes
        kind = (axes.pp, axes.cp, axes.tp, cut.num_batches, savings.recompute)
        stored = 0.0 if savings.offload else self._least(cut)
        if stored + self.passing.get(kind, 0) > self.asked.device:
            return False
        figures = self._in_full(cut, savings).figures
        self.passing[kind] = min(self.passing.get(kind, sys.maxsize), figures.most.parts.get(ACTIVATIONS, 0))
        return bool(figures.fits)

    def _priced(self, number: int, cut: Cut, savings: Savings, num: int) -> _Priced:
        self._tell(f"{number:,} of {num:,} meshes priced") if num else None
        found = first_price(self.model, cut.axes, self._work(cut), savings, self.asked.cluster, self.asked.device)
        return _Priced(found.seconds, number, cut, savings)

    def _work(self, cut: Cut) -> Work:
        return work_of(cut.axes, self.asked.size.tokens, cut.num_batches)

    def _in_full(self, cut: Cut, savings: Savings) -> Candidate:
        asked, key = self.asked, (cut, savings)
        if key not in self.in_full:
            self._tell(f"{counted(len(self.in_full), 'mesh', 'meshes')} reckoned in full")
            self.in_full[key] = Candidate(
                Figures(
                    asked.model, self.blueprint, cut.axes, self._work(cut), asked.device, asked.head, savings,
                    asked.state_dtype, asked.cluster,
                )
            )  # fmt: skip
        return self.in_full[key]

    def _nearest(self, tried: Sequence[Cut]) -> Candidate:
        """With all savings, of the meshes that cut a model into the smallest parts."""
        most = replace(self.asked.savings, recompute=self.asked.recompute[-1], offload=not self._once)
        smallest = sorted(tried, key=lambda cut: (self._least(cut), -cut.axes.tp * cut.axes.pp))[:_NEAREST]
        return max((self._in_full(cut, most) for cut in smallest), key=lambda each: each.left_bytes)

    def _tell(self, text: str) -> None:
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            self.say(text)


def _apart(priced: Sequence[_Priced]) -> list[_Priced]:
    """Of meshes that differ only in their replicas, those with more replicas must be worth the memory they take."""
    kept: dict[Axes, list[_Priced]] = {}
    for each in sorted(priced, key=lambda each: each.cut.axes.replicate):
        axes = each.cut.axes
        alike = kept.setdefault(replace(axes, replicate=1, fsdp=axes.fsdp * axes.replicate), [])
        if not alike or each.seconds < _WORTH * alike[-1].seconds:
            alike.append(each)
    return [each for alike in kept.values() for each in alike]
