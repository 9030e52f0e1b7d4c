"""Gathers and sums of shards between processes on the host, in a third to two thirds of the time that gloo takes.

gloo gathers into memory of its own and copies from there. For a reduce-scatter it sums everything on every rank. Here
each rank sends its parts from where they lie, and receives the others' where they belong. Both are operations of torch,
so that the recorder of `verify` counts one gather or one sum, and not what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

_LIBRARY = Library("meshwright", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) out, Tensor mine, str group) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) out, Tensor summands, str group) -> ()")

_PIECE = 1 << 20  # numbers of each other rank that are there at once

# A transfer that nobody holds any more stops gloo. So what an interrupt broke off stays here.
_UNDER_WAY: list[Any] = []


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether what lies on the device goes over gloo, from host to host."""
    return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group)


def gather_into(out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
    """`out` becomes what all ranks have, in their order. `mine` may be a view of its place there."""
    torch.ops.meshwright.all_gather(out, mine, group.group_name)


def scatter_sum_into(out: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
    """`out` becomes this rank's part of the sum over all ranks. They are added up in their order."""
    torch.ops.meshwright.reduce_scatter(out, summands, group.group_name)


def _all_gather(out: Tensor, mine: Tensor, name: str) -> None:
    group = _named(name)
    places = out.chunk(group.size())
    place = places[group.rank()]
    if place.data_ptr() != mine.data_ptr():
        place.copy_(mine)
    _swap([place] * len(places), places, group)


def _reduce_scatter(out: Tensor, summands: Tensor, name: str) -> None:
    """Piece by piece, so that what comes takes little memory, and is added up while it is in the cache."""
    group = _named(name)
    mine, rooms = group.rank(), out.new_empty(group.size(), min(_PIECE, out.numel()))
    parts = [part.split(_PIECE) for part in summands.chunk(group.size())]
    for total, *sent in zip(out.split(_PIECE), *parts, strict=True):
        got = [part if rank == mine else rooms[rank, : part.numel()] for rank, part in enumerate(sent)]
        _swap(sent, got, group)
        total.copy_(got[0])
        for part in got[1:]:
            total.add_(part)


def _swap(sent: Sequence[Tensor], got: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send each other rank its part, and receive what it has for this one."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    begun: list[Any] = []
    _UNDER_WAY.append((begun, sent, got))
    begun += (dist.irecv(got[rank], group=group, group_src=rank) for rank in others)
    begun += (dist.isend(sent[rank], group=group, group_dst=rank) for rank in others)
    for work in begun:
        work.wait()
    _UNDER_WAY.pop()


def _named(name: str) -> dist.ProcessGroup:
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


_LIBRARY.impl("all_gather", _all_gather, "CPU")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CPU")
