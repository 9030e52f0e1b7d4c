"""Defer a signal (SIGINT, SIGTERM) until a critical section is over."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_signal(number: int) -> Iterator[list[int]]:
    """Hold a signal back until the end of the block, and then raise it. The body can check the list for whether it
    came.

    Only the main thread gets signals and may handle them; in another thread the list stays empty.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(number, before or signal.SIG_DFL)
    if came:
        signal.raise_signal(number)
