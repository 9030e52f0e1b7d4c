"""Copy between host and device through pinned memory, and view host memory as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from .part_sizes import part_size

# Torch rounds each pinned allocation up to a power of two, which would waste up to half of the host memory of thousands
# of parameters. So copies share buffers of this size.
_PINNED_BYTES = part_size(__name__, "_PINNED_BYTES", 1 << 28, small=1001)
_ALIGNED = 64  # bytes at which each storage begins in a buffer: DMA from odd addresses is slow
_WRITABLE = 0x200  # PyBUF_WRITE
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype, _view_memory.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def bytes_of(x: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, to read a file into it or write it to a file. Valid while `x`
    lives.

    `x.numpy()` would pin the size: torch never again resizes a storage that numpy has seen, and `Engine.sleep` frees
    parameters by resizing them.
    """
    view: memoryview = _view_memory(x.data_ptr(), x.nbytes, _WRITABLE) if x.numel() else memoryview(b"")
    return view


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy `x` to the device, in stream order and without waiting for the device.

    A copy from pageable memory waits until the device has finished everything queued before it; one from pinned memory
    does not, and torch's caching host allocator keeps that memory until it was read. A tensor that the caller has
    pinned is copied first, because the caller may write to it again at once.
    """
    if x.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return x.to(device)
    staged = x.clone() if x.is_pinned() else x.contiguous()  # pin_memory keeps strides: expanded rows would stay one
    return staged.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class HostCopy:
    """The bytes of storages, copied to the host. `free` and `restore` empty and refill the storages in place, so
    FSDP2, the optimizer and hooks keep the tensors that they hold.
    """

    storages: Sequence[UntypedStorage]
    sizes: Sequence[int]
    buffers: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> HostCopy:
        """Copy the storages of tensors, each once: after a reduce-scatter, many gradients share one. On an accelerator
        the copy is pinned, and only queued: synchronise before reading it."""
        storages = [*storages_of(tensors).values()]
        sizes = [storage.nbytes() for storage in storages]
        total, pinned = sum(map(_padded, sizes)), any(storage.device.type != "cpu" for storage in storages)
        ends = [*range(_PINNED_BYTES, total, _PINNED_BYTES), *([total] if total else [])]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        buffers = [torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=pinned) for n in lengths]
        copy = cls(storages, sizes, buffers)
        for own, kept in copy._pairs():
            kept.copy_(own, non_blocking=True)
        return copy

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def free(self) -> None:
        """Free the storages. Their tensors keep shape and version: an in-place write would show in `_version`."""
        for storage in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again, and queue the copies into them."""
        for storage, size in zip(self.storages, self.sizes, strict=True):
            storage.resize_(size)
        for own, kept in self._pairs():
            own.copy_(kept, non_blocking=True)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the storages with their copies; each part lies in one buffer."""
        at, capacity = 0, len(self.buffers[0]) if self.buffers else 1
        for storage, size in zip(self.storages, self.sizes, strict=True):
            # A separate tensor, so that writing does not bump the version of a parameter.
            own, done = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), 0
            while done < size:
                number, start = divmod(at + done, capacity)
                length = min(size - done, capacity - start)
                yield own[done : done + length], self.buffers[number][start : start + length]
                done += length
            at += _padded(size)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Return the storages of tensors that have memory, each once, by their address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def release_cached_memory(device: torch.device) -> None:
    """Return freed memory from torch's cache to the device, where other processes can take it."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
