"""Build the elements of the HTML pages of `plan`, `verify` and `report`.

All text is escaped. A page is self-contained: one file that can be mailed or archived, without a request to anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..errors import ConfigError
from .wording import size, span

_STYLE = Path(__file__).with_name("style.css")
_LONG = 24  # characters: a longer word may not fit into a narrow column
# Options and exponents (--html, 1e-09): a browser would break both at the hyphen.
_UNBROKEN = re.compile(r"(?<![\w-])--[a-z][\w-]*|\d[\d.]*e-\d+")


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `kind`: classes of style.css. `note`: small text below. `title`: the tooltip.

    `share`: draw a bar below the text, whose length is this share of the column (0 to 1).
    """

    text: str
    kind: str = ""
    note: str = ""
    title: str = ""
    share: float | None = None


def tag(name: str, text: str, kind: str = "", title: str = "") -> str:
    """Return an element around text, which is escaped."""
    return wrap(name, escape(text), kind=kind, title=title)


def wrap(name: str, *inner: str, kind: str = "", title: str = "", style: str = "") -> str:
    """Return an element around HTML, which must be escaped already."""
    values = {"class": kind, "title": title, "style": style}
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in values.items() if value)
    return f"<{name}{attributes}>{''.join(inner)}</{name}>"


def bytes_cell(num_bytes: int, kind: str = "number") -> Cell:
    """Return a cell with a rounded size; the exact number is its tooltip."""
    return Cell(size(num_bytes), kind, title=f"{num_bytes:,} bytes")


def span_cell(least: int, most: int) -> Cell:
    """Return a cell with the least and the most bytes; with one number if they are equal."""
    exactly = f"{most:,} bytes" if least == most else f"{least:,} to {most:,} bytes"
    return Cell(span(least, most), "number", title=exactly)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "stacked") -> str:
    """Return a table. The kind `stacked` turns each row into labelled lines on a narrow screen.

    Columns of numbers get right-aligned headings, judged by the first row.
    """
    cells = [[_as_cell(value) for value in row] for row in rows]
    kinds = [row[i].kind for row in cells[:1] for i in range(len(head))] or [""] * len(head)
    top = wrap(
        "tr", *(tag("th", h, "number" if "number" in k.split() else "") for h, k in zip(head, kinds, strict=True))
    )
    body = (wrap("tr", *(_td(cell, h) for cell, h in zip(row, head, strict=True))) for row in cells)
    return wrap("table", "\n", wrap("thead", top), "\n<tbody>\n", "\n".join(body), "\n</tbody>", kind=kind) + "\n"


def _as_cell(value: object) -> Cell:
    """Return a value as a cell: integers with separators, everything else as its text."""
    if isinstance(value, int):
        return Cell(f"{value:,}", "number")
    return value if isinstance(value, Cell) else Cell(str(value))


def _td(cell: Cell, label: str) -> str:
    """Return the HTML of a cell. Where rows are stacked, CSS shows `label`, the name of the column, next to it."""
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    kind = f' class="{escape(cell.kind)}"' if cell.kind else ""
    note = wrap("small", flowing(cell.note)) if cell.note else ""
    share = "" if cell.share is None else wrap("i", kind="share", style=f"width:{100 * cell.share:.2f}%")
    return f'<td{kind} data-label="{escape(label)}"{title}>{wrap("div", _coded(flowing(cell.text)), note, share)}</td>'


def flowing(text: str) -> str:
    """Escape text. Allow line breaks after dots and underscores of long names, but none inside options and numbers."""
    words = re.sub(r"\S+", lambda word: _word(word[0]), text)
    return _UNBROKEN.sub(r'<span class="unbroken">\g<0></span>', words)


def _word(text: str) -> str:
    """Escape a word; allow breaks in a long one."""
    return escape(text) if len(text) <= _LONG else re.sub("([._])", r"\1<wbr>", escape(text))


def _coded(html: str) -> str:
    """Show text in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html)


def bar(parts: Iterable[tuple[int, str]], whole: int, mark: int | None = None) -> str:
    """Draw parts of a whole as one bar, each with a tooltip. `mark`: where to draw a line (the memory of a device)."""
    pieces = [
        wrap("i", kind=f"tint{n % 6}", title=title, style=f"width:{100 * part / max(whole, 1):.3f}%")
        for n, (part, title) in enumerate(parts)
    ]
    if mark is not None and mark < whole:
        pieces.append(wrap("b", kind="mark", style=f"left:{100 * mark / whole:.3f}%"))
    return wrap("div", *pieces, kind="bar")


def details(summary: str, *inner: str) -> str:
    """Return a section that is closed until a reader opens it."""
    return wrap("details", tag("summary", summary), *inner) + "\n"


def section(title: str, *inner: str) -> str:
    """Return a section with a heading."""
    return wrap("section", tag("h2", title), "\n", *inner) + "\n"


def page(title: str, origin: Mapping[str, str], *sections: Iterable[str], style: str = "") -> str:
    """Return a whole page. `origin`: versions, date and command, for the footer. `style`: CSS appended to style.css."""
    head = "\n".join([
        '<meta charset="utf-8">', '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">', tag("title", title),
        wrap("style", _STYLE.read_text("utf-8") + style),
    ])  # fmt: skip
    body = "\n".join(part for parts in sections for part in parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>\n{head}\n</head><body>\n{body}\n{_footer(origin)}</body></html>\n'


def _footer(origin: Mapping[str, str]) -> str:
    """Name the versions, the date and the command, so that a reader can reproduce the page."""
    packages = ", ".join(f"{name} {text}" for name, text in origin.items() if name not in ("command", "date", "seed"))
    seed = f", seed {origin['seed']}" if "seed" in origin else ""
    made = f"Made on {origin['date']}{seed} with {packages}, by the command"
    return wrap("footer", tag("p", made), wrap("pre", flowing(origin["command"]))) + "\n"


def check_page(file: str) -> Path:
    """Return the path of a page. Refuse a path that cannot be written, before an hour of work is lost to it."""
    path = Path(file).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--html {file}: this file cannot be written; name a file in a directory that you may write")
    return path


def write_page(path: Path, text: str) -> None:
    """Write a page atomically: a reader or a crash never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--html {path} was not written: {error}; the results are printed above") from error
    finally:
        temporary.unlink(missing_ok=True)
