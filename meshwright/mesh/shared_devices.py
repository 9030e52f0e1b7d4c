"""Let several NCCL ranks share a GPU, to try a mesh with more ranks than GPUs. It is slow: their kernels take turns.

NCCL refuses two ranks on one GPU of one host, and compares hosts first (2.28.9: src/init.cc:903). `NCCL_HOSTID`
replaces the name of the host. If each rank names a different host, NCCL takes it for a rank of another machine, and
reaches it over sockets. From NCCL 2.30 on, a variable permits sharing.
"""

from __future__ import annotations

import os

import torch

# Use only sockets, and as few of the GPU's multiprocessors as possible, since ranks that wait for each other share
# them.
_SOCKETS_ONLY = {
    "NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0", "NCCL_MAX_CTAS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}  # fmt: skip


def can_be_shared(device: torch.device) -> bool:
    """Return whether several ranks may use one device of this kind, which only NCCL allows."""
    return device.type == "cuda"


def environment_of(rank: int, ranks_per_device: int) -> dict[str, str]:
    """Return the environment variables of a rank that shares its device, to be set before it makes a mesh.

    Consecutive ranks share a device. Variables of the user stay, except those that tell the ranks apart.
    """
    if ranks_per_device == 1:
        return {}
    chosen = {name: value for name, value in _SOCKETS_ONLY.items() if name not in os.environ}
    return {**chosen, "NCCL_HOSTID": f"rank{rank}", "LOCAL_RANK": str(rank // ranks_per_device)}
