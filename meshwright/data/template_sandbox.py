"""Sandbox for chat templates, which are programs from the internet: bound their time, memory and single operations.

transformers renders templates in jinja2's ImmutableSandboxedEnvironment, which forbids attribute access but not `"a" *
10**12`. Time and memory are bounded from another thread, which cannot run while one C operation holds the GIL; so
single operations are bounded by their operands.
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

_MOST_BITS = 1 << 20  # of an integer: multiplying two takes some milliseconds
_WIDENING = ("center", "indent", "round", "batch")  # filters that take a width, a precision or a length
# A format with a width of 7 digits or more, or a width that is an argument (`%*d`).
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{7}|\*)")


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with bounds on products, powers, formats and widths."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _WIDENING:
            self.filters[name] = _bounded(self.filters[name], _check_numbers)
        self.filters["format"] = _bounded(self.filters["format"], _check_format)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the operands of `*`, `**` and `%` before they run."""
        if operator == "%":
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            # Bound the size of the result from the operands alone: the result itself must not be computed.
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, _MOST_BITS, "bits")
        elif operator == "*":
            size, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int) and isinstance(size, str | list | tuple):
                _check(len(size) * times, MOST_CHARACTERS, "elements")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments of string methods, such as `"".ljust(10**12)`."""
        if isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, str):
            _check_numbers(__obj.__self__, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def install() -> None:
    """Make transformers compile chat templates in this sandbox, in this process.

    transformers looks the class up in its module when a template is compiled, so replacing it there is enough.
    """
    from transformers.utils import chat_template_utils  # late: the import takes a second

    chat_template_utils.ImmutableSandboxedEnvironment = Sandbox  # type: ignore[misc] # it is looked up at each template


def _bounded(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """Wrap a filter with a check of its arguments."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


def _check_numbers(_: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse large widths. The value itself may be any number."""
    for each in (*args, *kwargs.values()):
        _check(each if isinstance(each, int) else 0, MOST_CHARACTERS, "elements")


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    """Refuse formats with large widths."""
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise SecurityError(f"a format has a width of 7 digits or more, or one that is an argument: {text[:40]!r}")


def _check(size: int, limit: int, unit: str) -> None:
    """Raise if an operation would create more than `limit`."""
    if size > limit:
        raise SecurityError(f"an operation would create more than {limit:,} {unit}; use another template")


MOST_CHARACTERS = 64 << 20
_POLLS, _POLL_S = 200, 0.05  # polls are counted instead of seconds: a stopped process uses up no time
_MOST_BYTES = 1 << 30
_THREADS = 16
_POOLS: dict[int, ThreadPoolExecutor] = {}  # by process
_LOOK = "check it for loops that grow with the text, or use another template"

Result = TypeVar("Result")


class Unbounded(DataError):
    """Raised for a template that would not end. It is not a bad row: the next row would take as long."""


def bounded(render: Callable[[], Result]) -> Result:
    """Run `render` in a thread; end it after 10 s, or when the process has grown by 1 GiB.

    It is a thread because a process would have to receive the tokenizer and the chats. `PyThreadState_SetAsyncExc`
    raises SystemExit in it, which takes effect at the next bytecode.
    """
    threads, bytes_before = list[int](), _peak_bytes()

    def run() -> Result:
        threads.append(get_ident())
        return render()

    future = _executor().submit(run)
    for _ in range(_POLLS):
        wait([future], _POLL_S)
        if future.done():
            return future.result()
        # The peak only grows, so memory that a template frees again still counts.
        if _peak_bytes() - bytes_before > _MOST_BYTES:
            _kill(threads)
            raise Unbounded(f"the chat template takes more than {_MOST_BYTES >> 30} GiB of memory; {_LOOK}")
    _kill(threads)
    raise Unbounded(f"the chat template has not ended in {counted(round(_POLLS * _POLL_S), 'second')}; {_LOOK}")


def _executor() -> ThreadPoolExecutor:
    """Return the thread pool of this process. A fork has none of its parent's threads."""
    if os.getpid() not in _POOLS:
        _POOLS.clear()
        _POOLS[os.getpid()] = ThreadPoolExecutor(_THREADS, "template")
    return _POOLS[os.getpid()]


def _kill(threads: list[int]) -> None:
    """Raise SystemExit in threads: a template cannot catch it, as jinja2 has no try.

    The pool is dropped with its threads. A thread in the middle of a C call dies when the call returns; new rows use
    new threads.
    """
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    _POOLS.clear()  # a killed thread must not take another job


def _peak_bytes() -> int:
    """Return the peak resident memory; macOS reports bytes, Linux KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
