"""Doors of n-gram tables on 2 and 4 ranks against one process: rows that other ranks hold, halos of short parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright import ops
from meshwright.axes import DATA_RANK, TOKENS, Axes
from meshwright.parallel import context, lookup
from meshwright.sharding import Halo, Lookup, Param, Rules, chunk, look_up
from tests import parts, tiny, trials, worlds
from tests.sharding.test_bill import model_of

WIDTH = 5
ASKED: dict[str, tuple[int, Callable[[int, int], list[int]]]] = {
    # the rows of the table, and what a rank of several asks for
    "all rows by everyone": (11, lambda rank, num: list(range(11))),
    "uneven pieces": (11, lambda rank, num: [(7 * rank + 3 * i) % 11 for i in range(4)]),
    "nothing of the last owner": (11, lambda rank, num: [0, 1, 2, 1] if rank % 2 else [10, 3, 0, 9]),
    "one row many times": (11, lambda rank, num: [4] * 6),
    "own rows alone": (12, lambda rank, num: [12 // num * rank, 12 // num * rank + 1]),
    "the rows of the next rank": (12, lambda rank, num: [12 // num * ((rank + 1) % num)] * 3),
    "an owner without rows": (9, lambda rank, num: [8, 0, rank, 8 - rank, 0]),
    "a rank that asks for nothing": (11, lambda rank, num: [] if rank == 0 else [10, 0, 5, 5]),
    "no rank asks": (11, lambda rank, num: []),
}
LOOKUPS = [dict(fsdp=2), dict(cp=2, tp=2), dict(replicate=2, fsdp=2), dict(tp=2), dict(fsdp=4)]


def _table(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def _gradient(rank: int, num: int) -> Tensor:
    return torch.randn(num, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank))


def looked_up(mesh_sizes: dict[str, int], name: str, trained: bool) -> None:
    """Look rows up on each rank; then rows, dtype and the gradient of own rows are those of one process."""
    mesh, (num_rows, asked) = trials.mesh_of(mesh_sizes), ASKED[name]
    group = mesh.axes.group(dist.get_rank(), TOKENS)
    num, rank, whole = len(group), group.index(dist.get_rank()), _table(num_rows)
    (lo, hi), step = chunk(num_rows, num, rank), chunk(num_rows, num, 0)[1]
    door, own_RW = Lookup(1, WIDTH), whole[lo:hi].clone().requires_grad_(trained)
    owners = lookup._Owners(num, step, lo)
    door.armed = partial(lookup._from_owners, owners=owners, group=mesh.name_of(TOKENS), at="table")
    row_N = torch.tensor(asked(rank, num), dtype=torch.int64)
    result = door(own_RW, row_N, torch.float64)
    assert torch.equal(result, whole[row_N])
    assert result.requires_grad == trained
    assert torch.equal(door(own_RW, row_N, torch.bfloat16), whole[row_N].bfloat16())
    if trained:
        result.backward(_gradient(rank, len(row_N)))
        _is_the_sum(own_RW, whole, [asked(each, num) for each in range(num)], lo, hi)


def _is_the_sum(own_RW: Tensor, whole: Tensor, asked: list[list[int]], lo: int, hi: int) -> None:
    """Compare with one process that looks the rows of all ranks up. Nothing is left to sum."""
    table = whole.clone().requires_grad_()
    rows = torch.tensor([row for each in asked for row in each], dtype=torch.int64)
    look_up(table, rows, torch.float64).backward(torch.cat([_gradient(r, len(each)) for r, each in enumerate(asked)]))
    assert own_RW.grad is not None
    assert table.grad is not None
    assert (own_RW.grad - table.grad[lo:hi]).abs().sum() <= 1e-14 * len(rows)
    assert torch.equal(own_RW.grad == 0, table.grad[lo:hi] == 0), "rows that no rank asks for have no gradient"


@pytest.mark.parametrize("mesh", parts.every(2, LOOKUPS, 1), ids=trials.named)
def test_rows_of_other_ranks(mesh: dict[str, int]) -> None:
    cases = {(name, trained): partial(looked_up, mesh, name, trained) for name in ASKED for trained in (True, False)}
    worlds.in_turn(trials.world_of(mesh), cases)


@pytest.mark.parametrize(("rank", "first", "part"), [(0, 0, 0), (3, 9, 3), (5, 3, 1), (7, 9, 3)])
def test_doors_know_their_rows_and_parts_in_each_replica(rank: int, first: int, part: int) -> None:
    """A table of 11 rows is 3, 3, 3 and 2 rows of the 4 ranks of a replica."""
    axes = Axes(replicate=2, cp=2, tp=2)
    mesh: Any = SimpleNamespace(axes=axes, coords=axes.coords(rank), name_of=str, rank=rank)
    model = model_of(look=Lookup(2, WIDTH, "grams"), halo=Halo(CHANNELS, 3))
    table = Param({"gram": 11}, {"code": WIDTH}, (), name="layers.0.grams", by_rows=True)
    spec: Any = SimpleNamespace(table={"layers.0.grams": table}, rules=Rules())
    lookup.arm(spec, model, mesh)
    door, halo = model.layers["0"].look, model.layers["0"].halo
    assert door.armed.keywords["owners"] == lookup._Owners(4, 3, first)
    assert (halo.parts, halo.part, halo.armed.keywords["size"]) == (4, part, 4)


CHANNELS, TAPS = 3, 4
STEP = 3  # so a token needs 9 rows before it
# Documents of a stream: parts of 3, 6 and 1 tokens on 4 ranks, and documents that begin in each.
STREAMS = [[12], [5, 1, 6], [2, 20, 2], [1, 1, 2], [4], [23, 1]]
HALOS = [dict(tp=2), dict(cp=2), dict(cp=2, tp=2), dict(cp=4), dict(tp=4)]


def convolved(mesh_sizes: dict[str, int], lengths: list[int]) -> None:
    """Convolve own tokens; then outputs and gradients are those of one process, the weight's in sum over the ranks."""
    mesh, g = trials.mesh_of(mesh_sizes), torch.Generator().manual_seed(len(lengths))
    num, total = mesh.axes.cp * mesh.axes.tp, sum(lengths)
    part, own = mesh.coords["cp"] * mesh.axes.tp + mesh.coords["tp"], total // num
    x, weight, d = (torch.randn(s, dtype=torch.float64, generator=g) for s in ((total, CHANNELS), (CHANNELS, TAPS), ()))
    d_TC = d + torch.randn(total, CHANNELS, dtype=torch.float64, generator=g)
    docs, halo = ops.documents(lengths, "cpu"), Halo(CHANNELS, (TAPS - 1) * STEP)
    expected = _with_gradients(lambda *inputs: ops.causal_conv(*inputs, docs, dilation=STEP), x, weight, d_TC)
    halo.parts, halo.part = num, part
    halo.armed = partial(context.gather_parts, size=num, group=mesh.name_of(DATA_RANK), name="halo")
    own_rows = slice(part * own, (part + 1) * own)
    y, dx, dw = _with_gradients(
        lambda *inputs: ops.causal_conv(*inputs, docs, halo, STEP), x[own_rows], weight, d_TC[own_rows]
    )
    dist.all_reduce(dw)
    for result, reference in zip((y, dx, dw), (expected[0][own_rows], expected[1][own_rows], expected[2]), strict=True):
        assert (result - reference).abs().max() <= 1e-13


def _with_gradients(conv: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, d: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = conv(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, d)]


@pytest.mark.parametrize("mesh", parts.every(2, HALOS), ids=trials.named)
def test_halos_of_short_parts(mesh: dict[str, int]) -> None:
    cases = {str(lengths): partial(convolved, mesh, lengths) for lengths in STREAMS}
    worlds.in_turn(trials.world_of(mesh), cases)


def scores_alone(source: Path) -> str:
    """Let the first replica score once more than the second: calls of one replica need no other."""
    model = mw.load(source, trials.mesh_of(dict(replicate=2)), dtype=torch.float32)
    batch = mw.pack([[1, 2, 3, 4, 5]], length=8)
    said = [trials.error_of(lambda: mw.logprobs(model, batch)) for _ in range(2 - model.mesh.coords["replicate"])]
    dist.barrier()
    return "".join(said)


def test_a_replica_needs_no_other(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen4_exp", dtype=torch.bfloat16)
    assert worlds.run(2, scores_alone, source) == ["", ""]
