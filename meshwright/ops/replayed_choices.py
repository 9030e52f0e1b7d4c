"""Routing choices that activation checkpointing replays: recompute takes the experts that forward chose.

Recomputed logits may differ in the last bit (another kernel, another reduction order). If a tie then fell the other
way, recompute would send rows to other experts than forward did, and the shapes of the all-to-alls would differ between
ranks, which hangs. So forward records its choices, and the recomputation reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_active: Choices | None = None  # global and not thread-local: autograd runs backward on a GPU in another thread


class Choices:
    """The choices of one forward of a layer, in order."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next: int | None = None  # None while recording

    @contextmanager
    def made(self) -> Iterator[None]:
        """Record the choices made inside the context."""
        with self._in_use(None):
            yield

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Replay the recorded choices inside the context."""
        with self._in_use(0):
            yield

    @contextmanager
    def _in_use(self, first: int | None) -> Iterator[None]:
        global _active  # noqa: PLW0603 - a layer runs within modules that hand nothing on
        previous, _active, self._next = _active, self, first
        try:
            yield
        finally:
            _active = previous

    def choose(self, make: Callable[[], Tensor]) -> Tensor:
        """Make and record a choice, or return the next recorded one."""
        if self._next is None:
            self._made.append(make())
            return self._made[-1]
        self._next += 1
        return self._made[self._next - 1]


def replayed(make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` chooses; in a recomputed layer, what it chose in forward.

    The result must carry no gradient.
    """
    return make() if _active is None else _active.choose(make)
