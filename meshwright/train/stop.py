"""Signals that end a run: the step is finished, the run saved. A second one ends the process at once.

SLURM signals launchers and ranks alike, and launchers pass it on: the same signal within a moment is the same request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_OF_LAUNCHERS = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_MOMENT_S = 2.0


class Stop:
    """Whether somebody asked this process to end, and how."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at = 0.0

    def ask(self, number: int, _: FrameType | None = None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
        elif number != self.signal or time.monotonic() - self._at > _MOMENT_S:
            os._exit(128 + number)


@contextmanager
def listening() -> Iterator[Stop]:
    """Signals reach the main thread alone."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with _handled(SIGNALS, stop.ask):
        yield stop


@contextmanager
def noted() -> Iterator[list[int]]:
    """Note the signals that this process gets, in their order, and heed none. One that it ignores (nohup) stays so."""
    got: list[int] = []
    numbers = [number for number in _OF_LAUNCHERS if signal.getsignal(number) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    with _handled(numbers, lambda number, _: got.append(number)):
        yield got


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
