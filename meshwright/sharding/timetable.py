"""What a schedule costs, reckoned from its lists: when each action runs, what ranks keep, gather and sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Orders, moments, needs
from .stage_map import Line


class Slot(NamedTuple):
    """An action in time."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timetable:
    """What each rank of the axis pp does when; a page draws it."""

    rows: tuple[tuple[Slot, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first action to the end of the last one."""
        return max(slot.end for row in self.rows for slot in row)

    def idle(self, rank: int) -> float:
        """The share of the time in which a rank waits."""
        return 1 - sum(slot.end - slot.start for slot in self.rows[rank]) / self.makespan

    @property
    def bubble(self) -> float:
        """The share of the time in which a rank waits, on average."""
        return sum(map(self.idle, range(len(self.rows)))) / len(self.rows)


def times(line: Line, orders: Orders, cost: Callable[[Action], float]) -> Timetable:
    """Every rank begins its next action as soon as it is free and has what the action needs. Transfers take no time."""
    rows: list[list[Slot]] = [[] for _ in orders]
    ends: dict[Action, float] = {}
    for moment in moments(line, orders):
        for rank, action in moment:
            before = [ends[need] for need in needs(line, action)] + [slot.end for slot in rows[rank][-1:]]
            start = max(before, default=0.0)
            ends[action] = start + cost(action)
            rows[rank].append(Slot(start, ends[action], action))
    return Timetable(tuple(map(tuple, rows)))


def most_kept(order: Sequence[Action]) -> int:
    """The most pairs of stage and micro-batch whose activations a rank keeps at once.

    Kept is what a backward will use, until it has. What waits for a gradient of weights is kept too.
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
    """How often a unit of a stage is gathered and its gradient summed, in the step of the rank that holds it.

    A unit is freed after each use: every F, B and I gathers it. W does not, since it reads no weights. Every B sums the
    gradient, or every W. Without `again` (`Unit.again`) forward does not free it, so that what follows finds it there,
    be it another forward; a backward still frees it. With `hold` it stays for the whole step, and is summed once.
    """
    own = [action.kind for action in order if action.stage == stage]
    num, there = {FORWARD: 0, BACKWARD: 0, INPUT: 0}, False
    for kind in own:
        if kind != WEIGHT:
            num[kind] += not there
            there = hold or (kind == FORWARD and not again)
    num_sums = own.count(BACKWARD) + own.count(WEIGHT)
    return Gathers(num[FORWARD], num[BACKWARD] + num[INPUT], min(num_sums, 1) if hold else num_sums)


def draw(table: Timetable, columns: int = 3) -> str:
    """The timetable as text, a line for each rank and so many columns for each unit of time.

    `F0` is the forward of micro-batch 0 in the first stage that the rank holds, `f0` in a later one. A dot: it waits.
    """
    width = round(table.makespan * columns)
    lines = []
    for rank, row in enumerate(table.rows):
        text, first = "", min(slot.action.stage for slot in row)
        for start, end, (kind, stage, batch) in row:
            name = f"{kind if stage == first else kind.lower()}{batch}"
            room = round(end * columns) - round(start * columns)
            name = name if len(name) <= room else name[:1] * bool(room)  # a part of a number is another number
            text = text.ljust(round(start * columns), ".") + name.ljust(room)
        lines.append(f"{rank:>3} {text.ljust(width, '.')}")
    return "\n".join(lines)
