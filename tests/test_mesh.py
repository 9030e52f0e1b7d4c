"""The collectives of a mesh on six ranks, what a rank knows of its place, and the environment in which it joins."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.axes import DENSE, Axes, Sum
from meshwright.errors import MeshError
from meshwright.mesh import hosts, joining, part
from meshwright.mesh.collectives import AllGather, AllToAll, AsyncAllToAll, ReduceScatter, all_to_all, broadcast_each_
from meshwright.mesh.local_collectives import _PIECE, _WHOLE, all_gather_into, all_reduce_, reduce_scatter_into
from meshwright.mesh.local_sockets import _HEADER, _described, _Incoming
from meshwright.mesh.shared_devices import can_be_shared
from meshwright.watch import position
from tests import worlds

RANKS = range(6)
AXES: dict[str, int] = dict(replicate=2, fsdp=3)


def numbers(mesh: mw.Mesh, num: int, axes: tuple[str, ...], op: str) -> tuple[bool, bool]:
    """All-reduce numbers that differ by rank; return whether they, and torch's gradients, are right."""
    x = [torch.arange(num) * 3 % 7 * (-1.0) ** rank - 10 * (rank + 1) for rank in RANKS]
    own = x[mesh.rank].clone()
    of_group = torch.stack([x[rank] for rank in mesh.ranks_over(axes).tolist()])
    if op == "sum":
        return torch.equal(mesh.all_reduce_(own, Sum("a sum", axes)), of_group.sum(0)), len(of_group) > 1
    return torch.equal(mesh.all_reduce_max_(own, "a maximum", axes), of_group.max(0).values), len(of_group) > 1


def broadcasts(mesh: mw.Mesh) -> list[Any]:
    made = [torch.full((n + 2,), float(mesh.rank)) for n in range(2)]
    broadcast_each_([(made[0], 4), (made[1], 1)], mesh.process_group(DENSE), "a broadcast")
    on_host = mesh.broadcast_on_hosts_(torch.tensor([mesh.rank + 5]), "a broadcast")
    return [[each.tolist() for each in made], on_host.tolist(), mesh.broadcast_object({"from": mesh.rank})]


def doors(mesh: mw.Mesh) -> list[Any]:
    """Differentiable collectives over fsdp, with 2 rows a rank, or n + 1 rows for rank n."""
    name, own, at = mesh.name_of(("fsdp",)), mesh.coords["fsdp"], "a door"
    out = []
    for function, num in ((AllGather, 2), (ReduceScatter, 6)):
        x = (torch.arange(float(num)) + 10 * own).requires_grad_()
        y = function.apply(x, 3, name, at)
        (y * torch.arange(1.0, len(y) + 1) * (own + 1)).sum().backward()
        out += [y.tolist(), x.grad.tolist()]
    sent, got = [1, 0, 2], [[1, 1, 1], [0, 0, 0], [2, 2, 2]][own]
    x = (torch.arange(3.0) + 10 * own).requires_grad_()
    y = AllToAll.apply(x, got, sent, name, at)
    (y * (own + 1)).sum().backward()
    transfer, z = AsyncAllToAll(got, sent, name, at), x.detach().requires_grad_()
    later = transfer.end(transfer.begin(z))
    (later * (own + 1)).sum().backward()
    assert torch.equal(all_to_all(x.detach(), got, sent, name), y.detach())
    assert (later.tolist(), z.grad.tolist(), transfer.gradient) == (y.tolist(), x.grad.tolist(), None)
    return [*out, y.tolist(), x.grad.tolist()]


def into(mesh: mw.Mesh) -> list[Any]:
    group, own = mesh.process_group(("fsdp",)), mesh.coords["fsdp"]
    gathered, part_of_sum = torch.empty(6), torch.empty(2)
    all_gather_into(gathered, torch.tensor([own, own + 0.5]), group)
    reduce_scatter_into(part_of_sum, torch.arange(6.0) * (own + 1), group)
    integers = torch.tensor([[own, -own], [7, own * own]])
    all_reduce_(integers, "max", group)
    return [gathered.tolist(), part_of_sum.tolist(), integers.tolist()]


def facts() -> dict[str, Any]:
    mesh = mw.Mesh(**AXES, device="cpu")
    sizes = (1, 3, _WHOLE, _WHOLE + 1, 2 * _PIECE + 5 if _PIECE < 10_000 else 4 * _WHOLE + 3)
    sums = {
        (num, axes, op): numbers(mesh, num, axes, op)
        for num in sizes for axes in (("fsdp",), ("replicate",), DENSE, ("cp",)) for op in ("sum", "max")
    }  # fmt: skip
    rows = mesh.gather_rows(torch.tensor([[mesh.rank, 1]]), ("fsdp",))
    on_host = mesh.all_gather_on_hosts((mesh.rank, 0.5), ("replicate",), "numbers")
    copied = mesh.to_host([torch.tensor([[1, 2]]), torch.tensor(3.5), torch.empty(0)])
    if mesh.rank == 1:
        mesh.send(torch.tensor([1.5, 2.5]), 4, "a send")
    received = mesh.receive(torch.zeros(2), 1, "a receive").tolist() if mesh.rank == 4 else None
    return dict(
        sums=sums, rows=rows.tolist(), on_host=on_host.tolist(), dtype=on_host.dtype,
        copied=[(each.dtype, each.tolist()) for each in copied], received=received, broadcasts=broadcasts(mesh),
        doors=doors(mesh), into=into(mesh), objects=mesh.gather_objects(f"r{mesh.rank}", ("fsdp",)),
        place=(mesh.rank, mesh.data_rank, mesh.num_data_ranks, mesh.size_of(("replicate",)), list(mesh.node)),
        same=mesh.process_group(("fsdp",)) is mesh.process_group(("fsdp", "cp")) is mesh.host_group(("fsdp",)),
        dense=(mesh.dense.mesh.tolist(), mesh.dense.mesh_dim_names),
        expert=(mesh.expert.mesh.tolist(), mesh.expert.mesh_dim_names),
    )  # fmt: skip


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return worlds.run(6, facts)


def test_sums_and_maxima_of_every_size(of_ranks: list[dict[str, Any]]) -> None:
    for each in of_ranks:
        assert {case: right for case, (right, _) in each["sums"].items() if not right} == {}
        assert {axes for (_, axes, _), (_, several) in each["sums"].items() if not several} == {("cp",)}


def test_rows_numbers_and_objects_are_of_a_group_in_order(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        of_fsdp = [rank // 3 * 3 + n for n in range(3)]
        assert each["rows"] == [[n, 1] for n in of_fsdp]
        assert each["objects"] == [f"r{n}" for n in of_fsdp]
        assert (each["on_host"], each["dtype"]) == ([[float(n), 0.5] for n in (rank % 3, rank % 3 + 3)], torch.float64)
        assert each["copied"] == [(torch.float64, [[1.0, 2.0]]), (torch.float64, 3.5), (torch.float64, [])]
        assert each["received"] == ([1.5, 2.5] if rank == 4 else None)
        assert each["broadcasts"] == [[[4.0] * 2, [1.0] * 3], [5], {"from": 0}]
        assert each["place"] == (rank, rank, 6, 2, [*RANKS])
        assert each["same"]
        assert each["dense"] == each["expert"] == ([[0, 1, 2], [3, 4, 5]], ("replicate", "shard"))


def test_doors_send_rows_and_gradients(of_ranks: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(of_ranks):
        own = rank % 3
        gathered, d_gathered, scattered, d_scattered, exchanged, d_exchanged = each["doors"]
        assert gathered == [0, 1, 10, 11, 20, 21]
        assert d_gathered == [6 * (2 * own + 1), 6 * (2 * own + 2)]
        assert scattered == [3 * (2 * own) + 30, 3 * (2 * own + 1) + 30]
        assert d_scattered == [1, 2, 2, 4, 3, 6]
        assert exchanged == [[0, 10, 20], [], [1, 2, 11, 12, 21, 22]][own]
        assert d_exchanged == [1, 3, 3]
        assert each["into"][0] == [0, 0.5, 1, 1.5, 2, 2.5]
        assert each["into"][1] == [6 * (2 * own), 6 * (2 * own + 1)]
        assert each["into"][2] == [[2, 0], [7, 4]]


@pytest.mark.parametrize(
    ("num", "most", "sizes"),
    [(1, 32, []), (6, 32, [6]), (64, 32, [32, 2]), (1024, 32, [32, 32]), (60, 8, [6, 5, 2]), (37, 32, [37]),
     (74, 32, [2, 37]), (8, 8, [8]), (9, 8, [3, 3])],
)  # fmt: skip
def test_hosts_meet_in_small_groups(num: int, most: int, sizes: list[int]) -> None:
    assert hosts._sizes(num, most) == sizes
    if num > 1:
        partitions = hosts.rounds([range(num), range(num, 2 * num)], most)
        assert [len(groups[0]) for groups in partitions] == sizes[::-1]
        held = {rank: [rank] for rank in range(2 * num)}
        for groups in partitions:
            held = {rank: [n for other in group for n in held[other]] for group in groups for rank in group}
        assert held == {rank: [*range(rank // num * num, rank // num * num + num)] for rank in range(2 * num)}


def test_numbers_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert joining.from_torchrun("WORLD_SIZE", 1) == 1
    assert joining.from_torchrun("LOCAL_WORLD_SIZE", 7) == 7
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert joining.from_torchrun("LOCAL_RANK", 0, least=0) == 3
    for text, least in (("0", 1), ("-1", 0), ("1.5", 0), ("", 0)):
        monkeypatch.setenv("LOCAL_RANK", text)
        with pytest.raises(MeshError, match="must be a whole number"):
            joining.from_torchrun("LOCAL_RANK", 0, least=least)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert joining.from_torchrun("LOCAL_RANK", 5, least=0) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="WORLD_SIZE=2 without RANK, MASTER_ADDR, MASTER_PORT"):
        joining.from_torchrun("WORLD_SIZE", 1)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(MeshError, match="without MASTER_PORT:"):
        joining.from_torchrun("WORLD_SIZE", 1)
    monkeypatch.setenv("MASTER_PORT", "0")
    assert joining.from_torchrun("WORLD_SIZE", 1) == 2


def test_a_variable_of_the_user_stays_under_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OLD": "user", "SECOND": "second"})
    assert joining._set_unless_known(("NEW", "OLD"), "ours") == "user"
    assert joining._set_unless_known(("FIRST",), "ours") == "ours"
    monkeypatch.setattr(os, "environ", {**os.environ, "NEW": "newer"})
    assert joining._set_unless_known(("NEW", "OLD"), "ours") == "newer"
    assert os.environ == {"OLD": "user", "SECOND": "second", "FIRST": "ours", "NEW": "newer"}


def test_only_gpus_are_shared() -> None:
    assert [can_be_shared(torch.device(kind)) for kind in ("cuda", "cpu")] == [True, False]


@pytest.mark.parametrize(
    ("wrong", "sizes", "message"),
    [
        (None, dict(fsdp=2), r"needs 2 processes, but 3 run.*ranks=\[...\]\) with 2 of the 3"),
        (None, {}, "3 processes run, but the mesh has one rank"), (None, dict(fsdp=4), "needs 4 processes"),
        ([0, 2], dict(fsdp=2), "to which it does not belong"), ([0, 1, 2], dict(fsdp=2), "needs 2 ranks, but"),
        ([0, 3], dict(fsdp=2), "no rank 3 among 3; choose from 0 to 2"), ([-1, 0], dict(fsdp=2), "no rank -1"),
        ([1, 0], dict(fsdp=2), r"do not ascend.*ranks=\[0, 1\]"), ([0, 0, 1], dict(fsdp=3), "do not ascend"),
        ([], {}, "are not ranks"), ([0, True], dict(fsdp=2), "are not ranks"), (2, {}, "are not ranks"),
    ],
)  # fmt: skip
def test_ranks_that_make_no_mesh_are_refused(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, sizes: dict[str, int], message: str
) -> None:
    """Global rank 1 of 3 asks."""
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 3)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    with pytest.raises(MeshError, match=message):
        part.global_ranks(Axes(**sizes), wrong, 3)
    assert part.global_ranks(Axes(fsdp=3), None, 3) == part.global_ranks(Axes(tp=3), [0, 1, 2], 3) == (0, 1, 2)
    assert part.global_ranks(Axes(cp=2), [1, 2], 3) == (1, 2)
    monkeypatch.setattr(position, "watch", SimpleNamespace(ranks=[1, 2]))
    assert part.global_ranks(Axes(cp=2), [1, 2], 3) == (1, 2)
    assert part.global_ranks(Axes(), [1], 3) == (1,)
    for ranks, num in ((None, 3), ([0, 1, 2], 3), ([0, 1], 2)):
        other = rf"belongs to a mesh of global ranks 1-2 and cannot join one of .* 0-{num - 1}"
        with pytest.raises(MeshError, match=other):
            part.global_ranks(Axes(cp=num), ranks, 3)
    assert [part.is_part(ranks) for ranks in ((0, 1), (0, 1, 2))] == [True, False]
    assert part._said([4]) == "global rank 4"
    assert part._said([2, 3, 4, 7]) == "global ranks 2-4, 7"


def test_a_message_arrives_in_any_pieces() -> None:
    body, head = bytearray(5), _HEADER.pack(7, 5, b"a sum")
    for cuts in ((53,), (3, 45, 5), (48, 5), (49, 4), (47, 6)):
        message, data, at = _Incoming(memoryview(body), (7, 5, b"a sum")), head + b"hello", 0
        for num in cuts:
            given, left = data[at : at + num], num
            for place in message.missing():
                taken = min(len(place), left)
                place[:taken] = given[num - left : num - left + taken]
                left -= taken
            at += num
            assert message.add(num, 3) == (at == len(data))
        assert bytes(body) == b"hello"
        body[:] = bytes(5)


@pytest.mark.parametrize("sent", [(8, 5, b"a sum"), (7, 6, b"a sum"), (7, 5, b"a max"), (7, 5, b"")])
def test_another_message_than_the_expected_one_is_refused(sent: tuple[int, int, bytes]) -> None:
    message = _Incoming(memoryview(bytearray(5)), (7, 5, b"a sum"))
    message.head[:] = _HEADER.pack(*sent)
    message.add(_HEADER.size - 1, 3)
    with pytest.raises(dist.DistBackendError, match=f"rank 3 sends {sent[1]} bytes of .* in exchange {sent[0]} "):
        message.add(1, 3)
    assert _described(*sent).startswith(f"{sent[1]} bytes of {sent[2].decode() or 'nothing'}")
