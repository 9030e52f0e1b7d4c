"""What a search has found, for a person at a terminal and for a program."""

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
from .refusals import as_option
from .search import Asked, Candidate, Found
from .step import assumptions, times_as_json, tokens_a_second
from .verdict import helps
from .wording import duration, kind, large, nominal, not_counted, saved, size

_HOST, _PIPELINE = "the host", "its pipeline"
_ALIKE = 0.01  # of a step: no estimate is that exact


def parts_of(candidate: Candidate) -> dict[str, float]:
    """What takes the time of a step, as a sentence names it."""
    found = candidate.estimate
    waits = {f"{wait.what} {wait.link}": wait.seconds for wait in found.waits}
    hidden = {"gathers and sums of FSDP beyond products": found.not_hidden}
    return {"products": found.products, _HOST: found.launching, **waits, **hidden, _PIPELINE: found.bubble}


def why(candidate: Candidate, first: Candidate) -> str:
    """One sentence: what it waits for most, and of all but the first what makes it slower."""
    parts, seconds = parts_of(candidate), candidate.estimate.seconds
    what, most = max(((w, s) for w, s in parts.items() if w != "products"), key=lambda part: part[1])
    waits = f"waits {most / seconds:.0%} of a step for {what}" if most >= _ALIKE * seconds else "waits for nothing long"
    slower, before = seconds - first.estimate.seconds, parts_of(first)
    if candidate is first or slower < _ALIKE * first.estimate.seconds:
        return waits if candidate is first else f"{waits}; as quick as the first"
    longer = max(parts, key=lambda name: parts[name] - before.get(name, 0.0))
    more, verb = duration(parts[longer] - before.get(longer, 0.0)), "takes" if longer in (_HOST, _PIPELINE) else "take"
    if longer == what:
        return f"{waits}, {more} longer than the first"
    return f"{waits}; {longer} {verb} {more} longer than in the first"


def print_found(found: Found, asked: Asked) -> None:
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


def _about(found: Found, asked: Asked, first: Candidate) -> str:
    tokens = asked.size.global_tokens
    return (
        f"{large(first.figures.num_parameters)} parameters; {tokens:,} tokens a step in micro-batches of "
        f"{asked.size.tokens:,}. {counted(found.num_meshes, 'mesh', 'meshes')} can be. {found.num_too_large:,} of them "
        f"are too large whatever recomputes. {found.num_in_full:,} were reckoned in full."
    )


def _table(found: Found) -> Grid:
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
    return f"{kind(most.what)} ({size(most.num_bytes)})"


def way_out(nearest: Candidate) -> str:
    found = [*helps(nearest.figures), *nearest.figures.choices]
    return f"take {' or '.join(found)}" if found else "take more ranks, larger devices, or fewer --tokens"


def command(candidate: Candidate, asked: Asked) -> str:
    """What tells all of it: the command of the search, with what it chose in the place of what it was asked."""
    figures = candidate.figures
    work, savings = figures.work, figures.savings
    chosen = ["--mesh", as_option(figures.axes), "--tokens", str(work.tokens), "--micro-batches", str(work.num_batches)]
    chosen += ["--recompute", savings.recompute] if savings.recompute != "none" else []
    chosen += ["--offload"] if savings.offload else []
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


def as_json(found: Found, asked: Asked, origin: Mapping[str, str]) -> dict[str, Any]:
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
        "savings": asdict(figures.savings),
        "pipeline": asdict(figures.blueprint.spec.pipeline) if figures.axes.pp > 1 else None,
        "num_batches": figures.work.num_batches,
        "estimate": times_as_json(figures),
        "tokens_a_second": tokens_a_second(figures),
        "bytes": figures.most.parts,
        "device_bytes": figures.most.device_bytes,
        "left_bytes": candidate.left_bytes,
        "why": why(candidate, first),
        "command": command(candidate, asked),
    }
