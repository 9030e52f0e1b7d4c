"""Tensors for backward that are not kept, but made once more, by running what has made them.

torch's own checkpoint does the same, with much that no layer here needs: random states, nested checkpoints, graphs
within graphs. That takes the host half a millisecond a layer and more.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import StateError

Context = Callable[[], AbstractContextManager[Any]]


def saved_by_running_again(
    run: Callable[..., Any], args: tuple[Any, ...], context: Context, saved: Callable[[], None] = lambda: None
) -> saved_tensors_hooks:
    """Within it `run(*args)` saves places in the stead of tensors, and tells `saved` of each. Backward runs it once
    more, within `context`, up to the last of them."""
    again = _Again(run, args, context, saved)
    return saved_tensors_hooks(again.save, again.give)


class _Place:
    """Stands for a saved tensor: which one it was, and of what kind."""

    __slots__ = ("__weakref__", "kind", "number")

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number, self.kind = number, (tensor.shape, tensor.dtype)


class _EnoughError(Exception):
    """All that was saved is there again. What would come after it, nobody needs."""


class _Again:
    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], context: Context, saved: Callable[[], None]
    ) -> None:
        self.run, self.args, self.context, self.saved = run, args, context, saved
        self.versions = [arg._version for arg in args if isinstance(arg, Tensor)]
        self.places: list[weakref.ref[_Place]] = []  # a place dies with the step of backward that wanted it
        self.found: dict[int, Tensor] = {}

    def save(self, tensor: Tensor) -> _Place:
        place = _Place(len(self.places), tensor)
        self.places.append(weakref.ref(place))
        self.saved()
        return place

    def give(self, place: _Place) -> Tensor:
        """To the step of backward that wants it, and to nobody else: so it is forgotten here."""
        if place.number not in self.found:
            self._run()
        return self.found.pop(place.number)

    def _run(self) -> None:
        if self.versions != [arg._version for arg in self.args if isinstance(arg, Tensor)]:
            raise StateError(
                "what a layer was given was written into before backward runs it again; change a copy of it, or choose "
                'recompute="none"'
            )
        numbers = count()
        keep = functools.partial(self._keep, numbers)
        hooks = saved_tensors_hooks(keep, _refuse)
        with contextlib.suppress(_EnoughError), self.context(), hooks, torch.enable_grad():
            self.run(*self.args)
        if (num := next(numbers)) != len(self.places):
            raise StateError(f"a layer saved {len(self.places)} tensors for backward, and {num} when it ran again")

    def _keep(self, numbers: Iterator[int], tensor: Tensor) -> None:
        """For the first run's steps of backward. Those of the second run are thrown away, so they get nothing."""
        number = next(numbers)
        place = self.places[number]()
        if place is not None:
            if place.kind != (tensor.shape, tensor.dtype):
                (was, dtype), (shape, now) = place.kind, (tensor.shape, tensor.dtype)
                raise StateError(
                    f"a layer saved {tuple(was)} in {dtype} for backward, and {tuple(shape)} in {now} when it ran again"
                )
            self.found[number] = tensor.detach()  # a step that saves its own output would hold itself for ever
        if number == len(self.places) - 1:
            raise _EnoughError


def _refuse(_: None) -> NoReturn:
    raise StateError(
        'a layer takes gradients within its own forward, so backward cannot run it again; choose recompute="none"'
    )
