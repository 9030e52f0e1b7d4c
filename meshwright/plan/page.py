"""Build the page of a plan (`--html`): the verdict, the memory of a rank, the mesh, the collectives, the parameters.

`verify --html` puts the same sections below its findings. Everything is computed on the meta device, for the model in
its real sizes. Identical layers share a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby

from ..errors import counted
from . import step_time as times
from .communicators import communicators
from .figures import Figures, RankMemory, Traffic
from .fit_advice import verdict
from .html import Cell, bar, bytes_cell, details, flowing, page, section, span_cell, table, tag, wrap
from .svg import mesh_diagram, pipeline_section
from .tables import ChargeLine, ParameterLine, charge_lines, parameter_lines
from .terminal import about, notes, placement, step
from .wording import (
    Unit,
    communicators_name,
    duration,
    in_unit,
    kind,
    large,
    nominal,
    peak_note,
    roughly,
    size,
    unit_of,
)

_MOST_ROWS = 64  # in the table of ranks: a mesh may have thousands


def plan_page(figures: Figures, origin: Mapping[str, str]) -> str:
    """Return the page of a plan. `origin`: versions, date and command."""
    title = f"{figures.name} on {figures.axes}"
    return page(title, origin, heading("plan", figures), verdict_of(figures), plan_of(figures))


def heading(command: str, figures: Figures) -> Iterator[str]:
    """Yield the head of a page: the command, the model and its mesh."""
    # The text of axes is `fsdp=2 tp=4`: alternating names and sizes.
    mesh = str(figures.axes).replace("=", " ").split(" ") if figures.axes.world > 1 else []
    chips = (
        wrap("span", tag("b", axis), f" {size}", kind="chip") for axis, size in zip(*[iter(mesh)] * 2, strict=True)
    )
    yield wrap(
        "header", tag("p", f"meshwright {command}", "eyebrow"), tag("h1", figures.name),
        wrap("p", *chips, tag("span", about(figures)), kind="mesh"),
    )  # fmt: skip


def verdict_of(figures: Figures) -> Iterator[str]:
    """Yield the verdict of a plan: whether it fits."""
    result = verdict(figures)
    yield verdict_box(result.text, result.ok, result.more)


def verdict_box(text: str, ok: bool | None, *more: str) -> str:
    """Return the verdict of a page in large letters, with sentences below; green if `ok`, red if not."""
    colour = {True: "pass", False: "fails", None: ""}[ok]
    below = (wrap("p", flowing(sentence)) for sentence in more if sentence)
    return wrap("div", tag("strong", text), *below, kind=f"verdict {colour}".strip()) + "\n"


def plan_of(figures: Figures) -> Iterator[str]:
    """Yield the sections of a plan below its verdict.

    The order follows the questions of a reader: does it fit, what fills the memory, which ranks communicate, how much,
    how long. Long tables are collapsed.
    """
    yield _tiles(figures)
    yield from (tag("p", note, "note") for note in notes(figures))
    yield _memory(figures)
    if figures.axes.pp > 1:
        yield pipeline_section(figures)
    yield section("The mesh", *mesh_diagram(figures), _ranks(figures))
    yield _traffic(figures)
    if figures.cluster:
        yield _times(figures)
    yield _parameters(figures)


def _tiles(figures: Figures) -> str:
    """Return the most important numbers, four in a row: memory, traffic and size, then time if it is estimated."""
    rows = figures.traffic
    facts = {
        "stored by a rank": size(figures.most.num_bytes),
        "bytes of collectives in a step": size(sum(row.num_bytes for row in rows)),
        "collectives in a step": f"{sum(row.count for row in rows):,}",
        "parameters": large(figures.num_parameters),
    }
    if figures.cluster:
        step, work = times.step_lines(figures)[-1], figures.work
        facts |= {
            "a step, estimated": duration(step.seconds),
            "tokens per second per GPU": f"{times.tokens_a_second(figures):,.0f}",
            "model FLOPs utilisation (MFU)": f"{times.mfu(figures):.1%}",
            "tokens in a step": f"{work.tokens * work.num_batches * figures.axes.num_data_ranks:,}",
        }
    return wrap("dl", *(wrap("div", tag("dt", what), tag("dd", fact)) for what, fact in facts.items()), kind="tiles")


def _memory(figures: Figures) -> str:
    """Return the memory of the ranks that store most and least: bars, and a table by kind."""
    # All bars share one scale: the device if everything fits, else the rank that stores most.
    memories, whole = figures.memories, max(figures.most.num_bytes, figures.device or 0)
    equal = len(memories) == 1
    text = "Every rank stores the same amount." if equal else (
        f"Rank {memories[0].rank:,} stores most, and rank {memories[-1].rank:,} stores least."
    )  # fmt: skip
    by_kind, unit = figures.by_kind, unit_of(whole)
    bars = map(partial(_memory_bar, figures, whole), memories, by_kind)
    rows = [
        [Cell(kind(what, figures), f"key tint{n}"), *(_in(unit, of_rank[what]) for of_rank in by_kind)]
        for n, what in enumerate(by_kind[0])
    ]
    rows.append([Cell("total", "key total"), *(_in(unit, m.num_bytes, "number total") for m in memories)])
    nccl = communicators(figures)
    if nccl.count:
        cells = (Cell(roughly(nccl.num_bytes), "number") for _ in memories)
        rows.append([Cell(f"{communicators_name(nccl.count)}, on top", "key"), *cells])
    names = ["each rank"] if equal else [f"rank {memory.rank:,}" for memory in memories]
    note = [tag("p", text) for text in (peak_note(figures),) if text]
    return section("What a rank stores", tag("p", text), *note, *bars, table(["stored", *names], rows, "figures"))


def _in(unit: Unit, num_bytes: int, style: str = "number") -> Cell:
    """Return a cell in the unit of its table, so that numbers can be compared; the exact bytes are its tooltip."""
    return Cell(in_unit(num_bytes, unit), style, title=f"{num_bytes:,} bytes")


def _memory_bar(figures: Figures, whole: int, memory: RankMemory, by_kind: Mapping[str, int]) -> str:
    """Draw the memory of a rank, with a mark where the device ends if it is too small."""
    parts = ((num, f"{kind(what, figures)}: {num:,} bytes") for what, num in by_kind.items())
    rank = "each rank" if len(figures.memories) == 1 else f"rank {memory.rank:,}"
    device = f" of {nominal(figures.device)}" if figures.device else ""
    label = wrap("div", tag("span", rank), tag("span", size(memory.num_bytes) + device), kind="label")
    return label + bar(parts, whole, figures.device)


def _traffic(figures: Figures) -> str:
    """Return the collectives by axes and operation, with bars for their time, and a collapsed table of all charges."""
    rows, title = figures.traffic, "The collectives of a step"
    if not rows:
        return section(title, tag("p", "None: this is one process."))
    even = " The router is taken to be balanced." if figures.blueprint.balance.num_experts else ""
    text = (
        f"In a step {step(figures)}, with compute in bfloat16 and reductions in float32. Bytes are those of the larger "
        f"side of each collective, on rank {figures.sender:,}, which sends most.{even}"
    )
    # Rows are sorted by axes already, so those of one group are neighbours.
    by_axes = [list(same) for _, same in groupby(rows, lambda row: row.over)]
    most = max(sum(_length(figures, row) for row in same) for same in by_axes)
    lines = (line for same in by_axes for line in _axes_lines(figures, same, most))
    bars = "estimated time" if figures.cluster else ""
    summed = table(["over", "operation", "count", "bytes", bars], lines, "stacked flows")
    return section(title, tag("p", text), summed, details("Every collective", _charges(figures)))


def _length(figures: Figures, row: Traffic) -> float:
    """Return the length of a bar: seconds with a cluster, since a byte between nodes takes longer, else bytes."""
    return times.link_time(figures, row).seconds if figures.cluster else float(row.num_bytes)


def _axes_lines(figures: Figures, rows: list[Traffic], most: float) -> Iterator[list[object]]:
    """Yield the rows of collectives over the same axes: first their total, then each operation."""
    count, num_bytes = sum(row.count for row in rows), sum(row.num_bytes for row in rows)
    length = sum(_length(figures, row) for row in rows)
    yield [
        Cell(rows[0].over, "group"), Cell(f"among {counted(rows[0].num_ranks, 'rank')}", "group"),
        Cell(f"{count:,}", "number group"), bytes_cell(num_bytes, "number group"),
        Cell(duration(length) if figures.cluster else "", "group", share=length / most),
    ]  # fmt: skip
    for row in rows:
        time = times.link_time(figures, row) if figures.cluster else None
        text = "" if time is None else f"{duration(time.seconds)} {time.link}"
        share = Cell(text, "part", share=_length(figures, row) / most)
        yield [Cell("", "part"), row.op, row.count, bytes_cell(row.num_bytes), share]


def _bytes_of_one(line: ChargeLine) -> Cell:
    """Return the bytes of one collective. If the router decides the bytes: their expectation, with bounds as the
    tooltip."""
    if line.between is None:
        return bytes_cell(line.one_bytes)
    least, most = line.between
    return Cell(
        size(line.one_bytes),
        "number",
        "expected",
        title=f"a rank sends {least:,} to {most:,} bytes, depending on the router",
    )


def _charges(figures: Figures) -> str:
    """Return a table of every kind of collective: what the bars above sum up, one line per kind of layer and door."""
    rows = (
        [
            Cell(line.what, "name", f"layers {line.layers}" if line.layers else ""), Cell(line.op),
            Cell(line.over, note=counted(line.num_ranks, "rank")), line.count,
            _bytes_of_one(line), bytes_cell(line.num_bytes), *_link_cells(figures, line),
        ]
        for line in charge_lines(figures)
    )  # fmt: skip
    head = ["what", "operation", "over", "count", "bytes of one", "bytes in all"]
    head += ["estimated"] if figures.cluster else []
    return tag("p", "{i} stands for the number of a layer.") + table(head, rows)


def _times(figures: Figures) -> str:
    """Return the parts of the estimated time of a step, and what the estimate assumes."""
    # The last line is the step itself, so it has no bar.
    *parts, whole = times.step_lines(figures)
    rows = [
        [
            Cell(line.what, "name"),
            Cell(duration(line.seconds), "number"),
            Cell(f"{line.share:.1%}", "", share=line.share),
        ]
        for line in parts
    ]
    rows.append(
        [Cell(f"{whole.what}, {times.speed(figures)}", "name"), Cell(duration(whole.seconds), "number"), Cell("")]
    )
    text = tag("p", times.assumptions(figures))
    return section("How long a step takes, estimated", text, table(["part", "seconds", "of a step"], rows))


def _parameters(figures: Figures) -> str:
    """Return where every kind of parameter is stored, and over which axes its gradient is reduced."""
    text = (
        "If an axis cuts a parameter, each of its ranks computes with a part. Rows are sharded, and gathered for "
        "compute. Bytes are those of one parameter on one rank. {i} stands for the number of a layer."
    )
    head = ["parameter", "placement", "on a rank", "gradient reduced", "keys of the files"]
    lines = table(head, (_parameter(line) for line in parameter_lines(figures)), "stacked wide")
    title = f"Where {figures.num_parameters:,} parameters lie"
    return section(title, tag("p", text), details("Every parameter", lines))


def _link_cells(figures: Figures, line: ChargeLine) -> list[Cell]:
    """Return the time and link of a charge; nothing without a cluster."""
    if not figures.cluster:
        return []
    time = times.link_time(figures, line)
    return [Cell(duration(time.seconds), "number", note=time.link)]


def _parameter(line: ParameterLine) -> list[Cell]:
    """Return the row of a kind of parameter. In `late` are the axes that FSDP's reduce-scatter does not cover."""
    layers = f"layers {line.layers}" if line.layers else ""
    reductions = {"by FSDP over": line.by_fsdp, "in the last all-reduce over": line.late}
    return [
        Cell(line.name, "name", "\n".join(filter(None, [layers, line.dims, *line.remarks]))),
        Cell("\n".join(placement(line)), "lines"),
        span_cell(line.least_bytes, line.most_bytes),
        Cell("\n".join(f"{how} {axes}" for how, axes in reductions.items() if axes != "-") or "-", "lines"),
        Cell("\n".join(line.keys), "keys"),
    ]


def _ranks(figures: Figures) -> str:
    """Return a collapsed table with the coordinates of the first ranks."""
    axes, live = figures.axes, figures.live
    if not live:
        return ""
    shown = min(axes.world, _MOST_ROWS)
    at = (axes.coords(rank) for rank in range(shown))
    rows = ([Cell(f"{r}", "name"), *(coords[a] for a in live), axes.data_rank(r)] for r, coords in enumerate(at))
    left = tag("p", f"and {axes.world - shown:,} more ranks") if axes.world > shown else ""
    return details("Coordinates of each rank", table(["rank", *live, "data rank"], rows, "stacked ranks"), left)
