"""A page that a person can file or send: the mesh, what each rank stores, what a step sends, where parameters lie.

All of it is worked out on the meta device, for the model in its real sizes. Layers that are alike share a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from ..errors import counted
from . import step_time as times
from .figures import Figures, RankMemory, Traffic
from .fit_advice import verdict
from .html import Cell, bar, bytes_cell, details, flowing, page, section, span_cell, table, tag, wrap
from .svg import mesh_picture, pipeline_section
from .tables import ChargeLine, ParameterLine, charge_lines, parameter_lines
from .terminal import about, lies, notes, step
from .wording import Unit, at_the_fullest, duration, in_unit, kind, large, nominal, size, unit_of

_MOST_ROWS = 64  # of the table of ranks


def plan_page(figures: Figures, origin: Mapping[str, str]) -> str:
    title = f"{figures.name} on {figures.axes}"
    return page(title, origin, heading("plan", figures), verdict_of(figures), plan_of(figures))


def heading(command: str, figures: Figures) -> Iterator[str]:
    mesh = str(figures.axes).replace("=", " ").split(" ") if figures.axes.world > 1 else []
    chips = (
        wrap("span", tag("b", axis), f" {size}", kind="chip") for axis, size in zip(*[iter(mesh)] * 2, strict=True)
    )
    yield wrap(
        "header", tag("p", f"meshwright {command}", "eyebrow"), tag("h1", figures.name),
        wrap("p", *chips, tag("span", about(figures)), kind="mesh"),
    )  # fmt: skip


def verdict_of(figures: Figures) -> Iterator[str]:
    said = verdict(figures)
    yield verdict_box(said.text, said.ok, said.more)


def verdict_box(text: str, ok: bool | None, *more: str) -> str:
    """What a reader came for, before all else."""
    colour = {True: "pass", False: "fails", None: ""}[ok]
    below = (wrap("p", flowing(sentence)) for sentence in more if sentence)
    return wrap("div", tag("strong", text), *below, kind=f"verdict {colour}".strip()) + "\n"


def plan_of(figures: Figures) -> Iterator[str]:
    """All that can be said of a model on a mesh without running it."""
    yield _tiles(figures)
    yield from (tag("p", note, "note") for note in notes(figures))
    yield _memory(figures)
    if figures.axes.pp > 1:
        yield pipeline_section(figures)
    yield section("The mesh", *mesh_picture(figures), _ranks(figures))
    yield _traffic(figures)
    if figures.cluster:
        yield _times(figures)
    yield _parameters(figures)


def _tiles(figures: Figures) -> str:
    """Rows of four."""
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
            "tokens a second of each GPU": f"{times.tokens_a_second(figures):,.0f}",
            "model FLOPs utilisation (MFU)": f"{times.mfu(figures):.1%}",
            "tokens in a step": f"{work.tokens * work.num_batches * figures.axes.num_data_ranks:,}",
        }
    return wrap("dl", *(wrap("div", tag("dt", what), tag("dd", fact)) for what, fact in facts.items()), kind="tiles")


def _memory(figures: Figures) -> str:
    memories, whole = figures.memories, max(figures.most.num_bytes, figures.device or 0)
    alike = len(memories) == 1
    text = "Every rank stores as much as rank 0." if alike else (
        f"No rank stores more than rank {memories[0].rank:,}, and none less than rank {memories[-1].rank:,}."
    )  # fmt: skip
    bars = (_memory_bar(memory, figures, whole) for memory in memories)
    by_kind, unit = [memory.parts for memory in memories], unit_of(whole)
    rows = [
        [Cell(kind(what, figures), f"key tint{n}"), *(_in(unit, of_rank.get(what, 0)) for of_rank in by_kind)]
        for n, what in enumerate(by_kind[0])
    ]
    rows.append([Cell("total", "key total"), *(_in(unit, m.num_bytes, "number total") for m in memories)])
    names = ["each rank"] if alike else [f"rank {memory.rank:,}" for memory in memories]
    note = [tag("p", text) for text in (at_the_fullest(figures),) if text]
    return section("What a rank stores", tag("p", text), *note, *bars, table(["stored", *names], rows, "figures"))


def _in(unit: Unit, num_bytes: int, style: str = "number") -> Cell:
    """All numbers of a column in one unit."""
    return Cell(in_unit(num_bytes, unit), style, title=f"{num_bytes:,} bytes")


def _memory_bar(memory: RankMemory, figures: Figures, whole: int) -> str:
    parts = ((num, f"{kind(what, figures)}: {num:,} bytes") for what, num in memory.parts.items())
    rank = "each rank" if len(figures.memories) == 1 else f"rank {memory.rank:,}"
    device = f" of {nominal(figures.device)}" if figures.device else ""
    label = wrap("div", tag("span", rank), tag("span", size(memory.num_bytes) + device), kind="label")
    return label + bar(parts, whole, figures.device)


def _traffic(figures: Figures) -> str:
    rows, title = figures.traffic, "The collectives of a step"
    if not rows:
        return section(title, tag("p", "There are none: this is one process."))
    even = " The router is taken to be even." if figures.blueprint.balance.num_experts else ""
    text = (
        f"In a step {step(figures)}, computed in bfloat16 and summed in float32. Bytes are of the larger side of each "
        f"collective, as counted on rank {figures.sender:,}; no rank counts more.{even}"
    )
    by_axes = [list(same) for _, same in groupby(rows, lambda row: row.over)]
    most = max(sum(_length(figures, row) for row in same) for same in by_axes)
    lines = (line for same in by_axes for line in _axes_lines(figures, same, most))
    bars = "estimated time" if figures.cluster else ""
    summed = table(["over", "operation", "count", "bytes", bars], lines, "stacked flows")
    return section(title, tag("p", text), summed, details("Every collective", _charges(figures)))


def _length(figures: Figures, row: Traffic) -> float:
    """Return the length of a bar: seconds where the links are known. A byte between nodes takes longer than inside."""
    return times.sent_of(figures, row).seconds if figures.cluster else float(row.num_bytes)


def _axes_lines(figures: Figures, rows: list[Traffic], most: float) -> Iterator[list[object]]:
    """What goes over the same axes: first all of it, then each operation."""
    count, num_bytes = sum(row.count for row in rows), sum(row.num_bytes for row in rows)
    length = sum(_length(figures, row) for row in rows)
    yield [
        Cell(rows[0].over, "group"), Cell(f"among {counted(rows[0].num_ranks, 'rank')}", "group"),
        Cell(f"{count:,}", "number group"), bytes_cell(num_bytes, "number group"),
        Cell(duration(length) if figures.cluster else "", "group", share=length / most),
    ]  # fmt: skip
    for row in rows:
        found = times.sent_of(figures, row) if figures.cluster else None
        told = "" if found is None else f"{duration(found.seconds)} {found.link}"
        share = Cell(told, "part", share=_length(figures, row) / most)
        yield [Cell("", "part"), row.op, row.count, bytes_cell(row.num_bytes), share]


def _bytes_of_one(line: ChargeLine) -> Cell:
    if line.between is None:
        return bytes_cell(line.one_bytes)
    least, most = line.between
    return Cell(
        size(line.one_bytes),
        "number",
        "likely",
        title=f"a rank sends {least:,} to {most:,} bytes, as the router decides",
    )


def _charges(figures: Figures) -> str:
    rows = (
        [
            Cell(line.what, "name", f"layers {line.layers}" if line.layers else ""), Cell(line.op),
            Cell(line.over, note=counted(line.num_ranks, "rank")), line.count,
            _bytes_of_one(line), bytes_cell(line.num_bytes), *_sent(figures, line),
        ]
        for line in charge_lines(figures)
    )  # fmt: skip
    head = ["what", "operation", "over", "count", "bytes of one", "bytes in all"]
    head += ["estimated"] if figures.cluster else []
    return tag("p", "{i} is the number of a layer.") + table(head, rows)


def _times(figures: Figures) -> str:
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
    text = (
        "What an axis cuts, each of its ranks computes with a part of. Rows are stored in shards, and gathered to "
        "compute. Bytes are of one parameter on one rank. {i} is the number of a layer."
    )
    head = ["parameter", "lies", "on a rank", "gradient is summed", "keys of the files"]
    lines = table(head, (_parameter(line) for line in parameter_lines(figures)), "stacked wide")
    title = f"Where {figures.num_parameters:,} parameters lie"
    return section(title, tag("p", text), details("Every parameter", lines))


def _sent(figures: Figures, line: ChargeLine) -> list[Cell]:
    if not figures.cluster:
        return []
    found = times.sent_of(figures, line)
    return [Cell(duration(found.seconds), "number", note=found.link)]


def _parameter(line: ParameterLine) -> list[Cell]:
    layers = f"layers {line.layers}" if line.layers else ""
    sums = {"by FSDP over": line.by_fsdp, "in the last sums over": line.late}
    return [
        Cell(line.name, "name", "\n".join(filter(None, [layers, line.dims, *line.remarks]))),
        Cell("\n".join(lies(line)), "lines"),
        span_cell(line.least_bytes, line.most_bytes),
        Cell("\n".join(f"{how} {axes}" for how, axes in sums.items() if axes != "-") or "-", "lines"),
        Cell("\n".join(line.keys), "keys"),
    ]


def _ranks(figures: Figures) -> str:
    axes, live = figures.axes, figures.live
    if not live:
        return ""
    shown = min(axes.world, _MOST_ROWS)
    at = (axes.coords(rank) for rank in range(shown))
    rows = ([Cell(f"{r}", "name"), *(coords[a] for a in live), axes.data_rank(r)] for r, coords in enumerate(at))
    left = tag("p", f"and {axes.world - shown:,} more ranks") if axes.world > shown else ""
    return details(
        "Where each rank stands on each axis", table(["rank", *live, "data rank"], rows, "stacked ranks"), left
    )
