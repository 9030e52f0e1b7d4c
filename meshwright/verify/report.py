"""What was found, for a person and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from .inspection import RUN, Part, Plan
from .oracles import ORACLES, Finding

ROWS = (RUN, *ORACLES)


def sentence(row: str) -> str:
    """What holds, if all is well."""
    if row == RUN:
        return "Every rank comes to the end of the run."
    text = " ".join((ORACLES[row].__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def print_oracles() -> None:
    grid = Grid("oracle", "holds if", box=None)
    for oracle in ROWS:
        grid.add_row(oracle, sentence(oracle))
    Console().print(grid)


def print_table(model: str, plan: Plan, parts: Sequence[Part]) -> None:
    """A line an oracle, and below it the first that fails, with its likely cause."""
    grid = Grid("oracle", "holds if", *(part.dtype for part in parts), title=f"{model} on {plan.axes}")
    for oracle in ROWS:
        grid.add_row(oracle, sentence(oracle), *(_cell(part, oracle) for part in parts))
    console = Console()
    console.print(grid)
    for part in parts:
        for oracle in ROWS:
            found = _of(part, oracle)
            if found:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                console.print(Text(f"{part.dtype} {found[0]}{more}"))
    num = sum(len(part.findings) for part in parts)
    seconds = sum(part.seconds for part in parts)
    console.print(f"{'all is well' if not num else f'findings: {num}'}, {seconds:.1f} s")


def _cell(part: Part, oracle: str) -> Text:
    found = _of(part, oracle)
    if oracle != RUN and _of(part, RUN):
        return Text("-")
    return Text(f"FAILS ({len(found)})", style="bold red") if found else Text("pass", style="green")


def _of(part: Part, oracle: str) -> list[Finding]:
    return [f for f in part.findings if f.oracle == oracle]


def as_json(model: str, plan: Plan, parts: Sequence[Part]) -> dict[str, Any]:
    return {
        "model": model,
        "mesh": str(plan.axes),
        "ranks": plan.axes.world,
        "head": plan.head,
        "ok": not any(part.findings for part in parts),
        "runs": [
            {
                "dtype": part.dtype,
                "seconds": round(part.seconds, 2),
                "oracles": {o: [{"name": f.name, "what": f.what} for f in _of(part, o)] for o in ROWS},
            }
            for part in parts
        ],
    }
