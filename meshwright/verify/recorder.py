"""See every collective that really runs: operation, ranks, bytes.

A `Recorder` with a store also makes the ranks of a group compare what they are about to do, so that ranks that
disagree get an error that says who stands where, and not a hang.
"""

from __future__ import annotations

import datetime
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch._subclasses import FakeTensor
from torch.library import Library

from ..errors import RankError
from ..watch import waits_at

_OURS = {
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "all_to_all"),
}
TRANSFERS = ("send", "recv")  # between two ranks of a group: its others do something else
_REDUCTIONS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class Seen:
    """`num_bytes` is the larger side; of an all-to-all, what comes in. `at`: the door, where one said so."""

    op: str
    ranks: tuple[int, ...]
    num_bytes: int
    at: str = ""

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes} bytes among ranks {list(self.ranks)}"


class Recorder:
    """`with Recorder() as recorder: ...`, then `recorder.seen`.

    Only collectives pass by here on their way to where they run, from whatever thread: all else costs nothing.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, seconds: float = 20.0) -> None:
        self.seen: list[Seen] = []
        self._store, self._rank, self._seconds = store, rank, seconds
        self._turns: Counter[tuple[int, ...]] = Counter()

    def __enter__(self) -> Self:
        _listen()
        _RECORDERS.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _RECORDERS.remove(self)

    def announce(self, op: str, args: tuple[Any, ...]) -> None:
        if op not in TRANSFERS:
            self._agree(_announced(op, args) + waits_at(), _ranks(args))

    def note(self, op: str, args: tuple[Any, ...], out: Any) -> None:
        sizes = [t.nbytes for t in _tensors((args, out))] or [0]
        self.seen.append(Seen(op, _ranks(args), sizes[-1] if op == "all_to_all" else max(sizes), waits_at()))

    def _agree(self, mine: str, ranks: tuple[int, ...]) -> None:
        """Wait until all ranks of the group say what they are about to do; raise if it is not the same."""
        if self._store is None or len(ranks) < 2:
            return
        turn, self._turns[ranks] = self._turns[ranks], self._turns[ranks] + 1
        self._store.set(f"{ranks}/{turn}/{self._rank}", mine)
        for other in ranks:
            try:
                self._store.wait([f"{ranks}/{turn}/{other}"], datetime.timedelta(seconds=self._seconds))
            except dist.DistStoreError:
                raise RankError(
                    f"rank {other} did not come to collective {turn} of ranks {list(ranks)}, where rank {self._rank} "
                    f"stands at {mine}, within {self._seconds:.0f} s"
                ) from None
            theirs = self._store.get(f"{ranks}/{turn}/{other}").decode()
            if theirs != mine:
                raise RankError(
                    f"collective {turn} of ranks {list(ranks)}: rank {self._rank} is at {mine}, "
                    f"rank {other} at {theirs}"
                )


_RECORDERS: list[Recorder] = []


@functools.cache
def _listen() -> list[Library]:
    """Once in a process, and for good; the libraries must be kept. BackendSelect is what is dispatched last, behind
    compilers, autograd, and selective checkpointing, which answers from what it has kept."""
    kept = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition(".")[0].partition("::")
        if space in ("c10d", "_c10d_functional", "meshwright") and name != "wait_tensor":
            op, packet = name.rstrip("_"), getattr(getattr(torch.ops, space), name)
            for func in (getattr(packet, overload) for overload in packet.overloads()):
                recorded = functools.partial(_recorded, func, _OURS.get(op, op))
                kept.append(Library(space, "IMPL"))
                kept[-1].impl(func, recorded, "BackendSelect", with_keyset=True)
    return kept


def _recorded(func: Any, op: str, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """What a collective is made of comes by here too, and what a compiler or the meta device only imagines: none of
    these is one more."""
    keys = keys.remove(torch._C.DispatchKey.BackendSelect)
    if not _RECORDERS:
        return func.redispatch(keys, *args, **kwargs)
    recorders = _RECORDERS.copy()
    _RECORDERS.clear()
    asked = [] if any(t.is_meta or isinstance(t, FakeTensor) for t in _tensors(args)) else recorders
    try:
        for recorder in asked:
            recorder.announce(op, args)
        out = func.redispatch(keys, *args, **kwargs)
        for recorder in asked:
            recorder.note(op, args, out)
        return out
    finally:
        _RECORDERS.extend(recorders)


def _announced(op: str, args: tuple[Any, ...]) -> str:
    """The operation, and the bytes that every rank of the group must bring alike. With splits, ranks may differ."""
    if op == "all_to_all" and any(isinstance(arg, list | tuple) and arg and isinstance(arg[0], int) for arg in args):
        return op
    return f"{op} of {max((t.nbytes for t in _tensors(args)), default=0)} bytes"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors(part)]
    return []


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    names = [arg for arg in args if isinstance(arg, str) and arg not in _REDUCTIONS]
    if not names:  # point to point
        return ()
    group = torch._C._distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))
