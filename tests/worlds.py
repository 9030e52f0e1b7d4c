"""Run a function on n forked gloo ranks. A hang is a failure that names the ranks; so is a rank that dies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from meshwright.verify import run_ranks

SECONDS = 60.0


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """`function(*args)` on every rank; the results in the order of the ranks (tensors and plain data)."""
    return run_ranks(size, function, *args, seconds=seconds)


def world(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on `size` ranks."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run(size, functools.partial(function, *args, **kwargs))

        return test

    return decorate
