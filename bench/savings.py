"""Measure what each of `mw.MemoryOptions`, and bfloat16 optimizer state, saves and costs on 2 ranks of fsdp=2.

    python -m bench.savings                       # all of them
    python -m bench.savings --rounds 5 --append

The model is the dense one of bench/step.py, in float32. A step has 2 micro-batches of 2048 tokens and an update. Each
option runs in new processes; a round runs all options once. The peak is that of a rank during its steps, the stored
bytes come from the bill, and the time is CPU seconds of a rank, so that other work on the cores does not count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

import meshwright as mw
from bench.step import MODELS
from meshwright.engine.step_bill import step_bill
from meshwright.verify import run_ranks

TOKENS, BATCHES = 2048, 2
TRIED: dict[str, dict[str, Any]] = {
    "none": {},
    'recompute="selective"': {"recompute": "selective"},
    'recompute="full"': {"recompute": "full"},
    "reshard=False": {"reshard": False},
    "offload=True": {"offload": True},
    "compiled=True": {"compiled": True},
    "state_dtype=bfloat16": {"state": torch.bfloat16},
}


def tried(directory: Path, options: dict[str, Any]) -> dict[str, float]:
    """Measure one step on this rank, after a first step that compiles."""
    torch.set_num_threads(1)
    memory = dict(options)
    state = memory.pop("state", None)
    model = mw.load(directory, mw.Mesh(fsdp=2), dtype=torch.float32, memory=mw.MemoryOptions(**memory))
    engine = mw.Engine(model, lr=1e-4, optimizer=mw.AdamW(state_dtype=state))
    g = torch.Generator().manual_seed(model.mesh.data_rank)
    batches = [mw.pack([torch.randint(32000, (TOKENS,), generator=g).tolist()]) for _ in range(BATCHES)]
    engine.step(batches)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    began, loss = time.process_time(), engine.step(batches).loss
    seconds = time.process_time() - began
    status = Path("/proc/self/status").read_text()
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024
    bill = sum(c.count * c.num_bytes for c in step_bill(model, TOKENS, BATCHES)) / 1e6
    stored = sum(s.num_bytes for s in model.need(engine.optimizer.options).stored(model.mesh.rank)) / 1e6
    return {"seconds": seconds, "peak": peak, "sent": bill, "stored": stored, "loss": loss}


def make(recipe: Path) -> None:
    mw.export(mw.init(recipe, mw.Mesh(device="cpu")), recipe / "m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in TRIED}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps({**MODELS["qwen3"], "dtype": "bfloat16"}))
        run_ranks(1, make, recipe, seconds=300)
        for _ in range(options.rounds):
            for name, what in TRIED.items():
                results[name].append(max(run_ranks(2, tried, recipe / "m", what, seconds=900), key=lambda r: r["peak"]))
    lines = [
        f"\n## Savings, {datetime.date.today()}\n",
        f"2 ranks of fsdp=2, {platform.machine()}, torch {torch.__version__}, Qwen3 57M in float32, {BATCHES} "
        f"micro-batches of {TOKENS} tokens and an update; medians of {options.rounds}. Stored and sent: the bill's.\n",
        "| saving | peak MB of a rank | stored MB | sent MB | CPU s | of none | loss |\n|---|---|---|---|---|---|---|",
    ]
    plain = statistics.median(r["seconds"] for r in results["none"])
    for name, runs in results.items():
        mid = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        lines.append(
            f"| `{name}` | {mid['peak']:.0f} | {mid['stored']:.0f} | {mid['sent']:.0f} | {mid['seconds']:.2f} "
            f"| {mid['seconds'] / plain:.2f} | {mid['loss']:.5f} |"
        )
    print("\n".join(lines))
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
