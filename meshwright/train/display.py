"""What a person sees of a run: a thread of the launcher follows its files and draws, or prints plain lines."""

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
from .rank import OURS

_TICK_S = 0.25
_ABOUT = ("kind", "step", "time", "attempt", "nan")  # of a line, not of what it tells
_ASKED = "signal {}: the step is finished and the run saved; a second one ends it at once"
_ASKED_EARLY = "signal {}: the ranks end, which have made no step yet; a second one ends them at once"
_GRACE_S = 2.0  # after a second signal, until ranks that are stuck are left to themselves


class Tail:
    """The lines that are added to a file, which may not be there yet. The last one is kept back until it is whole."""

    def __init__(self, file: Path, *, at_end: bool = False) -> None:
        self.file, self._rest = file, b""
        self._at = file.stat().st_size if at_end and file.exists() else 0

    def lines(self) -> Iterator[str]:
        if not self.file.exists():
            return
        with self.file.open("rb") as opened:
            opened.seek(self._at)
            text = self._rest + opened.read()
            self._at = opened.tell()
        *whole, self._rest = text.split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


class Display(threading.Thread):
    """Shows a run until it is left. `starts` is called before each start of its ranks."""

    def __init__(
        self, seen: RunState, out: Path, *, plain: bool, every: int, asked: Sequence[int] = ()
    ) -> None:  # fmt: skip
        super().__init__(daemon=True, name="display")
        self.console = Console()
        self.plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self.seen, self.metrics = seen, Tail(out / "metrics.jsonl", at_end=True)
        self.lines = Lines(seen.num_steps, every)
        self.log = Tail(out / "none")
        self.num_steps_seen, self._warned = 0, False
        self._last, self._began, self._ends = "", time.monotonic(), threading.Event()
        self._asked, self._said_so, self._lock = asked, False, threading.Lock()
        for line in parsed_lines(tail_of(self.metrics.file, HISTORY).decode(errors="replace").splitlines()):
            seen.take(line)
        seen.starts(again=False)

    def starts(self, log: Path, *, again: bool) -> None:
        """The ranks, the first of which writes to `log`."""
        with self._lock:
            self.seen.starts(again=again)
            self.log, self._last, self._began, self.num_steps_seen = Tail(log), "", time.monotonic(), 0

    def __enter__(self) -> Display:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        with self._live() as live:
            while True:
                ends = self._ends.wait(_TICK_S)
                self.follow()
                self._heed()
                if isinstance(live, Live):
                    live.update(self._picture(ends=ends), refresh=True)
                if ends:
                    return
                if len(self._asked) > 1 and not self._ends.wait(_GRACE_S):
                    break
        say(f"signal {self._asked[-1]}: ended at once; what came after the last checkpoint is lost")
        os._exit(128 + self._asked[-1])  # the ranks go with this process

    def _picture(self, *, ends: bool) -> RenderableType:
        """A frame, and while it is drawn again an empty line: there the terminal writes the ^C of a person. Behind a
        full line it would go on in the next one, and the frame would be drawn one line too low."""
        return Screen(self.seen, "") if ends else Group(Screen(self.seen, self.status()), Text())

    def _heed(self) -> None:
        if self._asked and self.plain and not self._said_so:
            say(self.status())
            self._said_so = True

    def _live(self) -> AbstractContextManager[Live | None]:
        if self.plain:
            return nullcontext()
        return Live(
            console=self.console, auto_refresh=False, screen=False, redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )  # fmt: skip

    def follow(self) -> None:
        """Take what the ranks have written since."""
        with self._lock:
            self._follow()

    def _follow(self) -> None:
        for text in self.log.lines():
            if text.startswith(OURS):
                say(text.removeprefix(OURS))
            self._last = text.removeprefix(OURS).strip() or self._last
        for line in parsed_lines(self.metrics.lines()):
            self.seen.take(line)
            self.num_steps_seen += line["kind"] == "step"
            self.lines.num_steps = self.seen.num_steps
            if self.plain and not self._warned and (warning := self.seen.experts.warning()):
                say(f"warning: {warning}")  # once; the live view shows it all the time
                self._warned = True
            if self.plain:
                self.lines.write(line["kind"], line["step"], {k: v for k, v in line.items() if k not in _ABOUT})

    def status(self) -> str:
        if self._asked:
            return (_ASKED if self.seen.begun else _ASKED_EARLY).format(self._asked[0])
        if self.seen.begun:
            return ""
        return f"no step yet, {clock(time.monotonic() - self._began)}: {self._last or 'the ranks are starting'}"


def say(text: str) -> None:
    """Above the live view, and never in the middle of it: a rank cannot do this."""
    sys.stderr.write(f"{OURS}{text}\n")
    sys.stderr.flush()


_KEPT = 200  # losses for the curve
_PACE = 50  # steps over which the time left is reckoned: evaluations and saves are in it
_CELL = 38  # columns that a name and its value take
_BLOCKS = "▁▂▃▄▅▆▇█"
_SAMPLES = 2  # of those that were written last
_BIG = 1e4  # a norm or a balance from which digits say nothing


@dataclass
class RunState:
    """What the lines of metrics.jsonl have told so far. `begun`: whether this start of the run has made a step."""

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
        step = line["step"]
        self.experts.take(line)
        if line["kind"] == "start":
            self.num_steps = line["num_steps"]
        elif line["kind"] == "step":
            self._take_step(step, line)
        elif line["kind"] == "eval":
            for name, value in line.items():
                if name.startswith("eval/") and name.endswith("/loss"):
                    of = self.held_out.setdefault(name[len("eval/") : -len("/loss")], {})
                    of[step] = math.nan if value is None else value
        elif line["kind"] == "save":
            self.saved = step, line["time"]
        elif line["kind"] == "sample":
            self.samples, self.sampled_at = (self.samples if step == self.sampled_at else {}), step
            self.samples[line["number"]] = line["prompt"], line["text"]

    def _take_step(self, step: int, line: Mapping[str, Any]) -> None:
        """A run that goes on from a checkpoint makes some steps again: what was seen of them is no more."""
        if step <= self.step:
            self._stamps.clear()
            for kept in (self.losses, *self.held_out.values()):
                for later in [old for old in kept if old >= step]:
                    del kept[later]
        loss = line["train/loss"]
        self.step, self.values, self.begun = step, line, True
        self.losses[step] = math.nan if loss is None else loss
        self.losses = dict(list(self.losses.items())[-_KEPT:])
        self._stamps.append((step, line["time"]))

    def starts(self, *, again: bool) -> None:
        """A start of the ranks: they load before they make a step."""
        self.begun = False
        self.restarts += again
        self._stamps.clear()

    @property
    def left_s(self) -> float:
        (first, then), (last, now) = self._stamps[0], self._stamps[-1]
        a_step = (now - then) / (last - first) if last > first else self.values["time/step_s"]
        return (self.num_steps - self.step) * a_step


@dataclass(frozen=True)
class Screen:
    """A picture of what is seen. `status` says what goes on where no step was made yet, or why the run ends."""

    seen: RunState
    status: str
    now: float = field(default_factory=time.time)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 4
        inner = Table.grid(expand=True)
        inner.add_row(self._head(width))
        num_columns = max(1, min(4, width // _CELL))
        cells = Table.grid(expand=True, padding=(0, 2, 0, 0))
        for _ in range(num_columns):
            cells.add_column(width=10, style="dim", no_wrap=True)
            cells.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        flat = list(self._cells(width // num_columns - 23, curve=not options.ascii_only))
        for at in range(0, len(flat), num_columns):
            cells.add_row(*(part for cell in flat[at : at + num_columns] for part in cell))
        if self.seen.values:
            inner.add_row(cells)
        for text in (*self._samples(width), *self._warnings(width)):
            inner.add_row(text)
        yield Panel(inner, title=Text(self.seen.title, style="bold"), title_align="left", border_style="dim")

    def _samples(self, width: int) -> Iterator[Text]:
        """Show the last samples of the model, each in a line or two."""
        for prompt, text in list(self.seen.samples.values())[:_SAMPLES]:
            said = Text(f"step {self.seen.sampled_at:,}  {_flat(prompt)[: width // 2]} ", style="dim", overflow="fold")
            said.append(_flat(text), style="not dim")
            said.truncate(2 * width, overflow="ellipsis")
            yield said

    def _warnings(self, width: int) -> Iterator[Text]:
        for text in filter(None, (self.seen.experts.warning(), self.status)):
            said = Text(text, style="yellow", overflow="fold")
            said.truncate(5 * width, overflow="ellipsis")
            yield said

    def _head(self, width: int) -> Table:
        seen = self.seen
        done = f"step {seen.step:,} of {seen.num_steps:,}"
        left = f"{clock(seen.left_s)} left" if seen.begun and seen.step < seen.num_steps else seen.mesh
        row = Table.grid(expand=True, padding=(0, 2, 0, 0))
        row.add_column(width=min(len(done), width), no_wrap=True, style="bold")
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(1, seen.num_steps), completed=min(seen.step, seen.num_steps))
        row.add_row(done, bar, left)
        return row

    def _cells(self, room: int, *, curve: bool) -> Iterator[tuple[str, Text]]:
        values = self.seen.values
        if not values:
            return
        loss = Text(number(values["train/loss"], ".4f"), style="bold")
        if curve:
            loss.append("  " + sparkline(list(self.seen.losses.values()), room), style="cyan")
        yield "loss", loss
        for name, losses in self.seen.held_out.items():
            yield ("held out" if len(self.seen.held_out) == 1 else name), _held_out(losses)
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
        if "experts/max_over_mean" in values:
            yield "experts", _experts(values)
            if dead := values.get("experts/dead"):
                yield "no tokens", Text(f"{dead:,} experts", style="yellow")
        yield "epoch", Text(number(values["train/epoch"], ".2f"))
        yield "saved", self._saved()
        if self.seen.restarts:
            yield "restarts", Text(str(self.seen.restarts), style="yellow")

    def _saved(self) -> Text:
        if self.seen.saved is None:
            return Text("not yet", style="dim")
        step, at = self.seen.saved
        return Text(f"step {step:,}, {clock(max(0.0, self.now - at))} ago")


def sparkline(values: Sequence[float], room: int) -> str:
    """Means of neighbours, each as a block between the lowest and the highest of them."""
    room = max(1, min(room, len(values)))
    ends = [len(values) * at // room for at in range(room + 1)]
    means = [_mean(values[first:last]) for first, last in pairwise(ends)]
    real = [value for value in means if math.isfinite(value)]
    if not real:
        return ""
    low, span = min(real), (max(real) - min(real)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / span * top)] if math.isfinite(v) else " " for v in means)


def _mean(values: Sequence[float]) -> float:
    real = [value for value in values if math.isfinite(value)]
    return sum(real) / len(real) if real else math.nan


def _bad(is_bad: bool) -> str:
    return "yellow" if is_bad else ""


def _held_out(losses: Mapping[int, float]) -> Text:
    if not losses:
        return Text("not yet", style="dim")
    step, loss = list(losses.items())[-1]
    best = min(losses, key=lambda at: losses[at])
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
    return " ".join(text.split())
