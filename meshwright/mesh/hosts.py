"""Between which ranks the hosts of accelerators tell each other a few numbers: arithmetic, no process group.

Ranks agree before each step. If that went over the devices, the host would wait until they have done what is queued. So
hosts have groups of their own, over TCP. A flat group of thousands would open a connection for each pair, and pass a
row on as often as there are ranks. In rounds among a few, a rank of 1,024 has 62 connections and passes on 62 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST = 32  # ranks of a group of hosts, unless their number does not divide


def rounds(groups: Sequence[Sequence[int]], most: int = MOST) -> list[tuple[tuple[int, ...], ...]]:
    """Of each round the groups of all ranks. Whoever gathers in the first, then in the second what he has by then, and
    so on, has what all of his `groups` have, in their order."""
    sizes = _sizes(len(groups[0]), most)
    of_group = torch.tensor([list(group) for group in groups], device="cpu").view(-1, *sizes)
    found = []
    for dim in range(len(sizes), 0, -1):  # neighbours first
        parts = of_group.movedim(dim, -1).reshape(-1, sizes[dim - 1])
        found.append(tuple(tuple(part) for part in parts.tolist()))
    return found


def _sizes(num: int, most: int) -> list[int]:
    """Factors of at most that much, as far as there are some."""
    sizes = []
    while num > 1:
        sizes.append(max((size for size in range(2, most + 1) if num % size == 0), default=num))
        num //= sizes[-1]
    return sizes
