"""One page of HTML that a person can file or send: the mesh, where every parameter lives, the bill, what was found.

Needs nothing else to be read: no scripts, no styles or fonts from elsewhere. Placement and bill are of the model as it
is, worked out on the meta device; layers that are alike share a line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from ..engine.bill import engine_bill
from ..errors import ConfigError
from ..layout import Rules, Step, units_of
from ..mesh import DENSE, EXPERT, Axes
from .account import CHARGES, PARAMETERS, alike, charge_lines, parameter_line, ranges, span
from .inspection import SHRUNK, Part, Plan
from .precision import lines_of
from .report import cell, found_by, rows_of, sentence, shrunk
from .subject import stored_bytes

_TOKENS = 4096  # of a micro-batch of a data rank, rounded up to what tp divides: the bill wants a number
_MOST_FINDINGS = 50
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
Cell = object  # a number is set right, a pair of (text, class) is coloured; all is escaped


def check_target(file: str) -> Path:
    """Said before an hour of work, not after it."""
    path = Path(file).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--html {file}: no file can be written there; name a file in a directory that you may write")
    return path


def write_page(path: Path, plan: Plan, parts: Sequence[Part]) -> None:
    """Whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(page(plan, parts), "utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--html {path} was not written: {error}; what was found stands above") from error
    finally:
        beside.unlink(missing_ok=True)


def page(plan: Plan, parts: Sequence[Part]) -> str:
    title = f"{plan.subject.name} on {plan.axes}"
    num = sum(len(part.findings) for part in parts)
    verdict = _tag("p", f"{num} findings", "fails") if num else _tag("p", "all is well", "pass")
    sections = (_results(plan, parts), _precision(parts), _mesh(plan.axes), _parameters(plan), _bill(plan))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join([_tag("h1", title), verdict, *(part for section in sections for part in section)])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _tag(name: str, text: str, kind: str = "") -> str:
    return f"<{name} class={kind}>{escape(text)}</{name}>" if kind else f"<{name}>{escape(text)}</{name}>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    lines = ["".join(_tag("th", h) for h in head), *("".join(map(_cell, row)) for row in rows)]
    return '<div class="wide"><table>\n' + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table></div>"


def _cell(value: Cell) -> str:
    if isinstance(value, int):
        return _tag("td", f"{value:,}", "number")
    return _tag("td", *value) if isinstance(value, tuple) else _tag("td", str(value))


def _results(plan: Plan, parts: Sequence[Part]) -> Iterator[str]:
    yield _tag("h2", "What was checked")
    yield _tag("p", _what_ran(plan))
    names = [f"{part.name}, {part.seconds:.1f} s" for part in parts]
    rows = ([row, sentence(row), *(_coloured(cell(part, row)) for part in parts)] for row in rows_of(parts))
    yield _table(["oracle", "holds if", *names], rows)
    for part in parts:
        yield from (_tag("p", f"{part.name}: {note}") for note in part.notes)
        for row in rows_of(parts):
            found = found_by(part, row)
            yield from (_tag("pre", f"{part.name} {finding}") for finding in found[:_MOST_FINDINGS])
            if len(found) > _MOST_FINDINGS:
                yield _tag("p", f"and {len(found) - _MOST_FINDINGS} more of {row}")


def _precision(parts: Sequence[Part]) -> Iterator[str]:
    for found in (part.precision for part in parts):
        if found:
            yield _tag("h2", "What bfloat16 adds, and what the mesh adds")
            yield _table([f"against {found.measure}", *found.costs], lines_of(found))


def _coloured(text: str) -> tuple[str, str]:
    return text, "pass" if text == "pass" else "fails"


def _what_ran(plan: Plan) -> str:
    if plan.kind != SHRUNK:
        return f"The model and its weights as they are, of {plan.subject.directory}."
    changed = [f"{name} {'unset' if was is None else was} → {now}" for name, (was, now) in shrunk(plan).items()]
    if not changed:
        return "The model is small as it is; its weights were drawn."
    return (
        "The oracles ran on a small model of the same kinds of layers, heads, experts and files, its weights drawn: "
        f"{', '.join(changed)}. All else on this page is of the model as it is."
    )


def _mesh(axes: Axes) -> Iterator[str]:
    yield _tag("h2", f"The mesh: {axes.world} ranks")
    yield _tag("p", "Two views of the same ranks: pp replicate fsdp cp tp, and for experts pp replicate efsdp ep.")
    coords = ((rank, axes.coords(rank)) for rank in range(axes.world))
    yield _table(["rank", *_AXES, "data rank"], ([r, *(at[a] for a in _AXES), axes.data_rank(r)] for r, at in coords))
    live = [a for a in _AXES if axes.size_of(a) > 1]
    yield _table(
        ["axis", "size", "groups of ranks that differ on it alone"],
        ([a, axes.size_of(a), "   ".join(f"[{ranges(g)}]" for g in axes.groups((a,)))] for a in live),
    )


def _parameters(plan: Plan) -> Iterator[str]:
    subject, axes = plan.subject, plan.axes
    total = sum(param.numel for param in subject.table)
    held = [stored_bytes(subject.table, axes, rank) for rank in range(axes.world)]
    yield _tag("h2", f"Where {total:,} parameters live")
    yield _tag(
        "p",
        f"A rank stores {span(held)} bytes of weights in float32, its gradients as much again. Bytes are of one "
        "parameter on one rank, the least and the most of all ranks. {i}: the layer.",
    )
    yield _table(PARAMETERS, (parameter_line(group, subject, axes) for group in alike(subject)))


def _bill(plan: Plan) -> Iterator[str]:
    axes, subject = plan.axes, plan.subject
    share = axes.cp * axes.tp
    step = Step(-(-_TOKENS // share) * share, 1)
    units = units_of(subject.module, subject.module.units())
    bills = [engine_bill(subject.module, units, subject.table, Rules(), axes, r, step) for r in range(axes.world)]
    yield _tag("h2", "The bill of a step")
    yield _tag(
        "p",
        f"Every collective of a step in which each data rank has one micro-batch of {step.tokens:,} tokens, computed "
        "in bfloat16 and summed in float32, as rank 0 pays it. Bytes are of the larger side; the rows of experts are "
        "counted as if the router were even. {i}: the layer.",
    )
    totals = [Counter[str]() for _ in bills]
    for total, charges in zip(totals, bills, strict=True):
        for charge in charges:
            total[charge.op] += charge.count * charge.num_bytes
    counts = Counter({op: sum(c.count for c in bills[0] if c.op == op) for op in totals[0]})
    ops = ([op, counts[op], totals[0][op], max(total[op] for total in totals)] for op in totals[0])
    yield _table(["operation", "how many", "bytes of rank 0", "most of any rank"], ops)
    yield _table(CHARGES, charge_lines(bills[0], axes))
