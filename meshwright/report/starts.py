"""The starts of a run: on which mesh each one trained which steps, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..errors import counted

_BLOCK = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4})\n", re.MULTILINE
)  # how a block of overcome.txt begins
_TIME = "%Y-%m-%d %H:%M:%S %z"


@dataclass(frozen=True)
class Start:
    """`begins`: the last step of the checkpoint that it goes on from. `last`: the last step that it made itself.

    `ended`: why, as its last line says, "" at the end of the data; None if it never came to write that.
    """

    time: float
    begins: int
    last: int
    mesh: Mapping[str, int]
    world: int
    ended: str | None = None

    def after(self, line: Mapping[str, Any]) -> Start:
        if line["kind"] == "step":
            return replace(self, last=line["step"])
        return replace(self, ended=str(line.get("why", ""))) if line["kind"] == "end" else self

    @property
    def on(self) -> str:
        """`tp=2,ep=2`, as `--mesh` takes it."""
        sizes = [f"{axis}={size}" for axis, size in self.mesh.items() if size > 1]
        return ",".join(sizes) or counted(self.world, "rank")


@dataclass(frozen=True)
class Failure:
    """One that the run overcame: it was started again."""

    time: float
    words: str


def start_of(line: Mapping[str, Any]) -> Start:
    begins = line.get("from")
    begins = begins if isinstance(begins, int) else line["step"]
    return Start(float(line.get("time") or 0), begins, begins, line.get("mesh", {}), int(line.get("world", 1)))


def stretches(starts: Sequence[Start]) -> list[Start]:
    """Return the starts whose steps are in the curves, in the order of their steps: the others were made anew."""
    kept: list[Start] = []
    for start in starts:
        kept = [each for each in kept if each.begins < start.begins]
        if start.last > start.begins:
            kept.append(start)
    return kept


def story(starts: Sequence[Start], last_step: int) -> str:
    """`fsdp=2 (40 steps) → tp=2,ep=2 (9 steps)`: the meshes that made the curves; "" if it was one alone."""
    kept = stretches(starts)
    ends = [*(each.begins for each in kept[1:]), last_step]
    steps: list[tuple[str, int]] = []
    for start, end in zip(kept, ends, strict=False):
        before = steps.pop()[1] if steps and steps[-1][0] == start.on else 0
        steps.append((start.on, before + end - start.begins))
    return " → ".join(f"{mesh} ({counted(num, 'step')})" for mesh, num in steps) if len(steps) > 1 else ""


def failures(text: str) -> list[Failure]:
    """Read overcome.txt: blocks of a time and the words of a failure."""
    begins = [*_BLOCK.finditer(text)]
    ends = [*(each.start() for each in begins), len(text)][1:]
    return [
        Failure(datetime.strptime(found[1], _TIME).timestamp(), text[found.end() : end].strip())
        for found, end in zip(begins, ends, strict=False)
    ]


def endings(starts: Sequence[Start], overcome: Sequence[Failure], last: str) -> Iterator[str]:
    """Say for each start how it ended. `last`: the words of the failure that ended the run, or ""."""
    for number, start in enumerate(starts):
        following = starts[number + 1].time if number + 1 < len(starts) else None
        if start.ended is not None:
            yield f"ended by {start.ended}" if start.ended else "done"
        elif following is None:
            yield _first_line(f"failed: {last}") if last else "no end is written yet"
        else:
            inside = (each.words for each in overcome if start.time <= each.time < following)
            yield _first_line(next(inside, "stopped; no reason is written"))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
