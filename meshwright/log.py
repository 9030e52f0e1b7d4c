"""The package's logger, and progress bars for long work. It imports no torch, so that --help is instant."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

logger = logging.getLogger("meshwright")

SECONDS_BETWEEN_LINES = 5.0

Advance = Callable[[int], None]

_quiet = ContextVar("quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress inside the block, nor in processes forked there: the caller shows its own."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


@contextmanager
def progress(label: str, total: int, unit: str, *, enabled: bool) -> Iterator[Advance]:
    """Show on stderr how much of `total` is done: a bar on a terminal, else a line now and then.

    Yield `advance(n)`, which any thread may call. It is silent unless `enabled`: pass `enabled=rank == 0`.

        with progress("loading", total=size_bytes, unit="bytes", enabled=True) as advance:
            advance(len(chunk))
    """
    if not enabled or _quiet.get():
        yield _silent
    elif sys.stderr.isatty():
        with _bar(label, total, unit) as advance:
            yield advance
    else:
        with _lines(label, total, unit) as advance:
            yield advance


def _silent(n: int) -> None:
    """Ignore progress."""


@contextmanager
def _bar(label: str, total: int, unit: str) -> Iterator[Advance]:
    """Show a progress bar of rich on a terminal."""
    from rich.console import Console  # imported late: --help should not wait for it
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amounts = [DownloadColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn("{task.fields[unit]}")]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *amounts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total, unit=unit)
        yield lambda n: bar.advance(task, n)


@contextmanager
def _lines(label: str, total: int, unit: str) -> Iterator[Advance]:
    """Print a line at most every few seconds, and one at the end: log files should not fill with carriage returns."""
    began = last = time.monotonic()
    done, lock = 0, Lock()

    def advance(n: int) -> None:
        nonlocal done, last
        with lock:
            done += n
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                _write(label, done, total, unit, "so far")

    ending = "stopped after"
    try:
        yield advance
        ending = "done in"
    finally:
        _write(label, done, total, unit, f"{ending} {time.monotonic() - began:.1f} s")


def _write(label: str, done: int, total: int, unit: str, ending: str) -> None:
    """Print one line of progress."""
    from rich.filesize import decimal

    amount = f"{decimal(done)} of {decimal(total)}" if unit == "bytes" else f"{done:,} of {total:,} {unit}"
    sys.stderr.write(f"{label}: {amount}, {ending}\n")
    sys.stderr.flush()


class Clock:
    """Print lines with the seconds since the clock was made."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self, text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self.began:6.1f} s  {text}\n")
