"""Run a function on n forked gloo ranks. A rank that hangs or dies is a failure that names it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from meshwright.errors import RankError
from meshwright.verify import run_ranks

SECONDS = 60.0

Case = TypeVar("Case")
Answer = TypeVar("Answer")


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """Call `function(*args)` on every rank. Return tensors and plain data in the order of the ranks."""
    return run_ranks(size, function, *args, seconds=seconds)


def in_turn(size: int, cases: Mapping[Case, Callable[[], Any]], seconds: float = SECONDS) -> dict[Case, list[Any]]:
    """Run many cases on the same ranks. Return the results of all ranks for each. A world costs more than most cases. A
    case must leave all ranks in the same state, without gradients or pending collectives."""
    ranks = run(size, _one_by_one, cases, seconds=seconds + 5 * len(cases))
    return {case: [answers[case] for answers in ranks] for case in cases}


def _one_by_one(cases: Mapping[Case, Callable[[], Any]]) -> dict[Case, Any]:
    answers = {}
    for case, act in cases.items():
        try:
            answers[case] = act()
            _refuse_other_than(case)
        except BaseException as error:
            error.add_note(f"in the case {case!r}")
            raise
    return answers


def _refuse_other_than(case: object) -> None:
    """Check that all ranks are at the same case, which keeps results of cases apart."""
    if not dist.is_initialized():
        return
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, str(case))
    assert gathered == [str(case)] * len(gathered), gathered


class Shared(Generic[Case, Answer]):
    """Results of cases that share worlds. The first request for a case runs its whole group."""

    def __init__(
        self, groups: Iterable[Sequence[Case]], run_group: Callable[[Sequence[Case]], Mapping[Case, Answer]]
    ) -> None:
        self._group_of = {case: group for group in groups for case in group}
        self._run_group = run_group
        self._answers: dict[Case, Answer | RankError] = {}

    def __call__(self, case: Case) -> Answer:
        if case not in self._answers:
            self._run(self._group_of[case])
        answer = self._answers[case]
        if isinstance(answer, RankError):
            raise RankError(f"in the world of {case!r}: {answer}")
        return answer

    def _run(self, group: Sequence[Case]) -> None:
        """Run a group once: a failure counts for each of its cases."""
        try:
            self._answers.update(self._run_group(group))
        except RankError as error:
            self._answers.update(dict.fromkeys(group, error))


def shared(
    keys: Mapping[Case, object], run_group: Callable[[Sequence[Case]], Mapping[Case, Answer]]
) -> Shared[Case, Answer]:
    """Group cases that have equal keys, such as a mesh."""
    groups: dict[str, list[Case]] = {}
    for case, key in keys.items():
        groups.setdefault(str(key), []).append(case)
    return Shared(groups.values(), run_group)


def world(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on `size` ranks."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run(size, functools.partial(function, *args, **kwargs))

        return test

    return decorate
