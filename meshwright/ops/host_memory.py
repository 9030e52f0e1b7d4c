"""Host memory: huge pages, glibc's heap, and copies to the device that do not wait.

These are hints to Linux and glibc about large blocks on a CPU; other devices and systems are left alone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_MMAP_BYTES = 32 << 20  # glibc's largest mmap threshold: a block this large is mapped unless a freed hole can hold it
_HUGEPAGE = 14  # MADV_HUGEPAGE


def with_huge_pages(block: Tensor) -> Tensor:
    """Ask for 2 MiB pages for a block that has not been touched yet; return it.

    The first write to a page faults. With 4 KiB pages, the faults alone take as long as filling the block.
    """
    advise = _of_libc("madvise")
    if block.device.type == "cpu" and block.nbytes >= _MMAP_BYTES and advise is not None:
        begin = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = block.data_ptr() + block.nbytes - begin
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _HUGEPAGE)  # if refused, pages stay small: no harm
    return block


def release_heap_before(large: Tensor) -> None:
    """Return freed heap memory to the system before as much as `large` is allocated next to it.

    Gradients of small parameters lie between the freed activations, and keep glibc from shrinking its heap by itself:
    the peak would count the activations and the new block.
    """
    trim = _of_libc("malloc_trim")
    if large.device.type == "cpu" and large.nbytes >= _MMAP_BYTES and trim is not None:
        trim(0)


@cache
def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        function: Callable[..., int] = ctypes.CDLL(None)[name]
    except AttributeError:  # a C library without it
        return None
    return function


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy `x` to the device, in stream order and without waiting for the device.

    A copy from pageable memory waits until the device has finished everything queued before it; one from pinned memory
    does not, and torch's caching host allocator keeps that memory until it was read. A tensor that the caller has
    pinned is copied first: he may write to it again at once.
    """
    if x.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return x.to(device)
    staged = x.clone() if x.is_pinned() else x.contiguous()  # pin_memory keeps strides: expanded rows would stay one
    return staged.pin_memory().to(device, non_blocking=True)
