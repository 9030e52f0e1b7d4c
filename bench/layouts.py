"""Forward + backward on 2 local ranks, ours and transformers' `DistributedConfig`, alternating in one run.

    python -m bench.layouts                          # tp=2 and fsdp=2 dense, fsdp=2 x ep=2 with experts
    python -m bench.layouts --layouts fsdp2 --rounds 9 --append

The models are those of bench/step.py, 8 layers, in float32, one thread a rank. Under tp both ranks have the same 1024
tokens, under fsdp each its own. Both sides live in the same processes and take turns; gradients are complete after
each turn, there is no optimizer. Times are medians, of the slower rank. Collectives and bytes (the larger side of each)
are counted in a turn of its own.
transformers' side needs accelerate: pip install -e '.[bench]' -c requirements/constraints.txt
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
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import meshwright as mw
from bench.step import MODELS, TOKENS, Step, document, needs, our_step, their_step
from meshwright.verify import Recorder, run_ranks

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tp2": ("qwen3", {"tp": 2}),
    "fsdp2": ("qwen3", {"fsdp": 2}),
    "fsdp2+ep2": ("qwen3_moe", {"fsdp": 2, "ep": 2}),
}


def ours(directory: Path, mesh: dict[str, int]) -> Step:
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32)
    return our_step(model, repeat(document(1 + model.mesh.data_rank)))


def theirs(directory: Path, mesh: dict[str, int]) -> Step:
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in mesh.items()})
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, distributed_config=config)
    return their_step(model, repeat(document(1 + dist.get_rank() if "fsdp" in mesh else 1)))


SIDES = {"meshwright": ours, "transformers": theirs}


def turns(directory: Path, mesh: dict[str, int], rounds: int) -> dict[str, Any]:
    """On one rank: the times, and what was counted, of both sides."""
    dist.init_process_group("gloo")
    steps = {side: make(directory, mesh) for side, make in SIDES.items()}
    found: dict[str, Any] = {}
    for side, step in steps.items():
        loss = step()
        with Recorder() as recorder:
            step()
        seen = [s for s in recorder.seen if len(s.ranks) > 1]
        kinds = {op: sum(s.op == op for s in seen) for op in sorted({s.op for s in seen})}
        found[side] = {"loss": loss, "kinds": kinds, "bytes": sum(s.num_bytes for s in seen), "seconds": []}
    for _ in range(rounds):
        for side, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            found[side]["seconds"].append(time.perf_counter() - began)
    return found


def compare(layout: str, rounds: int) -> list[str]:
    name, mesh = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
        run_ranks(1, make, recipe, seconds=300)
        ranks = run_ranks(2, turns, recipe / "m", mesh, rounds, seconds=1800)
    seconds = {side: [max(s) for s in zip(*(r[side]["seconds"] for r in ranks), strict=True)] for side in SIDES}
    ratios = [b / a for a, b in zip(seconds["meshwright"], seconds["transformers"], strict=True)]
    rows = [row(layout if side == "meshwright" else "", side, ranks[0][side], seconds[side]) for side in SIDES]
    return [*rows, f"| | ratio | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | | | |"]


def make(recipe: Path) -> None:
    mw.export(mw.init(recipe, mw.Mesh(device="cpu")), recipe / "m")


def row(what: str, side: str, found: dict[str, Any], seconds: list[float]) -> str:
    kinds = ", ".join(f"{count} {op}" for op, count in found["kinds"].items())
    return (
        f"| {what} | {side} | {statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) "
        f"| {sum(found['kinds'].values())}: {kinds} | {found['bytes'] / 1e6:.1f} | {found['loss']:.5f} |"
    )


def heading(rounds: int) -> str:
    return (
        f"\n## Layouts, {datetime.date.today()}\n\n"
        f"2 ranks, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, gloo; forward + backward of {TOKENS} tokens in float32, medians (min-max) of "
        f"{rounds} alternations, the slower rank.\n\n"
        "| layout | side | seconds | collectives | MB | loss of rank 0 |\n|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    needs("accelerate")
    torch.set_num_threads(1)
    lines = [heading(options.rounds)]
    print(lines[0], flush=True)
    for layout in options.layouts:
        lines += compare(layout, options.rounds)
        print("\n".join(lines[-3:]), flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
