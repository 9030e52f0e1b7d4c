"""Gathers and sums of shards between processes of one machine, in a third to two thirds of the time that gloo takes.

gloo gathers into memory of its own and copies from there. For a reduce-scatter it sums everything on every rank. Here
each rank sends its parts from where they lie, and receives the others' where they belong. Both are operations of torch,
so that the recorder of `verify` counts one gather or one sum, and not what it is made of.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from ..ops.part_sizes import part_size
from ..watch import deferred

_LIBRARY = Library("meshwright", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) out, Tensor mine, str group) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) out, Tensor summands, str group) -> ()")

_PIECE = part_size(__name__, "_PIECE", 1 << 20, small=1009)  # numbers of each rank that are there at once

# How often each group has gathered and summed. Ranks that are not at the same place wait for each other until the time
# is over, and do not take the one's gradients for the other's weights.
_TURNS: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()

# A transfer that nobody holds any more stops gloo. So what an error broke off stays here.
_BROKEN_OFF: list[Any] = []


def serves(group: dist.ProcessGroup, device: torch.device, node: range) -> bool:
    """Whether what lies on the device goes over gloo, within a machine. Between machines gloo sends less: its rings
    cross a network once, and here each rank would send over it to each."""
    here = all(rank in node for rank in dist.get_process_group_ranks(group))
    return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group) and here


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
    with deferred(signal.SIGINT):  # a rank that leaves something behind would receive it in the place of the next
        _swap([place] * len(places), places, group, _tag(group, "gather"))


def _reduce_scatter(out: Tensor, summands: Tensor, name: str) -> None:
    """Piece by piece, so that what comes takes little memory, and is added up while it is in the cache."""
    group = _named(name)
    mine, rooms = group.rank(), out.new_empty(group.size(), min(_PIECE, out.numel()))
    parts = [part.split(_PIECE) for part in summands.chunk(group.size())]
    tag = _tag(group, "sum")
    with deferred(signal.SIGINT):
        for total, *sent in zip(out.split(_PIECE), *parts, strict=True):
            got = [part if rank == mine else rooms[rank, : part.numel()] for rank, part in enumerate(sent)]
            _swap(sent, got, group, tag)
            total.copy_(got[0])
            for part in got[1:]:
                total.add_(part)


def _swap(sent: Sequence[Tensor], got: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> None:
    """Send each other rank its part, and receive what it has for this one."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    begun: list[Any] = []
    try:
        begun += (dist.irecv(got[rank], group=group, group_src=rank, tag=tag) for rank in others)
        begun += (dist.isend(sent[rank], group=group, group_dst=rank, tag=tag) for rank in others)
        for work in begun:
            work.wait()
    except BaseException:
        _BROKEN_OFF.append((begun, sent, got))
        raise


def _tag(group: dist.ProcessGroup, kind: str) -> int:
    """Another for each gather and each sum of a group. 0 is that of all other transfers."""
    turns = _TURNS.setdefault(group, Counter())
    turns[kind] += 1
    return 1 + 2 * (turns[kind] % (1 << 20)) + (kind == "sum")


def _named(name: str) -> dist.ProcessGroup:
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


_LIBRARY.impl("all_gather", _all_gather, "CPU")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CPU")
