"""What a run tells: a line of JSON for each step, evaluation and save, and a line on the terminal."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

HISTORY = 256 * 1024  # bytes of metrics.jsonl that are read when a run goes on: the last hundreds of steps
WIDTH = 80  # of a line on a terminal that is none, or a small one


class Sink(Protocol):
    """Where metrics go."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None: ...


class JsonLines:
    """A file to which lines are added. Of lines of the same step the last one holds: a run that was killed goes on from
    a checkpoint before its end."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file.open("a", buffering=1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        wrong = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        plain = {name: None if name in wrong else value for name, value in values.items()}
        told = {"kind": kind, "step": step, "time": round(time.time(), 3), **plain, **({"nan": wrong} if wrong else {})}
        self.file.write(json.dumps(told) + "\n")


class Lines:
    """A line for each of `every` steps, evaluations and saves, of 80 columns."""

    def __init__(self, num_steps: int, every: int = 1, say: Callable[[str], None] | None = None) -> None:
        self.num_steps, self.every = num_steps, every
        self.say = say or _say

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "step":
            if step % self.every == 0 or step == self.num_steps:
                self.say(_step_line(step, self.num_steps, values))
        elif kind == "eval":
            told = "  ".join(f"{name} {_number(value, '.4f')}" for name, value in values.items())
            self.say("\n".join(textwrap.wrap(f"step {step}  {told}", WIDTH, subsequent_indent="  ")))
        elif kind == "sample":
            self.say(f"step {step}  sample {values.get('number', '')}: {values['prompt']!r} -> {values['text']!r}")
        elif kind == "save":
            self.say(f"step {step}  save: {values['path']}, {values['seconds']} s")
        elif kind == "end" and values["why"]:
            self.say(f"step {step}  ended by {values['why']}")


def tail_of(file: Path, num_bytes: int) -> bytes:
    """The last whole lines, of which the first may lie further back."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        size = file.stat().st_size
        opened.seek(max(0, size - num_bytes))
        text = opened.read()
    return text if size <= num_bytes else text.partition(b"\n")[2]


def parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Without those that a run was killed in."""
    for line in lines:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def last_step(file: Path) -> int:
    """Return the last step that the file tells of; 0 for none."""
    lines = parsed(tail_of(file, HISTORY).decode(errors="replace").splitlines())
    return [0, *(line["step"] for line in lines if line["kind"] == "step")][-1]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _step_line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
    left = (num_steps - step) * values["time/step_s"]
    lr = f"  lr {_number(values['train/learning_rate'], '.2e')}"
    text = (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {_number(values['train/loss'], '.4f')}  "
        f"norm {_number(values['train/grad_norm'], '.3g')}{lr}  "
        f"{amount(values['throughput/tokens_per_s'])} tok/s  {clock(left)} left"
    )
    return text if len(text) <= WIDTH else text.replace(lr, "")  # which the schedule says as well


def _number(value: float | None, spec: str) -> str:
    """JSON has no number for what is none."""
    return "nan" if value is None else format(value, spec)


def amount(value: float) -> str:
    """Of tokens: 12,345 or 1.23M."""
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def clock(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 100:
        return f"{hours // 24} days"
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}"
