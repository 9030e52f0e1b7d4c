"""A bucket in memory that two processes of one host share: anonymous host memory, or a device's by an IPC handle.

Host memory has no name in /dev/shm (memfd_create, passed over a socket), so none can be left behind when a process is
killed, and the 64 MB that containers give /dev/shm do not limit it. torch.multiprocessing would send pickles.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError

_MARK_BYTES = 16  # at the start of a new bucket: proves that both processes see the same memory


def make(size: int, device: torch.device) -> tuple[Tensor, dict[str, Any], int | None]:
    """Make a bucket; return it, what the receiver needs for `attach`, and a file descriptor for it, if there is one.

    Device memory is shared as torch.multiprocessing.reductions shares it, and has not yet been run on a GPU. If the
    handle opens other memory, the mark makes `attach` raise.
    """
    padded, handle, ipc = max(size, _MARK_BYTES), None, None
    if device.type == "cpu":
        handle = _anonymous(padded)
        bucket = torch.frombuffer(mmap.mmap(handle, padded), dtype=torch.uint8)
    else:
        bucket = torch.empty(padded, dtype=torch.uint8, device=device)
        ipc = [each.hex() if isinstance(each, bytes) else each for each in bucket.untyped_storage()._share_cuda_()]
        ipc.append(int(bucket.storage_offset()))
    mark = os.urandom(_MARK_BYTES)
    bucket[:_MARK_BYTES] = torch.tensor(list(mark), dtype=torch.uint8)
    finish(device)
    return bucket[:size], {"num_bytes": size, "ipc": ipc, "mark": mark.hex()}, handle


def _anonymous(num_bytes: int) -> int:
    """Return the descriptor of new anonymous memory."""
    handle = os.memfd_create("meshwright weights")
    try:
        os.posix_fallocate(handle, 0, num_bytes)  # without memory it raises; a write into the map would be SIGBUS
    except OSError as error:
        os.close(handle)
        raise RankError(f"no {num_bytes:,} bytes of shared memory: {error}; give a smaller bucket_bytes=") from error
    return handle


def attach(offered: dict[str, Any], handle: int | None, device: torch.device) -> Tensor:
    """Return the bucket that the sender offers. Refuse memory without its mark."""
    padded = max(offered["num_bytes"], _MARK_BYTES)
    if handle is not None:
        bucket = torch.frombuffer(mmap.mmap(handle, padded), dtype=torch.uint8)
        os.close(handle)
    elif device.type == "cpu":
        raise RankError(
            "the sender offers memory of its device, and device= of the receiver is the host; give the receiver the "
            "same device, or the sender device=None"
        )
    else:
        bucket = _opened(offered["ipc"], padded, device)
    if bytes(bucket[:_MARK_BYTES].tolist()) != bytes.fromhex(offered["mark"]):
        raise RankError("the shared bucket is not the sender's memory; both processes must use one and the same device")
    return bucket[: offered["num_bytes"]]


def _opened(ipc: list[Any], size: int, device: torch.device) -> Tensor:
    """Open an IPC handle on this process's number of the device, as torch's `rebuild_cuda_tensor` does."""
    _, handle, num_bytes, start, counter, counter_start, event, event_sync, offset = ipc
    index = torch.empty(0, device=device).device.index  # starts the device, and says which one "the current" is
    storage = torch.UntypedStorage._new_shared_cuda(
        index, bytes.fromhex(handle), num_bytes, start, bytes.fromhex(counter), counter_start,
        bytes.fromhex(event), event_sync,
    )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (size,), (1,))


def finish(device: torch.device) -> None:
    """Wait until all copies of this process are in memory: the other process cannot wait for this one's stream."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
