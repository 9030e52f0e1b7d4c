"""A page of HTML that a person can file or send: the mesh, where every parameter lies, and the bill of a step.

It needs nothing else to be read: no scripts, no styles or fonts from elsewhere. Placement and bill are worked out on
the meta device, for the model in its real sizes. Layers that are alike share a line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from ..axes import DENSE, EXPERT, Axes
from ..blueprint import Blueprint
from ..engine.bill import engine_bill
from ..errors import ConfigError
from ..layout import Work, pieces
from .tables import CHARGES, PARAMETERS, STORED_BYTES, alike, charge_lines, parameter_line, ranges, span

_TOKENS = 4096  # in a micro-batch of a data rank, rounded up to what tp divides: the bill needs a number
_AXES = list(dict.fromkeys((*DENSE, *EXPERT)))
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }
body { max-width: 90em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } .wide { overflow-x: auto }
th, td { border: 1px solid #8886; padding: .25em .6em; text-align: left; vertical-align: top; white-space: pre-line }
th { background: #8882 }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { white-space: pre-wrap; border-left: 3px solid #d44; padding-left: .8em }
.pass { color: #292 } .fails { color: #d44 }
"""
Cell = object  # a number is aligned right, a pair of (text, class) is coloured; all text is escaped


def check_target(file: str) -> Path:
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


def page(title: str, *sections: Iterable[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join([tag("h1", title), *(part for section in sections for part in section)])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def plan_of(blueprint: Blueprint, axes: Axes) -> Iterator[str]:
    """All that can be said of a model on a mesh without running it."""
    yield from _mesh(axes)
    yield from _parameters(blueprint, axes)
    yield from _bill(blueprint, axes)


def tag(name: str, text: str, kind: str = "") -> str:
    return f"<{name} class={kind}>{escape(text)}</{name}>" if kind else f"<{name}>{escape(text)}</{name}>"


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = ["".join(tag("th", h) for h in head), *("".join(map(_cell, row)) for row in rows)]
    return '<div class="wide"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def _cell(value: Cell) -> str:
    if isinstance(value, int):
        return tag("td", f"{value:,}", "number")
    return tag("td", *value) if isinstance(value, tuple) else tag("td", str(value))


def _mesh(axes: Axes) -> Iterator[str]:
    yield tag("h2", f"The mesh: {axes.world} ranks")
    yield tag("p", "Two views of the same ranks: pp replicate fsdp cp tp, and for experts pp replicate efsdp ep.")
    coords = ((rank, axes.coords(rank)) for rank in range(axes.world))
    yield table(["rank", *_AXES, "data rank"], ([r, *(at[a] for a in _AXES), axes.data_rank(r)] for r, at in coords))
    live = [a for a in _AXES if axes.size_of(a) > 1]
    yield table(
        ["axis", "size", "groups of ranks that differ on it alone"],
        ([a, axes.size_of(a), "   ".join(f"[{ranges(g)}]" for g in axes.groups((a,)))] for a in live),
    )


def _parameters(blueprint: Blueprint, axes: Axes) -> Iterator[str]:
    total = sum(param.numel for param in blueprint.table)
    held = [sum(p.numel for p in pieces(blueprint.spec, axes, r).values()) * STORED_BYTES for r in range(axes.world)]
    yield tag("h2", f"Where {total:,} parameters lie")
    yield tag(
        "p",
        f"A rank stores {span(held)} bytes of weights in float32, and as many of gradients. The column of bytes is of "
        "one parameter on one rank, the least and the most of all ranks. {i} is the number of a layer.",
    )
    yield table(PARAMETERS, (parameter_line(group, blueprint, axes) for group in alike(blueprint)))


def _bill(blueprint: Blueprint, axes: Axes) -> Iterator[str]:
    share = axes.cp * axes.tp
    work = Work(-(-_TOKENS // share) * share, 1)
    bills = [engine_bill(blueprint, axes, rank, work) for rank in range(axes.world)]
    yield tag("h2", "The bill of a step")
    yield tag(
        "p",
        f"Every collective of a step in which each data rank has one micro-batch of {work.tokens:,} tokens, computed "
        "in bfloat16 and summed in float32, as rank 0 pays it. Bytes are of the larger side. The rows of experts are "
        "counted as if the router were even. {i} is the number of a layer.",
    )
    totals = [Counter[str]() for _ in bills]
    for total, charges in zip(totals, bills, strict=True):
        for charge in charges:
            total[charge.op] += charge.count * charge.num_bytes
    counts = Counter({op: sum(c.count for c in bills[0] if c.op == op) for op in totals[0]})
    ops = ([op, counts[op], totals[0][op], max(total[op] for total in totals)] for op in totals[0])
    yield table(["operation", "how many", "bytes of rank 0", "most of any rank"], ops)
    yield table(CHARGES, charge_lines(bills[0], axes))
