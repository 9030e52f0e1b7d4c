"""The screenshot of the live view in the README: `python -m tests.screenshot` writes docs/images/train-terminal.svg."""

from __future__ import annotations

import io
import math
import random
import re
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from meshwright.train.display import RunState, Screen

SCREENSHOT = Path(__file__).parents[1] / "docs" / "images" / "train-terminal.svg"
BEGAN = 1_750_000_000.0


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    """Return the trainer's line for a step of a mixture of experts."""
    dice = random.Random(step)
    values = {
        "train/loss": 1.1 + 1.5 * math.exp(-step / 150) + dice.uniform(-0.06, 0.06),
        "train/grad_norm": 0.7 + dice.random() / 4, "train/clipped": 0, "train/learning_rate": 9.13e-6,
        "train/epoch": step / 340, "train/tokens": step * 262144, "train/targets": 91_417,
        "throughput/tokens_per_s": 98_765.0, "throughput/mfu": 0.412, "time/step_s": 2.65,
        "time/data_wait_share": 0.002, "memory/peak_bytes": 61_200_000_000, "memory/rank": 3,
        "experts/max_over_mean": [1.21, 1.48, 1.37], "experts/dead": 0,
    }  # fmt: skip
    return {"kind": "step", "step": step, "time": BEGAN + 2.7 * step, "attempt": 0, **values, **changes}


def run_state(steps: int = 412) -> RunState:
    result = RunState("meshwright train runs/first", "8 ranks: fsdp=4 tp=2 ep=8", 1000)
    result.starts(again=False)
    for step in range(1, steps + 1):
        result.take(step_line(step))
        if step % 100 == 0:
            result.take({"kind": "eval", "step": step, "time": BEGAN, "eval/held-out/loss": 2.1 - step / 1000})
            result.take({"kind": "save", "step": step, "time": BEGAN + 2.7 * step, "path": "x", "seconds": 1.5})
    return result


def screenshot() -> str:
    """Leave out the fonts that rich would fetch."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Screen(run_state(), "", now=BEGAN + 2.7 * 412))
    plain = re.sub(r"@font-face \{\{.*?\n    \}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="meshwright train run.toml", code_format=plain)


if __name__ == "__main__":
    SCREENSHOT.parent.mkdir(exist_ok=True)
    SCREENSHOT.write_text(screenshot())
