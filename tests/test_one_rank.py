"""A failure on one rank is named on all ranks at once, and a caller that catches it can go on."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed
from tests.words import words

ON = dict(output_router_logits=True, router_aux_loss_coef=0.3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("one") / "m", "qwen3_moe", num_hidden_layers=2, **ON)


class Failing:
    """A loss that fails on rank 1, in its second micro-batch, while it is switched on."""

    def __init__(self, rank: int, error: Exception | None) -> None:
        self.error, self.rank, self.calls = error, rank, 0

    def __call__(self, scores: Any, fields: Any) -> Tensor:
        self.calls += 1
        if self.rank == 1 and self.calls >= 2 and self.error is not None:
            raise self.error
        return -scores["logprobs"]


def caught(act: Any) -> str:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    return "nothing"


def goes_on(source: Path, mesh: dict[str, int]) -> tuple[list[str], float, list[float], list[float]]:
    began = time.monotonic()
    engine = build(source, mesh)
    engine.evaluate(feed(engine))  # groups are made
    rank = engine.model.mesh.rank
    message = []
    for act in (engine.step, engine.evaluate):
        engine.loss = Failing(rank, ValueError("broken"))
        message.append(caught(lambda act=act: act(feed(engine))))
        engine.loss = Failing(rank, None)
    records = [engine.step(feed(engine)) for _ in range(2)]
    fresh = build(source, mesh)
    expected = [fresh.step(feed(fresh)) for _ in range(2)]
    seconds = time.monotonic() - began
    return message, seconds, [r.loss for r in records], [r.loss for r in expected]


@pytest.mark.parametrize(
    "mesh", [dict(fsdp=2, ep=2), *([dict(tp=2), dict(replicate=2)] if parts.ALL else [])], ids=trials.named
)
def test_a_loss_that_fails_on_one_rank(source: Path, mesh: dict[str, int]) -> None:
    """The others once waited for the rest of timeout_s, without a reason."""
    for rank, (message, seconds, losses, expected) in enumerate(worlds.run(2, goes_on, source, mesh)):
        for text in message:
            pattern = (
                "^ValueError: broken$"
                if rank
                else words("^RankError", "rank 1 ", "the loss of step 0", "ValueError: broken")
            )
            assert re.search(pattern, text), text
        assert losses == expected  # what failed has left nothing behind
        assert seconds < 20


def detached(source: Path) -> str:
    engine = build(
        source, dict(fsdp=2), loss=lambda s, f: s["logprobs"].detach() if mw_rank(engine) else -s["logprobs"]
    )
    return caught(lambda: engine.step(feed(engine)))


def mw_rank(engine: mw.Engine) -> int:
    return engine.model.mesh.rank


def test_terms_that_are_detached_on_one_rank(source: Path) -> None:
    first, second = worlds.run(2, detached, source)
    assert re.search(words("^RankError", "rank 1 ", "StateError: .*detached"), first), first
    assert re.search(words("^StateError", "detached"), second), second


def too_few(source: Path, timeout_s: float) -> tuple[str, float]:
    """All ranks refuse together, so that a caller may take another mesh."""
    began = time.monotonic()
    text = caught(lambda: mw.load(source, mw.Mesh(tp=4, timeout_s=timeout_s), dtype=torch.float64))
    model = mw.load(source, mw.Mesh(fsdp=2, tp=2, timeout_s=timeout_s), dtype=torch.float64)
    batch = mw.pack([[1, 2, 3]], length=4)
    mw.Engine(model, lr=1e-3).step([batch])
    return text, time.monotonic() - began


def test_a_vocabulary_that_leaves_a_rank_without_any(tmp_path: Path) -> None:
    """5 tokens over tp=4 are 2, 2, 1 and none: only the last rank failed, and the others went on."""
    source = tiny.directory(tmp_path / "m", "qwen3", vocab_size=5)
    for text, seconds in worlds.run(4, too_few, source, 20.0):
        assert re.search(
            words("^LayoutError", "tp=4 leaves a rank without any of vocab=5", "choose tp from 1, 2, 3, 5"), text
        )
        assert seconds < 15


def part_of_one(source: Path) -> list[str]:
    """A mask that is wrong in the part of one data rank, and then what is right."""
    engine = build(source, dict(fsdp=2))
    documents, masks = [[1, 2, 3, 4, 5], [6, 7, 8, 9], [5, 6, 7], [8, 9]], [[0, 0, 1, 1, 1], [0, 1, 1, 1], [0, 1]]
    message = []
    for of_third in ([0, 1], [0, 1, 1]):
        of_all = [*masks[:2], of_third, [0, 1]]
        message.append(caught(lambda of_all=of_all: mw.batches(documents, engine.model.mesh, length=6, trained=of_all)))
    return message


def test_documents_that_one_data_rank_alone_would_get(source: Path) -> None:
    """The rank once refused them alone, and the others waited for it in the step."""
    for message in worlds.run(2, part_of_one, source):
        assert message == ["DataError: trained: document 2 differs in length: 2 values for 3 tokens", "nothing"]


def late(timeout_s: float) -> str:
    mesh = mw.Mesh(fsdp=2, device="cpu", timeout_s=timeout_s)
    if mesh.rank:
        time.sleep(3 * timeout_s)
        return "late"
    return caught(lambda: mw.batches([[1, 2, 3]], mesh, length=8))


def test_a_rank_that_never_comes_to_batches() -> None:
    text, _ = worlds.run(2, late, 2.0)
    assert re.search(words("^RankError", r"rank 1: .*test_one_rank\.py", "rank 0: waiting at .*batches"), text), text
