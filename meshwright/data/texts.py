"""Make documents from plain texts, trained on every token, and from rows that are already tokenised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .json_values import kind_of
from .tokenizer import encoded
from .tokens import Tokens, tokens

_MASKS = ("labels", "mask", "loss_mask", "completion_mask", "assistant_masks", "weight", "weights")


@dataclass(frozen=True)
class Texts:
    """Rows of text. The model trains on every token, the end token included.

    `fields` renames fields: `{"text": "body"}` reads the text from `body`.
    """

    tokenizer: Any  # one of transformers
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        """Tokenise a row, and append the end token: it teaches the model to stop, and separates documents.

        An empty text makes no document. Text files arrive here already split, by file, paragraph or line.
        """
        name = self.fields.get("text", "text")
        text = row.get(name)
        if not isinstance(text, str):
            has = ", ".join(map(str, row)) or "none"
            raise DataError(f"its field {name!r} is {kind_of(text)}, not text; the row has the fields {has}")
        ids = encoded(self.tokenizer, text)
        end = self.tokenizer.eos_token_id
        return [tokens([*ids, *([] if end is None else [end])], [(0, len(ids) + (end is not None))])] if ids else []

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Return the fields of a row that are not used."""
        return _unused_fields(row, {self.fields.get("text", "text")})


@dataclass(frozen=True)
class TextOnly:
    """Text-only documents for a vision-language model. Refuses placeholder tokens.

    A document about the model itself may contain a placeholder in its text. The model would look for an image that
    does not exist.
    """

    make: Callable[[Mapping[str, Any]], list[Tokens]]
    placeholder_ids: tuple[int, ...]

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        """Make the documents of a row, and check them."""
        documents = self.make(row)
        for placeholder in (
            token for each in documents for token in each.ids.tolist() if token in self.placeholder_ids
        ):
            raise DataError(
                f"it has the token {placeholder}, which stands for an image, but no image; spell it differently"
            )
        return documents


@dataclass(frozen=True)
class Ready:
    """Rows of `ids` that were tokenised elsewhere, with an optional loss mask `trained` over the ids.

    Without the mask the model trains on every token. Ids are checked against the vocabulary: on a GPU an id beyond it
    is an illegal memory access, reported far from its cause.
    """

    vocab_size: int
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        """Check and return the tokens of a row."""
        ids, mask = (row.get(self.fields.get(name, name)) for name in ("ids", "trained"))
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < self.vocab_size for each in ids):
            raise DataError(f"its ids are not a list of integers from 0 to {self.vocab_size - 1}")
        if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
            raise DataError(f"trained is not a list of {len(ids)} values, one for each of its ids")
        if mask is not None and not all(each in (0, 1) for each in mask):
            raise DataError("trained has values other than 0 and 1; for weights use mw.pack(fields=) in your own loop")
        if other_masks := [name for name in _MASKS if row.get(name) is not None and name != self.fields.get("trained")]:
            raise DataError(
                f"the row has {other_masks[0]!r}, which would change what is trained on and is not supported; give "
                "trained, a mask over the ids (fields = {trained = ...} if this is one), or drop the field"
            )
        trained = [True] * len(ids) if mask is None else [bool(each) for each in mask]
        # Positions where the mask changes: starts and stops of spans, alternating.
        edges = [at for at in range(len(ids) + 1) if (at > 0 and trained[at - 1]) != (at < len(ids) and trained[at])]
        return [tokens(ids, [*zip(edges[::2], edges[1::2], strict=True)])] if ids else []

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Return the fields of a row that are not used."""
        return _unused_fields(row, {self.fields.get(name, name) for name in ("ids", "trained")})


def _unused_fields(row: Mapping[str, Any], used: set[str]) -> set[str]:
    """Return the non-null fields that are not in `used`."""
    return {name for name, value in row.items() if value is not None and name not in used}
