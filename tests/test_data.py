"""Data means what users think: masks over tokens, values by document, batches of a whole step."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from tests import tiny, worlds
from tests.trials import build, said
from tests.words import words

DOCUMENTS = [[5, 6, 7, 8], [9, 10, 11]]
MASKS = [[0, 0, 1, 1], [0, 1, 0]]


def test_a_mean_over_answers(source: Path) -> None:
    """docs/rl.md puts the weights at the tokens of the answer."""
    weights = mw.over_tokens([[learnt / sum(mask) for learnt in mask] for mask in MASKS])

    def act() -> tuple[float, float]:
        engine = build(source, {})
        lp = mw.logprobs(engine.model, mw.pack(DOCUMENTS))
        batch = mw.pack(DOCUMENTS, trained=MASKS, length=8, fields={"weight": weights})
        return engine.evaluate([batch]), -(lp[1:3].mean() + lp[4]).item() / 2

    [(result, expected)] = worlds.run(1, act)
    assert result == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("of", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_values_over_the_tokens_move_to_the_terms(of: Any) -> None:
    """Values stay within their document. `~` of the number 1 would be -2."""
    gain, keep = [[9.0, 0.0, 0.5, 0.75], [9.0, 1.0, 2.0]], [[True, False, True, True], [True, False, True]]
    fields = {name: mw.over_tokens([of(each) for each in values]) for name, values in (("gain", gain), ("keep", keep))}
    batch = mw.pack(DOCUMENTS, length=8, fields=fields)
    assert batch.fields["gain"].tolist() == [0.0, 0.5, 0.75, 0.0, 1.0, 2.0, 0.0, 0.0]
    assert (~batch.fields["keep"]).tolist() == [True, False, False, True, True, False, True, True]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, None])
def test_labels_over_the_tokens(kind: Any) -> None:
    """Labels are those of transformers. Not every kind of number holds -100."""
    documents = [[5, 6, 7, 8], [9, 10, 11]]
    labels = [np.array(each, kind) for each in documents] if kind else documents
    assert torch.equal(mw.pack(DOCUMENTS, labels=mw.over_tokens(labels)).labels, mw.pack(DOCUMENTS).labels)
    masked = mw.over_tokens([[-100, -100, 7, 8], [-100, 10, -100]])
    assert torch.equal(mw.pack(DOCUMENTS, labels=masked).labels, mw.pack(DOCUMENTS, trained=MASKS).labels)


def test_a_field_put_in_later_is_as_wide_as_one_of_pack() -> None:
    """bfloat16 turns a third into 0.334."""
    batch = mw.pack(DOCUMENTS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        fields = batch.with_fields(a=[1 / 3] * 7, b=torch.ones(7), c=np.full(7, 1 / 3)).fields
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: values.dtype for name, values in fields.items()} == dict(
        a=torch.float32, b=torch.float32, c=torch.float64
    )
    assert fields["a"].tolist() == [pytest.approx(1 / 3, rel=1e-7)] * 7
    with pytest.raises(mw.DataError, match="old must be numbers"):
        batch.with_fields(old=0.5)


def ratios(source: Path, mesh: dict[str, int]) -> tuple[list[float], list[float], str]:
    """Every ratio is 1 in a first step of RL, whichever way the old log-probabilities came."""
    seen: list[float] = []

    def loss(scores: Any, fields: Any) -> Tensor:
        ratio = (scores["logprobs"] - fields["old"]).exp()
        seen.extend(ratio[fields["labels"] != -100].tolist())
        return -ratio

    engine = build(source, mesh, loss=loss)
    documents, masks = [[5, 6, 7, 8], [9, 10]], [[0, 0, 1, 1], [0, 1]]
    batch = mw.pack(documents, trained=masks, length=8)
    old = mw.logprobs(engine.model, batch)
    again = mw.pack(documents, trained=masks, length=8, fields={"old": batch.split(old)})
    engine.evaluate([again])  # a new loss is tried with other scores too
    seen.clear()
    engine.evaluate([again])
    by_document = seen.copy()
    engine.evaluate([batch.with_fields(old=old)])
    return by_document, seen, repr(again)


def test_logprobs_feed_fields(source: Path) -> None:
    for by_document, both, text in worlds.run(2, ratios, source, dict(tp=2)):
        assert by_document
        assert both == pytest.approx([1.0] * len(both), abs=1e-12)
        assert text == "Batch(2 documents, 8 tokens of which 2 are padding, 3 targets, fields old)"


# Value heads: a token has a term where it has a label.


def test_labels_mask_a_value_head(source: Path) -> None:
    """`num_targets` counts the trained tokens: before, the prompt was trained too."""

    def act() -> tuple[float, float, int, int]:
        engine = build(source, {}, head="value", loss=mw.losses.squared_error)
        batch = mw.pack([[5, 6, 7, 8]], trained=[[0, 0, 1, 1]], length=6, fields={"target": [[1.0, 2.0, 3.0, 4.0]]})
        off = (mw.logits(engine.model, batch) - batch.fields["target"])[1:3]
        result = engine.evaluate([batch])
        return result, off.square().mean().item() / 2, batch.num_targets, engine.step([batch]).num_targets

    [(result, expected, in_batch, in_step)] = worlds.run(1, act)
    assert result == pytest.approx(expected, rel=1e-12)
    assert in_batch == in_step == 2


def test_classification_of_what_is_no_class(tmp_path: Path) -> None:
    at = tiny.classifier(tmp_path / "m", "qwen3", "Token", num_labels=3)

    def act() -> str:
        engine = build(at, {}, head="value", loss=mw.losses.classification)
        with pytest.raises(mw.DataError) as caught:
            engine.evaluate([mw.pack([[5, 6, 7]])])
        return str(caught.value)

    assert re.search(words("label 7", "head of 3", "num_labels"), worlds.run(1, act)[0])


# Batches of a whole step.


class Ranks:
    """A mesh as far as `mw.batches` asks it, without processes."""

    def __init__(self, data_rank: int, num: int) -> None:
        self.data_rank, self.num_data_ranks, self.rank, self.device = data_rank, num, data_rank, torch.device("cpu")
        self.axes, self.host = Axes(fsdp=num), self.device

    all_or_none = mw.Mesh.all_or_none

    def ranks_over(self, _: object) -> Tensor:
        return torch.tensor([self.rank])

    def all_gather_on_hosts(self, numbers: Sequence[float], *_: object) -> Tensor:
        return torch.tensor([list(numbers)], dtype=torch.float64)

    def gather_objects(self, x: object, *_: object) -> list[object]:
        return [x]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 11), min_size=1, max_size=30), st.integers(1, 4), st.integers(11, 30))
def test_every_document_is_in_one_batch(sizes: list[int], num: int, length: int) -> None:
    documents = [[i + 1] * size for i, size in enumerate(sizes)]
    of_ranks = [mw.batches(documents, Ranks(r, num), length=length, fields={"id": documents}) for r in range(num)]  # type: ignore[arg-type]
    assert len({len(of_rank) for of_rank in of_ranks}) == 1
    result = [document for of_rank in of_ranks for batch in of_rank for document in batch.split(batch.tokens)]
    assert all(len(batch) == length for of_rank in of_ranks for batch in of_rank)
    assert sorted(d.tolist() for d in result if d[0]) == sorted(documents)
    for batch in (batch for of_rank in of_ranks for batch in of_rank):
        assert torch.equal(batch.fields["id"], batch.tokens)
    assert len(of_ranks[0]) <= -(-len(documents) // num)  # no rank gets a batch more than documents could fill


def dealt(source: Path, mesh: dict[str, int]) -> tuple[float, int]:
    engine = build(source, mesh)
    documents = [list(range(i + 3, 2 * i + 5)) for i in range(9)]
    masks = [[i % 2 for i in range(len(d))] for d in documents]
    made = mw.batches(documents, engine.model.mesh, length=12, trained=masks)
    record = engine.step(made)
    return record.loss, record.num_targets


def test_the_loss_does_not_depend_on_the_ranks(source: Path) -> None:
    [one] = worlds.run(1, dealt, source, {})
    for loss, num in worlds.run(4, dealt, source, dict(fsdp=2, tp=2)):
        assert (loss, num) == (pytest.approx(one[0], rel=1e-12), one[1])


def own_documents(mesh: dict[str, int]) -> str:
    made = mw.Mesh(**mesh, device="cpu")
    try:
        mw.batches([[1, 2, 3]] * (made.rank + 1), made, length=8)
    except mw.RankError as error:
        return str(error)
    return "nothing"


def test_documents_of_a_rank_alone_are_refused() -> None:
    """They would be shared out once more, and the others never trained on."""
    for text in worlds.run(2, own_documents, dict(fsdp=2)):
        assert re.search(words(r"rank \d", "1 document", "2 documents", r"mw\.pack"), text), text


WHOLE = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
OF_ALL: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too long": ([[1] * 9], {}, r"document 0 of 9 tokens.*length=8"),
    "none": ([], {}, "no documents"),
    "an empty one": ([[1, 2], [], [3, 4, 5]], {}, "document 1 is empty"),
    "text": (["abc"], {}, "token ids, not text"),
    "what a tokenizer gives": ([{"input_ids": [1, 2]}], {}, "token ids, not text or dicts"),
    "a generator": ((d for d in WHOLE), {}, "documents must be a list"),
    "a mask too many": (WHOLE, dict(trained=[[0, 0, 1, 1], [0, 1, 1], [0, 1], [1, 1]]), "4 lists for 3 documents"),
    "a mask too few": (WHOLE, dict(trained=[[0, 0, 1, 1], [0, 1, 1]]), "trained: 2 lists for 3 documents"),
    "labels too many": (WHOLE, dict(labels=[*WHOLE, [1]]), "labels: 4 lists for 3 documents"),
    "a field too many": (WHOLE, dict(fields={"a": [*WHOLE, [1]]}), r"fields\['a'\]: 4 lists for 3 documents"),
    "a mask too long": (WHOLE, dict(trained=[[0, 0, 1, 1], [0, 1, 1], [0, 1, 1]]), "document 2.*3 values for 2 tokens"),
    "no length": (WHOLE, dict(length=None), "either length=, .* or max_tokens="),
    "a length of no whole number": (WHOLE, dict(length=8.0), r"length=8\.0 must be a whole number"),
}


@pytest.mark.parametrize(("documents", "options", "pattern"), OF_ALL.values(), ids=OF_ALL.keys())
def test_batches_refused(documents: Any, options: dict[str, Any], pattern: str) -> None:
    """Messages count in the caller's numbers, not in those of one batch."""
    with pytest.raises(mw.DataError, match=pattern):
        mw.batches(documents, Ranks(0, 1), **{"length": 8, **options})  # type: ignore[arg-type]


def test_batches_have_fields_of_one_kind() -> None:
    """Whole numbers of one document and others of the next are one field, also in a batch without documents."""
    fields = {"a": [[1, 1, 1, 1], [0.5] * 3, [2, 2]], "b": [[True] * 4, [False] * 3, [True] * 2]}
    made = [b for r in range(2) for b in mw.batches(WHOLE, Ranks(r, 2), length=4, fields=fields)]  # type: ignore[arg-type]
    assert len(made) == 4
    assert {batch.fields["a"].dtype for batch in made} == {torch.float32}
    assert {batch.fields["b"].dtype for batch in made} == {torch.bool}
    assert sum(batch.num_targets for batch in made) == 6


def test_a_mask_by_position() -> None:
    """The model would learn the ids 0 and 1."""
    with pytest.raises(TypeError, match="positional"):
        mw.pack([[1, 2, 3, 4]], [[0, 0, 1, 1]])  # type: ignore[misc]


def same_documents(source: Path) -> str:
    engine, message = build(source, dict(fsdp=2)), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: message.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    for _ in range(2):
        engine.evaluate([mw.pack([[1, 2, 3 + engine.model.mesh.rank]])])
        engine.evaluate([mw.pack([[1, 2, 3]])])
    return "; ".join(message)


def test_the_same_documents_on_all_data_ranks_are_warned_of(source: Path) -> None:
    """Once, on one rank."""
    first, second = worlds.run(2, same_documents, source)
    assert re.fullmatch(r"all 2 data ranks bring the same documents.*mw\.batches", first), first
    assert not second


def test_nothing_to_learn_names_the_template(source: Path) -> None:
    def act() -> str:
        return said(source, {}, lambda engine: engine.step([mw.pack([[1, 2, 3]], trained=[[0, 0, 0]])]))

    assert re.search(r"^DataError: no token.*\{% generation %\}", worlds.run(1, act)[0])
