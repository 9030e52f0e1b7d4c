"""Make a mesh on some ranks of a larger process group: check the ranks, let them agree, and give them a store.

A mesh numbers its ranks from 0. Only calls of `torch.distributed` use global ranks, those of the default process group.
Its other processes run other code, such as rollouts, and the ranks of a mesh never wait for them.
"""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..axes import Axes
from ..errors import MeshError, counted
from ..watch import position, spans

_POLL_S = 0.05
_FIT = "choose ranks or sizes that fit"


def global_ranks(axes: Axes, ranks: Sequence[int] | None, running: int) -> tuple[int, ...]:
    """Return the global rank of each rank of the mesh. Refuse ranks that no mesh can have, before anything is joined.

    `running`: the number of processes. Every process checks its own call, so a wrong call fails at once.
    """
    if ranks is None:
        _refuse_other_size(axes, running)
        _refuse_second(tuple(range(running)))
        return tuple(range(running))
    named = _checked(ranks, running)
    if len(named) != axes.world:
        raise MeshError(
            f"the mesh {axes} needs {counted(axes.world, 'rank')}, but {_said(named)} are {len(named)}; {_FIT}"
        )
    if dist.get_rank() not in named:
        raise MeshError(
            f"global rank {dist.get_rank()} makes a mesh of {_said(named)}, to which it does not belong; "
            f"only those call mw.Mesh: if torch.distributed.get_rank() in {list(named)!r}"
        )
    _refuse_second(named)
    return named


def _refuse_other_size(axes: Axes, running: int) -> None:
    """Refuse a mesh of all processes that has another size."""
    if axes.world == running:
        return
    part = f", or name its ranks: mw.Mesh(..., ranks=[...]) with {axes.world} of the {running}"
    hint = part if axes.world < running and dist.is_initialized() else ""
    if axes.world == 1:
        raise MeshError(
            f"{running} processes run, but the mesh has one rank; give it {running}: mw.Mesh(fsdp={running}){hint}"
        )
    raise MeshError(
        f"the mesh {axes} needs {axes.world} processes, but {running} run; "
        f"start it with torchrun --nproc-per-node {axes.world}, or choose sizes whose product is {running}{hint}"
    )


def _checked(ranks: object, running: int) -> tuple[int, ...]:
    """Refuse anything but different ranks of the process group, in ascending order."""
    named = tuple(ranks) if isinstance(ranks, Sequence) else ()
    if not named or any(type(rank) is not int for rank in named):
        raise MeshError(f"ranks={ranks!r} are not ranks; give a list of integers, such as ranks=[2, 3]")
    if not dist.is_initialized():
        raise MeshError(
            f"ranks={list(named)!r} are ranks of a process group, and there is none; call "
            "torch.distributed.init_process_group() in every process first, also in those outside of the mesh"
        )
    outside = [rank for rank in named if not 0 <= rank < running]
    if outside:
        raise MeshError(
            f"ranks={list(named)!r}: there is no rank {outside[0]} among {running}; choose from 0 to {running - 1}"
        )
    if list(named) != sorted({*named}):
        raise MeshError(
            f"ranks={list(named)!r} do not ascend: a process group numbers its members in ascending order, once each; "
            f"give ranks={sorted({*named})!r}"
        )
    return named


def _refuse_second(ranks: tuple[int, ...]) -> None:
    """Refuse a process in meshes of different ranks: an error could not tell which mesh it concerns.

    A mesh of one rank cannot lose another rank, so every process may also have such meshes.
    """
    if len(ranks) > 1 and position.watch is not None and tuple(position.watch.ranks) != ranks:
        raise MeshError(
            f"this process belongs to a mesh of {_said(position.watch.ranks)} and cannot join one of {_said(ranks)}; "
            "make its meshes of the same ranks, or of one rank"
        )


def _said(ranks: Sequence[int]) -> str:
    return f"global rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def is_part(ranks: Sequence[int]) -> bool:
    """Return whether processes outside of these ranks run."""
    return len(ranks) < dist.get_world_size()


def own_store(ranks: Sequence[int]) -> Store:
    """Return the store of the run; for a part of the ranks with a prefix, so that two meshes never share a key."""
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"mesh {spans(ranks)}", store) if is_part(ranks) else store


# The number of groups of the same global ranks that this process has made; it is equal on all members.
_MADE: Counter[tuple[int, ...]] = Counter()


def new_group(members: Sequence[int], timeout: datetime.timedelta, backend: str) -> dist.ProcessGroup:
    """Make a process group that only its members take part in making, like
    `dist.new_group(use_local_synchronization=True)`.

    torch names that group by the number of groups that the process knows. A trainer that also shares a group with a
    rollout then waits under a different name than the other trainers, until the timeout (pytorch#173608). So this
    function sets the name, and calls torch's inner function, as AReaL does for its weight updates.
    """
    key, c10d = tuple(members), dist.distributed_c10d
    name, _MADE[key] = f"meshwright/{spans(key)}/{_MADE[key]}", _MADE[key] + 1
    group, _ = c10d._new_process_group_helper(
        len(key), key.index(dist.get_rank()), list(key), dist.Backend(backend), c10d._get_default_store(), name,  # type: ignore[arg-type] # a NewType of str that torch 2.11 lacks
        timeout=timeout,
    )  # fmt: skip
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(key)}
    return group


def refuse_eager(device: torch.device) -> None:
    """Refuse a default group whose NCCL communicator is split for each new group.

    ncclCommSplit is collective over all ranks of the default group, and ranks outside the mesh never call it.
    """
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    if device.type != "cpu" and bound is not None:
        raise MeshError(
            f"the process group was made with device_id={bound}, so NCCL splits every new group off all "
            f"{dist.get_world_size()} ranks, and ranks outside of the mesh take no part in that; "
            "call init_process_group without device_id"
        )


def agree(ranks: tuple[int, ...], timeout: datetime.timedelta) -> None:
    """Wait until every rank of a mesh has named the same ranks; raise if one names different ranks, or none within the
    timeout.

    They agree through the store, because ranks that disagree cannot form a group.
    """
    store = PrefixStore("ranks of meshes", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), spans(ranks))
    deadline = time.monotonic() + timeout.total_seconds()
    keys = [str(rank) for rank in ranks]
    while True:
        present = keys if store.check(keys) else [key for key in keys if store.check([key])]
        for rank, text in zip(present, store.multi_get(present), strict=True):
            if text.decode() != spans(ranks):
                raise MeshError(
                    f"global rank {rank} makes a mesh of global ranks {text.decode()}, but global rank "
                    f"{dist.get_rank()} one of {spans(ranks)}; give all of them the same ranks="
                )
        if len(present) == len(keys):
            return
        if time.monotonic() > deadline:
            missing = [int(key) for key in keys if key not in present]
            raise MeshError(
                f"{_said(missing)} did not make the mesh of {_said(ranks)} within {timeout.total_seconds():g} s; "
                f"every rank of it calls mw.Mesh(..., ranks={list(ranks)!r})"
            )
        time.sleep(_POLL_S)
