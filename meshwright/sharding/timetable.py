"""Cost of a pipeline schedule: when each action runs, the bubble, activations kept, all-gathers and reductions.

All of it is computed from the lists that run, so a plan cannot describe another schedule than the engine executes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Orders, moments, needs
from .stage_map import Line


class Slot(NamedTuple):
    """An action with its start and end time."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timetable:
    """The actions of each rank of the axis pp over time; `plan` draws them."""

    rows: tuple[tuple[Slot, ...], ...]

    @property
    def makespan(self) -> float:
        """Return the time from the first action to the end of the last one."""
        return max(slot.end for row in self.rows for slot in row)

    def idle(self, rank: int) -> float:
        """Return the fraction of the time in which a rank waits."""
        return 1 - sum(slot.end - slot.start for slot in self.rows[rank]) / self.makespan

    @property
    def bubble(self) -> float:
        """Return the fraction of the time in which ranks wait, on average."""
        return sum(map(self.idle, range(len(self.rows)))) / len(self.rows)


def times(line: Line, orders: Orders, cost: Callable[[Action], float]) -> Timetable:
    """Start each rank's next action as soon as the rank is free and the action's inputs exist.

    Transfers take no time.
    """
    rows: list[list[Slot]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    for moment in moments(line, orders):
        for rank, action in moment:
            ready_at = [ends[need] for need in needs(line, action)] + [slot.end for slot in rows[rank][-1:]]
            start = max(ready_at, default=0.0)
            ends[action] = start + cost(action)
            rows[rank].append(Slot(start, ends[action], action))
    return Timetable(tuple(map(tuple, rows)))


def peak_kept(order: Sequence[Action]) -> int:
    """Return the peak number of (stage, micro-batch) pairs whose activations a rank keeps.

    Activations are kept until the last backward that uses them, which is the weight half where backwards are split.
    """
    last_use = {(a.stage, a.batch): a.kind for a in order if a.kind != FORWARD}
    now = most = 0
    for kind, stage, batch in order:
        used_by = last_use.get((stage, batch))
        now += (kind == FORWARD and used_by is not None) - (kind == used_by)
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Gathers:
    """Collectives of one FSDP unit in a step: all-gathers in forward and in backward, reduce-scatters of gradients."""

    forward: int
    backward: int
    reduced: int


def gathers(order: Sequence[Action], stage: int, *, again: bool = True, hold: bool = False) -> Gathers:
    """Count how often a unit of a stage is gathered and its gradient reduced, in the step of the rank that holds it.

    A unit is freed after each use: every F, B and I gathers it. W does not, since it reads no weights. Every B reduces
    the gradient, or every W. Without `again` (`Unit.again`) forward leaves it gathered, for whatever action follows,
    even another forward; a backward still frees it. With `hold` it stays for the whole step and is reduced once.
    """
    own = [action.kind for action in order if action.stage == stage]
    num, is_gathered = {FORWARD: 0, BACKWARD: 0, INPUT: 0}, False
    for kind in own:
        if kind != WEIGHT:
            num[kind] += not is_gathered
            is_gathered = hold or (kind == FORWARD and not again)
    num_reductions = own.count(BACKWARD) + own.count(WEIGHT)
    return Gathers(num[FORWARD], num[BACKWARD] + num[INPUT], min(num_reductions, 1) if hold else num_reductions)


def draw(table: Timetable, columns: int = 3) -> str:
    """Draw the timetable as text: a line for each rank, `columns` characters for each unit of time.

    `F0` is the forward of micro-batch 0 in the first stage that the rank holds, `f0` in a later one. A dot means idle.
    """
    width = round(table.makespan * columns)
    lines = []
    for rank, row in enumerate(table.rows):
        text, first = "", min(slot.action.stage for slot in row)
        for start, end, (kind, stage, batch) in row:
            name = f"{kind if stage == first else kind.lower()}{batch}"
            room = round(end * columns) - round(start * columns)
            name = (
                name if len(name) <= room else name[:1] * bool(room)
            )  # a truncated number would be a different micro-batch
            text = text.ljust(round(start * columns), ".") + name.ljust(room)
        lines.append(f"{rank:>3} {text.ljust(width, '.')}")
    return "\n".join(lines)
