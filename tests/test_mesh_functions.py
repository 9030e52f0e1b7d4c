"""Functions of a mesh with stand-ins for its ranks: groups, errors, stores, and how it joins a process group."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import meshwright as mw
from meshwright import mesh as module
from meshwright.axes import DENSE, Axes
from meshwright.errors import CheckpointError, MeshError, RankError
from meshwright.mesh import collectives, joining, local_collectives, local_sockets, memory_limits, part
from meshwright.mesh.local_sockets import LocalSockets
from meshwright.watch import position

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
SECOND = datetime.timedelta(seconds=1)


def fake(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def test_a_failure_within_a_group_names_the_rank_of_the_mesh() -> None:
    """Ranks 4 and 6 form the group, and rank 6 failed."""
    mesh = fake(
        ranks_over=returns(torch.tensor([4, 6])), gather_objects=returns([None, "ValueError: odd"]),
        all_gather_on_hosts=returns(torch.tensor([[0.0, 7.0], [1.0, 8.0]])), _named=lambda rank: f"rank {rank}",
    )  # fmt: skip
    for error in (None, CheckpointError):
        with pytest.raises(error or RankError, match=r"^rank 6 failed in a test: ValueError: odd$"):
            mw.Mesh.all_or_none(mesh, None, "a test", error, axes=("tp",))
    mesh.all_gather_on_hosts = returns(torch.tensor([[0.0, 7.0], [0.0, 8.0]]))
    assert mw.Mesh.all_or_none(mesh, None, "a test", numbers=[7.0], axes=("tp",)).tolist() == [[7.0], [8.0]]


def test_all_ranks_raise_the_same_class_if_an_act_fails_on_one() -> None:
    asked: list[Any] = []
    mesh = fake(all_or_none=lambda *args: asked.append(args))
    assert mw.Mesh.together(mesh, lambda: 3, "a test", CheckpointError, "nothing: ") == 3
    assert asked == [(None, "a test", CheckpointError)]


@pytest.mark.parametrize(("replicate", "ranks"), [(2, [[2, 5], [11, 17]]), (1, None)])
def test_fsdp_gets_the_global_ranks_of_a_mesh(
    replicate: int, ranks: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh has ranks 2 to 17 of a world, and this is the last one of a stage."""
    made: list[Any] = []
    monkeypatch.setattr(module, "DeviceMesh", fake(from_group=lambda *args, **more: made.append((args, more))))
    mesh = fake(axes=Axes(replicate=replicate, fsdp=2), rank=1, ranks=(2, 5, 11, 17), device=CPU)
    mesh.process_group = lambda axes: axes
    names = ("replicate", "shard")
    mw.Mesh._device_mesh(mesh, ("replicate", "fsdp", "cp"), names)
    ((groups, kind), more), shard = made[0], ("fsdp", "cp")
    assert (groups, kind) == ([("replicate",), shard] if ranks else shard, "cpu")
    assert more["mesh_dim_names"] == (names if ranks else names[1:])
    assert (more["mesh"].tolist() if ranks else more.get("mesh")) == ranks


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_groups_wait_for_the_timeout_of_the_mesh(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank makes all groups of a world, and only its own one of a mesh that has a part of the world."""
    parts, made, served = [(0, 1), (2, 3)], list[Any](), list[Any]()
    mesh = fake(rank=2, ranks=(3, 4, 5, 6), timeout=SECOND, device=GPU, _serve=served.append)
    monkeypatch.setattr(module, "is_part", lambda ranks: len(ranks) < 5)
    monkeypatch.setattr(module, "new_group", lambda *args: made.append(args) or "own")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **more: made.append((ranks, more)) or str(ranks))
    assert mw.Mesh._make(mesh, parts, "a test", backend) == "own"
    assert made == [([5, 6], SECOND, backend or "nccl")]
    mesh.ranks, made[:] = (0, 1, 2, 3, 4), []
    assert mw.Mesh._make(mesh, parts, "a test", backend) == "[2, 3]"
    assert made == [(ranks, dict(timeout=SECOND, backend=backend)) for ranks in ([0, 1], [2, 3])]
    assert served == ["own", "[2, 3]"]


def test_all_ranks_plan_with_the_smallest_device() -> None:
    facts = [("fsdp=2 on cpu", size, "a machine") for size in (70, 50)]
    mesh = fake(
        axes=Axes(fsdp=2), device=CPU, memory=fake(device_bytes=70), global_node=range(2), rank=0,
        gather_objects=returns(facts), _group_of={}, _named=str,
    )  # fmt: skip
    mw.Mesh._refuse_another(mesh)
    assert (mesh.least_bytes, mesh._machines) == (50, ("a machine",) * 2)
    facts[1] = ("fsdp=2 on cuda", 50, "")
    with pytest.raises(MeshError, match=r"the mesh is fsdp=2 on cuda on 1, but fsdp=2 on cpu on 0"):
        mw.Mesh._refuse_another(mesh)


@pytest.mark.parametrize(("sizes", "eager"), [(dict(pp=2), False), (dict(tp=2), True)])
def test_pipelines_make_communicators_late(sizes: dict[str, int], eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*args: Any, eager: bool) -> None:
        raise KeyError(*args, eager)

    monkeypatch.setattr(module, "global_ranks", returns((0, 1)))
    monkeypatch.setattr(module, "from_torchrun", returns(2))
    monkeypatch.setattr(module, "join", join)
    with pytest.raises(KeyError) as joined:
        mw.Mesh(**sizes, device="cpu", timeout_s=1)
    assert joined.value.args == (CPU, SECOND, (0, 1), eager)


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for the process group that `join` starts, and what it does."""
    done: dict[str, Any] = {"exits": []}
    for name, value in (("is_initialized", False), ("get_rank", 1), ("get_default_backend_for_device", "any")):
        monkeypatch.setattr(dist, name, returns(value))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: done.update(more, backend=backend))
    for name in ("refuse_gloo_on", "refuse_eager", "agree"):
        monkeypatch.setattr(joining, name, lambda *args, name=name: done.update({name: args}))
    monkeypatch.setattr(joining, "is_part", lambda ranks: ranks == (1, 2))
    monkeypatch.setattr(joining, "own_store", lambda ranks: f"store of {ranks}")
    monkeypatch.setattr(joining, "Watch", lambda *args: fake(args=args, leave=None))
    monkeypatch.setattr(joining, "atexit", fake(register=done["exits"].append))
    monkeypatch.setattr(position, "watch", None)
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "3"})
    return done


@pytest.mark.parametrize(
    ("device", "eager", "bound"), [(GPU, True, GPU), (GPU, False, None), (CPU, True, None), (CPU, False, None)]
)
def test_a_group_is_bound_to_a_gpu_unless_it_is_for_a_pipeline(
    no_group: dict[str, Any], device: torch.device, eager: bool, bound: torch.device | None
) -> None:
    for seconds in (1, 90):
        timeout = datetime.timedelta(seconds=seconds)
        joining.join(device, timeout, (0, 1, 2), eager)
        assert no_group["device_id"] == bound
        assert no_group["timeout"].total_seconds() == max(seconds, 60), "processes may start at different times"
    assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == ("1" if device == GPU else None)


@pytest.mark.parametrize(("ranks", "watched", "agreed"), [((1,), False, False), ((1, 2), True, True),
                                                          ((0, 1, 2), True, False)])  # fmt: skip
def test_a_rank_is_watched_where_it_has_others(
    no_group: dict[str, Any], ranks: tuple[int, ...], watched: bool, agreed: bool
) -> None:
    """A mesh of one rank leaves the heartbeat of the process to a later mesh of several."""
    joining.join(CPU, SECOND, ranks, eager=True)
    assert (position.watch is not None) == watched
    assert no_group["exits"][0] == joining.leave
    assert len(no_group["exits"]) == 1 + watched
    assert ("agree" in no_group, "refuse_eager" in no_group) == (agreed, agreed)
    if watched:
        assert position.watch.args == (f"store of {ranks}", 1, ranks, 1.0, "")  # type: ignore[union-attr]


def test_meshes_and_users_of_a_store_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", returns(1))
    store = HashStore()
    monkeypatch.setattr(module, "own_store", returns(store))
    first, second = (mw.Mesh.store(fake(ranks=(0,)), name) for name in ("save/1", "save/2"))
    first.set("done", "yes")
    assert first.check(["done"])
    assert not second.check(["done"])
    monkeypatch.setattr(dist, "get_world_size", returns(4))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", returns(store))
    own, other, whole = (part.own_store(ranks) for ranks in ([0, 1], [2, 3], range(4)))
    own.set("beat", "1")
    assert [each.check(["beat"]) for each in (own, other, whole)] == [True, False, False]


def test_rows_that_ranks_cannot_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows cannot be shared out over 2 ranks"):
        local_collectives._reduce_scatter_tensor(torch.ones(5), "sum", 2, "no group")


def test_an_error_of_sockets_names_global_ranks_and_the_first_failure() -> None:
    """Ranks 4 and 7 form the group."""
    sockets = LocalSockets("a group", (4, 7), 0, HashStore(), SECOND)
    with pytest.raises(dist.DistBackendError, match=r"no answer from ranks \[7\] within 1 s"):
        list(sockets._ready({1: None}, {}, deadline=0.0))
    with pytest.raises(dist.DistBackendError, match=r"no answer from ranks \[7\] within 1 s"):
        list(sockets._ready({}, {1: None}, deadline=0.0))
    sockets.fail(ValueError("the first"))
    sockets.fail(KeyError("the second"))
    with pytest.raises(dist.DistBackendError, match=r"connections of ranks \[4, 7\]: ValueError: the first$"):
        sockets.exchange([torch.ones(1)] * 2, [torch.ones(1)] * 2, "a sum")


def test_another_boot_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces may have the same numbers on all machines."""
    own = local_sockets.machine_of(range(2))
    monkeypatch.setattr(Path, "read_text", returns("another boot\n"))
    assert own != local_sockets.machine_of(range(2)) == f"another boot {own.partition(' ')[2]}"


def test_each_rank_has_an_accelerator_and_a_share_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: 1000)
    device = fake(get_device_properties=lambda device: fake(total_memory=800 if device == GPU else 0))
    monkeypatch.setattr(torch, "get_device_module", returns(device))
    assert memory_limits.memory_of(GPU, 3) == memory_limits.Memory(800, 333, shared=False)


@pytest.mark.parametrize(("kind", "compiles"), [("cuda", True), ("xpu", True), ("cpu", False), ("meta", False)])
def test_devices_for_which_torch_compiles(kind: str, compiles: bool) -> None:
    assert memory_limits.has_inductor(torch.device(kind)) == compiles


def test_the_mesh_of_all_ranks_is_the_default_of_collectives() -> None:
    asked: list[Any] = []
    mesh = fake(all_gather_on_hosts=lambda row, axes, at: asked.append((row, axes, at)) or torch.zeros(1, 2))
    mw.Mesh.all_or_none(mesh, None, "a test", numbers=[3])
    assert asked == [((0.0, 3), DENSE, "a test")]


@pytest.mark.parametrize("op", ["sum", "max"])
def test_ranks_of_several_machines_reduce_by_torch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(module, "all_reduce_", lambda *args: done.append(args))
    monkeypatch.setattr(dist, "all_reduce", lambda x, how, group: done.append((x, how, group)))
    for served in (True, False):
        monkeypatch.setattr(module, "serves", returns(served))
        mw.Mesh._all_reduce_(fake(), "x", op, "a group")  # type: ignore[arg-type]
    of_torch = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
    assert done == [("x", op, "a group"), ("x", of_torch[op], "a group")]


def test_a_send_waits_until_its_tensor_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(dist, "send", lambda x, group, group_dst: done.append((x, group, group_dst)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake(synchronize=lambda: done.append(device)))
    for device in (GPU, CPU):
        mesh = fake(process_group=lambda axes: axes, device=device)
        mesh.synchronize = lambda mesh=mesh: mw.Mesh.synchronize(mesh)
        mw.Mesh.send(mesh, "x", 5, "a test")  # type: ignore[arg-type]
    assert done == [("x", DENSE, 5), GPU, ("x", DENSE, 5)]


def test_collectives_of_both_kinds_are_kept_when_a_layer_runs_again() -> None:
    """A compiled layer uses those of torch, and CPU ranks of one machine use ours."""
    names = ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
    spaces = (torch.ops._c10d_functional, torch.ops.meshwright)
    kept = [getattr(space, name).default for space in spaces for name in names]
    assert {*collectives.OPS} == {*kept, torch.ops._c10d_functional.wait_tensor.default}


def test_each_of_several_broadcasts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, int]] = []

    def broadcast(x: torch.Tensor, rank: int, **_: Any) -> Any:
        return fake(wait=lambda: waited.append((rank, x.numel())))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    parts = [(torch.zeros(num), rank) for num, rank in ((2, 1), (3, 0), (1, 1))]
    collectives.broadcast_each_(parts, fake(), "a test")
    assert waited == [(1, 8), (0, 12), (1, 4)]
