"""The device mesh of a run: its device, its process groups, and small collectives between all ranks.

Nothing else makes process groups or knows a device by its name. A collective over axes of size 1 does nothing, so the
same code serves one rank and many.
"""

from __future__ import annotations

import atexit
import contextlib
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
from ..log import logger
from ..provenance import untried
from ..watch import RAISED, Watch, position, waiting_at
from .collectives import all_gather
from .hosts import rounds
from .memory_limits import Memory, memory_of

Made = TypeVar("Made")


class Mesh:
    """The mesh of a run. It joins the process group that torchrun describes; without torchrun, one process.

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
                    f"{world} processes run, but the mesh has one rank; give it {world}: mw.Mesh(fsdp={world})"
                )
            raise MeshError(
                f"the mesh {self.axes} needs {self.axes.world} processes, but {world} run; "
                f"start it with torchrun --nproc-per-node {self.axes.world}, or choose sizes whose product is {world}"
            )
        self.device = _device(device)
        self.host = torch.device("cpu")
        self.timeout = datetime.timedelta(seconds=timeout_s)
        _join(self.device, self.timeout, eager=self.axes.pp == 1)
        self.rank = dist.get_rank()
        self.coords = self.axes.coords(self.rank)
        # If an error interrupts a pipeline pass: its reason, and its pending transfers. Those must stay referenced:
        # destroying them would break the very connections over which ranks report the error.
        self.cut_off = ""
        self.under_way: object = None
        self._refuse_another()

    def _refuse_another(self) -> None:
        """Refuse meshes that differ between ranks, which would wait for one another in groups that never form."""
        own_mesh = f"{self.axes} on {self.device.type}"
        all_meshes = self.gather_objects((own_mesh, self.memory.device_bytes), DENSE)
        self.least_bytes = min(num_bytes for _, num_bytes in all_meshes)  # the smallest device memory of all ranks
        for rank, (other, _) in enumerate(all_meshes):
            if other != own_mesh:
                raise MeshError(
                    f"the mesh is {other} on rank {rank}, but {own_mesh} on rank {self.rank}; make the same mesh on all"
                )

    @cached_property
    def dense(self) -> DeviceMesh:
        """Return the mesh over which FSDP shards dense parameters: `fsdp x cp` flattened, replicated over `replicate`
        (HSDP).
        """
        return self._device_mesh(("replicate", "fsdp", "cp"), ("replicate", "shard"))

    @cached_property
    def expert(self) -> DeviceMesh:
        """Return the mesh over which FSDP shards experts."""
        return self._device_mesh(("replicate", "efsdp"), ("replicate", "shard"))

    def _device_mesh(self, axes: tuple[str, ...], names: tuple[str, str]) -> DeviceMesh:
        """Return this rank's mesh over `axes`: `[replicate, all others]`, or one-dimensional without replicas."""
        ranks = torch.tensor(self.axes.group(self.rank, axes)).view(self.axes.replicate, -1)
        shard = self.process_group(axes[1:])
        if self.axes.replicate == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=names[1:])
        both = [self.process_group(("replicate",)), shard]
        return DeviceMesh.from_group(both, self.device.type, mesh=ranks, mesh_dim_names=names)

    def process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one only on `axes`.

        Axes that partition the ranks in the same way share a group. Making one is collective over all ranks, so all
        must call this with the same axes in the same order. The cache is therefore keyed by the partition, which is
        equal on all ranks, and not by this rank's own group.
        """
        if axes not in self._group_over:
            parts = tuple(self.axes.groups(axes))
            if parts not in self._group_of:
                self._group_of[parts] = self._make(parts, f"making the groups over {' x '.join(axes)}")
            self._group_over[axes] = self._group_of[parts]
        return self._group_over[axes]

    def host_groups(self, axes: tuple[str, ...]) -> list[dist.ProcessGroup]:
        """Return groups between the hosts of `axes` (gloo), one for each round of `rounds`, to exchange small numbers.

        All ranks or none must call it, as for `process_group`.
        """
        if self.device == self.host:
            return [self.process_group(axes)]
        if axes not in self._hosts_over:
            at, partitions = f"making the groups of hosts over {' x '.join(axes)}", rounds(self.axes.groups(axes))
            for parts in partitions:
                if parts not in self._hosts_of:
                    self._hosts_of[parts] = self._make(parts, at, "gloo")
            self._hosts_over[axes] = [self._hosts_of[parts] for parts in partitions]
        return self._hosts_over[axes]

    def _make(self, parts: Iterable[tuple[int, ...]], at: str, backend: str | None = None) -> dist.ProcessGroup:
        """Make the groups of a partition: every rank makes every group, in the same order; return this rank's.

        The default group belongs to the user. His collectives in another thread (torch's async checkpoint has some)
        would meet ours in another order on each rank.
        """
        own: list[Any] = []
        for ranks in parts:
            with waiting_at(at):
                group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            if self.rank in ranks:
                own.append(group)
        return own[0]

    @cached_property
    def _group_over(self) -> dict[tuple[str, ...], Any]:
        return {}

    @cached_property
    def _group_of(self) -> dict[tuple[tuple[int, ...], ...], Any]:
        """Return the cache of groups, by partition of all ranks."""
        return {}

    @cached_property
    def _hosts_over(self) -> dict[tuple[str, ...], list[Any]]:
        return {}

    @cached_property
    def _hosts_of(self) -> dict[tuple[tuple[int, ...], ...], Any]:
        return {}

    def name_of(self, axes: tuple[str, ...]) -> str:
        """Return the name by which functional collectives know a group."""
        return self.process_group(axes).group_name

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks of a group."""
        return len(self.ranks_over(axes))

    def ranks_over(self, axes: tuple[str, ...]) -> Tensor:
        """Return the ranks that differ from this one at most on `axes`, in order. Cached: there may be thousands."""
        if axes not in self._ranks_over:
            self._ranks_over[axes] = torch.tensor(self.axes.group(self.rank, axes), device=self.host)
        return self._ranks_over[axes]

    @cached_property
    def _ranks_over(self) -> dict[tuple[str, ...], Tensor]:
        return {}

    def all_reduce_(self, x: Tensor, over: Sum) -> Tensor:
        """All-reduce `x` in place: sum over the ranks of a declared `Sum`."""
        if self.size_of(over.axes) > 1:
            with waiting_at(over.name):
                dist.all_reduce(x, group=self.process_group(over.axes))
        return x

    def all_reduce_max_(self, x: Tensor, at: str, axes: tuple[str, ...] | None = None) -> Tensor:
        """All-reduce `x` in place: elementwise maximum over the ranks of `axes`, by default over all."""
        axes = DENSE if axes is None else axes
        if self.size_of(axes) > 1:
            with waiting_at(at):
                dist.all_reduce(x, dist.ReduceOp.MAX, group=self.process_group(axes))
        return x

    def gather_rows(self, x: Tensor, axes: tuple[str, ...], at: str = "an all-gather of rows") -> Tensor:
        """All-gather the rows `[n, ...]` of every rank of `axes`, in order.

        `n` is the same on all ranks. No gradients.
        """
        size = self.size_of(axes)
        if size == 1:
            return x
        with waiting_at(at):
            return all_gather(x, size, self.name_of(axes))

    def all_gather_on_hosts(self, numbers: Sequence[float], axes: tuple[str, ...], at: str) -> Tensor:
        """All-gather numbers between hosts; return a row for each rank of `axes`, in float64.

        Devices take no part. Over NCCL the exchange would be queued behind all pending kernels, and the host would wait
        for them just to compare a few numbers.
        """
        rows = torch.tensor([list(numbers)], dtype=torch.float64, device=self.host)
        groups = self.host_groups(axes) if self.size_of(axes) > 1 else []
        with waiting_at(at):
            for group in groups:
                rows = all_gather(rows, group.size(), group.group_name)
        return rows

    def to_host(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Copy results from the device, in float64 on the host: one copy, so the host waits once for all of them."""
        flat = torch.cat([x.double().flatten() for x in results])
        with waiting_at("results from the device"):
            on_host = flat.to(self.host)
        parts = on_host.split([x.numel() for x in results])
        return [part.view(x.shape) for part, x in zip(parts, results, strict=True)]

    def gather_objects(self, x: Any, axes: tuple[str, ...]) -> list[Any]:
        """All-gather a pickled object from every rank of `axes`, between hosts. Slow: for setup and for errors.

        Devices take no part: after a CUDA error or without memory a device could not even carry the reason to the
        other ranks, and all would wait for the timeout.
        """
        objects = [x]
        groups = self.host_groups(axes) if self.size_of(axes) > 1 else []
        with waiting_at("an all-gather of settings"):
            for group in groups:
                gathered: list[list[Any]] = [[]] * group.size()
                dist.all_gather_object(gathered, objects, group=group)
                objects = [each for part in gathered for each in part]
        return objects

    def store(self, prefix: str) -> Store:
        """Return a key-value store that all ranks can read and write without a collective, on a connection of
        its own.
        """
        store = dist.distributed_c10d._get_default_store()
        return PrefixStore(prefix, store.clone() if self.axes.world > 1 else store)  # type: ignore[attr-defined] # torch's stub lacks it

    def broadcast_object(self, x: Any) -> Any:
        """Broadcast rank 0's object, pickled, between hosts. What the others pass is ignored.

        The groups of a round are the lines of a grid along one dim, and rank 0 is the grid's origin. So after each
        round the object has spread along one dim more, always from the first rank of a line.
        """
        objects = [x]
        groups = self.host_groups(DENSE) if self.axes.world > 1 else []
        with waiting_at("the broadcast from rank 0"):
            for group in groups:
                dist.broadcast_object_list(objects, group_src=0, group=group, device=self.host)
        return objects[0]

    def broadcast_on_hosts_(self, x: Tensor, at: str) -> Tensor:
        """Broadcast rank 0's host tensor in place, as `broadcast_object` does."""
        groups = self.host_groups(DENSE) if self.axes.world > 1 else []
        with waiting_at(at):
            for group in groups:
                dist.broadcast(x, group_src=0, group=group)
        return x

    def send(self, x: Tensor, rank: int, at: str) -> None:
        """Send `x` to a rank that receives it. Return when `x` may be overwritten."""
        with waiting_at(at):
            dist.send(x, rank, group=self.process_group(DENSE))
            self.synchronize()

    def receive(self, x: Tensor, rank: int, at: str) -> Tensor:
        """Fill `x` with what that rank sends."""
        with waiting_at(at):
            dist.recv(x, rank, group=self.process_group(DENSE))
        return x

    def all_or_none(
        self, failure: BaseException | None, at: str, error: type[MeshwrightError] | None = None,
        numbers: Sequence[float] = (), axes: tuple[str, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        """Raise on every rank if any rank failed, so that none waits for one that has given up.

        The rank that failed raises its `failure`, the others an error that names that rank and its reason. Otherwise
        return the `numbers` of all ranks, a row for each, on the host. `error`: the class that the other ranks raise,
        RankError by default. `axes`: among which ranks, by default all.
        """
        axes = DENSE if axes is None else axes
        rows = self.all_gather_on_hosts((float(failure is not None), *numbers), axes, at)
        if bool(rows[:, 0].any()):
            reason = None if failure is None else f"{type(failure).__name__}: {failure!s:.1000}"
            reasons = zip(self.ranks_over(axes).tolist(), self.gather_objects(reason, axes), strict=True)
            raise failure or (error or RankError)(
                next(f"rank {rank} failed in {at}: {why}" for rank, why in reasons if why)
            )
        return rows[:, 1:]

    def together(self, act: Callable[[], Made], at: str, error: type[MeshwrightError], what: str) -> Made:
        """Run what each rank does alone. If it fails on any rank, all raise `error`, as in `all_or_none`.

        `what` begins the message of the rank that failed: "nothing was loaded: " and the reason.
        """
        made = list[Made]()
        self.all_or_none(failure_in(lambda: made.append(act()), error, what), at, error)
        return made[0]

    def synchronize(self) -> None:
        """Synchronise with the device.

        NCCL's timeout starts when a send is queued, so it would fire behind a long queue.
        """
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def token_range(self, num_tokens: int) -> tuple[int, int]:
        """Return which tokens of its data rank's stream this rank works on: a contiguous part, ordered by (cp, tp)."""
        share = num_tokens // (self.axes.cp * self.axes.tp)
        at = self.coords["cp"] * self.axes.tp + self.coords["tp"]
        return at * share, (at + 1) * share

    @property
    def node(self) -> range:
        """Return the ranks of this rank's machine: neighbours, as torchrun numbers them.

        Without torchrun, all ranks.
        """
        size = _from_torchrun("LOCAL_WORLD_SIZE", self.axes.world)
        if self.axes.world % size:
            raise MeshError(f"{self.axes.world} ranks are not whole nodes of LOCAL_WORLD_SIZE={size}")
        first = self.rank - self.rank % size
        return range(first, first + size)

    @property
    def memory(self) -> Memory:
        """Return the memory that this rank may use."""
        return memory_of(self.device, len(self.node))

    @property
    def data_rank(self) -> int:
        """Return which of `num_data_ranks` streams this rank reads: the same for ranks that differ only in cp,
        tp, pp.
        """
        return self.axes.data_rank(self.rank)

    @property
    def num_data_ranks(self) -> int:
        return self.axes.num_data_ranks

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, rank {self.rank} of {self.axes.world} on {self.device})"


def _device(wanted: str | torch.device | None) -> torch.device:
    """Return the device of this rank, by LOCAL_RANK where there are several, or explain why it cannot be used."""
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        dist.get_default_backend_for_device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise MeshError(f"device={wanted!r} cannot be used: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MeshError(f"device={wanted!r}: torch finds no CUDA device; choose device='cpu', or check nvidia-smi")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", _from_torchrun("LOCAL_RANK", 0, least=0))
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise MeshError(
                f"{device} does not exist: this process sees {torch.cuda.device_count()} devices. LOCAL_RANK chooses "
                "one; if the launcher shows each process a single device, give device='cuda:0'"
            )
        torch.cuda.set_device(device)
    return device


def _from_torchrun(name: str, alone: int, least: int = 1) -> int:
    """Return a number that torchrun left in the environment; `alone` without torchrun."""
    text = os.environ.get(name, str(alone))
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if name == "WORLD_SIZE" and name in os.environ and missing:
        raise MeshError(f"WORLD_SIZE={text} without {', '.join(missing)}: start with torchrun, or unset WORLD_SIZE")
    if not text.isdecimal() or int(text) < least:
        raise MeshError(f"environment variable {name}={text!r} must be a whole number of at least {least}")
    return int(text)


# Settings of torch's flight recorder, each under its current and its older name; what the user has set stays.
_RECORDER = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): os.path.join(
        tempfile.gettempdir(), "meshwright_flight_rank_"
    ),
}


def _record(device: torch.device) -> str:
    """Turn on torch's flight recorder; return the sentence that says where its dump is once a collective fails."""
    if device.type == "cpu":
        return ""
    *_, path = [_set_unless_known(names, value) for names, value in _RECORDER.items()]
    return f"What the devices did: {path}*, to be read with torchfrtrace."


def _set_unless_known(names: tuple[str, ...], value: str) -> str:
    """Set a variable unless the user did, under any of its names; return the value that torch will read.

    torch takes the first of the names that is set.
    """
    known = [os.environ[name] for name in names if name in os.environ]
    return known[0] if known else os.environ.setdefault(names[0], value)


def _join(device: torch.device, timeout: datetime.timedelta, eager: bool) -> None:
    """Join or start the process group, and start the heartbeat of this rank.

    `eager`: make NCCL's communicators at once, each split off the first. Otherwise a communicator is made by its first
    collective, inside of that one's timeout. Not for pipelines: where communicators are eager, torch queues all
    transfers of a rank on one stream, the sends to one neighbour behind the receives from the other, and stages that
    send both ways could wait for each other for ever. Lazy communicators have a stream for each pair of ranks.
    """
    recorder_note = _record(device)
    if device.type == "cuda":
        # Several communicators are in flight at once (FSDP's prefetch, doors of tp and ep). Without an order between
        # them, two ranks may start them in opposite order and fill their multiprocessors with kernels that wait.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        if "WORLD_SIZE" in os.environ:
            device_id = device if eager and device.type == "cuda" else None
            dist.init_process_group(backend, timeout=timeout, device_id=device_id)
        else:
            alone = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        atexit.register(_leave)
        if dist.get_rank() == 0 and (note := untried()):
            logger.warning("%s", note)
    _refuse_gloo_on(device)
    if position.watch is None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        position.watch = Watch(store, dist.get_rank(), dist.get_world_size(), timeout.total_seconds(), recorder_note)
        atexit.register(
            position.watch.leave
        )  # registered later, so it runs before `_leave` and the store still answers


def _refuse_gloo_on(device: torch.device) -> None:
    """Refuse a process group of the caller's that would hand a device's memory to gloo: FSDP2 then ends in a
    segmentation fault (pytorch#132471).
    """
    backends = dist.get_backend_config()
    if device.type == "cuda" and "cuda:nccl" not in backends:
        raise MeshError(
            f"{device} needs NCCL, but the process group that this program started has {backends!r}; start it with "
            "dist.init_process_group('cpu:gloo,cuda:nccl'), or leave that to mw.Mesh"
        )


def _leave() -> None:
    """Leave the process group before the interpreter shuts down: gloo's threads would abort a process that exits.

    After an error other ranks may be in the middle of a collective, and NCCL's orderly end would wait for them until
    the timeout. So a rank that raised aborts.
    """
    if not dist.is_initialized():
        return
    if position.now[0] == RAISED and "nccl" in dist.get_backend_config():
        with contextlib.suppress(RuntimeError):  # the process ends either way
            dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
