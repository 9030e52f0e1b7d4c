"""Choices that a layer makes once, however often it runs.

Backward may run a layer again. If a tie then fell the other way, other rows would go to the experts than came from
them. So the second run takes what the first has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_now: Choices | None = None  # not by thread: on a GPU backward runs in another one


class Choices:
    """Those of one run of a layer, in their order."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next: int | None = None  # None while they are made

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within it they are made."""
        with self._in_use(None):
            yield

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within it they are those that were made."""
        with self._in_use(0):
            yield

    @contextmanager
    def _in_use(self, first: int | None) -> Iterator[None]:
        global _now  # noqa: PLW0603 - a layer runs within modules that hand nothing on
        before, _now, self._next = _now, self, first
        try:
            yield
        finally:
            _now = before

    def choose(self, make: Callable[[], Tensor]) -> Tensor:
        if self._next is None:
            self._made.append(make())
            return self._made[-1]
        self._next += 1
        return self._made[self._next - 1]


def once(make: Callable[[], Tensor]) -> Tensor:
    """What `make` chooses; or has chosen, where a layer runs again. It must have no gradient."""
    return make() if _now is None else _now.choose(make)
