"""List the starts of a run: the mesh and the steps of each, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..errors import counted

# The first line of a failure in overcome.txt is its time.
_FAILURE_HEADER = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4})\n", re.MULTILINE)
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"


@dataclass(frozen=True)
class Start:
    """A start of a run. `begins`: the step of the checkpoint that it resumed. `last`: the last step that it made.

    `ended`: the reason in its last line, "" at the end of the data, None if it never wrote one.

    A run has several starts if a user resumed it, or the launcher restarted it after a failure, maybe on another mesh.
    """

    time: float
    begins: int
    last: int
    mesh: Mapping[str, int]
    world: int
    ended: str | None = None

    def after(self, line: Mapping[str, Any]) -> Start:
        """Return the start after another line of metrics."""
        if line["kind"] == "step":
            return replace(self, last=line["step"])
        return replace(self, ended=str(line.get("why", ""))) if line["kind"] == "end" else self

    @property
    def on(self) -> str:
        """Return the mesh as `--mesh` takes it: `tp=2,ep=2`."""
        sizes = [f"{axis}={size}" for axis, size in self.mesh.items() if size > 1]
        return ",".join(sizes) or counted(self.world, "rank")


@dataclass(frozen=True)
class Failure:
    """A failure after which the run was started again."""

    time: float
    words: str


def start_of(line: Mapping[str, Any]) -> Start:
    """Parse the line of a start."""
    begins = line.get("from")
    begins = begins if isinstance(begins, int) else line["step"]
    return Start(float(line.get("time") or 0), begins, begins, line.get("mesh", {}), int(line.get("world", 1)))


def surviving_starts(starts: Sequence[Start]) -> list[Start]:
    """Return the starts whose steps are in the curves, in order. A later start that resumed an earlier step replaces
    the starts after that step.

    Example: starts that begin at steps 0, 40 and 20 (the third resumed an older checkpoint). The curves consist of
    start 1 up to step 20, and start 3 from there on.
    """
    survivors: list[Start] = []
    # A start that resumed at step s repeats everything after s, so drop earlier starts that begin at or after s.
    for start in starts:
        survivors = [each for each in survivors if each.begins < start.begins]
        if start.last > start.begins:
            survivors.append(start)
    return survivors


def story(starts: Sequence[Start], last_step: int) -> str:
    """Return the meshes that made the curves, `fsdp=2 (40 steps) → tp=2,ep=2 (9 steps)`; "" if there is only one."""
    survivors = surviving_starts(starts)
    last_steps = [*(each.begins for each in survivors[1:]), last_step]
    steps: list[tuple[str, int]] = []
    for start, end in zip(survivors, last_steps, strict=False):
        previous_steps = steps.pop()[1] if steps and steps[-1][0] == start.on else 0
        steps.append((start.on, previous_steps + end - start.begins))
    return " → ".join(f"{mesh} ({counted(num, 'step')})" for mesh, num in steps) if len(steps) > 1 else ""


def failures(text: str) -> list[Failure]:
    """Parse overcome.txt: blocks of a time and an error text.

    The launcher appends to overcome.txt when it restarts a run after a failure.
    """
    block_starts = [*_FAILURE_HEADER.finditer(text)]
    block_ends = [*(each.start() for each in block_starts), len(text)][1:]
    return [
        Failure(datetime.strptime(match[1], _TIME_FORMAT).timestamp(), text[match.end() : end].strip())
        for match, end in zip(block_starts, block_ends, strict=False)
    ]


def endings(starts: Sequence[Start], overcome: Sequence[Failure], last: str) -> Iterator[str]:
    """Yield how each start ended. `last`: the error that ended the run, or "".

    The log of a start has an `end` line only if it ended by itself. Otherwise the reason is among failures of
    that time span, or is unknown (a lost machine).
    """
    for number, start in enumerate(starts):
        next_start = starts[number + 1].time if number + 1 < len(starts) else None
        if start.ended is not None:
            yield f"ended by {start.ended}" if start.ended else "done"
        elif next_start is None:
            yield _first_line(f"failed: {last}") if last else "no end is written yet"
        else:
            reasons = (each.words for each in overcome if start.time <= each.time < next_start)
            yield _first_line(next(reasons, "stopped; no reason is written"))


def _first_line(text: str) -> str:
    """Return the first line."""
    return text.strip().partition("\n")[0]
