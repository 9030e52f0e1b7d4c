"""Shards between processes on the host: what arrives, how it is added up, and what a recorder counts."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.mesh import local_collectives
from meshwright.mesh.local_collectives import all_gather_into, reduce_scatter_into, serves
from meshwright.verify import Recorder
from tests import tiny, worlds

NUM = 7


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
        expected = everybodys[0].clone()
        for other in everybodys[1:]:
            expected += other
        out, local = torch.empty(NUM, dtype=dtype), everybodys[group.rank()].clone()
        reduce_scatter_into(out, local, group)
        assert torch.equal(out, expected.chunk(size)[group.rank()])
        assert torch.equal(local, everybodys[group.rank()]), "what is summed stays as it was"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_arrives_and_is_added_up_in_the_order_of_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_collectives, "_PIECE", 3)  # numbers come in three pieces, the last of them smaller
    worlds.in_turn(size, {"gathers": lambda: gathers(size), "sums": lambda: sums(size)})


@worlds.world(3)
def test_groups_of_a_part_of_the_world_do_not_meet() -> None:
    """Ranks of a group are not those of the world, and one rank is in none."""
    world(3)
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    out = torch.zeros(2 * NUM)
    all_gather_into(out, numbers(dist.get_rank(), torch.float32), group)
    assert torch.equal(out, torch.cat([numbers(rank, torch.float32) for rank in (1, 2)]))


@worlds.world(2)
def test_a_recorder_counts_one_gather_and_one_sum() -> None:
    group, whole = world(2), torch.ones(2 * NUM)
    with Recorder() as recorder:
        all_gather_into(whole, whole[:NUM].clone(), group)
        reduce_scatter_into(torch.empty(NUM), whole, group)
    result = [(seen.op, seen.ranks, seen.num_bytes) for seen in recorder.collectives]
    assert result == [("all_gather", (0, 1), 56), ("reduce_scatter", (0, 1), 56)]


class Interrupted:
    """A receive that is posted, and whose wait is broken off."""

    real = staticmethod(dist.irecv)

    def __init__(self, *got: Any, **source: Any) -> None:
        self.work = self.real(*got, **source)

    def wait(self) -> None:
        raise KeyboardInterrupt


@worlds.world(2)
def test_a_gather_that_is_broken_off_leaves_the_group_as_it_was() -> None:
    """A tensor without a receiver would stop gloo."""
    group = world(2)
    if group.rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "irecv", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                all_gather_into(torch.empty(2 * NUM), torch.ones(NUM), group)
        gc.collect()
    else:
        time.sleep(0.5)
        all_gather_into(torch.empty(2 * NUM), torch.ones(NUM), group)
    gathers(2)


@worlds.world(2)
def test_an_interrupt_waits_until_all_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum has three pieces, and the interrupt follows the first. A leftover piece would arrive as part of the next
    sum."""
    group, real = world(2), dist.isend
    monkeypatch.setattr(local_collectives, "_PIECE", 3)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background

    def interrupted(*sent: Any, **target: Any) -> Any:
        work = real(*sent, **target)
        os.kill(os.getpid(), signal.SIGINT)
        return work

    summands, out = torch.arange(2.0 * NUM), torch.empty(NUM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reduce_scatter_into(out, summands, group)
    assert torch.equal(out, 2 * summands.chunk(2)[group.rank()])
    gathers(2)
    sums(2)


def apart(kind: str) -> str:
    """One rank gathers where the other sums, or is a gather further: what it got, or its error."""
    group = mw.Mesh(fsdp=2, device="cpu", timeout_s=2.0).process_group(("fsdp",))
    whole = torch.full((2 * NUM,), float(group.rank()))
    try:
        if kind == "a sum" and group.rank() == 0:
            reduce_scatter_into(torch.empty(NUM), whole, group)
            return "summed"
        if kind == "a gather further" and group.rank() == 0:
            local_collectives._tag(group, "gather")
        if kind == "a transfer" and group.rank() == 0:
            dist.send(whole[:NUM], group=group, group_dst=1)
            return "sent"
        all_gather_into(whole, whole.chunk(2)[group.rank()], group)
    except RuntimeError as error:
        return f"gloo: {error}"
    return "gathered"


@pytest.mark.parametrize("kind", ["a sum", "a gather further", "a transfer"])
def test_ranks_that_are_not_at_the_same_place_get_no_numbers(kind: str) -> None:
    assert "gathered" not in (answers := worlds.run(2, apart, kind))
    assert any("gloo" in answer for answer in answers)


def fsdp_steps(directory: Path, mesh: dict[str, int]) -> tuple[int, list[str]]:
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32)
    swaps, real = [0], local_collectives._swap

    def counted(*args: Any) -> None:
        swaps[0] += 1
        real(*args)

    local_collectives._swap = counted
    with Recorder() as recorder:
        mw.Engine(model, lr=0.0).backward(tiny.batches(model.mesh.data_rank))
    return swaps[0], [seen.op for seen in recorder.collectives if seen.op != "all_reduce" and not seen.at]


def test_fsdp_sends_so(tmp_path: Path) -> None:
    directory = tiny.directory(tmp_path / "m", "qwen3")
    swaps, seen = worlds.run(2, fsdp_steps, directory, dict(fsdp=2))[0]
    assert swaps == len(seen) > 0


@worlds.world(1)
def test_other_groups_and_devices_go_their_own_way() -> None:
    group = mw.Mesh(device="cpu").process_group(("fsdp",))
    assert serves(group, torch.device("cpu"), range(1))
    assert not serves(group, torch.device("meta"), range(1))
    assert not serves(group, torch.device("cpu"), range(1, 2)), "on several machines"
