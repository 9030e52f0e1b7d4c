"""What was found, as a part of a page: see `plan.page` for the rest of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.page import table, tag
from .inspection import SHRUNK, Plan, RunResult
from .report import cell, found_by, rows_of, sentence, shrunk

_MOST_FINDINGS = 50


def results(plan: Plan, parts: Sequence[RunResult]) -> Iterator[str]:
    num = sum(len(part.findings) for part in parts)
    yield tag("p", f"findings: {num}", "fails") if num else tag("p", "all is well", "pass")
    yield tag("h2", "What was checked")
    yield tag("p", _what_ran(plan))
    names = [f"{part.name}, {part.seconds:.1f} s" for part in parts]
    rows = ([row, sentence(row), *(_coloured(cell(part, row)) for part in parts)] for row in rows_of(parts))
    yield table(["oracle", "holds if", *names], rows)
    for part in parts:
        yield from (tag("p", f"{part.name}: {note}") for note in part.notes)
        for row in rows_of(parts):
            found = found_by(part, row)
            yield from (tag("pre", f"{part.name} {finding}") for finding in found[:_MOST_FINDINGS])
            if len(found) > _MOST_FINDINGS:
                yield tag("p", f"and {len(found) - _MOST_FINDINGS} more of {row}")


def _coloured(text: str) -> tuple[str, str]:
    return text, "pass" if text == "pass" else "fails"


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
