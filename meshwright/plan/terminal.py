"""A plan for a person at a terminal, and for a program."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ..axes import Axes
from ..errors import counted
from ..sharding import draw, ways
from . import pipeline_timing
from . import step_time as times
from .figures import Figures
from .fit_advice import advice, helps, verdict
from .mesh_checks import as_option
from .search import Asked, Candidate, SearchResult
from .step_time import assumptions, times_as_json, tokens_a_second
from .tables import ParameterLine, axis_lines, charge_lines, parameter_lines
from .wording import (
    at_the_fullest,
    duration,
    in_unit,
    kind,
    large,
    name_of,
    nominal,
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
        found.append(f"cp={figures.axes.cp}, by mixer: {way}. --context (mw.ContextParallel) chooses another way.")
    if figures.axes.ep > 1 and not figures.blueprint.balance.num_experts:
        found.append(f"ep={figures.axes.ep} changes nothing of this model: it has no experts.")
    return found + (pipeline_timing.pipeline_notes(figures) if figures.axes.pp > 1 else [])


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
    for line in pipeline_timing.place_lines(figures):
        stages, shares = zip(
            *((pipeline_timing.layers_of_stage(s), f"{s.share:.1%}") for s in line.stages), strict=True
        )
        grid.add_row(
            str(line.place), "\n".join(stages), "\n".join(shares), f"{line.idle:.1%}", str(line.most_kept),
            size(line.num_bytes),
        )  # fmt: skip
    return grid


def _print_schedule(figures: Figures, console: Console) -> None:
    table = pipeline_timing.timetable(figures)
    columns = min(3, int((console.width - 4) / table.makespan))  # of a unit of time; what is before it takes 4
    console.print()
    console.print(Text("Who does what when", style="bold"))
    console.print(Text(f"{pipeline_timing.about_schedule(figures)}. An estimate: --html says of what."))
    if columns < 1:
        console.print(Text("It is too long to be drawn here: --html draws it."))
        return
    console.print(Text(pipeline_timing.LEGEND))
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
        grid.add_row(kind(what, figures), *(in_unit(of_rank.get(what, 0), unit) for of_rank in by_kind))
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


def plan_json(figures: Figures, origin: Mapping[str, str]) -> dict[str, Any]:
    """Every number exactly. `origin`: what made it, when, and by which command."""
    axes, work, said, state_dtype = figures.axes, figures.work, verdict(figures), figures.optimizer.state_dtype
    of_step = {name: value for name, value in asdict(work).items() if name != "begins"}  # a plan trains everything
    return {
        **origin,
        "model": figures.model,
        "mesh": asdict(axes),
        "ranks": axes.world,
        "pipeline": pipeline_timing.pipeline_json(figures) if axes.pp > 1 else None,
        "num_parameters": figures.num_parameters,
        "head": figures.blueprint.head,
        "savings": asdict(figures.memory),
        "state_dtype": None if state_dtype is None else name_of(state_dtype),
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
        "way_out": advice(figures) if said.ok is False else None,
        "step": {**of_step, "frozen": sorted(work.frozen), "numbers": sorted(work.numbers)},
        "traffic": [times.timed(figures, row) for row in figures.traffic],
        "total_count": sum(row.count for row in figures.traffic),
        "total_bytes": sum(row.num_bytes for row in figures.traffic),
        "charges": [times.timed(figures, line) for line in charge_lines(figures)],
        "estimate": times.times_as_json(figures),
        "groups": [asdict(line) for line in axis_lines(figures)],
    }


_HOST, _PIPELINE = "the host", "its pipeline"
_ALIKE = 0.01  # of a step: no estimate is that exact


def parts_of_step(candidate: Candidate) -> dict[str, float]:
    """What takes the time of a step, as a sentence names it."""
    found = candidate.estimate
    waits = {f"{wait.what} {wait.link}": wait.seconds for wait in found.waits}
    hidden = {"gathers and sums of FSDP beyond products": found.not_hidden}
    return {"products": found.products, _HOST: found.launching, **waits, **hidden, _PIPELINE: found.bubble}


def why(candidate: Candidate, first: Candidate) -> str:
    """One sentence: what it waits for most, and of all but the first what makes it slower."""
    parts, seconds = parts_of_step(candidate), candidate.estimate.seconds
    what, most = max(((w, s) for w, s in parts.items() if w != "products"), key=lambda part: part[1])
    waits = f"waits {most / seconds:.0%} of a step for {what}" if most >= _ALIKE * seconds else "waits for nothing long"
    slower, before = seconds - first.estimate.seconds, parts_of_step(first)
    if candidate is first or slower < _ALIKE * first.estimate.seconds:
        return waits if candidate is first else f"{waits}; as quick as the first"
    longer = max(parts, key=lambda name: parts[name] - before.get(name, 0.0))
    more, verb = duration(parts[longer] - before.get(longer, 0.0)), "takes" if longer in (_HOST, _PIPELINE) else "take"
    if longer == what:
        return f"{waits}, {more} longer than the first"
    return f"{waits}; {longer} {verb} {more} longer than in the first"


def print_found(found: SearchResult, asked: Asked) -> None:
    console, first = Console(), (*found.best, found.nearest)[0]
    assert first is not None
    title = f"{asked.model} on {counted(asked.size.num_ranks, 'rank')} of {asked.device_name} ({nominal(asked.device)})"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(_about(found, asked, first)))
    if found.best:
        console.print()
        console.print(_table(found))
        for number, candidate in enumerate(found.best, 1):
            console.print(Text(f"{number:>2} {_mesh(candidate)}"))
            console.print(Padding(Text(f"{why(candidate, first)}."), (0, 0, 0, 3)))
    else:
        console.print(Text(f"none fits {nominal(asked.device)}", style="bold red"))
        console.print(Padding(Text(_nearest(first)), (0, 0, 0, 2)))
    console.print()
    console.print(Text(f"{assumptions(first.figures)} {not_counted(first.figures)}"))
    console.print(Text(f"  {command(first, asked)}", style="bold"), soft_wrap=True)


def _about(found: SearchResult, asked: Asked, first: Candidate) -> str:
    tokens = asked.size.global_tokens
    return (
        f"{large(first.figures.num_parameters)} parameters; {tokens:,} tokens a step in micro-batches of "
        f"{asked.size.tokens:,}. {counted(found.num_meshes, 'mesh', 'meshes')} can be. {found.num_too_large:,} of them "
        f"are too large whatever recomputes. {found.num_in_full:,} were reckoned in full."
    )


def _table(found: SearchResult) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("")
    for column in ("a step", "products", "waits", "host", "gathers", "bubble", "stored", "left"):
        grid.add_column(column, justify="right")
    for number, candidate in enumerate(found.best, 1):
        times, figures = candidate.estimate, candidate.figures
        parts = (times.products, times.waited, times.launching, times.not_hidden, times.bubble)
        grid.add_row(
            str(number), duration(times.seconds), *(f"{part / times.seconds:.0%}" for part in parts),
            size(figures.most.device_bytes), size(candidate.left_bytes),
        )  # fmt: skip
    return grid


def _mesh(candidate: Candidate) -> str:
    figures = candidate.figures
    host, batches = figures.most.host_bytes, counted(figures.work.num_batches, "micro-batch", "micro-batches")
    on_host = [f"{size(host)} of a rank on the host"] if host else []
    hold = [] if candidate.chosen_hold is None else [f"hold={candidate.chosen_hold}"]
    return ", ".join([str(figures.axes), batches, *hold, *saved(figures), *on_host])


def _nearest(nearest: Candidate) -> str:
    stored, more = size(nearest.figures.most.device_bytes), size(-nearest.left_bytes)
    return (
        f"The nearest is {_mesh(nearest)}: a rank stores {stored}, which is {more} too much, most of it "
        f"{_largest(nearest)}. Way out: {way_out(nearest)}."
    )


def _largest(candidate: Candidate) -> str:
    """Name what takes most of the device's memory."""
    most = max((each for each in candidate.figures.most.stored if not each.host), key=lambda each: each.num_bytes)
    return f"{kind(most.what, candidate.figures)} ({size(most.num_bytes)})"


def way_out(nearest: Candidate) -> str:
    found = [*helps(nearest.figures), *nearest.figures.choices]
    return f"take {' or '.join(found)}" if found else "take more ranks, larger devices, or fewer --tokens"


def command(candidate: Candidate, asked: Asked) -> str:
    """What tells all of it: the command of the search, with what it chose in the place of what it was asked."""
    figures = candidate.figures
    work, memory = figures.work, figures.memory
    chosen = ["--mesh", as_option(figures.axes), "--tokens", str(work.tokens), "--micro-batches", str(work.num_batches)]
    chosen += ["--recompute", memory.recompute] if memory.recompute != "none" else []
    chosen += ["--offload"] if memory.offload else []
    chosen += {True: ["--hold"], False: ["--no-hold"], None: []}[candidate.chosen_hold]
    return shlex.join([*_that_do_something(asked.words, figures.axes), *chosen])


def _that_do_something(words: Sequence[str], axes: Axes) -> Iterator[str]:
    """Without options of an axis that the mesh lacks, which would be refused."""
    with_value = [
        *(["--schedule", "--stages", "--ends"] if axes.pp == 1 else []),
        *(["--context"] if axes.cp == 1 else []),
    ]
    alone, left = ["--hold", "--no-hold"] if axes.pp == 1 else [], iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name in with_value:
            next(left) if not equals else None
        elif name not in alone:
            yield word


def search_as_json(found: SearchResult, asked: Asked, origin: Mapping[str, str]) -> dict[str, Any]:
    first = (*found.best, found.nearest)[0]
    assert first is not None
    return {
        **origin,
        "model": asked.model,
        "ranks": asked.size.num_ranks,
        "device_bytes": asked.device,
        "tokens": asked.size.tokens,
        "global_tokens": asked.size.global_tokens,
        "num_meshes": found.num_meshes,
        "num_too_large": found.num_too_large,
        "num_in_full": found.num_in_full,
        "best": [_candidate_as_json(candidate, first, asked) for candidate in found.best],
        "way_out": None if found.nearest is None else way_out(found.nearest),
        "nearest": None if found.nearest is None else _candidate_as_json(found.nearest, found.nearest, asked),
        "assumptions": assumptions(first.figures),
        "not_counted": not_counted(first.figures),
    }


def _candidate_as_json(candidate: Candidate, first: Candidate, asked: Asked) -> dict[str, Any]:
    figures = candidate.figures
    return {
        "mesh": asdict(figures.axes),
        "savings": asdict(figures.memory),
        "pipeline": asdict(figures.blueprint.recipe.pipeline) if figures.axes.pp > 1 else None,
        "num_batches": figures.work.num_batches,
        "estimate": times_as_json(figures),
        "tokens_a_second": tokens_a_second(figures),
        "bytes": figures.most.parts,
        "device_bytes": figures.most.device_bytes,
        "left_bytes": candidate.left_bytes,
        "why": why(candidate, first),
        "command": command(candidate, asked),
    }
