"""Who is to blame when a collective fails: two looks at what all ranks say of themselves, some seconds apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

WAITS, WORKS, RAISED, LEFT = "waits", "works", "raised", "left"
_MOST = 6  # places that are named: a message about thousands of ranks is to be read too


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself once a beat."""

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


# What can be found, worst first, with what is to be done about it.
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


def judge(before: Mapping[int, Sign | None], after: Mapping[int, Sign | None], home: str, timeout_s: float) -> str:
    """One sentence for all ranks that are alike, the guilty first, then the way out."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, sign in after.items():
        kind = _kind(before[rank], sign, home)
        alike.setdefault((kind, _place(kind, sign)), []).append(rank)
    order, now = list(_WAYS_OUT), max((sign.beat for sign in after.values() if sign), default=0.0)
    told = sorted(alike.items(), key=lambda item: (order.index(item[0][0]), len(item[1]), item[1]))
    sentences = []
    for (kind, place), ranks in told[:_MOST]:
        signs = [sign for rank in ranks if (sign := after[rank])]
        sentences.append(f"{_named(ranks)}: {kind}{place}{_since(kind, signs, now)}.")
    if len(told) > _MOST:
        sentences.append(f"{sum(len(ranks) for _, ranks in told[_MOST:])} ranks elsewhere.")
    return f"{' '.join(sentences)} (timeout_s={timeout_s:g}) {_WAYS_OUT[told[0][0][0]]}"


def _kind(before: Sign | None, after: Sign | None, home: str) -> str:
    if after is None:
        return NEVER
    if after.state in (LEFT, RAISED):
        return ENDED if after.state == LEFT else FAILED
    if after == before:
        return _fate(after) if home and after.home == home else GONE
    return WAITING if after.state == WAITS else BUSY


def _fate(sign: Sign) -> str:
    """Of a silent process of the same machine."""
    try:
        state = Path(f"/proc/{sign.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return DIED
    return {"Z": DIED, "X": DIED, "T": STOPPED, "t": STOPPED}.get(state, HELD)


def _place(kind: str, sign: Sign | None) -> str:
    if sign is None:
        return ""
    task = f" ({sign.task})" if sign.task else ""
    if kind == FAILED:
        return f": {sign.at}{task}"
    link = {WAITING: " ", BUSY: ": "}.get(kind, "; last seen ")
    return f"{link}{'at ' if sign.state == WAITS else ''}{sign.at}{task}"


def _since(kind: str, signs: list[Sign], now: float) -> str:
    """`now` is the youngest sign of all, as the clocks of machines differ by little."""
    if not signs:
        return ""
    if kind in (BUSY, WAITING):
        return f", for {max(sign.still_s for sign in signs):.0f} s"
    return f", {max(now - sign.beat for sign in signs):.0f} s ago"


def _named(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 7`."""
    runs = [[r for _, r in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
