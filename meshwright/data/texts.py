"""Texts and ready tokens as documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .tokenizer import encoded
from .tokens import Tokens, tokens

_MASKS = ("labels", "mask", "loss_mask", "completion_mask", "assistant_masks", "weight", "weights")


@dataclass(frozen=True)
class Texts:
    """A text is learnt as a whole, with the token that ends it. `fields`: `{"text": "body"}` for rows with a `body`."""

    tokenizer: Any  # one of transformers
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        name = self.fields.get("text", "text")
        text = row.get(name)
        if not isinstance(text, str):
            has = ", ".join(map(str, row)) or "none"
            raise DataError(f"its field {name!r} is a {type(text).__name__}, not text; the row has the fields {has}")
        ids = encoded(self.tokenizer, text)
        end = self.tokenizer.eos_token_id
        return [tokens([*ids, *([] if end is None else [end])], [(0, len(ids) + (end is not None))])] if ids else []

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        return _others(row, {self.fields.get("text", "text")})


@dataclass(frozen=True)
class TextOnly:
    """Documents that show nothing, for a model that sees. `places`: tokens that stand for what is shown."""

    make: Callable[[Mapping[str, Any]], list[Tokens]]
    places: tuple[int, ...]

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        made = self.make(row)
        for found in (token for each in made for token in each.ids.tolist() if token in self.places):
            raise DataError(f"it has the token {found}, which stands for a picture, and no picture; write it otherwise")
        return made


@dataclass(frozen=True)
class Ready:
    """Rows of `ids`, and of `trained` if not all are learnt: a mask over the tokens."""

    vocab_size: int
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Mapping[str, Any]) -> list[Tokens]:
        ids, mask = (row.get(self.fields.get(name, name)) for name in ("ids", "trained"))
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < self.vocab_size for each in ids):
            raise DataError(f"its ids are no list of whole numbers from 0 to {self.vocab_size - 1}")
        if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
            raise DataError(f"trained is no list of {len(ids)} values, one for each of its ids")
        if mask is not None and not all(each in (0, 1) for each in mask):
            raise DataError("trained has values other than 0 and 1; a token is learnt or not: mw.pack takes weights")
        if others := [name for name in _MASKS if row.get(name) is not None and name != self.fields.get("trained")]:
            raise DataError(
                f"the row has {others[0]!r}, which says what is learnt and is not read; give trained, a mask over the "
                "ids (fields = {trained = ...} where it is one), or leave it out"
            )
        learnt = [True] * len(ids) if mask is None else [bool(each) for each in mask]
        edges = [at for at in range(len(ids) + 1) if (at > 0 and learnt[at - 1]) != (at < len(ids) and learnt[at])]
        return [tokens(ids, [*zip(edges[::2], edges[1::2], strict=True)])] if ids else []

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        return _others(row, {self.fields.get(name, name) for name in ("ids", "trained")})


def _others(row: Mapping[str, Any], used: set[str]) -> set[str]:
    return {name for name, value in row.items() if value is not None and name not in used}
