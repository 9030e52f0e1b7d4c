"""Print plans and searches on a terminal, and return them as JSON for programs.

Programs read the JSON, so its keys are part of the public interface and stay, even where the text for people has newer
words ("way_out", "savings").
"""

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
from .communicators import communicators
from .figures import Figures
from .fit_advice import advice, helps, verdict
from .mesh_checks import as_option
from .search import Candidate, SearchRequest, SearchResult
from .step_time import assumptions, times_as_json, tokens_a_second
from .tables import ParameterLine, axis_lines, charge_lines, parameter_lines
from .wording import (
    communicators_name,
    duration,
    in_unit,
    kind,
    large,
    name_of,
    nominal,
    not_counted,
    peak_note,
    roughly,
    saved,
    size,
    span,
    unit_of,
)

STORES = "What a rank stores"  # the title of the table below which the note on the peak stands


def print_plan(figures: Figures) -> None:
    """Print a plan. The verdict comes last, where a reader at a terminal looks first.

    docs/plan.md explains the tables in the order in which they appear.
    """
    console, result = Console(), verdict(figures)
    # Rich does not break lines that users copy (paths, commands, schedules): soft_wrap leaves them to the terminal.
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
        if title == STORES and (note := peak_note(figures)):
            console.print(Text(note))
    if figures.axes.pp > 1:
        _print_schedule(figures, console)
    console.print()
    console.print(Text(result.text, style={True: "bold green", False: "bold red", None: "bold"}[result.ok]))
    console.print(Padding(Text(result.more), (0, 0, 0, 2)))
    if result.ok is None:
        console.print(Text("  Add --device 80GB to see whether that fits."))
    for note in notes(figures):
        console.print(Padding(Text(note), (0, 0, 0, 2)))


def about(figures: Figures) -> str:
    """Describe the model and its options in a line."""
    experts, axes = figures.blueprint.balance.num_experts, figures.axes
    parts = [counted(axes.world, "rank"), f"{large(figures.num_parameters)} parameters"]
    parts.append(counted(len(figures.blueprint.module.layers), "layer"))
    parts += [counted(experts, "expert")] if experts else []
    parts += saved(figures)
    return ", ".join(parts)


def notes(figures: Figures) -> list[str]:
    """List notes on figures that could mislead a reader."""
    lines = []
    way = ways(figures.blueprint.spec, figures.axes)
    if way:
        lines.append(f"cp={figures.axes.cp}, by mixer: {way}. --context (mw.ContextParallel) chooses another way.")
    if figures.axes.ep > 1 and not figures.blueprint.balance.num_experts:
        lines.append(f"ep={figures.axes.ep} changes nothing in this model: it has no experts.")
    if wide := figures.left_wide:
        of_all = counted(len(wide), "such matrix", "such matrices")
        lines.append(f"{wide[0]} is stored as values, not in 4 bits ({of_all}): a rank has no whole blocks of columns.")
    return lines + (pipeline_timing.pipeline_notes(figures) if figures.axes.pp > 1 else [])


def step(figures: Figures) -> str:
    """Describe the size of a step."""
    work = figures.work
    batches = counted(work.num_batches, "micro-batch", "micro-batches")
    return f"each data rank has {batches} of {counted(work.tokens, 'token')}"


def _parameters(figures: Figures) -> Grid:
    """Return a table of the placement of parameters, a row for each kind."""
    lines, grid = parameter_lines(figures), _grid()
    # On 80 columns rich shrinks columns without a fixed width. So names, which users copy into patterns, and numbers
    # keep one line, and placements wrap.
    grid.add_column("parameter", width=max(32, *(len(line.name) for line in lines)))
    grid.add_column("placement")
    grid.add_column("on a rank", justify="right", width=len("to 999 bytes"))
    for line in lines:
        more = "; ".join(filter(None, [f"layers {line.layers}" if line.layers else "", line.dims, *line.remarks]))
        name = Text(line.name).append(f"\n{more}", style="dim")
        grid.add_row(name, "\n".join(placement(line)), span(line.least_bytes, line.most_bytes, "\nto "))
    return grid


def placement(line: ParameterLine) -> list[str]:
    """Describe how tensor and expert parallelism, FSDP and replication place a parameter."""
    named = {"cut": line.cut, "rows over": line.shards, "copies over": line.copies}
    return [f"{what} {axes}" for what, axes in named.items() if axes != "-"] or ["whole"]


def _places(figures: Figures) -> Grid:
    """Return a table of the places on pp: their layers, work, bubble and memory."""
    grid = _grid()
    grid.add_column("on pp")
    grid.add_column("stages")
    for column in ("of the work", "idle", "keeps", "a rank stores"):
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
    """Print the schedule as a line for each place on pp, unless it is wider than the terminal."""
    table = pipeline_timing.timetable(figures)
    columns = min(3, int((console.width - 4) / table.makespan))  # characters per unit of time; 4 for the place
    console.print()
    console.print(Text("The pipeline schedule", style="bold"))
    console.print(Text(f"{pipeline_timing.about_schedule(figures)}. An estimate: --html shows its assumptions."))
    if columns < 1:
        console.print(Text("It is too long to be drawn in this terminal: --html draws it."))
        return
    console.print(Text(pipeline_timing.LEGEND))
    console.print(Text(draw(table, columns)), soft_wrap=True)


def _memory(figures: Figures) -> Grid:
    """Return a table of the ranks that store most and least, by kind."""
    unit = unit_of(figures.most.num_bytes)  # one unit for the whole table, so that its numbers can be compared
    grid = _grid()
    grid.add_column("")
    for memory, which in zip(figures.memories, ("most", "least"), strict=False):
        grid.add_column(
            f"rank {memory.rank:,} ({which})" if len(figures.memories) > 1 else "each rank", justify="right"
        )
    by_kind = figures.by_kind
    for what in by_kind[0]:
        grid.add_row(kind(what, figures), *(in_unit(of_rank[what], unit) for of_rank in by_kind))
    grid.add_section()
    grid.add_row("total", *(in_unit(memory.num_bytes, unit) for memory in figures.memories), style="bold")
    nccl = communicators(figures)
    if nccl.count:
        grid.add_row(f"{communicators_name(nccl.count)}, on top", *(roughly(nccl.num_bytes) for _ in figures.memories))
    return grid


def _traffic(figures: Figures) -> Grid | Padding:
    """Return a table of the collectives of a step by axes and operation, with link and time if a cluster is known."""
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
        time = times.link_time(figures, row) if figures.cluster else None
        more = () if time is None else (time.link, duration(time.seconds))
        grid.add_row(row.over, row.op, f"{row.count:,}", size(row.num_bytes), *more)
    grid.add_section()
    total, count = sum(row.num_bytes for row in rows), sum(row.count for row in rows)
    grid.add_row("total", "", f"{count:,}", size(total), style="bold")
    return grid


def _times(figures: Figures) -> Grid:
    """Return a table of the parts of the estimated time of a step, with its assumptions as the caption."""
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
    """Return an empty table in the style of all tables."""
    return Grid(box=box.SIMPLE_HEAD, pad_edge=False)


def plan_json(figures: Figures, origin: Mapping[str, str]) -> dict[str, Any]:
    """Return a plan as JSON, with exact numbers. `origin`: versions, date and command."""
    axes, work, result, state_dtype = figures.axes, figures.work, verdict(figures), figures.optimizer.state_dtype
    of_step = {name: value for name, value in asdict(work).items() if name != "begins"}  # a plan trains every layer
    return {
        **origin,
        "model": figures.model,
        "mesh": asdict(axes),
        "ranks": axes.world,
        "pipeline": pipeline_timing.pipeline_json(figures) if axes.pp > 1 else None,
        "num_parameters": figures.num_parameters,
        "head": figures.blueprint.head,
        "savings": asdict(figures.memory),  # the fields of `mw.MemoryOptions`
        "optimizer": type(figures.optimizer).__name__,
        "state_dtype": None if state_dtype is None else name_of(state_dtype),
        "refused": [],  # for an impossible mesh only this list is printed, with the reasons
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
        "communicators": asdict(communicators(figures)),  # NCCL's memory; not included in `total_bytes`
        "device_bytes": figures.device,
        "fits": result.ok,
        "way_out": advice(figures) if result.ok is False else None,
        "step": {**of_step, "frozen": sorted(work.frozen), "numbers": sorted(work.numbers)},
        "traffic": [times.timed(figures, row) for row in figures.traffic],
        "total_count": sum(row.count for row in figures.traffic),
        "total_bytes": sum(row.num_bytes for row in figures.traffic),
        "charges": [times.timed(figures, line) for line in charge_lines(figures)],
        "estimate": times.times_as_json(figures),
        "groups": [asdict(line) for line in axis_lines(figures)],
    }


_HOST, _PIPELINE = "the host", "its pipeline"
_NEGLIGIBLE = 0.01  # share of a step: the estimate is not that exact


def parts_of_step(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of each part of a step, under names that fit into a sentence. They add up to the step."""
    times = candidate.estimate
    waits = {f"{wait.what} {wait.link}": wait.seconds for wait in times.waits}
    exposed = {"collectives of FSDP beyond matmuls": times.not_hidden}
    return {"matmuls": times.products, _HOST: times.launching, **waits, **exposed, _PIPELINE: times.bubble}


def why(candidate: Candidate, first: Candidate) -> str:
    """Say in a sentence what a mesh waits for most, and what makes it slower than the first one."""
    parts, seconds = parts_of_step(candidate), candidate.estimate.seconds
    # Matmuls are the work itself, not a wait.
    what, most = max(((w, s) for w, s in parts.items() if w != "matmuls"), key=lambda part: part[1])
    waits = f"waits {most / seconds:.0%} of a step for {what}" if most >= _NEGLIGIBLE * seconds else "hardly waits"
    slower, before = seconds - first.estimate.seconds, parts_of_step(first)
    if candidate is first or slower < _NEGLIGIBLE * first.estimate.seconds:
        return waits if candidate is first else f"{waits}; as fast as the first"
    # Among the parts that differ from the first mesh, name the one that adds most.
    longer = max(parts, key=lambda name: parts[name] - before.get(name, 0.0))
    more, verb = duration(parts[longer] - before.get(longer, 0.0)), "takes" if longer in (_HOST, _PIPELINE) else "take"
    if longer == what:
        return f"{waits}, {more} longer than the first"
    return f"{waits}; {longer} {verb} {more} longer than in the first"


def print_search(result: SearchResult, request: SearchRequest) -> None:
    """Print the result of a search, and last the command that prints the full plan of the best mesh."""
    console, first = Console(), (*result.best, result.nearest)[0]  # a search has at least one of these
    assert first is not None
    title = (
        f"{request.model} on {counted(request.size.num_ranks, 'rank')} of {request.device_name} "
        f"({nominal(request.device)})"
    )
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Text(_about(result, request, first)))
    if result.best:
        console.print()
        console.print(_table(result))
        for number, candidate in enumerate(result.best, 1):
            console.print(Text(f"{number:>2} {_mesh(candidate)}"))
            console.print(Padding(Text(f"{why(candidate, first)}."), (0, 0, 0, 3)))
    else:
        console.print(Text(f"none fits {nominal(request.device)}", style="bold red"))
        console.print(Padding(Text(_nearest(first)), (0, 0, 0, 2)))
    console.print()
    console.print(Text(f"{assumptions(first.figures)} {not_counted(first.figures)}"))
    console.print(Text(f"  {command(first, request)}", style="bold"), soft_wrap=True)


def _about(result: SearchResult, request: SearchRequest, first: Candidate) -> str:
    """Say what was searched: the step, and how many meshes were possible, too large, and costed."""
    tokens = request.size.global_tokens
    return (
        f"{large(first.figures.num_parameters)} parameters; {tokens:,} tokens a step in micro-batches of "
        f"{request.size.tokens:,}. {counted(result.num_meshes, 'mesh', 'meshes')} possible. "
        f"{result.num_too_large:,} of them cannot fit, however much they recompute. "
        f"{result.num_in_full:,} were costed in full."
    )


def _table(result: SearchResult) -> Grid:
    """Return a table of the best meshes: their time, its parts, and the memory they store and leave free."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("")
    for column in ("a step", "matmuls", "waits", "host", "FSDP", "bubble", "stored", "free"):
        grid.add_column(column, justify="right")
    for number, candidate in enumerate(result.best, 1):
        times, figures = candidate.estimate, candidate.figures
        # These follow the columns; "host" and "FSDP" count only the time that matmuls do not hide.
        parts = (times.products, times.waited, times.launching, times.not_hidden, times.bubble)
        grid.add_row(
            str(number), duration(times.seconds), *(f"{part / times.seconds:.0%}" for part in parts),
            size(figures.most.device_bytes), size(candidate.left_bytes),
        )  # fmt: skip
    return grid


def _mesh(candidate: Candidate) -> str:
    """Describe a mesh and its options in a line. `hold` is named only if the search chose it."""
    figures = candidate.figures
    host, batches = figures.most.host_bytes, counted(figures.work.num_batches, "micro-batch", "micro-batches")
    on_host = [f"{size(host)} per rank on the host"] if host else []
    hold = [] if candidate.chosen_hold is None else [f"hold={candidate.chosen_hold}"]
    return ", ".join([str(figures.axes), batches, *hold, *saved(figures), *on_host])


def _nearest(nearest: Candidate) -> str:
    """Say how far the nearest mesh is from fitting, and what would make it fit."""
    stored, more = size(nearest.figures.most.device_bytes), size(-nearest.left_bytes)
    return (
        f"The nearest is {_mesh(nearest)}: a rank stores {stored}, which is {more} too much, most of it "
        f"{_largest(nearest)}. To fit, {remedy(nearest)}."
    )


def _largest(candidate: Candidate) -> str:
    """Name the kind that takes most of the device's memory."""
    most = max((each for each in candidate.figures.most.stored if not each.host), key=lambda each: each.num_bytes)
    return f"{kind(most.what, candidate.figures)} ({size(most.num_bytes)})"


def remedy(nearest: Candidate) -> str:
    """Return the options that would make a mesh fit, as the end of a sentence. Each is enough on its own."""
    options = [*helps(nearest.figures), *nearest.figures.choices]
    return f"choose {' or '.join(options)}" if options else "choose more ranks, larger devices, or fewer --tokens"


def command(candidate: Candidate, request: SearchRequest) -> str:
    """Return the command that prints the full plan: the command of the search, with the chosen mesh and options.

    Its figures equal those of the search exactly, which a test checks.
    """
    figures = candidate.figures
    work, memory = figures.work, figures.memory
    chosen = ["--mesh", as_option(figures.axes), "--tokens", str(work.tokens), "--micro-batches", str(work.num_batches)]
    chosen += ["--recompute", memory.recompute] if memory.recompute != "none" else []
    chosen += ["--offload"] if memory.offload else []
    chosen += {True: ["--hold"], False: ["--no-hold"], None: []}[candidate.chosen_hold]
    return shlex.join([*_words_for_mesh(request.words, figures.axes), *chosen])


def _words_for_mesh(words: Sequence[str], axes: Axes) -> Iterator[str]:
    """Yield the words of a command without options of axes that the mesh lacks: `plan` would refuse them."""
    with_value = [
        *(["--schedule", "--stages", "--ends"] if axes.pp == 1 else []),
        *(["--context"] if axes.cp == 1 else []),
    ]
    alone, left = ["--hold", "--no-hold"] if axes.pp == 1 else [], iter(words)
    for word in left:
        # The value of an option is the next word, unless "=" joins it to the name.
        name, equals, _ = word.partition("=")
        if name in with_value:
            next(left) if not equals else None
        elif name not in alone:
            yield word


def search_as_json(result: SearchResult, request: SearchRequest, origin: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of a search as JSON. `origin`: versions, date and command."""
    first = (*result.best, result.nearest)[0]
    assert first is not None
    return {
        **origin,
        "model": request.model,
        "ranks": request.size.num_ranks,
        "device_bytes": request.device,
        "tokens": request.size.tokens,
        "global_tokens": request.size.global_tokens,
        "num_meshes": result.num_meshes,
        "num_too_large": result.num_too_large,
        "num_in_full": result.num_in_full,
        "best": [_candidate_as_json(candidate, first, request) for candidate in result.best],
        "way_out": None if result.nearest is None else remedy(result.nearest),
        "nearest": None if result.nearest is None else _candidate_as_json(result.nearest, result.nearest, request),
        "assumptions": assumptions(first.figures),
        "not_counted": not_counted(first.figures),
    }


def _candidate_as_json(candidate: Candidate, first: Candidate, request: SearchRequest) -> dict[str, Any]:
    """Return a mesh of a search as JSON."""
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
        "command": command(candidate, request),
    }
