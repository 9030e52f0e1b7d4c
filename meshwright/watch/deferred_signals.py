"""Defer a signal (SIGINT, SIGTERM) until a critical section is over."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_signal(number: int) -> Iterator[list[int]]:
    """Ignore a signal inside; yield the list of those that arrived, for the caller to raise again afterwards."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield arrived
        return
    previous = signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        signal.signal(number, previous or signal.SIG_DFL)
