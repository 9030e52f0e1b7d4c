"""Memory limits of a rank's device, and of its machine or container; allocator settings; whether Inductor works."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..log import logger

_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)  # cgroup v2 and v1: limits of a container


# Variables that torch's allocator reads: the first, else the deprecated second, or the third for ROCm.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank may use. On a CPU device and host share the same memory."""

    device_bytes: int
    host_bytes: int
    shared: bool


def memory_of(device: torch.device, local_ranks: int) -> Memory:
    """Return the memory of one of `local_ranks` ranks that share this machine, each with its own accelerator."""
    host = _host_bytes() // local_ranks
    if device.type == "cpu":
        return Memory(host, host, shared=True)
    properties = torch.get_device_module(device).get_device_properties(device)
    return Memory(int(properties.total_memory), host, shared=False)


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator on a GPU expand its segments, unless the user has set its options.

    Experts get different numbers of rows in every step, which fragments segments of fixed sizes. The allocator reads
    its options once: after the user's program has initialised CUDA, it is too late.
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized() and environment.keys().isdisjoint(_ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"
        logger.info("%s=%s; set it yourself to choose otherwise", _ALLOCATOR[0], environment[_ALLOCATOR[0]])


def has_inductor(device: torch.device) -> bool:
    """Return whether torch.compile makes Triton kernels for a kind of device, so that layers gain by it."""
    return device.type in ("cuda", "xpu")


def _host_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    texts = (Path(file).read_text().strip() for file in _LIMITS if Path(file).exists())
    limits = [int(text) for text in texts if text.isdecimal()]  # "max": no limit
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])
