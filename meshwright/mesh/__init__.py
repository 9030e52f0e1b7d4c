"""The mesh of a run: its device, its process groups, and what ranks say to each other.

Nothing else makes process groups or knows a device by its name. A collective over axes of size 1 does nothing, so the
same code serves one rank and many.
"""

from __future__ import annotations

import atexit
import datetime
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from ..axes import DENSE, Axes, Sum
from ..errors import MeshError, MeshwrightError, RankError, failure_in
from ..watch import Watch, here, waiting_at
from .collectives import gather
from .hosts import rounds
from .memory_limits import Memory, memory_of

Made = TypeVar("Made")


class Mesh:
    """The mesh of a run: joins the process group that torchrun describes; with no torchrun, one process.

    >>> mesh = Mesh(fsdp=2, tp=2)          # under `torchrun --nproc-per-node 4`   # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        replicate: int = 1,
        fsdp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        device: str | torch.device | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.axes = Axes(pp, replicate, fsdp, cp, tp, ep)
        if not timeout_s > 0:
            raise MeshError(f"timeout_s={timeout_s!r}: it must be a number of seconds above 0")
        world = dist.get_world_size() if dist.is_initialized() else _from_torchrun("WORLD_SIZE", 1)
        if self.axes.world != world:
            if self.axes.world == 1:
                raise MeshError(
                    f"{world} processes run, but the mesh is of one; give one of {world}: mw.Mesh(fsdp={world})"
                )
            raise MeshError(
                f"the mesh {self.axes} needs {self.axes.world} processes, but {world} run; "
                f"start it with torchrun --nproc-per-node {self.axes.world}, or choose sizes whose product is {world}"
            )
        self.device = _device(device)
        self.host = torch.device("cpu")
        self.timeout = datetime.timedelta(seconds=timeout_s)
        _join(self.device, self.timeout)
        self.rank = dist.get_rank()
        self.coords = self.axes.coords(self.rank)
        self.cut_off = ""  # by what a pass through a pipeline was, whose transfers are then still under way
        self.under_way: object = None  # keeps those transfers alive, or the ranks cannot even tell each other of it
        self._refuse_another()

    def _refuse_another(self) -> None:
        """Ranks that make different meshes would wait for one another in groups that never form."""
        mine = f"{self.axes} on {self.device.type}"
        told = self.gather_objects((mine, self.memory.device_bytes), DENSE)
        self.least_bytes = min(num_bytes for _, num_bytes in told)  # of a device of any rank
        for rank, (other, _) in enumerate(told):
            if other != mine:
                raise MeshError(
                    f"the mesh is {other} on rank {rank}, and {mine} on rank {self.rank}; make the same on all"
                )

    @cached_property
    def dense(self) -> DeviceMesh:
        """What FSDP shards dense parameters over: flattened `fsdp x cp`, replicated over `replicate`."""
        return self._device_mesh(("replicate", "fsdp", "cp"), ("replicate", "shard"))

    @cached_property
    def expert(self) -> DeviceMesh:
        return self._device_mesh(("replicate", "efsdp"), ("replicate", "shard"))

    def _device_mesh(self, axes: tuple[str, ...], names: tuple[str, str]) -> DeviceMesh:
        """This rank's own mesh over `axes`: `[replicate, all others]`, or one-dimensional without replicas."""
        ranks = torch.tensor(self.axes.group(self.rank, axes)).view(self.axes.replicate, -1)
        shard = self.process_group(axes[1:])
        if self.axes.replicate == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=names[1:])
        both = [self.process_group(("replicate",)), shard]
        return DeviceMesh.from_group(both, self.device.type, mesh=ranks, mesh_dim_names=names)

    def process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one only on `axes`. Axes that part all ranks alike share it: on
        all ranks or on none. A rank that has such a group already, while others have not, must make theirs too."""
        if axes not in self._group_over:
            parts = tuple(self.axes.groups(axes))
            if parts not in self._group_of:
                self._group_of[parts] = self._make(parts, f"the making of the groups over {' x '.join(axes)}")
            self._group_over[axes] = self._group_of[parts]
        return self._group_over[axes]

    def host_groups(self, axes: tuple[str, ...]) -> list[dist.ProcessGroup]:
        """Those between which the hosts of `axes` tell each other numbers, one for each round: on all ranks or on none,
        as `process_group`."""
        if self.device == self.host:
            return [self.process_group(axes)]
        if axes not in self._hosts_over:
            at, parts_of = f"the making of the groups of hosts over {' x '.join(axes)}", rounds(self.axes.groups(axes))
            for parts in parts_of:
                if parts not in self._hosts_of:
                    self._hosts_of[parts] = self._make(parts, at, "gloo")
            self._hosts_over[axes] = [self._hosts_of[parts] for parts in parts_of]
        return self._hosts_over[axes]

    def _make(self, parts: Iterable[tuple[int, ...]], at: str, backend: str | None = None) -> dist.ProcessGroup:
        """Every rank makes every group, in the same order. The default group is the user's: his calls in a thread
        (torch's asynchronous save makes some) would meet ours in another order on each rank."""
        made: list[Any] = []
        for ranks in parts:
            with waiting_at(at):
                group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            if self.rank in ranks:
                made.append(group)
        return made[0]

    @cached_property
    def _group_over(self) -> dict[tuple[str, ...], Any]:
        return {}

    @cached_property
    def _group_of(self) -> dict[tuple[tuple[int, ...], ...], Any]:
        """By the groups of all ranks."""
        return {}

    @cached_property
    def _hosts_over(self) -> dict[tuple[str, ...], list[Any]]:
        return {}

    @cached_property
    def _hosts_of(self) -> dict[tuple[tuple[int, ...], ...], Any]:
        return {}

    def name_of(self, axes: tuple[str, ...]) -> str:
        return self.process_group(axes).group_name

    def size_of(self, axes: tuple[str, ...]) -> int:
        return len(self.ranks_over(axes))

    def ranks_over(self, axes: tuple[str, ...]) -> Tensor:
        """The ranks that differ from this one at most on `axes`, in order. They are reckoned once: they may be many."""
        if axes not in self._ranks_over:
            self._ranks_over[axes] = torch.tensor(self.axes.group(self.rank, axes), device=self.host)
        return self._ranks_over[axes]

    @cached_property
    def _ranks_over(self) -> dict[tuple[str, ...], Tensor]:
        return {}

    def sum_(self, x: Tensor, over: Sum) -> Tensor:
        """Sum `x` in place over the ranks that `over` names."""
        if self.size_of(over.axes) > 1:
            with waiting_at(over.name):
                dist.all_reduce(x, group=self.process_group(over.axes))
        return x

    def most_(self, x: Tensor, at: str, axes: tuple[str, ...] | None = None) -> Tensor:
        """The most that any rank of `axes` has of each number, in place; by default any rank at all."""
        axes = DENSE if axes is None else axes
        if self.size_of(axes) > 1:
            with waiting_at(at):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.process_group(axes))
        return x

    def gather_rows(self, x: Tensor, axes: tuple[str, ...], at: str = "a gathering of rows") -> Tensor:
        """The rows `[n, ...]` of every rank of `axes`, in their order. `n` is the same on all ranks. No gradients."""
        size = self.size_of(axes)
        if size == 1:
            return x
        with waiting_at(at):
            return gather(x, size, self.name_of(axes))

    def gather_on_hosts(self, numbers: Sequence[float], axes: tuple[str, ...], at: str) -> Tensor:
        """What every rank of `axes` tells, a row for each, in float64 on the host. No device takes part: what is queued
        there would have to be done first."""
        rows = torch.tensor([list(numbers)], dtype=torch.float64, device=self.host)
        groups = self.host_groups(axes) if self.size_of(axes) > 1 else []
        with waiting_at(at):
            for group in groups:
                rows = gather(rows, group.size(), group.group_name)
        return rows

    def read(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Numbers of the device, in float64 on the host. It is one copy, so the host waits once for all of them."""
        flat = torch.cat([x.double().flatten() for x in found])
        with waiting_at("what the device has found"):
            here = flat.to(self.host)
        parts = here.split([x.numel() for x in found])
        return [part.view(x.shape) for part, x in zip(parts, found, strict=True)]

    def gather_objects(self, x: Any, axes: tuple[str, ...]) -> list[Any]:
        """An object of every rank of `axes`, by pickle. Slow: for what is done once, and for errors."""
        if self.size_of(axes) == 1:
            return [x]
        out: list[Any] = [None] * self.size_of(axes)
        with waiting_at("a gathering of settings"):
            dist.all_gather_object(out, x, group=self.process_group(axes))
        return out

    def store(self, prefix: str) -> Store:
        """What all ranks can write and read without a collective, through a connection of its own."""
        store = dist.distributed_c10d._get_default_store()
        return PrefixStore(prefix, store.clone() if self.axes.world > 1 else store)  # type: ignore[attr-defined] # torch's stub lacks it

    def of_rank_0(self, x: Any) -> Any:
        """What rank 0 has, by pickle. What the others give is not looked at."""
        if self.axes.world == 1:
            return x
        told = [x]
        with waiting_at("what rank 0 tells"):
            dist.broadcast_object_list(told, src=0, group=self.process_group(DENSE), device=self.device)
        return told[0]

    def send(self, x: Tensor, rank: int, at: str) -> None:
        """To a rank that receives it. Returns when `x` may be written again."""
        with waiting_at(at):
            dist.send(x, rank, group=self.process_group(DENSE))
            self.settle()

    def receive(self, x: Tensor, rank: int, at: str) -> Tensor:
        """Fill `x` with what that rank sends."""
        with waiting_at(at):
            dist.recv(x, rank, group=self.process_group(DENSE))
        return x

    def all_or_none(
        self, failure: BaseException | None, at: str, error: type[MeshwrightError] | None = None,
        numbers: Sequence[float] = (), axes: tuple[str, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        """If a rank failed, every rank raises: that rank its `failure`, the others an error that names it, and why.

        So no rank waits for one that has given up. Otherwise it returns the `numbers` that each rank told, a row for
        each, on the host. `error`: the class that the others raise, RankError by default. `axes`: between which ranks,
        all by default.
        """
        axes = DENSE if axes is None else axes
        rows = self.gather_on_hosts((float(failure is not None), *numbers), axes, at)
        if bool(rows[:, 0].any()):
            reason = None if failure is None else f"{type(failure).__name__}: {failure!s:.1000}"
            told = zip(self.ranks_over(axes).tolist(), self.gather_objects(reason, axes), strict=True)
            raise failure or (error or RankError)(
                next(f"rank {rank} failed in {at}: {why}" for rank, why in told if why)
            )
        return rows[:, 1:]

    def together(self, act: Callable[[], Made], at: str, error: type[MeshwrightError], what: str) -> Made:
        """Run what each rank does alone. If it fails on any rank, all raise `error`, as in `all_or_none`.

        `what` begins the message of the rank that failed: "nothing was loaded: " and the reason.
        """
        made = list[Made]()
        self.all_or_none(failure_in(lambda: made.append(act()), error, what), at, error)
        return made[0]

    def settle(self) -> None:
        """Wait for the device. NCCL times a send from when it is queued, so a queue that is long would time out."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def token_range(self, num_tokens: int) -> tuple[int, int]:
        """Which tokens of its data rank's stream this rank works on: a contiguous part, by (cp, tp)."""
        share = num_tokens // (self.axes.cp * self.axes.tp)
        at = self.coords["cp"] * self.axes.tp + self.coords["tp"]
        return at * share, (at + 1) * share

    @property
    def node(self) -> range:
        """The ranks on this rank's machine: neighbours, as torchrun numbers them. Without torchrun, all."""
        size = _from_torchrun("LOCAL_WORLD_SIZE", self.axes.world)
        if self.axes.world % size:
            raise MeshError(f"{self.axes.world} ranks are not whole nodes of LOCAL_WORLD_SIZE={size}")
        first = self.rank - self.rank % size
        return range(first, first + size)

    @property
    def memory(self) -> Memory:
        """The memory that this rank may use."""
        return memory_of(self.device, len(self.node))

    @property
    def data_rank(self) -> int:
        """Which of `num_data_ranks` streams this rank reads: the same for ranks that differ only in cp, tp, pp."""
        return self.axes.data_rank(self.rank)

    @property
    def num_data_ranks(self) -> int:
        return self.axes.num_data_ranks

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, rank {self.rank} of {self.axes.world} on {self.device})"


def _device(wanted: str | torch.device | None) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        dist.get_default_backend_for_device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise MeshError(f"device={wanted!r} cannot be used: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeshError(f"device={wanted!r}: torch finds no such device here; choose device='cpu', or see nvidia-smi")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", _from_torchrun("LOCAL_RANK", 0, least=0))
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise MeshError(
                f"{device} is not there: this process sees {torch.cuda.device_count()} devices. LOCAL_RANK chooses; "
                "where a launcher shows each process one device alone, give device='cuda:0'"
            )
        torch.cuda.set_device(device)
    return device


def _from_torchrun(name: str, alone: int, least: int = 1) -> int:
    """A number that torchrun left in the environment; `alone` without torchrun."""
    text = os.environ.get(name, str(alone))
    lacking = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if name == "WORLD_SIZE" and name in os.environ and lacking:
        raise MeshError(f"WORLD_SIZE={text} without {', '.join(lacking)}: start with torchrun, or unset WORLD_SIZE")
    if not text.isdecimal() or int(text) < least:
        raise MeshError(f"{name}={text!r} of the environment must be a whole number of at least {least}")
    return int(text)


# Torch's flight recorder, if the user has not set it himself, by these names or by older ones.
_RECORDER = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): os.path.join(
        tempfile.gettempdir(), "meshwright_flight_rank_"
    ),
}


def _record(device: torch.device) -> str:
    """Have torch write down what the devices do; where that lies once a collective fails."""
    if device.type == "cpu":
        return ""
    *_, at = [_set_unless_known(names, value) for names, value in _RECORDER.items()]
    return f"What the devices did: {at}*, to be read with torchfrtrace."


def _set_unless_known(names: tuple[str, ...], value: str) -> str:
    """What torch will read: it takes the first of these names that is set."""
    known = [os.environ[name] for name in names if name in os.environ]
    return known[0] if known else os.environ.setdefault(names[0], value)


def _join(device: torch.device, timeout: datetime.timedelta) -> None:
    loud = _record(device)
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            alone = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        atexit.register(_leave)
    if here.watch is None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        here.watch = Watch(store, dist.get_rank(), dist.get_world_size(), timeout.total_seconds(), loud)
        atexit.register(here.watch.leave)  # runs before `_leave`


def _leave() -> None:
    """Before the interpreter shuts down: a process that ends while gloo's threads run is aborted by them."""
    if dist.is_initialized():
        dist.destroy_process_group()
