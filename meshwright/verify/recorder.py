"""Record every collective that runs: operation, ranks, bytes.

The recorder hooks into torch's dispatcher, so it sees collectives of FSDP, of autograd and of compiled code as well as
Meshwright's own. A `Recorder` with a store also makes the ranks of a group compare their next collective. Ranks that
disagree raise an error that names each rank's place, instead of hanging until the timeout.
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

# Names of the same collective in c10d, in the functional collectives and in Meshwright's own ops.
_OPS = {
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_into_tensor"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor"), "reduce_scatter"),
    **dict.fromkeys(("allreduce", "all_reduce"), "all_reduce"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "all_to_all"),
}
TRANSFERS = ("send", "recv")  # between two ranks of a group, while its other ranks do something else
_REDUCTIONS = ("sum", "avg", "product", "min", "max")


@dataclass(frozen=True)
class RecordedCollective:
    """One collective. `num_bytes` is its larger side; for an all-to-all, what the rank receives.

    `at`: the place, such as a door, that the code had announced when the collective ran (`watch.waits_at`).
    """

    op: str
    ranks: tuple[int, ...]
    num_bytes: int
    at: str = ""

    def __str__(self) -> str:
        return f"{self.op} of {self.num_bytes} bytes among ranks {list(self.ranks)}"


class Recorder:
    """A context manager that records: `with Recorder() as recorder: ...`, then `recorder.collectives`.

    Only collectives pass through it, from any thread, so all other work runs at full speed. A recorder that is entered
    again continues the same record.
    """

    def __init__(self, store: Store | None = None, rank: int = 0, seconds: float = 20.0) -> None:
        self.collectives: list[RecordedCollective] = []
        self._store, self._rank, self._seconds = store, rank, seconds
        self._turns: Counter[tuple[int, ...]] = Counter()

    def __enter__(self) -> Self:
        _listen()
        _RECORDERS.append(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _RECORDERS.remove(self)

    def announce(self, op: str, args: tuple[Any, ...]) -> None:
        """Compare the coming collective with that of the other ranks. Transfers are not compared."""
        if op not in TRANSFERS:
            self._agree(_description(op, args) + waits_at(), _ranks(args))

    def note(self, op: str, args: tuple[Any, ...], out: Any) -> None:
        """Append a collective that ran."""
        sizes = [t.nbytes for t in _tensors((args, out))] or [0]
        self.collectives.append(
            RecordedCollective(op, _ranks(args), sizes[-1] if op == "all_to_all" else max(sizes), waits_at())
        )

    def _agree(self, local: str, ranks: tuple[int, ...]) -> None:
        """Wait until all ranks of the group have announced their next collective; raise if they differ.

        Each rank numbers the collectives of a group (`turn`), so ranks that agreed so far meet under one key.
        """
        if self._store is None or len(ranks) < 2:
            return
        turn, self._turns[ranks] = self._turns[ranks], self._turns[ranks] + 1
        keys = {other: f"{ranks}/{turn}/{other}" for other in ranks if other != self._rank}
        self._store.set(f"{ranks}/{turn}/{self._rank}", local)
        missing = list[int]()
        try:  # for all ranks at once: each call is a round trip to the store, and a trial has thousands
            self._store.wait([*keys.values()], datetime.timedelta(seconds=self._seconds))
        except dist.DistStoreError:
            present = {other: key for other, key in keys.items() if self._store.check([key])}
            missing, keys = [other for other in keys if other not in present], present
        for other, remote in zip(keys, self._store.multi_get([*keys.values()]), strict=True):
            if remote.decode() != local:
                raise RankError(
                    f"collective {turn} of ranks {list(ranks)}: rank {self._rank} is at {local}, "
                    f"rank {other} at {remote.decode()}"
                )
        if missing:
            raise RankError(
                f"rank {missing[0]} did not reach collective {turn} of ranks {list(ranks)} within {self._seconds:.0f} "
                f"s; rank {self._rank} waits at {local}"
            )


_RECORDERS: list[Recorder] = []


@functools.cache
def _listen() -> list[Library]:
    """Intercept all collectives of this process, once and for good. Without a recorder they pass straight through.

    The key is BackendSelect, the last that is dispatched before the backend. Compilers, autograd and selective
    checkpointing come before it, so a collective that they answer from saved results is not counted. The returned
    libraries must stay alive: torch drops the interception with them.
    """
    libraries = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition(".")[0].partition("::")
        if space in ("c10d", "_c10d_functional", "meshwright") and name != "wait_tensor":
            op, packet = name.rstrip("_"), getattr(getattr(torch.ops, space), name)
            for func in (getattr(packet, overload) for overload in packet.overloads()):
                recorded = functools.partial(_recorded, func, _OPS.get(op, op))
                libraries.append(Library(space, "IMPL"))
                libraries[-1].impl(func, recorded, "BackendSelect", with_keyset=True)
    return libraries


def _recorded(func: Any, op: str, keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
    """Run a collective and note it with all recorders.

    Two kinds are not counted: a collective that implements another one, so the list is empty while one runs; and a
    collective on meta or fake tensors, which a compiler only traces.
    """
    keys = keys.remove(torch._C.DispatchKey.BackendSelect)
    if not _RECORDERS:
        return func.redispatch(keys, *args, **kwargs)
    recorders = _RECORDERS.copy()
    _RECORDERS.clear()
    active = [] if any(t.is_meta or isinstance(t, FakeTensor) for t in _tensors(args)) else recorders
    try:
        for recorder in active:
            recorder.announce(op, args)
        out = func.redispatch(keys, *args, **kwargs)
        for recorder in active:
            recorder.note(op, args, out)
        return out
    finally:
        _RECORDERS.extend(recorders)


def _description(op: str, args: tuple[Any, ...]) -> str:
    """Describe what all ranks of a group must agree on: the operation and its bytes.

    An all-to-all with split sizes may differ in bytes, as experts receive what the router sends them.
    """
    if op == "all_to_all" and any(isinstance(arg, list | tuple) and arg and isinstance(arg[0], int) for arg in args):
        return op
    return f"{op} of {max((t.nbytes for t in _tensors(args)), default=0)} bytes"


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists of arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors(part)]
    return []


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the global ranks of a collective's group, which is an object in c10d and a name elsewhere."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    names = [arg for arg in args if isinstance(arg, str) and arg not in _REDUCTIONS]
    if not names:  # point to point
        return ()
    group = torch._C._distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))
