"""Group the hosts of accelerators into rounds of small gloo groups, to exchange a few numbers off the device.

Ranks agree before each step. Over NCCL the host would wait until the device has finished all queued work; so hosts have
separate groups, over TCP. One flat group of thousands would open a connection for each pair, and its ring would pass
every row on as many times as there are ranks. With rounds in small groups, each of 1,024 ranks has 62 connections and
62 forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST = 32  # the largest group of hosts, unless the number of ranks has no such factor


def rounds(groups: Sequence[Sequence[int]], most: int = MOST) -> list[tuple[tuple[int, ...], ...]]:
    """Return for each round its groups of all ranks.

    A rank all-gathers in the first round, then all-gathers the result in the second, and so on. It ends with the values
    of its whole group in order. `groups` form a grid of factors; a round gathers along one dim of it.
    """
    sizes = _sizes(len(groups[0]), most)
    grid = torch.tensor([list(group) for group in groups], device="cpu").view(-1, *sizes)
    partitions = []
    for dim in range(len(sizes), 0, -1):  # neighbours first, so that results stay in order
        parts = grid.movedim(dim, -1).reshape(-1, sizes[dim - 1])
        partitions.append(tuple(tuple(part) for part in parts.tolist()))
    return partitions


def _sizes(num: int, most: int) -> list[int]:
    """Factorise `num` into factors of at most `most`, as far as possible."""
    sizes = []
    while num > 1:
        sizes.append(max((size for size in range(2, most + 1) if num % size == 0), default=num))
        num //= sizes[-1]
    return sizes
