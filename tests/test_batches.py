"""Mistakes that a batch, a loss or a schedule may hide are refused, or change no number."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.data import check_shifted
from tests import tiny, trials, worlds
from tests.trials import build, feed, said
from tests.words import words

DOCUMENTS = [[5, 6, 7, 8], [9, 10, 11], [13, 14, 15, 16], [1, 2]]


def evaluated(source: Path, batches: list[list[mw.Batch]], loss: Any, **options: Any) -> list[float]:
    engine = build(source, {}, loss=loss, **options)
    return [engine.evaluate(each) for each in batches]


@pytest.mark.parametrize("length", [6, 8])
def test_filler_keeps_the_kind_of_a_field(source: Path, length: int) -> None:
    """A 0 behind booleans would make `~` give -2, and a mask pick rows."""
    fields = {"is_prompt": [[True] * 3 + [False] * 3], "advantage": [[0.5] * 6], "at": [[1, 2, 3, 4, 5, 6]]}
    batch = mw.pack([[5, 6, 7, 8, 9, 10]], length=length, fields=fields)
    kinds = {name: values.dtype for name, values in batch.fields.items()}
    assert kinds == {"is_prompt": torch.bool, "advantage": torch.float32, "at": torch.int64}
    expected = worlds.run(1, evaluated, source, [[mw.pack([[5, 6, 7, 8, 9, 10]], fields=fields)]], _not_prompt)
    assert worlds.run(1, evaluated, source, [[batch]], _not_prompt)[0] == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int32, torch.int32),
        (torch.bool, torch.bool),
    ],
)
def test_fields_may_be_tensors_or_arrays(args: torch.dtype, kept: torch.dtype) -> None:
    values = [torch.tensor(of_document).to(args) for of_document in ([1, 0, 1], [0, 1])]
    arrays = [v.numpy() for v in values] if args != torch.bfloat16 else []  # which numpy has not
    for kind in filter(None, (values, arrays)):
        field = mw.pack([[5, 6, 7], [8, 9]], length=8, fields={"f": kind}).fields["f"]
        assert field.dtype == kept
        assert torch.equal(field, torch.cat([*values, torch.zeros(3, dtype=args)]).to(kept))


def test_a_field_that_requires_grad_is_refused() -> None:
    with pytest.raises(mw.errors.DataError, match=words(r"fields\['kl'\]", "requires.grad", r"detach\(\)")):
        mw.pack([[5, 6]], fields={"kl": [torch.ones(2, requires_grad=True)]})


def _not_prompt(scores: Any, fields: Any) -> Tensor:
    return -scores["logprobs"] * ~fields["is_prompt"]


@pytest.mark.parametrize(
    ("documents", "labels"),
    [
        ([[1, 2, 3]], [[1, 2, 3]]),
        ([[1, 2, 3, 4, 5, 6]], [[-100, -100, -100, -100, 5, 6]]),
        ([[3, 3, 3], [4, 5, 6], [7, 8, 9]], [[3, 3, 3], [4, 5, 6], [7, 8, 9]]),
    ],
    ids=["short", "a short answer", "with a run of one token"],
)
def test_labels_of_their_own_tokens(documents: list[list[int]], labels: list[list[int]]) -> None:
    with pytest.raises(mw.DataError, match=words("labels", "trained=", r"mw\.over_tokens\(labels\)")):
        check_shifted(mw.pack(documents, labels=labels))


@pytest.mark.parametrize(
    ("documents", "labels"),
    [
        ([[3, 9, 9]], [[-100, 9, -100]]),
        ([[9]], [[9]]),
        ([[3, 4, 4, 4]], [[-100, -100, 4, -100]]),
        ([[9, 9]], None),
        ([[7, 7], [7, 7]], [[7, 7], [7, -100]]),
        ([[1, 2, 3]], [[-100, 2, -100]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]),
    ],
    ids=["a run of one token", "one token", "the last of a run", "no labels", "windows", "one label", "one is another"],
)
def test_labels_that_only_look_like_their_tokens(documents: list[list[int]], labels: list[list[int]] | None) -> None:
    check_shifted(mw.pack(documents, labels=labels))


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


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        (dict(bounds=()), "bounds of the batch must rise from 0 to 6"),
        (dict(bounds=None), "bounds of the batch must rise from 0 to 6"),
        (dict(bounds=(0, 6), num_filler=1), "num_filler=1, .*begins at 0 of 6 tokens"),
        (dict(tokens=torch.tensor(1)), r"tokens has shape \(\); give one value a token"),
        (dict(labels=torch.tensor(1)), r"labels has shape \(\) for 6 tokens"),
        (dict(fields={"tokens": torch.zeros(6)}), "field cannot be named 'tokens'"),
    ],
    ids=str,
)
def test_a_batch_made_by_hand(changed: dict[str, Any], pattern: str) -> None:
    with pytest.raises(mw.DataError, match=pattern):
        replace(mw.pack([[1, 2, 3], [4, 5]], length=6), **changed)


@pytest.mark.parametrize("documents", ["text", ["text"], {"input_ids": [[1]]}, [{"input_ids": [1]}], [{1, 2}]], ids=str)
def test_ids_beyond_the_tokenizer(documents: Any) -> None:
    with pytest.raises(mw.DataError, match=words("token ids", "text", "dict", r'tokenizer\(texts\)\["input_ids"\]')):
        mw.pack(documents)


def of_rewards(*documents: list[list[int]], length: int | None = None, name: str = "reward") -> list[mw.Batch]:
    number = {str(each): at + 1.0 for at, each in enumerate(DOCUMENTS)}  # of filler it is 0
    values = [[[number[str(d)]] * len(d) for d in some] for some in documents]
    return [mw.pack(some, length=length, fields={name: v}) for some, v in zip(documents, values, strict=True)]


@pytest.mark.parametrize("name", ["weights", "loss_mask"])
def test_an_unused_field(source: Path, name: str) -> None:
    batches = of_rewards(DOCUMENTS, name=name)
    text = worlds.run(1, said, source, {}, lambda engine: engine.evaluate(batches))[0]
    assert re.search(words("^DataError", rf"field {name!r}", r"\bloss\b", "'weight'"), text), text
    padded = of_rewards(DOCUMENTS, name="attention_mask")
    text = worlds.run(1, said, source, {}, lambda engine: engine.evaluate(padded))[0]
    assert re.search(words("^DataError", "'attention_mask'", "without padding"), text), text
    reads = lambda s, f: -s["logprobs"] * f[name]  # noqa: E731
    assert worlds.run(1, evaluated, source, [batches], reads)[0][0] > 0


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

    plain = worlds.run(1, evaluated, source, [of_rewards(DOCUMENTS)], mw.losses.cross_entropy)[0]
    assert worlds.run(1, evaluated, source, [of_rewards(DOCUMENTS)], loss)[0] == pytest.approx(plain)


def two_losses(source: Path, mesh: dict[str, int]) -> tuple[float, float, float]:
    engine = build(source, mesh)
    alone = engine.evaluate(feed(engine))
    record = engine.step(feed(engine))
    return alone, record.loss, record.router_loss


@pytest.mark.parametrize("mesh", [dict(), dict(fsdp=2, tp=2)], ids=trials.named)
def test_the_router_s_part_of_the_loss(tmp_path: Path, mesh: dict[str, int]) -> None:
    on = tiny.directory(tmp_path / "m", "qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.3)
    for alone, loss, router in worlds.run(trials.world_of(mesh), two_losses, on, mesh):
        assert router > 0.1
        assert alone + router == pytest.approx(loss, rel=1e-12)
