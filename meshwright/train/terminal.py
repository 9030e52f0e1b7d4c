"""The live view of a run: what is known of it, and a frame that shows it at the width that there is."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..metrics import ExpertUse
from .metrics import amount, clock

_KEPT = 200  # losses for the curve
_PACE = 50  # steps over which the time left is reckoned: evaluations and saves are in it
_CELL = 38  # columns that a name and its value take
_BLOCKS = "▁▂▃▄▅▆▇█"
_SAMPLES = 2  # of those that were written last
_BIG = 1e4  # a norm or a balance from which digits say nothing


@dataclass
class Seen:
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
class Frame:
    """A picture of what is seen. `status` says what goes on where no step was made yet, or why the run ends."""

    seen: Seen
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
        loss = Text(_number(values["train/loss"], ".4f"), style="bold")
        if curve:
            loss.append("  " + sparkline(list(self.seen.losses.values()), room), style="cyan")
        yield "loss", loss
        for name, losses in self.seen.held_out.items():
            yield ("held out" if len(self.seen.held_out) == 1 else name), _held_out(losses)
        yield "grad norm", _norm(values)
        yield "lr", Text(_number(values["train/learning_rate"], ".2e"))
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
        yield "epoch", Text(_number(values["train/epoch"], ".2f"))
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


def _number(value: float | None, spec: str) -> str:
    return "nan" if value is None or math.isnan(value) else format(value, spec)


def _bad(is_bad: bool) -> str:
    return "yellow" if is_bad else ""


def _held_out(losses: Mapping[int, float]) -> Text:
    if not losses:
        return Text("not yet", style="dim")
    step, loss = list(losses.items())[-1]
    best = min(losses, key=lambda at: losses[at])
    text = f"{_number(loss, '.4f')} at step {step:,}"
    return Text(text) if best == step else Text(f"{text}, best {_number(losses[best], '.4f')}", style="yellow")


def _norm(values: Mapping[str, Any]) -> Text:
    norm = values["train/grad_norm"]
    text = Text(_number(norm, ".2e" if norm and norm > _BIG else ".3g"))
    return text.append("  clipped", style="dim") if values.get("train/clipped") else text


def _speed(values: Mapping[str, Any]) -> Text:
    text = Text(amount(values["throughput/tokens_per_s"]))
    mfu = values.get("throughput/mfu")
    return text if mfu is None else text.append(f"  MFU {mfu:.1%}")


def _experts(values: Mapping[str, Any]) -> Text:
    worst = max(values["experts/max_over_mean"])
    return Text(f"max {worst:.2f} of the mean", style=_bad(worst > 4))


def _flat(text: str) -> str:
    return " ".join(text.split())
