"""Estimate the device memory of NCCL's communicators, which torch's allocator does not see. Gloo takes none.

A rank has a communicator for each group of its collectives. NCCL allocates buffers for channels, and uses more channels
on faster links. A ring connects two neighbours, whatever the size of the group; an all-to-all connects a rank to every
other rank of its node. The figures are published by others, not measured on our meshes, and depend on links and
version. So a plan shows the sum but does not use it to decide whether a rank fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices import GB
from .figures import Figures

# NVIDIA/nccl#964: a communicator of two ranks, and one of more, on A100 with NVLink.
_PAIR, _RING = 544 * GB // 1000, 688 * GB // 1000
# NVIDIA/nccl#1685: the first all-to-all among eight H100 took 3.28 GB more, for 32 channels to each other GPU.
_PEER = 3280 * GB // 1000 // 7
_NODE = 8  # ranks of a node
SOURCE = "as others measured on A100 and H100 (NVIDIA/nccl#964 and #1685)"


@dataclass(frozen=True)
class Communicators:
    """The communicators of a rank on CUDA devices, and the bytes that they are expected to take."""

    count: int
    num_bytes: int


def communicators(figures: Figures) -> Communicators:
    """Count the communicators of the rank that sends most: the groups of its bill, and torch's default group.

    A pipeline has a communicator for each neighbour, made on first use, and no default one.
    """
    axes, sender = figures.axes, figures.sender
    if axes.world == 1:
        return Communicators(0, 0)
    sizes = [2] * min(2, axes.pp - 1) if axes.pp > 1 else [axes.world]
    exchanges = dict[tuple[int, ...], bool]()
    for charge in figures.charges:
        if charge.op not in ("send", "recv"):
            ranks = axes.group(sender, charge.axes)
            exchanges[ranks] = exchanges.get(ranks, False) or charge.op == "all_to_all"
    sizes += map(len, exchanges)
    num_peers = sum(min(len(ranks), _NODE) - 1 for ranks, exchange in exchanges.items() if exchange)
    rings = sum(_PAIR if size == 2 else _RING for size in sizes)
    return Communicators(len(sizes), rings + num_peers * _PEER)
