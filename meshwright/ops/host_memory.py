"""What Linux and its C library are told about large blocks on a CPU. Other devices and systems are told nothing."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
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


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on the device, in the order of what is queued there.

    A copy from pageable memory waits until all is done that was queued before it. One from pinned memory does not, and
    torch keeps that memory until it was read. What the caller has pinned is copied too: he may write there again.
    """
    if x.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return x.to(device)
    ours = x.clone() if x.is_pinned() else x.contiguous()  # pinning would keep rows that share memory
    return ours.pin_memory().to(device, non_blocking=True)
