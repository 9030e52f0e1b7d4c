"""Rows for sequence classification: a text or a chat with a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DataError
from .chat_formats import with_our_names
from .tokenizer import encoded
from .tokens import Tokens, scored, tokens

Row = Mapping[str, Any]


@dataclass(frozen=True)
class WholeText:
    """Turns a row into the tokens of its text, without an end token, as a classifier of transformers sees it."""

    tokenizer: Any  # one of transformers

    def document(self, row: Row) -> Tokens:
        """Return the tokens of the field `text`."""
        text = row.get("text")
        if not isinstance(text, str) or not text:
            has = ", ".join(map(str, row)) or "none"
            raise DataError(f"its field 'text' is no text; the row has the fields {has}. Name yours with fields=")
        return tokens(encoded(self.tokenizer, text), [])

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        return {name for name, value in row.items() if value is not None and name != "text"}


@dataclass(frozen=True)
class Labelled:
    """Documents with a class in the field `label`: a number from 0, or one of `names`.

    `whole`: makes the document of a row. `fields` renames fields of rows.
    """

    whole: Callable[[Row], Tokens]
    unread: Callable[[Row], set[str]]
    names: Sequence[str]
    fields: Mapping[str, str] = field(default_factory=dict)

    def documents(self, row: Row) -> list[Tokens]:
        """Return the document of a row, with its class at the last token."""
        row = with_our_names(row, self.fields)
        label = self._class(row.get("label"))
        document = self.whole({name: value for name, value in row.items() if name != "label"})
        return [scored(document, label)]

    def _class(self, label: Any) -> int:
        """Return the number of a class."""
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.names):
            return label
        known = ", ".join(map(repr, self.names[:8])) + ", ..." * (len(self.names) > 8)
        raise DataError(
            f"its label is {label!r:.80}; give a number from 0 to {len(self.names) - 1}, or one of {known} (labels of "
            "[classify], or id2label of config.json)"
        )

    def unused(self, row: Row) -> set[str]:
        """Return the fields of a row that are not used."""
        renamed = with_our_names(row, self.fields)
        return self.unread({name: value for name, value in renamed.items() if name != "label"})
