"""The meshes of so many ranks that a search tries. What a model refuses, or nobody would take, is left out here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..axes import Axes
from ..blueprint import Blueprint
from ..errors import ConfigError
from ..layout import Context
from .refusals import objections

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


def cuts(blueprint: Blueprint, size: Size, coded: Sequence[str]) -> list[Cut]:
    """tp stays within a node, and cp leaves a rank enough tokens. A replica, where there are several, is one node or a
    few: a part of a node would send sums between nodes all the same. A pipeline gets as many micro-batches as it has
    places, at least."""
    if size.global_tokens % size.tokens:
        raise ConfigError(
            f"--global-tokens {size.global_tokens} is no multiple of the {size.tokens} tokens of a micro-batch; choose "
            f"{-(-size.global_tokens // size.tokens) * size.tokens}"
        )
    return list(_cuts(size, _allowed(blueprint, coded), blueprint.balance.num_experts))


def _allowed(blueprint: Blueprint, coded: Sequence[str]) -> Callable[..., bool]:
    """Whether a model takes sizes of axes. Each is asked once: what one axis does depends on few others. How mixers
    come to other tokens (`Context`) is asked with cp alone, which it is of."""
    plain = blueprint.in_context(Context())

    @cache
    def allowed(num_batches: int | None = None, **sizes: int) -> bool:
        return not objections(blueprint if "cp" in sizes else plain, sizes, num_batches, coded)

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
