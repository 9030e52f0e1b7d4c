"""Diagnose a failed collective: compare two readings of every rank's heartbeat, taken some seconds apart.

A timeout alone tells only that some rank did not arrive. The comparison shows which ranks wait in a collective, and
which are elsewhere, dead, stopped, or never joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

WAITS, WORKS, RAISED, LEFT = "waits", "works", "raised", "left"
_MOST = 6  # a message names at most this many groups of ranks, so that it stays readable with thousands of ranks


@dataclass(frozen=True)
class Heartbeat:
    """The status that a rank reports about itself once per second."""

    state: str  # waits in a collective, works, raised an error, or left the run
    at: str  # the door (a named collective of the model), phase or line of code; after an error, its text
    task: str  # the step and micro-batch
    still_s: float  # seconds since any of these changed
    beat: float  # the time of writing by the rank's own clock
    home: str  # names the machine's PID namespace, in which `pid` is valid; empty if unknown
    pid: int

    def __str__(self) -> str:
        task = f" ({self.task})" if self.task else ""
        return f"{self.state} {'at ' if self.state == WAITS else ''}{self.at}{task}, for {self.still_s:.0f} s"


# The fates of a rank, worst first. A message blames the worst that any rank has. `_FIXES` tells the user what to do.
NEVER = "never joined the run"
GONE = "no sign of life: it died, or its machine or network is gone"
DIED = "died, its process is gone"
STOPPED = "stopped (SIGSTOP, a debugger), its process exists but gets no turn"
HELD = "no sign of life, though its process runs"
ENDED = "left, its script came to an end"
FAILED = "raised an error"
BUSY = "in no collective"
WAITING = "waiting"
_FIXES = {
    NEVER: "See its own output, and start all ranks again.",
    GONE: "See its own output and the log of its machine (out of memory?), and start all ranks again.",
    DIED: "See its own output (gloo aborts a process whose peer passes another size) and the log of its machine (out "
    "of memory?), and start all ranks again.",
    STOPPED: "Do not stop it for longer than timeout_s, and start all ranks again.",
    HELD: "Something in it holds Python's GIL, or its machine is overloaded; fix that, and start all ranks again.",
    ENDED: "Every rank must make the same calls: take as many steps, and export, stream or evaluate on all ranks, not "
    "under `if rank == 0`.",
    FAILED: "See its own output.",
    BUSY: "Shorten that work, do it on all ranks, or give the others more time with mw.Mesh(timeout_s=).",
    WAITING: "Every rank must issue the same collectives in the same order: call the same methods of the engine, "
    "with the same model, on all of them.",
}


# Heartbeats of all ranks of a mesh by global rank; None for one that never joined.
Heartbeats = Mapping[int, Heartbeat | None]


def diagnose(before: Heartbeats, after: Heartbeats, home: str, timeout_s: float) -> str:
    """Return the error message: one sentence for each group of ranks with the same fate, worst first, then the fix."""
    by_fate: dict[tuple[str, str], list[int]] = {}
    for rank, seen in after.items():
        fate = _fate_of(before[rank], seen, home)
        by_fate.setdefault((fate, _place(fate, seen)), []).append(rank)
    mesh, order, now = tuple(after), list(_FIXES), max((seen.beat for seen in after.values() if seen), default=0.0)
    # The worst fate comes first; within a fate, the smallest group, which is the odd one out.
    fates = sorted(by_fate.items(), key=lambda item: (order.index(item[0][0]), len(item[1]), item[1]))
    sentences = []
    for (fate, place), ranks in fates[:_MOST]:
        beats = [seen for rank in ranks if (seen := after[rank])]
        sentences.append(f"{named_in(mesh, ranks)}: {fate}{place}{_since(fate, beats, now)}.")
    if len(fates) > _MOST:
        sentences.append(f"{sum(len(ranks) for _, ranks in fates[_MOST:])} ranks elsewhere.")
    return f"{' '.join(sentences)} (timeout_s={timeout_s:g}) {_FIXES[fates[0][0][0]]}"


def _fate_of(before: Heartbeat | None, after: Heartbeat | None, home: str) -> str:
    """Return a rank's fate: its reported state if the heartbeat changes, else the state of its process."""
    if after is None:
        return NEVER
    if after.state in (LEFT, RAISED):
        return ENDED if after.state == LEFT else FAILED
    # The heartbeat did not change. On this machine /proc tells why; about a rank on another machine nothing more is
    # known.
    if after == before:
        return _fate_of_silent(after) if home and after.home == home else GONE
    return WAITING if after.state == WAITS else BUSY


def _fate_of_silent(seen: Heartbeat) -> str:
    """Return the fate of a silent process, from /proc if it runs on this machine."""
    try:
        # The third field of stat, after a command name in parentheses that may contain anything.
        state = Path(f"/proc/{seen.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return DIED
    return {"Z": DIED, "X": DIED, "T": STOPPED, "t": STOPPED}.get(state, HELD)


def _place(fate: str, seen: Heartbeat | None) -> str:
    """Describe where a rank is, or was last seen."""
    if seen is None:
        return ""
    task = f" ({seen.task})" if seen.task else ""
    if fate == FAILED:
        return f": {seen.at}{task}"
    link = {WAITING: " ", BUSY: ": "}.get(fate, "; last seen ")
    return f"{link}{'at ' if seen.state == WAITS else ''}{seen.at}{task}"


def _since(fate: str, beats: list[Heartbeat], now: float) -> str:
    """Describe how long ranks have been there, or how long ago they were last seen.

    `now` is the newest heartbeat of all ranks. Machines are assumed to have nearly equal clocks.
    """
    if not beats:
        return ""
    if fate in (BUSY, WAITING):
        return f", for {max(seen.still_s for seen in beats):.0f} s"
    return f", {max(now - seen.beat for seen in beats):.0f} s ago"


def named(ranks: Sequence[int], mesh: Sequence[int] | None = None) -> str:
    """Format ranks as `rank 3` or `ranks 0-2, 7`, and in parentheses their global ranks if those differ.

    `mesh`: the global rank of each rank of a mesh on a part of the ranks.
    """
    several, others = "s" if len(ranks) > 1 else "", [rank if mesh is None else mesh[rank] for rank in ranks]
    inside = f"rank{several} {spans(ranks)}"
    return inside if others == list(ranks) else f"{inside} (global rank{several} {spans(others)})"


def named_in(mesh: Sequence[int], ranks: Sequence[int]) -> str:
    """Format global ranks by their ranks in a mesh, as `named` does."""
    return named([mesh.index(rank) for rank in ranks], mesh)


def spans(ranks: Sequence[int]) -> str:
    """Format ascending numbers as `0-2, 7`."""
    runs = [[r for _, r in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
