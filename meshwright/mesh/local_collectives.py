"""All-gather and reduce-scatter between CPU ranks of one machine, in a third to two thirds of gloo's time.

gloo gathers into a buffer and copies from it, and implements reduce-scatter as a full reduction on every rank. These
two send parts from their place in memory, and receive parts of other ranks directly into place. Both are registered as
torch ops, so that the recorder of `verify` counts one collective and not its sends.
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
from ..watch import deferred_signal

_LIBRARY = Library("meshwright", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) out, Tensor own_rows, str group) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) out, Tensor summands, str group) -> ()")

_PIECE = part_size(__name__, "_PIECE", 1 << 20, small=1009)  # elements of each rank that are received at once

# The number of collectives that each group has run serves as their tag. Ranks that have diverged then time out, instead
# of mistaking one rank's gradients for another's weights.
_TURNS: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()

# gloo aborts when a pending transfer is garbage-collected. So transfers that an error has interrupted stay referenced.
_INTERRUPTED: list[Any] = []


def serves(group: dist.ProcessGroup, device: torch.device, node: range) -> bool:
    """Return whether these collectives serve a group: CPU tensors, over gloo, within one machine.

    Between machines gloo sends less: its rings cross the network once, while each rank would send its parts over it to
    every other rank.
    """
    is_local = all(rank in node for rank in dist.get_process_group_ranks(group))
    return device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group) and is_local


def all_gather_into(out: Tensor, own_rows: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with the rows of all ranks, in order. `own_rows` may be a view of its place in `out`."""
    torch.ops.meshwright.all_gather(out, own_rows, group.group_name)


def reduce_scatter_into(out: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with this rank's part of the sum over all ranks, added up in the order of ranks."""
    torch.ops.meshwright.reduce_scatter(out, summands, group.group_name)


def _all_gather(out: Tensor, own_rows: Tensor, name: str) -> None:
    group = _named(name)
    slots = out.chunk(group.size())
    own_slot = slots[group.rank()]
    if own_slot.data_ptr() != own_rows.data_ptr():
        own_slot.copy_(own_rows)
    # A rank that is interrupted in between would receive the rest as its next transfer.
    with deferred_signal(signal.SIGINT):
        _swap([own_slot] * len(slots), slots, group, _tag(group, "gather"))


def _reduce_scatter(out: Tensor, summands: Tensor, name: str) -> None:
    """Receive and add up piece by piece: buffers stay small, and a piece is added while it is in the cache."""
    group = _named(name)
    own_rank, buffers = group.rank(), out.new_empty(group.size(), min(_PIECE, out.numel()))
    parts = [part.split(_PIECE) for part in summands.chunk(group.size())]
    tag = _tag(group, "sum")
    with deferred_signal(signal.SIGINT):
        for total, *sent in zip(out.split(_PIECE), *parts, strict=True):
            received = [part if rank == own_rank else buffers[rank, : part.numel()] for rank, part in enumerate(sent)]
            _swap(sent, received, group, tag)
            total.copy_(received[0])
            for part in received[1:]:
                total.add_(part)


def _swap(sent: Sequence[Tensor], got: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> None:
    """Send each other rank its part, and receive the part that it has for this rank."""
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    pending: list[Any] = []
    try:
        pending += (dist.irecv(got[rank], group=group, group_src=rank, tag=tag) for rank in others)
        pending += (dist.isend(sent[rank], group=group, group_dst=rank, tag=tag) for rank in others)
        for work in pending:
            work.wait()
    except BaseException:
        _INTERRUPTED.append((pending, sent, got))
        raise


def _tag(group: dist.ProcessGroup, kind: str) -> int:
    """Return a new tag for each collective of a group. 0 is the tag of all other transfers."""
    num_runs = _TURNS.setdefault(group, Counter())
    num_runs[kind] += 1
    return 1 + 2 * (num_runs[kind] % (1 << 20)) + (kind == "sum")


def _named(name: str) -> dist.ProcessGroup:
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


_LIBRARY.impl("all_gather", _all_gather, "CPU")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CPU")
