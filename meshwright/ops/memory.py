"""What Linux and its C library are told about large blocks on a CPU. Other devices and systems are told nothing."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

_MAPPED_APART = 32 << 20  # bytes from which glibc always maps a block that no single freed hole can hold
_HUGEPAGE = 14  # MADV_HUGEPAGE


def fresh(block: Tensor) -> Tensor:
    """A block nobody has touched, to be filled in pages of 2 MiB: in those of 4 KiB, that takes twice as long."""
    advise = _of_libc("madvise")
    if block.device.type == "cpu" and block.nbytes >= _MAPPED_APART and advise is not None:
        begin = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = block.data_ptr() + block.nbytes - begin
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _HUGEPAGE)  # refused: pages as they were
    return block


def give_back_before(large: Tensor) -> None:
    """Returns to the system what activations freed, where as much as `large` is about to be mapped beside it.

    Gradients of small parameters lie between the freed blocks and keep glibc from returning any of them by itself.
    """
    trim = _of_libc("malloc_trim")
    if large.device.type == "cpu" and large.nbytes >= _MAPPED_APART and trim is not None:
        trim(0)


@cache
def _of_libc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        found: Callable[..., int] = ctypes.CDLL(None)[name]
    except AttributeError:  # a C library without it
        return None
    return found
