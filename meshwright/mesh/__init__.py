"""The device mesh of a run: its device, its process groups, and small collectives between all ranks.

No other package makes process groups or names a device. A collective over axes of size 1 does nothing, so the same code
serves one rank and many.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
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
from ..watch import named, names_lost_ranks, waiting_at
from .collectives import all_gather
from .hosts import rounds
from .joining import device_of, from_torchrun, join
from .local_collectives import all_reduce_, serve, serves
from .local_sockets import machine_of
from .memory_limits import Memory, memory_of
from .part import global_ranks, is_part, new_group, own_store

Made = TypeVar("Made")


class Mesh:
    """The mesh of a run. It joins the process group that torchrun describes; without torchrun, one process.

    >>> mesh = Mesh(fsdp=2, tp=2)          # under `torchrun --nproc-per-node 4`   # doctest: +SKIP

    If the program has already made a process group, the mesh uses it. `ranks`: the ranks of that group that form the
    mesh, by default all. Only these ranks make the mesh, and all that follows is among them. `mesh.rank` counts from 0
    within the mesh; `mesh.ranks[rank]` is the global rank.
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
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.axes = Axes(pp, replicate, fsdp, cp, tp, ep)
        if not timeout_s > 0:
            raise MeshError(f"timeout_s={timeout_s!r}: it must be a number of seconds above 0")
        running = dist.get_world_size() if dist.is_initialized() else from_torchrun("WORLD_SIZE", 1)
        self.ranks = global_ranks(self.axes, ranks, running)
        self.device = device_of(device)
        self.host = torch.device("cpu")
        self.timeout = datetime.timedelta(seconds=timeout_s)
        join(self.device, self.timeout, self.ranks, eager=self.axes.pp == 1)
        self.rank = self.ranks.index(dist.get_rank())
        self.coords = self.axes.coords(self.rank)
        # The reason and the pending transfers of a pipeline pass that an error has interrupted. The transfers must stay
        # referenced: destroying them would break the connections over which ranks report the error.
        self.cut_off = ""
        self.under_way: object = None
        self._machines: tuple[str, ...] = ()
        self._refuse_another()

    @names_lost_ranks()
    def _refuse_another(self) -> None:
        """Refuse meshes that differ between ranks: they would wait for each other in groups that never form."""
        own_mesh = f"{self.axes} on {self.device.type}"
        facts = (own_mesh, self.memory.device_bytes, machine_of(self.global_node))
        meshes, memories, self._machines = zip(*self.gather_objects(facts, DENSE), strict=True)
        self.least_bytes = min(memories)  # the smallest device memory of all ranks
        for group in self._group_of.values():
            self._serve(group)
        for rank, other in enumerate(meshes):
            if other != own_mesh:
                raise MeshError(
                    f"the mesh is {other} on {self._named(rank)}, but {own_mesh} on {self._named(self.rank)}; make "
                    "the same mesh on all"
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
        """Return this rank's mesh over `axes`: `[replicate, all other axes]`, or one-dimensional without replicas."""
        group = self.axes.group(self.rank, axes)
        ranks = torch.tensor([self.ranks[rank] for rank in group]).view(self.axes.replicate, -1)
        shard = self.process_group(axes[1:])
        if self.axes.replicate == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=names[1:])
        both = [self.process_group(("replicate",)), shard]
        return DeviceMesh.from_group(both, self.device.type, mesh=ranks, mesh_dim_names=names)

    def process_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one only on `axes`.

        Axes that partition the ranks in the same way share a group. Making a group is collective over all ranks, so all
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
        """Return gloo groups between the hosts of `axes`, one for each round of `rounds`, to exchange small numbers.

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

    def host_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return a single gloo group between the hosts of `axes`, for a framework that needs one process group.

        It opens a connection for each pair of ranks, which `host_groups` avoids. All ranks or none must call it.
        """
        if self.device == self.host:
            return self.process_group(axes)
        parts = tuple(self.axes.groups(axes))
        if parts not in self._hosts_of:
            self._hosts_of[parts] = self._make(parts, f"making the group of hosts over {' x '.join(axes)}", "gloo")
        return self._hosts_of[parts]

    def _make(self, parts: Iterable[tuple[int, ...]], at: str, backend: str | None = None) -> dist.ProcessGroup:
        """Make the groups of a partition, and return this rank's. Every rank makes every group, in the same order.

        The default group belongs to the user. The user's collectives in another thread (torch's async checkpoint has
        some) would interleave with ours in a different order on each rank. If the mesh has only some of its ranks, only
        the members make each group, and for the device of the mesh, because the default group may be one of hosts.
        """
        if is_part(self.ranks):
            members = next([self.ranks[rank] for rank in ranks] for ranks in parts if self.rank in ranks)
            with waiting_at(at):
                own = new_group(members, self.timeout, backend or dist.get_default_backend_for_device(self.device))
        else:
            made = []
            for ranks in parts:
                with waiting_at(at):
                    made.append((dist.new_group(list(ranks), timeout=self.timeout, backend=backend), ranks))
            own = next(group for group, ranks in made if self.rank in ranks)
        self._serve(own)
        return own

    def _serve(self, group: dist.ProcessGroup) -> None:
        """Let the ranks of a group use Unix sockets, if all are on one machine, and as soon as that is known."""
        if self.device.type == "cpu" and self._machines:
            machines = [self._machines[self.ranks.index(rank)] for rank in dist.get_process_group_ranks(group)]
            serve(group, machines, own_store(self.ranks), self.timeout)

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
        """Return the name of a group for functional collectives."""
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
                self._all_reduce_(x, "sum", self.process_group(over.axes))
        return x

    def all_reduce_max_(self, x: Tensor, at: str, axes: tuple[str, ...] | None = None) -> Tensor:
        """All-reduce `x` in place: elementwise maximum over the ranks of `axes`, by default over all."""
        axes = DENSE if axes is None else axes
        if self.size_of(axes) > 1:
            with waiting_at(at):
                self._all_reduce_(x, "max", self.process_group(axes))
        return x

    def _all_reduce_(self, x: Tensor, op: str, group: dist.ProcessGroup) -> None:
        if serves(group):
            all_reduce_(x, op, group)
        else:
            dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group)

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

        Devices take no part: after a CUDA error or out of memory, a device could not send the reason to the other
        ranks, and all would wait for the timeout.
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
        """Return a key-value store, on its own connection, that all ranks can use without a collective."""
        store = own_store(self.ranks)
        return PrefixStore(prefix, store.clone() if dist.get_world_size() > 1 else store)  # type: ignore[attr-defined] # torch's stub lacks it

    def broadcast_object(self, x: Any) -> Any:
        """Broadcast rank 0's object, pickled, between hosts. The arguments of other ranks are ignored.

        The groups of a round are the lines of a grid along one dim, and rank 0 is the grid's origin. So each round
        spreads the object along one more dim, always from the first rank of a line.
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
        """Send `x` to a rank, which must receive it. Return when `x` may be overwritten."""
        with waiting_at(at):
            dist.send(x, group=self.process_group(DENSE), group_dst=rank)
            self.synchronize()

    def receive(self, x: Tensor, rank: int, at: str) -> Tensor:
        """Fill `x` with the tensor that a rank sends."""
        with waiting_at(at):
            dist.recv(x, group=self.process_group(DENSE), group_src=rank)
        return x

    def all_or_none(
        self, failure: BaseException | None, at: str, error: type[MeshwrightError] | None = None,
        numbers: Sequence[float] = (), axes: tuple[str, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        """Raise on every rank if any rank failed, so that none waits for one that has given up.

        The rank that failed raises its `failure`; all others raise an error that names that rank and its reason.
        Otherwise return the `numbers` of all ranks on the host, a row per rank. `error`: the class that the other ranks
        raise, RankError by default. `axes`: the ranks that take part, by default all.
        """
        axes = DENSE if axes is None else axes
        rows = self.all_gather_on_hosts((float(failure is not None), *numbers), axes, at)
        if bool(rows[:, 0].any()):
            reason = None if failure is None else f"{type(failure).__name__}: {failure!s:.1000}"
            reasons = zip(self.ranks_over(axes).tolist(), self.gather_objects(reason, axes), strict=True)
            raise failure or (error or RankError)(
                next(f"{self._named(rank)} failed in {at}: {why}" for rank, why in reasons if why)
            )
        return rows[:, 1:]

    def together(self, act: Callable[[], Made], at: str, error: type[MeshwrightError], what: str) -> Made:
        """Run `act` on each rank. If it fails on any rank, all raise `error`, as in `all_or_none`.

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
        """Return the range of tokens in the data rank's stream that this rank works on, ordered by (cp, tp)."""
        share = num_tokens // (self.axes.cp * self.axes.tp)
        at = self.coords["cp"] * self.axes.tp + self.coords["tp"]
        return at * share, (at + 1) * share

    @property
    def node(self) -> range:
        """Return the ranks of the mesh on this rank's machine: neighbours, as torchrun numbers them.

        Without torchrun, all ranks.
        """
        of_node = self.global_node
        return range(bisect_left(self.ranks, of_node.start), bisect_left(self.ranks, of_node.stop))

    @property
    def global_node(self) -> range:
        """Return the global ranks of all processes of this rank's machine, including those outside the mesh."""
        running = dist.get_world_size()
        size = from_torchrun("LOCAL_WORLD_SIZE", running)
        if running % size:
            raise MeshError(f"{running} ranks are not whole nodes of LOCAL_WORLD_SIZE={size}")
        first = dist.get_rank() // size * size
        return range(first, first + size)

    @property
    def memory(self) -> Memory:
        """Return the memory that this rank may use. Processes outside of the mesh keep their share of the machine's."""
        return memory_of(self.device, len(self.global_node))

    def _named(self, rank: int) -> str:
        """Name a rank in an error: `rank 1`, and its global rank if that differs."""
        return named([rank], self.ranks)

    @property
    def data_rank(self) -> int:
        """Return the index of the stream that this rank reads, of `num_data_ranks`. Ranks that differ only in cp, tp or
        pp read the same stream.
        """
        return self.axes.data_rank(self.rank)

    @property
    def num_data_ranks(self) -> int:
        return self.axes.num_data_ranks

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, {self._named(self.rank)} of {self.axes.world} on {self.device})"
