"""What a run tells: a line of JSON for each step, evaluation and save, and a line on the terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


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
    """A line for each step, of 80 columns."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "step":
            left = (self.num_steps - step) * values["time/step_s"]
            text = (
                f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  loss {values['train/loss']:.4f}  "
                f"norm {values['train/grad_norm']:.3g}  lr {values['train/learning_rate']:.2e}  "
                f"{values['throughput/tokens_per_s']:,.0f} tok/s  {_clock(left)} left"
            )
        elif kind == "eval":
            text = f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        else:
            text = f"step {step}  {kind}: " + ", ".join(str(value) for value in values.values())
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _clock(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours}:{minutes % 60:02}:{int(seconds) % 60:02}"
