"""Signals that would come in the middle of what must come to its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def put_off(number: int) -> Iterator[list[int]]:
    """Within it the signal does nothing. Whoever asks for it looks afterwards whether it came, and raises it again."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield asked
        return
    before = signal.signal(number, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(number, before or signal.SIG_DFL)
