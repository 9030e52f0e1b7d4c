"""The page of verify: what was found, and below it what `plan.page` knows of the model and the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..plan import Figures, work_of
from ..plan.html import Cell, details, flowing, page, section, table, tag, wrap
from ..plan.page import heading, plan_of, verdict_box
from .inspection import SHRUNK, Plan, RunResult
from .report import (
    beginning,
    cell,
    found_by,
    headline,
    lines_found,
    margins_of,
    planted,
    rows_of,
    sentence,
    shrunk,
    unproven,
)

_MOST_FINDINGS = 50


def verify_page(plan: Plan, parts: Sequence[RunResult], origin: Mapping[str, str]) -> str:
    work = work_of(plan.axes, None, plan.num_batches if plan.axes.pp > 1 else 1)
    figures = Figures(plan.model, plan.blueprint, plan.axes, work, head=plan.options.head)
    title = f"{figures.name} on {figures.axes}"
    return page(title, origin, heading("verify", figures), results(plan, parts), plan_of(figures))


def results(plan: Plan, parts: Sequence[RunResult]) -> Iterator[str]:
    verdict, more = headline(plan, parts)
    well = not any(part.findings for part in parts)
    yield verdict_box(verdict, well, more, beginning(parts), unproven(plan, parts))
    yield section(
        "What was checked", tag("p", f"{planted(plan)} {_what_ran(plan)}".strip()), _oracles(parts), *_findings(parts)
    )


def _oracles(parts: Sequence[RunResult]) -> str:
    names = [f"{part.name}, {part.seconds:.1f} s" for part in parts]
    rows = (
        [Cell(row, "name"), Cell(sentence(row), "sentence"), *(_result(part, row) for part in parts)]
        for row in rows_of(parts)
    )
    return table(["oracle", "holds if", *names], rows, "stacked oracles")


def _result(part: RunResult, row: str) -> Cell:
    """Of one oracle in one run, with what it compared, how far off the worst is, what is allowed, and where."""
    text, figures = cell(part, row), "\n".join(map(str, margins_of(part, row)))
    return Cell(text, {"pass": "pass", "-": "", "": ""}.get(text, "fails"), note=figures if text == "pass" else "")


def _findings(parts: Sequence[RunResult]) -> Iterator[str]:
    for part in parts:
        yield from (tag("p", f"{part.name}: {note}") for note in part.notes)
        lines = lines_found(part, "all stand below")
        yield from (_finding(part, line) for line in lines)
        if not {str(finding) for finding in part.findings} <= set(lines):
            yield details(f"All {len(part.findings)} findings of {part.name}", *_every_finding(part))


def _every_finding(part: RunResult) -> Iterator[str]:
    for row in rows_of([part]):
        found = found_by(part, row)
        yield from (_finding(part, str(finding)) for finding in found[:_MOST_FINDINGS])
        if len(found) > _MOST_FINDINGS:
            yield wrap("p", flowing(f"and {len(found) - _MOST_FINDINGS} more of {row}: --json has them all"))


def _finding(part: RunResult, line: str) -> str:
    return wrap("pre", flowing(f"{part.name} {line}"), kind="finding")


def _what_ran(plan: Plan) -> str:
    if plan.kind != SHRUNK:
        return f"The model and its weights as they are, of {plan.blueprint.directory}."
    changed = [f"{name} {'unset' if was is None else was} → {now}" for name, (was, now) in shrunk(plan).items()]
    if not changed:
        return "The model is small as it is; its weights were drawn."
    return (
        "The oracles ran on a small model of the same kinds of layers, heads, experts and files, its weights drawn: "
        f"{', '.join(changed)}. All else on this page is of the model as it is."
    )
