"""Rows of retrieval and of classification: which of their fields become documents, and which are not used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.data.labelled import Labelled, WholeText
from meshwright.data.retrieval import EmbeddingRows, RerankRows, Retrieval

ROW = {
    "query": "q", "positive": "p", "negative": "a", "negative_1": "b", "negative_12": "c", "neg": ["d"],
    "negatives": ["e", "f"],
}  # fmt: skip


def words(text: str) -> dict[str, list[int]]:
    """Tokenise to characters, with an end token."""
    return {"input_ids": [*map(ord, text), 0]}


def text_of(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_texts_of_all_names() -> None:
    assert Retrieval().texts(ROW) == ("q", ["p"], ["a", "b", "c", "d", "e", "f"])
    assert Retrieval().texts({"anchor": ["q"], "positive": "p", "positives": ["r"], "pos": ["s", "t"]}) == (
        "q", ["p", "r", "s", "t"], [],
    )  # fmt: skip
    renamed = Retrieval({"query": "asked", "negative": "bad"})
    assert renamed.texts({"asked": "q", "bad": ["n"], "pos": ["p"]}) == ("q", ["p"], ["n"])


def test_fields_of_a_row_that_are_not_used() -> None:
    more = {"negative_x": "n", "my_negative": "n", "id": 3, "title": None}
    assert Retrieval().unused({**ROW, **more}) == {"negative_x", "my_negative", "id"}
    assert Retrieval({"query": "asked"}).unused({"asked": "q", "positive": "p", "id": 3}) == {"id"}


@pytest.mark.parametrize(
    "name", ["instruction", "prompt", "score", "scores", "label", "labels", "pos_scores", "neg_scores"]
)
def test_fields_that_would_change_the_loss_are_refused(name: str) -> None:
    for value in (None, [], ""):
        Retrieval().texts({**ROW, name: value})
    for value in (0, 1.0, "x", [0.5]):
        with pytest.raises(mw.DataError, match=f"the row has '{name}'"):
            Retrieval().texts({**ROW, name: value})


def test_each_positive_makes_a_group_with_all_negatives() -> None:
    """A prompt stands before each text of its kind."""
    row = {"query": "q", "pos": ["p", "rs"], "neg": ["n", "m"]}
    groups = EmbeddingRows(words, "Q:", "D:").documents(row)
    ends = [text_of(group.ids).split("\0")[:-1] for group in groups]
    assert ends == [["Q:q", "D:p", "D:n", "D:m"], ["Q:q", "D:rs", "D:n", "D:m"]]
    assert [group.parts for group in groups] == [(4, 4, 4, 4), (4, 5, 4, 4)]
    assert [(group.classes, group.spans) for group in groups] == [((0,) * 4, ())] * 2


def test_a_reranker_answers_for_each_text() -> None:
    prompt = lambda query, text: [*map(ord, f"{query}?{text}")]  # noqa: E731 - short
    made = RerankRows(prompt, (7, 9), {"query": "asked"}).documents({"asked": "q", "pos": ["p", "r"], "neg": ["n"]})
    assert [(text_of(each.ids), each.classes) for each in made] == [("q?p", (9,)), ("q?r", (9,)), ("q?n", (7,))]


def test_a_class_under_another_name() -> None:
    whole = WholeText(SimpleNamespace(encode=lambda text, **_: [*map(ord, text)]))
    row = {"body": "ab", "kind": "good", "id": 1, "label": 0, "empty": None}
    named = Labelled(whole.document, whole.unused, ("bad", "good"), {"text": "body", "label": "kind"})
    [made] = named.documents(row)
    assert (made.ids.tolist(), made.classes, made.spans) == ([97, 98], (1,), ())
    assert named.unused(row) == {"id"}
    plain = Labelled(whole.document, whole.unused, ("bad", "good"))
    assert [each.classes for each in plain.documents({"text": "ab", "label": 0})] == [(0,)]
    assert plain.unused({"text": "ab", "label": 0, "id": 1}) == {"id"}
