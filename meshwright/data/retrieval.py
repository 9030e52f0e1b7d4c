"""Rows for embedding models and rerankers: a query, documents that answer it, and documents that do not.

The formats, by the fields that a row has:

  query, positive, negative          sentence-transformers, also with negative_1, negative_2, ...
  anchor, positive, negatives        the same with a list
  query, pos, neg                    lists (FlagEmbedding): each of pos makes a group with all of neg
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .chat_formats import with_our_names
from .json_values import kind_of
from .tokens import Tokens, scored, together, tokens

Row = Mapping[str, Any]

_QUERIES, _POSITIVES = ("query", "anchor"), ("positive", "positives", "pos")
_NEGATIVE = re.compile(r"negatives?|neg|negative_\d+")
# Fields of other libraries that would change what is trained on.
_MEANINGFUL = ("instruction", "prompt", "score", "scores", "label", "labels", "pos_scores", "neg_scores")


@dataclass(frozen=True)
class Retrieval:
    """The texts of a row. `fields` renames fields of rows."""

    fields: Mapping[str, str] = field(default_factory=dict)

    def texts(self, row: Row) -> tuple[str, list[str], list[str]]:
        """Return the query, its positives and its negatives."""
        row = with_our_names(row, self.fields)
        for name in _MEANINGFUL:
            if row.get(name) not in (None, [], ""):
                raise DataError(
                    f"the row has {name!r}, which would change its meaning and is not supported; give texts that "
                    "answer the query in positive, others in negatives, and instructions inside of the texts"
                )
        queries = [text for name in _QUERIES for text in _texts(row, name)]
        positives = [text for name in _POSITIVES for text in _texts(row, name)]
        negatives = [text for name in row if _NEGATIVE.fullmatch(str(name)) for text in _texts(row, name)]
        if len(queries) != 1 or not positives:
            has = ", ".join(map(str, row)) or "none"
            raise DataError(f"the row has the fields {has}; it needs query and positive. Name yours with fields=")
        if both := {*positives} & {*negatives}:
            raise DataError(f"the text {next(iter(both))!r:.80} is a positive and a negative of one query")
        return queries[0], positives, negatives

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        used = {*self.fields.values(), *_QUERIES, *_POSITIVES}
        return {n for n, value in row.items() if value is not None and n not in used and not _NEGATIVE.fullmatch(n)}


def _texts(row: Row, name: str) -> list[str]:
    """Return the texts of a field: one, a list, or none."""
    value = row.get(name)
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise DataError(f"its field {name!r} is {kind_of(value)}, not text or a list of texts")
    return texts


@dataclass(frozen=True)
class EmbeddingRows:
    """Groups for contrastive learning: a query, a positive, and hard negatives, each with a label at its last token.

    Texts are tokenised with the special tokens of their tokenizer, as sentence-transformers does: texts for
    Qwen3-Embedding end with an end token.
    """

    tokenizer: Any  # one of transformers
    query_prompt: str = ""
    document_prompt: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Row) -> list[Tokens]:
        """Return a group for each positive of a row."""
        query, positives, negatives = Retrieval(self.fields).texts(row)
        others = [self._document(self.document_prompt + text) for text in negatives]
        asked = self._document(self.query_prompt + query)
        return [together([asked, self._document(self.document_prompt + text), *others]) for text in positives]

    def _document(self, text: str) -> Tokens:
        return scored(tokens(self.tokenizer(text)["input_ids"], []))

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        return Retrieval(self.fields).unused(row)


@dataclass(frozen=True)
class RerankRows:
    """Documents for a reranker: a prompt with a query and a document, whose last token predicts one of two answers.

    `prompt`: the tokens that a server would send for a query and a document. `answers`: the ids of "no" and "yes".
    """

    prompt: Callable[[str, str], Sequence[int]]
    answers: tuple[int, int]
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Row) -> list[Tokens]:
        """Return a document for each positive and each negative of a row."""
        query, positives, negatives = Retrieval(self.fields).texts(row)
        pairs = [*((text, True) for text in positives), *((text, False) for text in negatives)]
        return [scored(tokens(self.prompt(query, text), []), self.answers[is_yes]) for text, is_yes in pairs]

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        return Retrieval(self.fields).unused(row)
