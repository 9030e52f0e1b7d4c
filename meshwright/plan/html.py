"""Pieces of a page. All text is escaped, and a page needs nothing else to be read: no script, no file of anyone."""

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
_LONG = 24  # letters: a longer word may have to be broken
_WHOLE = re.compile(r"(?<![\w-])--[a-z][\w-]*|\d[\d.]*e-\d+")  # --html, 1e-09: a browser would break both at a hyphen


@dataclass(frozen=True)
class Cell:
    """Of a table. `kind`: a class of style.css. `note`: small, below the text. `title`: shown when pointed at.

    `share`: of a bar below the text, from 0 to 1.
    """

    text: str
    kind: str = ""
    note: str = ""
    title: str = ""
    share: float | None = None


def tag(name: str, text: str, kind: str = "", title: str = "") -> str:
    return wrap(name, escape(text), kind=kind, title=title)


def wrap(name: str, *inner: str, kind: str = "", title: str = "", style: str = "") -> str:
    """An element around HTML."""
    given = {"class": kind, "title": title, "style": style}
    attributes = "".join(f' {key}="{escape(value)}"' for key, value in given.items() if value)
    return f"<{name}{attributes}>{''.join(inner)}</{name}>"


def bytes_cell(num_bytes: int, kind: str = "number") -> Cell:
    return Cell(size(num_bytes), kind, title=f"{num_bytes:,} bytes")


def span_cell(least: int, most: int) -> Cell:
    exactly = f"{most:,} bytes" if least == most else f"{least:,} to {most:,} bytes"
    return Cell(span(least, most), "number", title=exactly)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "stacked") -> str:
    """Where it is `stacked`, a row becomes a block of lines on a narrow screen, each with the name of its column."""
    cells = [[_as_cell(value) for value in row] for row in rows]
    kinds = [row[i].kind for row in cells[:1] for i in range(len(head))] or [""] * len(head)
    top = wrap(
        "tr", *(tag("th", h, "number" if "number" in k.split() else "") for h, k in zip(head, kinds, strict=True))
    )
    body = (wrap("tr", *(_td(cell, h) for cell, h in zip(row, head, strict=True))) for row in cells)
    return wrap("table", "\n", wrap("thead", top), "\n<tbody>\n", "\n".join(body), "\n</tbody>", kind=kind) + "\n"


def _as_cell(value: object) -> Cell:
    if isinstance(value, int):
        return Cell(f"{value:,}", "number")
    return value if isinstance(value, Cell) else Cell(str(value))


def _td(cell: Cell, label: str) -> str:
    title = f' title="{escape(cell.title)}"' if cell.title else ""
    kind = f' class="{escape(cell.kind)}"' if cell.kind else ""
    note = wrap("small", flowing(cell.note)) if cell.note else ""
    share = "" if cell.share is None else wrap("i", kind="share", style=f"width:{100 * cell.share:.2f}%")
    return f'<td{kind} data-label="{escape(label)}"{title}>{wrap("div", _coded(flowing(cell.text)), note, share)}</td>'


def flowing(text: str) -> str:
    """Escaped. A long name breaks after a dot or an underscore rather than anywhere; a number or an option does not."""
    words = re.sub(r"\S+", lambda word: _word(word[0]), text)
    return _WHOLE.sub(r'<span class="unbroken">\g<0></span>', words)


def _word(text: str) -> str:
    return escape(text) if len(text) <= _LONG else re.sub("([._])", r"\1<wbr>", escape(text))


def _coded(html: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", html)


def bar(parts: Iterable[tuple[int, str]], whole: int, mark: int | None = None) -> str:
    """Parts of a whole side by side, each with what it is; `mark`: a place to be marked."""
    pieces = [
        wrap("i", kind=f"tint{n % 6}", title=title, style=f"width:{100 * part / max(whole, 1):.3f}%")
        for n, (part, title) in enumerate(parts)
    ]
    if mark is not None and mark < whole:
        pieces.append(wrap("b", kind="mark", style=f"left:{100 * mark / whole:.3f}%"))
    return wrap("div", *pieces, kind="bar")


def details(summary: str, *inner: str) -> str:
    return wrap("details", tag("summary", summary), *inner) + "\n"


def section(title: str, *inner: str) -> str:
    return wrap("section", tag("h2", title), "\n", *inner) + "\n"


def page(title: str, origin: Mapping[str, str], *sections: Iterable[str], style: str = "") -> str:
    """`origin`: what made it, when, and by which command. `style`: more of it."""
    head = "\n".join([
        '<meta charset="utf-8">', '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">', tag("title", title),
        wrap("style", _STYLE.read_text("utf-8") + style),
    ])  # fmt: skip
    body = "\n".join(part for parts in sections for part in parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>\n{head}\n</head><body>\n{body}\n{_footer(origin)}</body></html>\n'


def _footer(origin: Mapping[str, str]) -> str:
    packages = ", ".join(f"{name} {text}" for name, text in origin.items() if name not in ("command", "date", "seed"))
    seed = f", seed {origin['seed']}" if "seed" in origin else ""
    made = f"Made on {origin['date']}{seed} with {packages}, by the command"
    return wrap("footer", tag("p", made), wrap("pre", flowing(origin["command"]))) + "\n"


def check_page(file: str) -> Path:
    """Refuse a place that cannot be written before an hour of work, not after it."""
    path = Path(file).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--html {file}: no file can be written there; name a file in a directory that you may write")
    return path


def write_page(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--html {path} was not written: {error}; what was found stands above") from error
    finally:
        beside.unlink(missing_ok=True)
