"""A page of HTML as a reader sees it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

_EMPTY = ("meta", "wbr", "input")


class Read(HTMLParser):
    """Its tables as lists of rows of texts, and all other text. Tags must be closed in order.

    A note below the text of a cell is a line of its own. `titles`: what is shown when something is pointed at.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text, self.open, self.tags = "", list[str](), set[str]()
        self.titles, self.labels = list[str](), list[str]()
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        args = dict(attrs)
        self.titles += [args["title"]] if "title" in args else []
        self.labels += [args["data-label"]] if "data-label" in args else []
        if tag not in _EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "small" and "td" in self.open and self.tables[-1][-1][-1]:
            self.tables[-1][-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data

    def table(self, first: str) -> list[dict[str, str]]:
        """The table whose first column is called so."""
        head, *rows = next(t for t in self.tables if t[0][0] == first)
        assert all(len(row) == len(head) for row in rows)
        return [dict(zip(head, row, strict=True)) for row in rows]
