"""Mistakes that a batch, a loss or a schedule may hide are refused, or change no number."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import meshwright as mw
from tests import parts, tiny, trials, worlds
from tests.trials import build, feed, said
from tests.words import words

DOCUMENTS = [[5, 6, 7, 8], [9, 10, 11], [13, 14, 15, 16], [1, 2]]


def evaluated(source: Path, batches: list[list[mw.Batch]], loss: Any, **options: Any) -> list[float]:
    engine = build(source, {}, loss=loss, **options)
    return [engine.evaluate(each) for each in batches]


def test_labels_of_a_value_head_are_no_tokens(tmp_path: Path) -> None:
    """A classifier may say 2 of a document that ends with token 2; a critic's labels only mark where its terms are."""
    classes = mw.pack([[3, 4, 2]], labels=[[-100, -100, 2]])
    marks = [[-100, -100, -100, 14, 15], [-100, -100, -100, -100, 15]]
    target = {"target": [[0.0, 0.0, 0.0, 0.0, 1.0]]}
    classifier = tiny.classifier(tmp_path / "c", "qwen3", "Token", num_labels=3)
    language_model = tiny.directory(tmp_path / "m", "qwen3")

    def act() -> tuple[list[float], str]:
        judge = build(classifier, {}, head="value", loss=mw.losses.classification)
        critic = build(language_model, {}, head="value", loss=mw.losses.squared_error)
        batches = [mw.pack([[11, 12, 13, 14, 15]], labels=[mark], fields=target) for mark in marks]
        losses = [judge.evaluate([classes]), *(critic.evaluate([batch]) for batch in batches)]
        return losses, said(language_model, {}, lambda engine: engine.evaluate([batches[0]]))

    [(losses, of_language_model)] = worlds.run(1, act)
    assert all(loss > 0 for loss in losses)
    assert "the labels are the tokens themselves" in of_language_model


def of_rewards(*documents: list[list[int]], length: int | None = None, name: str = "reward") -> list[mw.Batch]:
    number = {str(each): at + 1.0 for at, each in enumerate(DOCUMENTS)}  # of filler it is 0
    values = [[[number[str(d)]] * len(d) for d in some] for some in documents]
    return [mw.pack(some, length=length, fields={name: v}) for some, v in zip(documents, values, strict=True)]


@pytest.mark.parametrize("name", ["weights", "loss_mask"])
def test_an_unused_field(source: Path, name: str) -> None:
    batches = of_rewards(DOCUMENTS, name=name)
    padded = of_rewards(DOCUMENTS, name="attention_mask")
    reads = lambda s, f: -s["logprobs"] * f[name]  # noqa: E731
    acts = {
        "unused": partial(said, source, {}, lambda engine: engine.evaluate(batches)),
        "padded": partial(said, source, {}, lambda engine: engine.evaluate(padded)),
        "used": partial(evaluated, source, [batches], reads),
    }
    unused, mask, losses = (answer for [answer] in worlds.in_turn(1, acts).values())
    assert re.search(words("^DataError", rf"field {name!r}", r"\bloss\b", "'weight'"), unused), unused
    assert re.search(words("^DataError", "'attention_mask'", "without padding"), mask), mask
    assert losses[0] > 0


def stateful(source: Path) -> list[float]:
    schedule = iter([1e-3, 1e-4, 1e-5])
    engine = build(source, {}, lr=lambda step: next(schedule))
    return [engine.step(feed(engine)).lr for _ in range(3)]


def test_a_schedule_is_called_once_a_step(source: Path) -> None:
    assert worlds.run(1, stateful, source)[0] == [1e-3, 1e-4, 1e-5]


def test_what_a_loss_may_do_with_its_fields(source: Path) -> None:
    def loss(scores: Any, fields: Any) -> Tensor:
        requested = [fields.get("advantage", 1.0), len(fields | {"more": 1}), isinstance(fields, dict), *fields.items()]
        return (
            -scores["logprobs"]
            * requested[0]
            * (3 in requested and True in requested and ("reward" in dict(requested[3:])))
        )

    losses = {"plain": mw.losses.cross_entropy, "ours": loss}
    acts = {name: partial(evaluated, source, [of_rewards(DOCUMENTS)], each) for name, each in losses.items()}
    answers = worlds.in_turn(1, acts)
    assert answers["ours"][0] == pytest.approx(answers["plain"][0])


def two_losses(source: Path, mesh: dict[str, int]) -> tuple[float, float, float]:
    engine = build(source, mesh)
    alone = engine.evaluate(feed(engine))
    record = engine.step(feed(engine))
    return alone, record.loss, record.router_loss


@pytest.mark.parametrize("mesh", [{}, dict(tp=2), *([dict(fsdp=2, tp=2)] if parts.ALL else [])], ids=trials.named)
def test_the_router_s_part_of_the_loss(tmp_path: Path, mesh: dict[str, int]) -> None:
    on = tiny.directory(tmp_path / "m", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    for alone, loss, router in worlds.run(trials.world_of(mesh), two_losses, on, mesh):
        assert router > 0.1
        assert alone + router == pytest.approx(loss, rel=1e-12)
