"""A plan for a person at a terminal, and for a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ..errors import counted
from ..layout import draw, ways
from . import pipeline
from . import step as times
from .figures import Figures
from .tables import ParameterLine, axis_lines, charge_lines, parameter_lines
from .verdict import verdict, ways_out
from .wording import (
    at_the_fullest,
    duration,
    in_unit,
    kind,
    large,
    name_of,
    not_counted,
    saved,
    size,
    span,
    unit_of,
)

STORES = "What a rank stores"


def print_plan(figures: Figures) -> None:
    console, said = Console(), verdict(figures)
    console.print(Text(f"{figures.model} on {figures.axes}", style="bold"), soft_wrap=True)
    console.print(Text(about(figures)))
    tables = {
        "Where parameters lie, one of each kind": _parameters(figures),
        **({"The stages of the pipeline": _places(figures)} if figures.axes.pp > 1 else {}),
        STORES: _memory(figures),
        f"The collectives of a step; {step(figures)}": _traffic(figures),
        **({"How long a step takes, estimated": _times(figures)} if figures.cluster else {}),
    }
    for title, grid in tables.items():
        console.print()
        console.print(Text(title, style="bold"))
        console.print(grid)
        if title == STORES and (note := at_the_fullest(figures)):
            console.print(Text(note))
    if figures.axes.pp > 1:
        _print_schedule(figures, console)
    console.print()
    console.print(Text(said.text, style={True: "bold green", False: "bold red", None: "bold"}[said.ok]))
    console.print(Padding(Text(said.more), (0, 0, 0, 2)))
    if said.ok is None:
        console.print(Text("  meshwright plan MODEL --device 80GB tells whether that fits."))
    for note in notes(figures):
        console.print(Padding(Text(note), (0, 0, 0, 2)))


def about(figures: Figures) -> str:
    experts, axes = figures.blueprint.balance.num_experts, figures.axes
    parts = [counted(axes.world, "rank"), f"{large(figures.num_parameters)} parameters"]
    parts.append(counted(len(figures.blueprint.module.layers), "layer"))
    parts += [counted(experts, "expert")] if experts else []
    parts += saved(figures)
    return ", ".join(parts)


def notes(figures: Figures) -> list[str]:
    """What a reader might believe that is not so."""
    found = []
    way = ways(figures.blueprint.spec, figures.axes)
    if way:
        found.append(f"cp={figures.axes.cp}, by mixer: {way}. --context (mw.Context) chooses another way.")
    if figures.axes.ep > 1 and not figures.blueprint.balance.num_experts:
        found.append(f"ep={figures.axes.ep} changes nothing of this model: it has no experts.")
    return found + (pipeline.notes(figures) if figures.axes.pp > 1 else [])


def step(figures: Figures) -> str:
    work = figures.work
    batches = counted(work.num_batches, "micro-batch", "micro-batches")
    return f"each data rank has {batches} of {counted(work.tokens, 'token')}"


def _parameters(figures: Figures) -> Grid:
    lines, grid = parameter_lines(figures), _grid()
    grid.add_column("parameter", width=max(32, *(len(line.name) for line in lines)))
    grid.add_column("lies")
    grid.add_column("on a rank", justify="right", width=len("to 999 bytes"))
    for line in lines:
        more = "; ".join(filter(None, [f"layers {line.layers}" if line.layers else "", line.dims, *line.remarks]))
        name = Text(line.name).append(f"\n{more}", style="dim")
        grid.add_row(name, "\n".join(lies(line)), span(line.least_bytes, line.most_bytes, "\nto "))
    return grid


def lies(line: ParameterLine) -> list[str]:
    """What each axis does to it."""
    named = {"cut": line.cut, "rows over": line.shards, "copies over": line.copies}
    return [f"{what} {axes}" for what, axes in named.items() if axes != "-"] or ["whole"]


def _places(figures: Figures) -> Grid:
    grid = _grid()
    grid.add_column("on pp")
    grid.add_column("has")
    for column in ("of the work", "waits", "keeps", "a rank stores"):
        grid.add_column(column, justify="right")
    for line in pipeline.place_lines(figures):
        stages, shares = zip(*((pipeline.told(s), f"{s.share:.1%}") for s in line.stages), strict=True)
        grid.add_row(
            str(line.place), "\n".join(stages), "\n".join(shares), f"{line.idle:.1%}", str(line.most_kept),
            size(line.num_bytes),
        )  # fmt: skip
    return grid


def _print_schedule(figures: Figures, console: Console) -> None:
    table = pipeline.timetable(figures)
    columns = min(3, int((console.width - 4) / table.makespan))  # of a unit of time; what is before it takes 4
    console.print()
    console.print(Text("Who does what when", style="bold"))
    console.print(Text(f"{pipeline.about_schedule(figures)}. An estimate: --html says of what."))
    if columns < 1:
        console.print(Text("It is too long to be drawn here: --html draws it."))
        return
    console.print(Text(pipeline.LEGEND))
    console.print(Text(draw(table, columns)), soft_wrap=True)


def _memory(figures: Figures) -> Grid:
    unit = unit_of(figures.most.num_bytes)
    grid = _grid()
    grid.add_column("")
    for memory, which in zip(figures.memories, ("most", "least"), strict=False):
        grid.add_column(
            f"rank {memory.rank:,} ({which})" if len(figures.memories) > 1 else "each rank", justify="right"
        )
    by_kind = [memory.parts for memory in figures.memories]
    for what in by_kind[0]:
        grid.add_row(kind(what), *(in_unit(of_rank.get(what, 0), unit) for of_rank in by_kind))
    grid.add_section()
    grid.add_row("total", *(in_unit(memory.num_bytes, unit) for memory in figures.memories), style="bold")
    return grid


def _traffic(figures: Figures) -> Grid | Padding:
    rows = figures.traffic
    if not rows:
        return Padding(Text("none: this is one process"), (0, 0, 0, 2))
    grid = _grid()
    for column in ("over", "operation"):
        grid.add_column(column)
    for column in ("count", "bytes"):
        grid.add_column(column, justify="right")
    for column in ("link", "estimated") if figures.cluster else ():
        grid.add_column(column, justify="right" if column == "estimated" else "left")
    for row in rows:
        found = times.sent_of(figures, row) if figures.cluster else None
        more = () if found is None else (found.link, duration(found.seconds))
        grid.add_row(row.over, row.op, f"{row.count:,}", size(row.num_bytes), *more)
    grid.add_section()
    total, count = sum(row.num_bytes for row in rows), sum(row.count for row in rows)
    grid.add_row("total", "", f"{count:,}", size(total), style="bold")
    return grid


def _times(figures: Figures) -> Grid:
    grid, lines = _grid(), times.step_lines(figures)
    grid.add_column("")
    for column in ("seconds", "of a step"):
        grid.add_column(column, justify="right")
    for line in lines[:-1]:
        grid.add_row(line.what, duration(line.seconds), f"{line.share:.1%}")
    grid.add_section()
    grid.add_row(f"{lines[-1].what}, {times.speed(figures)}", duration(lines[-1].seconds), "", style="bold")
    grid.caption, grid.caption_justify = times.assumptions(figures), "left"
    return grid


def _grid() -> Grid:
    return Grid(box=box.SIMPLE_HEAD, pad_edge=False)


def as_json(figures: Figures, origin: Mapping[str, str]) -> dict[str, Any]:
    """Every number exactly. `origin`: what made it, when, and by which command."""
    axes, work, said = figures.axes, figures.work, verdict(figures)
    of_step = {name: value for name, value in asdict(work).items() if name != "begins"}  # a plan trains everything
    return {
        **origin,
        "model": figures.model,
        "mesh": asdict(axes),
        "ranks": axes.world,
        "pipeline": pipeline.as_json(figures) if axes.pp > 1 else None,
        "num_parameters": figures.num_parameters,
        "head": figures.head,
        "savings": asdict(figures.savings),
        "state_dtype": None if figures.state_dtype is None else name_of(figures.state_dtype),
        "refused": [],
        "notes": notes(figures),
        "parameters": [asdict(line) for line in parameter_lines(figures)],
        "memory": [
            {
                "rank": memory.rank,
                "bytes": memory.parts,
                "total_bytes": memory.num_bytes,
                "host_bytes": memory.host_bytes,
            }
            for memory in figures.memories
        ],
        "not_counted": not_counted(figures),
        "device_bytes": figures.device,
        "fits": said.ok,
        "way_out": ways_out(figures) if said.ok is False else None,
        "step": {**of_step, "frozen": sorted(work.frozen), "numbers": sorted(work.numbers)},
        "traffic": [times.timed(figures, row) for row in figures.traffic],
        "total_count": sum(row.count for row in figures.traffic),
        "total_bytes": sum(row.num_bytes for row in figures.traffic),
        "charges": [times.timed(figures, line) for line in charge_lines(figures)],
        "estimate": times.times_as_json(figures),
        "groups": [asdict(line) for line in axis_lines(figures)],
    }
