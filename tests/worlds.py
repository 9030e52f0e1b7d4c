"""Run a function on n forked gloo ranks. A hang is a failure that names the ranks; so is a rank that dies."""

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
    """`function(*args)` on every rank; the results in the order of the ranks (tensors and plain data)."""
    return run_ranks(size, function, *args, seconds=seconds)


def in_turn(size: int, cases: Mapping[Case, Callable[[], Any]], seconds: float = SECONDS) -> dict[Case, list[Any]]:
    """Many cases on the same ranks, one after the other: of each what every rank answered. A world costs more than most
    cases do. A case must leave all ranks alike, and without gradients or collectives that wait."""
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
    """A rank that is at another case would answer for the wrong one from here on."""
    if not dist.is_initialized():
        return
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(case))
    assert everywhere == [str(case)] * len(everywhere), everywhere


class Shared(Generic[Case, Answer]):
    """The answers of cases that share worlds. Whoever asks for the first case of a group runs the whole group."""

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
        """A world that breaks is not tried again for each of its cases."""
        try:
            self._answers.update(self._run_group(group))
        except RankError as error:
            self._answers.update(dict.fromkeys(group, error))


def world(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on `size` ranks."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run(size, functools.partial(function, *args, **kwargs))

        return test

    return decorate
