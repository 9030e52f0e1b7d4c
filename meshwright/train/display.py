"""The terminal view of a run: a live frame, or plain lines.

A thread of the launcher follows two files, metrics.jsonl and the log of rank 0, and redraws. It gets nothing from the
ranks directly, so a slow terminal cannot slow down a step, and what it shows is what the files record.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..expert_collapse import ExpertUse
from .metrics import HISTORY, Lines, clock, number, parsed_lines, tail_of, token_amount
from .rank import PREFIX

_TICK_S = 0.25
_NOT_METRICS = ("kind", "step", "time", "attempt", "nan")  # fields of a line that describe the line itself
_STOPPING = "signal {}: finishing the step and saving; a second signal ends the run at once"
_STOPPING_EARLY = "signal {}: the ranks end before their first step; a second signal ends them at once"
_GRACE_S = 2.0  # after a second signal, before this process exits and the kernel kills its ranks
# Figures of objectives other than the next token, by the name on the terminal.
_OF_OBJECTIVES = {"accuracy": "train/accuracy", "margin": "train/margins"}


class Tail:
    """Follows a file like `tail -f`. The file need not exist yet; an incomplete last line waits for its end.

    `at_end`: skip what the file holds already.
    """

    def __init__(self, file: Path, *, at_end: bool = False) -> None:
        self.file, self._rest = file, b""
        self._at = file.stat().st_size if at_end and file.exists() else 0

    def lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        if not self.file.exists():
            return
        with self.file.open("rb") as opened:
            opened.seek(self._at)
            text = self._rest + opened.read()
            self._at = opened.tell()
        *complete, self._rest = text.split(b"\n")
        yield from (line.decode(errors="replace") for line in complete)


class Display(threading.Thread):
    """The thread that shows a run, from entering to leaving its context.

    `signals`: those that the launcher has received; the list grows. `starts` must be called before each start of ranks.
    """

    def __init__(
        self, state: RunState, out: Path, *, plain: bool, every: int, signals: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(daemon=True, name="display")
        self.console = Console()
        self.plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self.state, self.metrics = state, Tail(out / "metrics.jsonl", at_end=True)
        self.lines = Lines(state.num_steps, every)
        self.log = Tail(out / "none")
        self.attempt_steps, self._warned = 0, False
        self._last, self._began, self._ends = "", time.monotonic(), threading.Event()
        self._signals, self._announced, self._lock = signals, False, threading.Lock()
        # A resumed run shows the curves of the earlier attempts.
        for line in parsed_lines(tail_of(self.metrics.file, HISTORY).decode(errors="replace").splitlines()):
            state.take(line)
        state.starts(again=False)

    def starts(self, log: Path, *, again: bool) -> None:
        """Prepare for a start of the ranks. Rank 0 writes to `log`; `again`: it is a restart."""
        with self._lock:
            self.state.starts(again=again)
            self.log, self._last, self._began, self.attempt_steps = Tail(log), "", time.monotonic(), 0

    def __enter__(self) -> Display:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        """Redraw until the context is left, or end the process after a second signal."""
        with self._live() as live:
            while True:
                ends = self._ends.wait(_TICK_S)
                self.follow()
                self._announce_signal()
                if isinstance(live, Live):
                    live.update(self._frame(ends=ends), refresh=True)
                if ends:
                    return
                if len(self._signals) > 1 and not self._ends.wait(_GRACE_S):
                    break
        say(f"signal {self._signals[-1]}: ended at once; everything after the last checkpoint is lost")
        os._exit(128 + self._signals[-1])  # which kills the ranks too: see `rank.leave_with`

    def _frame(self, *, ends: bool) -> RenderableType:
        """Return the frame to draw. All but the last are followed by an empty line.

        The terminal echoes ^C at the cursor. At the end of a full line it would wrap into the next one, and every later
        frame would be drawn one line too low.
        """
        return Screen(self.state, "") if ends else Group(Screen(self.state, self.status()), Text())

    def _announce_signal(self) -> None:
        """Print once, in plain mode, that a signal was received; the live view shows it in every frame."""
        if self._signals and self.plain and not self._announced:
            say(self.status())
            self._announced = True

    def _live(self) -> AbstractContextManager[Live | None]:
        """Return rich's live view, or nothing in plain mode."""
        if self.plain:
            return nullcontext()
        return Live(
            console=self.console, auto_refresh=False, screen=False, redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )  # fmt: skip

    def follow(self) -> None:
        """Process what the ranks have written since the last call. The launcher calls it too, hence the lock."""
        with self._lock:
            self._follow()

    def _follow(self) -> None:
        for text in self.log.lines():
            # Only marked lines are for the user; the last line of any kind is the status before the first step.
            if text.startswith(PREFIX):
                say(text.removeprefix(PREFIX))
            self._last = text.removeprefix(PREFIX).strip() or self._last
        for line in parsed_lines(self.metrics.lines()):
            self.state.take(line)
            self.attempt_steps += line["kind"] == "step"
            self.lines.num_steps = self.state.num_steps
            if self.plain and not self._warned and (warning := self.state.experts.warning()):
                say(f"warning: {warning}")  # once; the live view shows it in every frame
                self._warned = True
            if self.plain:
                self.lines.write(line["kind"], line["step"], {k: v for k, v in line.items() if k not in _NOT_METRICS})

    def status(self) -> str:
        """Return the line below the metrics: what a signal does, or before the first step what rank 0 logged last."""
        if self._signals:
            return (_STOPPING if self.state.begun else _STOPPING_EARLY).format(self._signals[0])
        if self.state.begun:
            return ""
        return f"no step yet, {clock(time.monotonic() - self._began)}: {self._last or 'the ranks are starting'}"


def say(text: str) -> None:
    """Print a line for the user above the live view. Ranks cannot: their output would land inside the frame."""
    sys.stderr.write(f"{PREFIX}{text}\n")
    sys.stderr.flush()


_MOST_LOSSES = 200  # for the curve
_PACE = 50  # steps that the remaining time is estimated from, with the evaluations and saves between them
_CELL = 38  # columns of a name and its value
_BLOCKS = "▁▂▃▄▅▆▇█"
_SAMPLES = 2  # of the last samples
_BIG = 1e4  # norms above it are shown with an exponent


@dataclass
class RunState:
    """The state of a run as read from metrics.jsonl. `begun`: this attempt has made a step."""

    title: str
    mesh: str
    num_steps: int
    step: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    held_out: dict[str, dict[int, float]] = field(default_factory=dict)
    saved: tuple[int, float] | None = None
    begun: bool = False
    restarts: int = 0
    samples: dict[int, tuple[str, str]] = field(default_factory=dict)
    sampled_at: int = 0
    experts: ExpertUse = field(default_factory=ExpertUse)
    _stamps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE))

    def take(self, line: Mapping[str, Any]) -> None:
        """Update the state with one line."""
        step = line["step"]
        self.experts.take(line)
        if line["kind"] == "start":
            self.num_steps = line["num_steps"]
        elif line["kind"] == "step":
            self._take_step(step, line)
        elif line["kind"] == "eval":
            for name, value in line.items():
                if name.startswith("eval/") and name.endswith("/loss"):
                    losses = self.held_out.setdefault(name[len("eval/") : -len("/loss")], {})
                    losses[step] = math.nan if value is None else value
        elif line["kind"] == "save":
            self.saved = step, line["time"]
        elif line["kind"] == "sample":
            self.samples, self.sampled_at = (self.samples if step == self.sampled_at else {}), step
            self.samples[line["number"]] = line["prompt"], line["text"]

    def _take_step(self, step: int, line: Mapping[str, Any]) -> None:
        """Update the state with a step. A resumed run repeats some steps, so their old values are removed."""
        if step <= self.step:
            self._stamps.clear()  # the pause of the restart does not count as time of a step
            for losses in (self.losses, *self.held_out.values()):
                for later in [old for old in losses if old >= step]:
                    del losses[later]
        loss = line["train/loss"]
        self.step, self.values, self.begun = step, line, True
        self.losses[step] = math.nan if loss is None else loss
        self.losses = dict(list(self.losses.items())[-_MOST_LOSSES:])
        self._stamps.append((step, line["time"]))

    def starts(self, *, again: bool) -> None:
        """Note a start of the ranks: they load before their first step, which must not count as time of a step."""
        self.begun = False
        self.restarts += again
        self._stamps.clear()

    @property
    def left_s(self) -> float:
        """The estimated remaining time in seconds, from the last steps and all that ran between them."""
        (first, start), (last, end) = self._stamps[0], self._stamps[-1]
        per_step = (end - start) / (last - first) if last > first else self.values["time/step_s"]
        return (self.num_steps - self.step) * per_step


@dataclass(frozen=True)
class Screen:
    """One frame of the live view. `status`: what happens before the first step, or why the run ends."""

    state: RunState
    status: str
    now: float = field(default_factory=time.time)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out the frame for the terminal's width: progress, up to four columns of metrics, samples, warnings."""
        width = options.max_width - 4
        inner = Table.grid(expand=True)
        inner.add_row(self._head(width))
        # As many columns of cells as fit; each cell is a dim name of 10 columns and a value that takes the rest.
        num_columns = max(1, min(4, width // _CELL))
        cells = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(num_columns):
            cells.add_column(width=10, style="dim", no_wrap=True)
            cells.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        flat = list(self._cells(width // num_columns - 23, curve=not options.ascii_only))
        for at in range(0, len(flat), num_columns):
            cells.add_row(*(part for cell in flat[at : at + num_columns] for part in cell))
        if self.state.values:
            inner.add_row(cells)
        for text in (*self._samples(width), *self._warnings(width)):
            inner.add_row(text)
        yield Panel(inner, title=Text(self.state.title, style="bold"), title_align="left", border_style="dim")

    def _samples(self, width: int) -> Iterator[Text]:
        """Yield the last samples of the model, each cut to two lines."""
        for prompt, text in list(self.state.samples.values())[:_SAMPLES]:
            line = Text(f"step {self.state.sampled_at:,}  {_flat(prompt)[: width // 2]} ", style="dim", overflow="fold")
            line.append(_flat(text), style="not dim")
            line.truncate(2 * width, overflow="ellipsis")
            yield line

    def _warnings(self, width: int) -> Iterator[Text]:
        for text in filter(None, (self.state.experts.warning(), self.status)):
            line = Text(text, style="yellow", overflow="fold")
            line.truncate(5 * width, overflow="ellipsis")
            yield line

    def _head(self, width: int) -> Table:
        """Return the first row: step, progress bar, and the remaining time, or the mesh while none is known."""
        state = self.state
        done = f"step {state.step:,} of {state.num_steps:,}"
        left = f"{clock(state.left_s)} left" if state.begun and state.step < state.num_steps else state.mesh
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(width=min(len(done), width), no_wrap=True, style="bold")
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(1, state.num_steps), completed=min(state.step, state.num_steps))
        row.add_row(done, bar, left)
        return row

    def _cells(self, room: int, *, curve: bool) -> Iterator[tuple[str, Text]]:
        """Yield pairs of name and value; metrics that this run does not have are left out."""
        values = self.state.values
        if not values:
            return
        loss = Text(number(values["train/loss"], ".4f"), style="bold")
        if curve:
            loss.append("  " + sparkline(list(self.state.losses.values()), room), style="cyan")
        yield "loss", loss
        for name, losses in self.state.held_out.items():
            yield ("held out" if len(self.state.held_out) == 1 else name), _held_out(losses)
        yield from _figures_of_objective(values)
        yield "grad norm", _norm(values)
        yield "lr", Text(number(values["train/learning_rate"], ".2e"))
        yield "tokens/s", _speed(values)
        yield (
            "data wait",
            Text(f"{values['time/data_wait_share']:.1%}", style=_bad(values["time/data_wait_share"] > 0.05)),
        )
        if "memory/peak_bytes" in values:
            rank = f" on rank {values['memory/rank']}" if "memory/rank" in values else ""
            yield "memory", Text(f"{decimal(values['memory/peak_bytes'])}{rank}")
        if "train/mtp_loss" in values:
            share = f"  {values['train/mtp_acceptance']:.1%} accepted"
            yield "mtp loss", Text(number(values["train/mtp_loss"], ".4f") + share)
        if "experts/max_over_mean" in values:
            yield "experts", _experts(values)
            if dead := values.get("experts/dead"):
                yield "no tokens", Text(f"{dead:,} experts", style="yellow")
        yield "epoch", Text(number(values["train/epoch"], ".2f"))
        yield "saved", self._saved()
        if self.state.restarts:
            yield "restarts", Text(str(self.state.restarts), style="yellow")

    def _saved(self) -> Text:
        if self.state.saved is None:
            return Text("not yet", style="dim")
        step, at = self.state.saved
        return Text(f"step {step:,}, {clock(max(0.0, self.now - at))} ago")


def sparkline(values: Sequence[float], room: int) -> str:
    """Draw a curve of at most `room` block characters, scaled from the lowest value to the highest.

    Each is the mean of neighbouring values; a space stands for values that are all non-finite.
    """
    room = max(1, min(room, len(values)))
    ends = [len(values) * at // room for at in range(room + 1)]
    means = [_mean(values[first:last]) for first, last in pairwise(ends)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in means)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _bad(is_bad: bool) -> str:
    return "yellow" if is_bad else ""


def _held_out(losses: Mapping[int, float]) -> Text:
    """Format the last loss of a held-out set, yellow with the best one if it is not the best."""
    if not losses:
        return Text("not yet", style="dim")
    step, loss = list(losses.items())[-1]
    best = min(losses, key=lambda at: (math.isnan(losses[at]), losses[at]))
    text = f"{number(loss, '.4f')} at step {step:,}"
    return Text(text) if best == step else Text(f"{text}, best {number(losses[best], '.4f')}", style="yellow")


def _norm(values: Mapping[str, Any]) -> Text:
    norm = values["train/grad_norm"]
    text = Text(number(norm, ".2e" if norm and norm > _BIG else ".3g"))
    return text.append("  clipped", style="dim") if values.get("train/clipped") else text


def _speed(values: Mapping[str, Any]) -> Text:
    text = Text(token_amount(values["throughput/tokens_per_s"]))
    mfu = values.get("throughput/mfu")
    return text if mfu is None else text.append(f"  MFU {mfu:.1%}")


def _experts(values: Mapping[str, Any]) -> Text:
    worst = max(values["experts/max_over_mean"])
    return Text(f"max {worst:.2f} of the mean", style=_bad(worst > 4))


def _flat(text: str) -> str:
    """Put a text on one line."""
    return " ".join(text.split())


def _figures_of_objective(values: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    """Yield the figures of an objective other than the next token."""
    for name, metric in _OF_OBJECTIVES.items():
        if metric in values:
            yield name, Text(number(values[metric], ".3f"))
