"""The sandbox of chat templates. It refuses single operations whose result would be too large.

Another thread bounds the time and memory of a template (`render.py`), and waits while one operation in C runs.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import wraps
from threading import get_ident
from types import BuiltinMethodType
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import DataError, counted

_MOST_BITS = 1 << 20  # of a number: the product of two takes some milliseconds
_WIDENING = ("center", "indent", "round", "batch")  # filters that take a width, a precision or a length
_WIDE = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{7}|\*)")  # in a format: a width of 7 digits, or of an argument


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with bounds on products, powers, formats and widths."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _WIDENING:
            self.filters[name] = _bounded(self.filters[name], _check_numbers)
        self.filters["format"] = _bounded(self.filters["format"], _check_format)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, _MOST_BITS, "bits")
        elif operator == "*":
            size, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(size, str | list | tuple):
                _check(len(size) * times, MOST_CHARACTERS, "elements")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            _check_numbers(__obj.__self__, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def install() -> None:
    """Let transformers compile chat templates for this sandbox, in this process."""
    from transformers.utils import chat_template_utils  # late: it takes a second

    chat_template_utils.ImmutableSandboxedEnvironment = Sandbox  # type: ignore[misc] # it is looked up at each template


def _bounded(of: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(of)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return of(*args, **kwargs)

    return checked


def _check_numbers(_: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a large width; the value itself may be any number."""
    for each in (*args, *kwargs.values()):
        _check(each if isinstance(each, int) else 0, MOST_CHARACTERS, "elements")


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise SecurityError(f"a format has a width of 7 digits or more, or one that is an argument: {text[:40]!r}")


def _check(size: int, most: int, of: str) -> None:
    if size > most:
        raise SecurityError(f"an operation would make more than {most:,} {of}; take another template")


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
