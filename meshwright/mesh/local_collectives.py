"""Collectives between CPU ranks of one machine, over Unix sockets (mesh/local_sockets.py).

gloo gathers into a buffer and copies from it, and implements reduce-scatter as a full reduction on every rank. These
send parts from their place in memory, and receive parts of other ranks directly into place. Sums are added up in the
order of ranks. All are synchronous. They are registered as torch ops, so that the recorder of `verify` and selective
checkpointing see them. Those that return a tensor have the names of torch's functional collectives. Compilers cannot
trace them.
"""

from __future__ import annotations

import datetime
import signal
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.library import Library

from ..ops.part_sizes import part_size
from ..watch import deferred_signal
from .local_sockets import LocalSockets

_LIBRARY = Library("meshwright", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) out, Tensor own_rows, str group) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) out, Tensor summands, str group) -> ()")
_LIBRARY.define("all_reduce(Tensor(a!) x, str op, str group) -> ()")
_LIBRARY.define("all_gather_into_tensor(Tensor x, int size, str group) -> Tensor")
_LIBRARY.define("reduce_scatter_tensor(Tensor x, str op, int size, str group) -> Tensor")
_LIBRARY.define("all_to_all_single(Tensor x, SymInt[] outs, SymInt[] ins, str group) -> Tensor")

_PIECE = part_size(__name__, "_PIECE", 1 << 20, small=1009)  # elements of each rank that are received at once
_WHOLE = part_size(__name__, "_WHOLE", 1 << 13, small=5)  # elements up to which an all-reduce sends all to all ranks

_SOCKETS: WeakKeyDictionary[dist.ProcessGroup, LocalSockets] = WeakKeyDictionary()
_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()  # those served, by name


def serve(group: dist.ProcessGroup, machines: Sequence[str], store: Store, timeout: datetime.timedelta) -> None:
    """Let these collectives serve a gloo group of CPU ranks, if all of them are on one machine.

    Between machines gloo sends less: its rings cross the network once, while each rank would send its parts over it to
    every other rank. `machines`: one description for each rank of the group (`local_sockets.machine_of`), the same list
    on all of them, so that all make the same choice.
    """
    if "cpu:gloo" in dist.get_backend_config(group) and {*machines} == {machines[0]} != {""}:
        store, ranks = PrefixStore("local sockets", store), dist.get_process_group_ranks(group)
        _GROUPS[group.group_name] = group
        _SOCKETS[group] = LocalSockets(group.group_name, ranks, group.rank(), store, timeout)


def serves(group: dist.ProcessGroup) -> bool:
    """Return whether a group uses these collectives."""
    return group in _SOCKETS


def serves_named(name: str) -> bool:
    """Return whether the group of this name uses these collectives.

    After `destroy_process_group` torch reuses names, so an entry of an earlier group does not count.
    """
    group = _GROUPS.get(name)
    return group is not None and group is torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def all_gather_into(out: Tensor, own_rows: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with the rows of all ranks, in order. `own_rows` may be a view of its place in `out`."""
    torch.ops.meshwright.all_gather(out, own_rows, group.group_name)


def reduce_scatter_into(out: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with this rank's part of the sum over all ranks."""
    torch.ops.meshwright.reduce_scatter(out, summands, group.group_name)


def all_reduce_(x: Tensor, op: str, group: dist.ProcessGroup) -> None:
    """Replace a contiguous `x` by the "sum" or the "max" over all ranks."""
    torch.ops.meshwright.all_reduce(x, op, group.group_name)


def _all_gather(out: Tensor, own_rows: Tensor, name: str) -> None:
    group = _GROUPS[name]
    slots = out.chunk(group.size())
    own_slot = slots[group.rank()]
    if own_slot.data_ptr() != own_rows.data_ptr():
        own_slot.copy_(own_rows)
    _exchange([own_slot] * len(slots), slots, group, "all_gather")


def _reduce_scatter(out: Tensor, summands: Tensor, name: str) -> None:
    group = _GROUPS[name]
    _add_up(out, summands.chunk(group.size()), "sum", group, "reduce_scatter")


def _all_reduce(x: Tensor, op: str, name: str) -> None:
    """Send all to all ranks, or for a large tensor to each rank the part that it adds up."""
    group = _GROUPS[name]
    flat = x.view(-1)
    if x.numel() <= _WHOLE:
        _add_up(flat, [flat] * group.size(), op, group, "all_reduce")
        return
    parts = flat.tensor_split(group.size())
    own_part = parts[group.rank()]
    _add_up(own_part, parts, op, group, "all_reduce in parts")
    _exchange([own_part] * group.size(), parts, group, "all_gather of sums")


def _add_up(out: Tensor, parts: Sequence[Tensor], op: str, group: dist.ProcessGroup, what: str) -> None:
    """Send each rank its part, and add up what the ranks send, in their order. `out` may be this rank's own part.

    `what`: the collective. Parts travel piece by piece: buffers stay small, and a piece is added while it is in the
    cache.
    """
    own_rank, buffers = group.rank(), out.new_empty(group.size(), min(_PIECE, out.numel()))
    add = Tensor.add_ if op == "sum" else _maximum_
    num_pieces = max(-(-part.numel() // _PIECE) for part in parts)
    for piece in range(num_pieces):
        at = slice(piece * _PIECE, (piece + 1) * _PIECE)
        total, sent = out[at], [part[at] for part in parts]
        received = [buffer[: total.numel()] for buffer in buffers]
        received[own_rank].copy_(sent[own_rank])
        _exchange(sent, received, group, f"{op}, {what}")
        total.copy_(received[0])
        for part in received[1:]:
            add(total, part)


def _maximum_(total: Tensor, part: Tensor) -> None:
    torch.maximum(total, part, out=total)


def _all_gather_into_tensor(x: Tensor, size: int, name: str) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    _all_gather(out, x, name)
    return out


def _reduce_scatter_tensor(x: Tensor, op: str, size: int, name: str) -> Tensor:
    if x.shape[0] % size:
        raise ValueError(f"{x.shape[0]} rows cannot be shared out over {size} ranks")
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    _add_up(out.view(-1), x.view(-1).chunk(size), op, _GROUPS[name], "reduce_scatter")
    return out


def _all_to_all_single(x: Tensor, outs: Sequence[int], ins: Sequence[int], name: str) -> Tensor:
    group, out = _GROUPS[name], x.new_empty(sum(outs), *x.shape[1:])
    sent, received = x.split([*ins]), out.split([*outs])
    received[group.rank()].copy_(sent[group.rank()])
    _exchange(sent, received, group, "all_to_all")
    return out


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup, what: str) -> None:
    if group.size() > 1:
        dtype = str(sent[group.rank()].dtype).removeprefix("torch.")
        _SOCKETS[group].exchange(sent, received, f"{dtype} {what}")


def _implement(name: str, function: Callable[..., Tensor | None]) -> None:
    """Register the implementation of an op, whose last argument names the group.

    An interrupt waits until its end, and an error closes the connections. Otherwise the other ranks would take this
    rank's next collective for this one, or for the rest of it.
    """

    def uninterrupted(*args: Any) -> Tensor | None:
        with deferred_signal(signal.SIGINT), torch.no_grad():
            try:
                return function(*args)
            except BaseException as error:
                if group := _GROUPS.get(args[-1]):
                    _SOCKETS[group].fail(error)
                raise

    _LIBRARY.impl(name, uninterrupted, "CPU")


_implement("all_gather", _all_gather)
_implement("reduce_scatter", _reduce_scatter)
_implement("all_reduce", _all_reduce)
_implement("all_gather_into_tensor", _all_gather_into_tensor)
_implement("reduce_scatter_tensor", _reduce_scatter_tensor)
_implement("all_to_all_single", _all_to_all_single)
