"""Who is to blame when a collective fails: the heartbeats of all ranks, looked at twice, some seconds apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

WAITS, WORKS, RAISED, LEFT = "waits", "works", "raised", "left"
_MOST = 6  # places that are named, so that a message about thousands of ranks can be read


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself, once a second."""

    state: str  # it waits in a collective, works, raised an error, or left the run
    at: str  # the door, phase or line; of an error its text
    task: str
    still_s: float  # for how long nothing of this has changed
    beat: float  # when this was written, by its own clock
    home: str  # which table of processes `pid` is of; empty if that cannot be known
    pid: int

    def __str__(self) -> str:
        task = f" ({self.task})" if self.task else ""
        return f"{self.state} {'at ' if self.state == WAITS else ''}{self.at}{task}, for {self.still_s:.0f} s"


# What may have happened to a rank, worst first. Below: what the user can do about it.
NEVER = "never joined the run"
GONE = "no sign of life: it died, or its machine or network is gone"
DIED = "died, its process is gone"
STOPPED = "stopped (SIGSTOP, a debugger), its process is there but gets no turn"
HELD = "no sign of life, though its process runs"
ENDED = "left, its script came to an end"
FAILED = "raised an error"
BUSY = "in no collective"
WAITING = "waiting"
_WAYS_OUT = {
    NEVER: "See its own output, and start all ranks again.",
    GONE: "See its own output and the log of its machine (out of memory?), and start all ranks again.",
    DIED: "See its own output (gloo ends a process whose peer brings another size) and the log of its machine (out of "
    "memory?), and start all ranks again.",
    STOPPED: "Let it go on before the others' time is over, and start all ranks again.",
    HELD: "Something in it keeps Python's lock, or its machine is overloaded; see to it, and start all ranks again.",
    ENDED: "Every rank must make as many calls as the others: as many steps, and export, stream or evaluate on all of "
    "them, not under `if rank == 0`.",
    FAILED: "See its own output.",
    BUSY: "Make that shorter, or the same on all ranks, or give the others more patience with mw.Mesh(timeout_s=).",
    WAITING: "Every rank must come to the same collectives in the same order: call the same methods of the engine, "
    "with the same model, on all of them.",
}


Heartbeats = Mapping[int, Heartbeat | None]  # by rank; None for one that never joined


def diagnose(before: Heartbeats, after: Heartbeats, home: str, timeout_s: float) -> str:
    """One sentence for all ranks of the same fate, the guilty ones first, then the way out."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, seen in after.items():
        kind = _kind(before[rank], seen, home)
        alike.setdefault((kind, _place(kind, seen)), []).append(rank)
    order, now = list(_WAYS_OUT), max((seen.beat for seen in after.values() if seen), default=0.0)
    told = sorted(alike.items(), key=lambda item: (order.index(item[0][0]), len(item[1]), item[1]))
    sentences = []
    for (kind, place), ranks in told[:_MOST]:
        beats = [seen for rank in ranks if (seen := after[rank])]
        sentences.append(f"{named(ranks)}: {kind}{place}{_since(kind, beats, now)}.")
    if len(told) > _MOST:
        sentences.append(f"{sum(len(ranks) for _, ranks in told[_MOST:])} ranks elsewhere.")
    return f"{' '.join(sentences)} (timeout_s={timeout_s:g}) {_WAYS_OUT[told[0][0][0]]}"


def _kind(before: Heartbeat | None, after: Heartbeat | None, home: str) -> str:
    if after is None:
        return NEVER
    if after.state in (LEFT, RAISED):
        return ENDED if after.state == LEFT else FAILED
    if after == before:
        return _fate(after) if home and after.home == home else GONE
    return WAITING if after.state == WAITS else BUSY


def _fate(seen: Heartbeat) -> str:
    """What happened to a silent process of this machine."""
    try:
        state = Path(f"/proc/{seen.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return DIED
    return {"Z": DIED, "X": DIED, "T": STOPPED, "t": STOPPED}.get(state, HELD)


def _place(kind: str, seen: Heartbeat | None) -> str:
    if seen is None:
        return ""
    task = f" ({seen.task})" if seen.task else ""
    if kind == FAILED:
        return f": {seen.at}{task}"
    link = {WAITING: " ", BUSY: ": "}.get(kind, "; last seen ")
    return f"{link}{'at ' if seen.state == WAITS else ''}{seen.at}{task}"


def _since(kind: str, beats: list[Heartbeat], now: float) -> str:
    """`now` is the youngest heartbeat: the clocks of machines differ by little."""
    if not beats:
        return ""
    if kind in (BUSY, WAITING):
        return f", for {max(seen.still_s for seen in beats):.0f} s"
    return f", {max(now - seen.beat for seen in beats):.0f} s ago"


def named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 7`."""
    runs = [[r for _, r in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
