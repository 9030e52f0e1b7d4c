"""The router's aux loss, in transformers' pooled form and in the form that does not depend on the cut; expert loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.errors import RankError
from tests import parts, tiny, trials, worlds
from tests.words import words

COEFFICIENT = 0.3
DOCUMENT = list(range(3, 60))
MOE = ["qwen3_moe", "qwen3_5_moe"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("router")
    options = dict(output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    return {name: tiny.directory(at / name, name, **options) for name in MOE}


def reference_outputs(name: str) -> tuple[float, dict[str, Tensor]]:
    model = tiny.reference(name, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    ids = torch.tensor([DOCUMENT])
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), tiny._per_expert({k: p.grad for k, p in model.named_parameters() if p.grad is not None})


@functools.cache
def on_one(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a world of one process, once for all tests."""
    return worlds.run(1, function, *args)[0]


def ours(source: Path, mesh: dict[str, int], length: int | None = None) -> tuple[float, dict[str, Tensor]]:
    engine = mw.Engine(mw.load(source, mw.Mesh(**mesh), dtype=torch.float32), lr=1e-3)
    loss = engine.backward([mw.pack([DOCUMENT], length=length)])
    return loss, mw.gather(engine.model, "grad")


TP = dict(tp=2, ep=2)
WITH_PADDING: list[Any] = [("qwen3_moe", {}, 70), ("qwen3_5_moe", TP, 58)]
if parts.ALL:
    WITH_PADDING = [(name, *each) for name in MOE for each in (({}, None), ({}, 70), (TP, 58), (dict(tp=2), 70))]


@pytest.mark.parametrize(("name", "mesh", "length"), WITH_PADDING, ids=str)
def test_pooled_is_transformers(sources: dict[str, Path], name: str, mesh: dict[str, int], length: int | None) -> None:
    """Padding counts nothing."""
    ref_loss, ref = on_one(reference_outputs, name)
    loss, grads = worlds.run(trials.world_of(mesh), ours, sources[name], mesh, length)[0]
    assert loss == pytest.approx(ref_loss, rel=1e-5)
    norm = torch.stack([g.norm() for g in ref.values()]).norm()
    for key, grad in ref.items():
        assert (grads[key] - grad).norm() <= 1e-5 * max(grad.norm(), 1e-2 * norm), key


def in_micro_batches(source: Path, num: int) -> tuple[float, dict[str, Tensor]]:
    engine = mw.Engine(mw.load(source, mw.Mesh(), dtype=torch.float64), lr=1e-3)
    loss = engine.backward([mw.pack([DOCUMENT])] * num)
    return loss, mw.gather(engine.model, "grad")


@pytest.mark.parametrize("name", parts.every(2, MOE))
def test_equal_micro_batches_have_the_aux_loss_of_one(sources: dict[str, Path], name: str) -> None:
    """The aux loss is a mean over micro-batches, as the loss is one over their tokens."""
    one, three = (on_one(in_micro_batches, sources[name], num) for num in (1, 3))
    assert three[0] == pytest.approx(one[0], rel=1e-12)
    for key, grad in one[1].items():
        torch.testing.assert_close(three[1][key], grad, rtol=1e-10, atol=1e-12)


def stepped(source: Path, mesh: dict[str, int], mode: str, batches: Any) -> tuple[list[Any], list[Tensor], Any]:
    engine = mw.Engine(mw.load(source, mw.Mesh(**mesh), dtype=torch.float64), lr=1e-3, router_aux=mode)
    mesh_ = engine.model.mesh
    records = [engine.step(batches(mesh_.data_rank, mesh_.num_data_ranks)) for _ in range(2)]
    loss = engine.backward(batches(mesh_.data_rank, mesh_.num_data_ranks))
    grads = mw.gather(engine.model, "grad")
    losses = [*(r.loss for r in records), *(r.router_loss for r in records), loss]
    return losses, [r.expert_load for r in records], grads


def alone(source: Path, mode: str, batches: Any) -> tuple[list[Any], list[Tensor], Any]:
    return stepped(source, {}, mode, batches)


def two_streams(rank: int, num: int) -> list[mw.Batch]:
    return [batch for stream in range(rank, 2, num) for batch in tiny.batches(stream)]


def one_batch_a_rank(rank: int, num: int) -> list[mw.Batch]:
    """The pooled formula is of the micro-batch of all data ranks: one process sees it as one longer micro-batch."""
    documents = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [100] * 8, [33, 44]]
    if num == 2:
        return [mw.pack(documents[2 * rank : 2 * rank + 2])]
    return [mw.pack(documents)]


PREVIOUS, POOLED = ("previous", two_streams), ("pooled", one_batch_a_rank)
ON_MESHES = [(dict(fsdp=2), *PREVIOUS), (dict(fsdp=2), *POOLED), (TP, *POOLED)]
if parts.ALL:
    ON_MESHES += [(TP, *PREVIOUS), (dict(fsdp=2, tp=2, ep=4), *PREVIOUS)]


@pytest.fixture(scope="module")
def on_ranks(sources: dict[str, Path]) -> Callable[[Any], Any]:
    """The results of all ranks, by the number of a case."""

    def run(group: Any) -> Any:
        cases = {at: functools.partial(stepped, sources["qwen3_moe"], *ON_MESHES[at]) for at in group}
        return worlds.in_turn(trials.world_of(ON_MESHES[group[0]][0]), cases)

    return worlds.shared({at: trials.world_of(mesh) for at, (mesh, *_) in enumerate(ON_MESHES)}, run)


def check_same(sources: dict[str, Path], on_ranks: Any, wanted: Any) -> None:
    for at, (_, *how) in enumerate(ON_MESHES):
        if tuple(how) != wanted:
            continue
        losses, loads, grads = on_one(alone, sources["qwen3_moe"], *how)
        for result in on_ranks(at):
            assert result[0] == pytest.approx(losses, rel=1e-9)
            assert all(torch.equal(a, b) for a, b in zip(result[1], loads, strict=True))
        for key, grad in grads.items():
            assert (on_ranks(at)[0][2][key] - grad).norm() <= 1e-9 * max(grad.norm(), 1e-6), key


def test_previous_does_not_depend_on_the_mesh(sources: dict[str, Path], on_ranks: Any) -> None:
    check_same(sources, on_ranks, PREVIOUS)


def test_pooled_is_over_all_data_ranks(sources: dict[str, Path], on_ranks: Any) -> None:
    check_same(sources, on_ranks, POOLED)


def test_previous_begins_with_even_shares(sources: dict[str, Path]) -> None:
    """Each of E experts then has the share k / E, and the mean over layers and tokens of E * sum(share * P) is k."""
    losses, _, _ = on_one(alone, sources["qwen3_moe"], "previous", two_streams)
    assert losses[2] == pytest.approx(COEFFICIENT * tiny.ODD["qwen3_moe"]["num_experts_per_tok"], rel=1e-12)


def cut(num: int) -> Any:
    """Return the same documents in 1, 2 or 4 micro-batches."""
    documents = [[5, 6, 7, 8], [1, 2, 3, 4], [100, 101, 102, 103], [33, 44, 55, 66]]
    share = len(documents) // num
    return lambda rank, ranks: [mw.pack(documents[i : i + share]) for i in range(0, len(documents), share)]


def test_previous_does_not_depend_on_the_cut(sources: dict[str, Path]) -> None:
    nums = (1, 2, 4) if parts.ALL else (1, 4)
    cases = {num: functools.partial(alone, sources["qwen3_moe"], "previous", cut(num)) for num in nums}
    one, *several = [of_rank for (of_rank,) in worlds.in_turn(1, cases).values()]
    for many in several:
        assert many[0] == pytest.approx(one[0], rel=1e-12)
        for key, grad in one[2].items():
            assert (many[2][key] - grad).norm() <= 1e-9 * max(grad.norm(), 1e-6), key


def test_load_counts_every_token_once(on_ranks: Any) -> None:
    _, loads, _ = on_ranks(0)[0]
    tokens = sum(len(b) - b.num_filler for b in two_streams(0, 1))
    assert [load.shape for load in loads] == [(2, 8), (2, 8)]
    assert [load.sum(1).tolist() for load in loads] == [[3 * tokens] * 2] * 2


def test_an_unknown_mode(sources: dict[str, Path]) -> None:
    with pytest.raises(RankError, match=words("ConfigError", "router_aux='global'", "pooled, previous")):
        worlds.run(1, stepped, sources["qwen3_moe"], {}, "global", two_streams)


def test_a_coefficient_of_0_is_no_finding_of_verify(tmp_path: Path) -> None:
    """Nor are experts of new adapters that no token chose: their gradients are 0."""
    options = dict(output_router_logits=True, router_aux_loss_coef=0.0, num_experts=32, num_experts_per_tok=1)
    source = tiny.directory(tmp_path / "m", "qwen3_moe", **options)
    plain = trials.changed(trials.trial(source, {}), lora=mw.Lora(rank=2, b_std=0.1), steps=1)
    for reference in trials.references([trials.changed(plain, router_aux=mode) for mode in ("pooled", "previous")]):
        assert (reference.steps[0].loads == 0).any()
        assert reference.notes.findings == []
