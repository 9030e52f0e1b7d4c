"""A bound on the time and memory of a chat template, which is a program of somebody else and may never end.

It runs in a thread, where an exception can be raised in it: in any process, whoever handles its signals.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import get_ident
from typing import TypeVar

from ..errors import DataError, counted

MOST_CHARACTERS = 64 << 20
_POLLS, _POLL_S = 200, 0.05  # counted, so that the time in which this process is stopped is not the template's
_MOST_BYTES = 1 << 30
_THREADS = 16
_POOLS: dict[int, ThreadPoolExecutor] = {}  # by process
_LOOK = "look for loops in it that grow with the text, or take another template"

Result = TypeVar("Result")


class Unbounded(DataError):
    """A template that would go on for ever: no bad row, since the next row would take as long."""


def bounded(render: Callable[[], Result]) -> Result:
    """Return what `render` returns. End it after 10 s, or when the process has grown by 1 GiB meanwhile."""
    threads, before = list[int](), _peak_bytes()

    def run() -> Result:
        threads.append(get_ident())
        return render()

    future = _threads().submit(run)
    for _ in range(_POLLS):
        wait([future], _POLL_S)
        if future.done():
            return future.result()
        if _peak_bytes() - before > _MOST_BYTES:
            _end(threads)
            raise Unbounded(f"the chat template takes more than {_MOST_BYTES >> 30} GiB of memory; {_LOOK}")
    _end(threads)
    raise Unbounded(f"the chat template has not ended in {counted(round(_POLLS * _POLL_S), 'second')}; {_LOOK}")


def _threads() -> ThreadPoolExecutor:
    """Return the threads of this process: a fork has none of its parent's."""
    if os.getpid() not in _POOLS:
        _POOLS.clear()
        _POOLS[os.getpid()] = ThreadPoolExecutor(_THREADS, "template")
    return _POOLS[os.getpid()]


def _end(threads: list[int]) -> None:
    """Raise SystemExit in them, which no template can catch."""
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    _POOLS.clear()  # one that was just done ends all the same, and these threads take no more


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
