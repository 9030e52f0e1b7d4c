"""Shards between processes on the host: what arrives, how it is added up, and what a recorder counts."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

import meshwright as mw
from meshwright.axes import DENSE
from meshwright.mesh import collectives, local_collectives, local_sockets
from meshwright.mesh.collectives import all_gather, all_to_all, reduce_scatter
from meshwright.mesh.local_collectives import (
    all_gather_into,
    all_reduce_,
    reduce_scatter_into,
    serve,
    serves,
    serves_named,
)
from meshwright.mesh.part import own_store
from meshwright.verify import Recorder
from tests import parts, tiny, worlds

NUM = 7
ACTS: dict[str, Callable[[], None]] = {}


@functools.cache
def together() -> dict[str, list[None]]:
    """Run what needs two ranks in one world. Each act makes a group of its own."""
    return worlds.in_turn(2, ACTS)


def on_two_ranks(act: Callable[[], None]) -> Callable[[], None]:
    ACTS[act.__name__] = act
    return functools.wraps(act)(lambda: together() and None)


def world(size: int) -> dist.ProcessGroup:
    return mw.Mesh(fsdp=size, device="cpu").process_group(("fsdp",))


def numbers(rank: int, dtype: torch.dtype, num: int = NUM) -> Tensor:
    """Large and small ones, so that a sum in another order has other bits."""
    drawn = torch.randn(num, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)
    return drawn.mul(20).abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


def gathers(size: int) -> None:
    group = world(size)
    for dtype in (torch.float64, torch.bfloat16, torch.uint8):
        expected, local = torch.cat([numbers(rank, dtype) for rank in range(size)]), numbers(group.rank(), dtype)
        out = torch.zeros_like(expected)
        all_gather_into(out, local, group)
        assert torch.equal(out, expected)
        in_place = torch.zeros_like(expected)
        place = in_place.chunk(size)[group.rank()]
        place.copy_(local)
        all_gather_into(in_place, place, group)
        assert torch.equal(in_place, expected)


def sums(size: int) -> None:
    group = world(size)
    for dtype in (torch.float32, torch.bfloat16):
        everybodys = [numbers(rank, dtype, NUM * size) for rank in range(size)]
        total = in_order(everybodys)
        out, local = torch.empty(NUM, dtype=dtype), everybodys[group.rank()].clone()
        reduce_scatter_into(out, local, group)
        assert torch.equal(out, total.chunk(size)[group.rank()])
        assert torch.equal(local, everybodys[group.rank()]), "what is summed stays as it was"
        # _WHOLE is 5: up to there whole, beyond in uneven parts, some with a piece more than others.
        for num in (1, 5, 6, 7, min(16, NUM * size), NUM * size):
            x = local[:num].clone()
            all_reduce_(x, "sum", group)
            assert torch.equal(x, total[:num])
            x = local[:num].clone()
            all_reduce_(x, "max", group)
            assert torch.equal(x, torch.stack(everybodys)[:, :num].amax(0))


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def doors(size: int) -> None:
    """Try the collectives of doors: rows of several dimensions, and uneven pieces, some of them empty."""
    group = world(size)
    own_rank, name = group.rank(), group.group_name
    rows = [numbers(rank, torch.float32, size * 6).view(size * 2, 3) for rank in range(size)]
    assert torch.equal(all_gather(rows[own_rank].t(), size, name), torch.cat([each.t() for each in rows]))
    own_sum = in_order(rows).chunk(size)[own_rank]
    assert torch.equal(reduce_scatter(rows[own_rank], size, name), own_sum)
    counts = [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)]
    sent = [torch.randn(sum(of), 3, generator=torch.Generator().manual_seed(rank)) for rank, of in enumerate(counts)]
    ins, outs = counts[own_rank], [of[own_rank] for of in counts]
    expected = torch.cat([x.split(of)[own_rank] for x, of in zip(sent, counts, strict=True)])
    assert torch.equal(all_to_all(sent[own_rank], outs, ins, name), expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_arrives_and_is_added_up_in_the_order_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_collectives, "_PIECE", 3)  # numbers come in three pieces, the last of them smaller
    monkeypatch.setattr(local_collectives, "_WHOLE", 5)
    cases = {"gathers": lambda: gathers(size), "sums": lambda: sums(size), "doors": lambda: doors(size)}
    worlds.in_turn(size, cases)


@on_two_ranks
def test_messages_larger_than_the_buffers_of_a_socket() -> None:
    group = world(2)
    for dtype in (torch.float64, torch.bfloat16):
        parts = [numbers(rank, dtype, 600_001) for rank in range(2)]
        out = torch.empty(2 * 600_001, dtype=dtype)
        all_gather_into(out, parts[group.rank()], group)
        assert torch.equal(out, torch.cat(parts))
        x = parts[group.rank()].clone()
        all_reduce_(x, "sum", group)
        assert torch.equal(x, parts[0] + parts[1])


@worlds.world(3)
def test_groups_of_a_part_of_the_world_do_not_meet() -> None:
    """Ranks of a group are not those of the world, and one rank is in none."""
    world(3)
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    store = own_store(range(3))
    # An earlier start has left the address of a rank that is gone.
    store.set(f"local sockets/{group.group_name}/0", "\0meshwright-gone")
    serve(group, ["a machine"] * 2, store, datetime.timedelta(seconds=5))
    out, own = torch.zeros(2 * NUM), numbers(dist.get_rank(), torch.float32)
    if group.rank() == 0:
        time.sleep(0.2)
    all_gather_into(out, own, group)
    assert torch.equal(out, torch.cat([numbers(rank, torch.float32) for rank in (1, 2)]))
    if group.rank() == 0:  # errors have global ranks
        return
    with pytest.raises(dist.DistBackendError, match="rank 1 has closed its connection"):
        all_gather_into(out, own, group)


@on_two_ranks
def test_a_recorder_counts_one_gather_and_one_sum() -> None:
    group, whole = world(2), torch.ones(2 * NUM)
    with Recorder() as recorder:
        all_gather_into(whole, whole[:NUM].clone(), group)
        reduce_scatter_into(torch.empty(NUM), whole, group)
    result = [(seen.op, seen.ranks, seen.num_bytes) for seen in recorder.collectives]
    assert result == [("all_gather", (0, 1), 56), ("reduce_scatter", (0, 1), 56)]


@on_two_ranks
def test_a_gather_that_is_broken_off_ends_the_group_on_all_ranks() -> None:
    """The rest of a message would arrive as the next one. So whoever uses the group again gets an error."""
    group = world(2)
    gathers(2)
    whole, own = torch.empty(2 * NUM), torch.ones(NUM)
    with pytest.MonkeyPatch.context() as patch:
        if group.rank() == 0:
            patch.setattr(local_sockets._Incoming, "add", interrupt)
            with pytest.raises(KeyboardInterrupt):
                all_gather_into(whole, own, group)
        else:
            with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
                twice(all_gather_into, whole, own, group)  # rank 0 may have sent its part of the first
    with pytest.raises(dist.DistBackendError, match="an error closed the connections of ranks"):
        all_gather_into(whole, own, group)
    gathers(2)  # a new group


def twice(act: Callable[..., None], *args: object) -> None:
    act(*args)
    act(*args)


def interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


@on_two_ranks
def test_an_interrupt_waits_until_all_has_arrived() -> None:
    """A sum has three pieces, and the interrupt follows the first. A leftover piece would arrive as part of the next
    sum."""
    group, real = world(2), local_sockets.LocalSockets._send
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background

    def interrupted(*args: Any) -> None:
        real(*args)
        os.kill(os.getpid(), signal.SIGINT)

    summands, out = torch.arange(2.0 * NUM), torch.empty(NUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_collectives, "_PIECE", 3)
        with patch.context() as sending:
            sending.setattr(local_sockets.LocalSockets, "_send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reduce_scatter_into(out, summands, group)
        assert torch.equal(out, 2 * summands.chunk(2)[group.rank()])
        reduce_scatter_into(out, summands, group)
        assert torch.equal(out, 2 * summands.chunk(2)[group.rank()])
        gathers(2)
        sums(2)


def apart(kind: str) -> str:
    """One rank does something else than the other gathers: what it got, or its error."""
    group = mw.Mesh(fsdp=2, device="cpu", timeout_s=2.0).process_group(("fsdp",))
    rank, whole = group.rank(), torch.full((2 * NUM,), float(group.rank()))
    try:
        if rank == 0:
            PARTED[kind](whole, group)
            return kind
        all_gather_into(whole, whole.chunk(2)[rank], group)
    except dist.DistBackendError as error:
        return f"error: {error}"
    return "gathered"


def a_gather_further(whole: Tensor, group: dist.ProcessGroup) -> None:
    local_collectives._SOCKETS[group]._turn += 1
    all_gather_into(whole, whole[:NUM], group)


# What rank 0 does, and what rank 1 reads then.
PARTED: dict[str, Callable[[Tensor, dist.ProcessGroup], Any]] = {
    "a smaller sum": lambda whole, group: reduce_scatter_into(torch.empty(NUM - 1), whole[2:], group),
    "a sum of the same size": lambda whole, group: reduce_scatter_into(torch.empty(NUM), whole, group),
    "another dtype": lambda whole, group: all_gather_into(whole.int(), whole[:NUM].int(), group),
    "a gather further": a_gather_further,
    "nothing": lambda *_: time.sleep(4),
}
EXPECTED = {
    "a smaller sum": "rank 0 sends 24 bytes of float32 sum, reduce_scatter in exchange 1 of the group, but this rank "
    "expects 28 bytes of float32 all_gather in exchange 1 of the group",
    "a sum of the same size": "rank 0 sends 28 bytes of float32 sum, reduce_scatter in exchange 1",
    "another dtype": "rank 0 sends 28 bytes of int32 all_gather in exchange 1",
    "a gather further": "in exchange 2 of the group, but this rank expects 28 bytes of float32 all_gather in exchange",
    "nothing": "no connection to rank 0 within 2 s",
}


@functools.cache
def parted() -> dict[str, list[str]]:
    return worlds.in_turn(2, {kind: functools.partial(apart, kind) for kind in PARTED})


@pytest.mark.parametrize("kind", EXPECTED)
def test_ranks_that_are_not_at_the_same_place_get_no_numbers(kind: str) -> None:
    assert "gathered" not in (answers := parted()[kind])
    assert EXPECTED[kind] in answers[1]


@on_two_ranks
def test_an_op_that_fails_before_it_sends_ends_the_group() -> None:
    group = world(2)
    whole, own = torch.zeros(2 * NUM), torch.ones(NUM)
    all_gather_into(whole, own, group)
    if group.rank() == 0:
        with pytest.raises(RuntimeError, match="size of tensor"):
            all_gather_into(whole, own[1:], group)
        with pytest.raises(dist.DistBackendError, match=r"an error closed the connections .* RuntimeError"):
            all_gather_into(whole, own, group)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
            twice(all_gather_into, whole, own, group)


def leaves_a_child(how: str) -> float:
    """Rank 0 forks a child that lives on, and then fails or dies. Return how long rank 1 waits."""
    group = mw.Mesh(fsdp=2, device="cpu", timeout_s=20.0).process_group(("fsdp",))
    whole, own = torch.zeros(2 * NUM), torch.ones(NUM)
    all_gather_into(whole, own, group)
    if group.rank() == 0:
        if not os.fork():
            time.sleep(6)
            os._exit(0)
        if how == "dies":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="size of tensor"):
            all_gather_into(whole, own[1:], group)
        return 0.0
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
        twice(all_gather_into, whole, own, group)
    (Path(os.environ["SENDS_AT"]) / "waited").write_text(str(time.monotonic() - started))
    return 0.0


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_forked_child_keeps_no_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("SENDS_AT", str(tmp_path))
    with contextlib.suppress(mw.RankError):
        worlds.run(2, leaves_a_child, how)
    assert float((tmp_path / "waited").read_text()) < 5


@on_two_ranks
def test_a_signal_handler_cannot_send_within_a_collective() -> None:
    """It would wait for its own rank, without a time limit."""
    group, seen = world(2), list[str]()
    whole, own = torch.zeros(2 * NUM), torch.ones(NUM)
    all_gather_into(whole, own, group)

    def handler(*_: object) -> None:
        try:
            all_gather_into(whole.clone(), own, group)
        except dist.DistBackendError as error:
            seen.append(str(error))

    if group.rank() == 0:
        signal.signal(signal.SIGUSR1, handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(dist.DistBackendError):
            all_gather_into(whole, own, group)
        assert seen == ["a signal handler must not run a collective within another one"]
    else:
        time.sleep(1.5)
        with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
            twice(all_gather_into, whole, own, group)


@on_two_ranks
def test_a_broken_pipe_is_an_error_even_if_the_signal_would_end_the_process() -> None:
    group = world(2)
    whole, own = torch.zeros(2 * NUM), torch.ones(NUM)
    all_gather_into(whole, own, group)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if group.rank() == 0:
        local_collectives._SOCKETS[group].close()
        return
    time.sleep(0.5)
    with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
        all_gather_into(whole, own, group)


@on_two_ranks
def test_inputs_that_require_gradients_are_sent_too() -> None:
    group = world(2)
    rows = torch.ones(4, 3, requires_grad=True)
    assert torch.equal(all_gather(rows, 2, group.group_name), torch.ones(8, 3))
    assert torch.equal(reduce_scatter(rows, 2, group.group_name), torch.full((2, 3), 2.0))
    assert torch.equal(all_to_all(rows, [2, 2], [2, 2], group.group_name), torch.ones(4, 3))


@worlds.world(2)
def test_a_group_that_gets_an_earlier_name_is_not_served() -> None:
    mesh = mw.Mesh(fsdp=2, device="cpu")
    name = mesh.process_group(("fsdp",)).group_name
    assert serves_named(name)
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=PrefixStore("again", store), rank=rank, world_size=2)
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    assert name in [group.group_name for group in groups]
    assert not serves_named(name)
    assert mesh.axes.world == 2  # the mesh is alive, and so are its groups


@worlds.world(2)
def test_a_rank_that_stays_away_or_leaves_is_named() -> None:
    group = mw.Mesh(fsdp=2, device="cpu", timeout_s=1.0).process_group(("fsdp",))
    whole, own = torch.empty(2 * NUM), torch.ones(NUM)
    all_gather_into(whole, own, group)
    if group.rank() == 1:
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"no answer from ranks \[0\] within 1 s"):
            all_gather_into(whole, own, group)
        assert time.monotonic() - started < 5
    else:
        time.sleep(2)
        with pytest.raises(dist.DistBackendError, match="rank 1 has closed its connection"):
            twice(all_gather_into, whole, own, group)


@on_two_ranks
def test_a_rank_that_leaves_while_others_wait_is_named() -> None:
    """A kernel reports the end in two ways: a reset if something that was sent to the rank is left unread."""
    for has_read in (False, True):
        group = world(2)
        whole, own = torch.zeros(2 * NUM), torch.ones(NUM)
        all_gather_into(whole, own, group)
        if group.rank() == 0:
            time.sleep(1)
            sockets = local_collectives._SOCKETS[group]
            if has_read:
                sockets._peers[1].recv(4096)
            sockets.close()
        else:
            with pytest.raises(dist.DistBackendError, match="rank 0 has closed its connection"):
                all_gather_into(whole, own, group)


@worlds.world(1)
def test_doors_of_compiled_layers_stay_with_torch() -> None:
    """Another rank may run the same layer uncompiled, for another length of its tokens."""
    with tempfile.TemporaryDirectory() as at:
        source, mesh = tiny.directory(Path(at) / "m", "qwen3"), mw.Mesh(device="cpu")
        name = mesh.process_group(DENSE).group_name
        mw.load(source, mesh)
        assert collectives._ops_for(name) is torch.ops.meshwright
        mw.load(source, mesh, memory=mw.MemoryOptions(compiled=True))
        assert collectives._ops_for(name) is torch.ops._c10d_functional


@worlds.world(2)
def test_processes_of_other_users_are_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    group = mw.Mesh(fsdp=2, device="cpu", timeout_s=1.0).process_group(("fsdp",))
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(dist.DistBackendError, match=r"another user's process answers|no connection from ranks"):
        all_gather_into(torch.empty(2 * NUM), torch.ones(NUM), group)


def fsdp_steps(directory: Path, mesh: dict[str, int]) -> tuple[int, list[str]]:
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32)
    exchanges, real = [0], local_collectives._exchange

    def counted(*args: Any) -> None:
        exchanges[0] += 1
        real(*args)

    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(local_collectives, "_exchange", counted)
        mw.Engine(model, lr=0.0).backward(tiny.batches(model.mesh.data_rank)[:1])
    return exchanges[0], [seen.op for seen in recorder.collectives]


def test_every_collective_of_a_step_is_sent_so(tmp_path: Path) -> None:
    directory = tiny.directory(tmp_path / "m", "qwen3_moe", num_hidden_layers=2, num_experts=4)
    meshes: list[dict[str, int]] = [dict(tp=2), dict(fsdp=2, ep=2), *([dict(fsdp=2)] if parts.ALL else [])]
    acts = {str(mesh): functools.partial(fsdp_steps, directory, mesh) for mesh in meshes}
    for mesh, [(exchanges, seen), _] in worlds.in_turn(2, acts).items():
        assert exchanges == len(seen) > 0, mesh


def on_machines(root: Path) -> list[bool]:
    """Rank 2 belongs to another user, as one of another machine or container would differ."""
    if int(os.environ["RANK"]) == 2:
        os.geteuid = lambda: 12_345
    mesh = mw.Mesh(fsdp=2, replicate=2, device="cpu")
    axes = ("fsdp",), ("replicate",), DENSE
    for each in axes:
        group = mesh.process_group(each)
        out = all_gather(torch.full((3,), float(group.rank())), group.size(), group.group_name)
        assert torch.equal(out, torch.arange(float(group.size())).repeat_interleave(3))
    return [serves(mesh.process_group(each)) for each in axes]


def test_groups_over_several_machines_go_their_own_way(tmp_path: Path) -> None:
    """All ranks of a group make the same choice."""
    served = worlds.run(4, on_machines, tmp_path)
    assert served == [[True, False, False], [True, True, False], [False, False, False], [False, True, False]]


def test_a_machine_is_what_sockets_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    local = local_sockets.machine_of(range(4))
    assert local == local_sockets.machine_of(range(4)) != ""
    assert local != local_sockets.machine_of(range(4, 8)), "another node of the launcher"
    real = os.readlink
    for name in ("net", "user"):
        monkeypatch.setattr(os, "readlink", lambda path, name=name: f"other {path}" if name in path else real(path))
        assert local != local_sockets.machine_of(range(4))
        monkeypatch.undo()
    monkeypatch.setattr(local_sockets.sys, "platform", "darwin")
    assert local_sockets.machine_of(range(4)) == ""


@worlds.world(1)
def test_no_sockets_where_the_system_has_none() -> None:
    group = mw.Mesh(device="cpu").process_group(("fsdp",))
    assert serves(group)
    other = dist.new_group([0])
    serve(other, [""], own_store(range(1)), datetime.timedelta(seconds=5))
    assert not serves(other)
