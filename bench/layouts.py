"""Time forward + backward on 2 local ranks for each kind of parallelism, against a peer, alternating in one run.

    python -m bench.layouts                          # tp, fsdp, fsdp x ep, sums once a step, cp and pp
    python -m bench.layouts --layouts fsdp2 --rounds 9 --append

The models are those of bench/step.py, 8 layers, in float32, one thread per rank. Under tp and cp both ranks have the
same 1024 tokens, under fsdp each has its own. A pipeline has 8 micro-batches of 256 (bench/pipelines.py has all
schedules). fsdp2x4 has 4 micro-batches, and checks that a step of Meshwright sends the bytes of its bill. All
contenders live in the same processes and take turns. Gradients are complete after each turn; there is no optimizer.
Times are medians of the slower rank. Collectives and their bytes (the larger of sent and received) are counted in a
separate turn.

The peer is transformers' `DistributedConfig`, for pp torch's own Schedule1F1B. cp has no peer, so it is compared with
what one process would do: all tokens on both ranks.
transformers needs accelerate: pip install -e '.[bench]' -c requirements/constraints.txt
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
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import meshwright as mw
from bench.pipelines import side, torchs
from bench.step import MODELS, TOKENS, Step, document, make, needs, our_step, their_step
from meshwright.engine.step_bill import step_bill
from meshwright.verify import Recorder, run_ranks


def ours(directory: Path, mesh: dict[str, int], memory: mw.MemoryOptions = mw.MemoryOptions()) -> Step:  # noqa: B008 - frozen
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32, memory=memory)
    return our_step(model, repeat(document(1 + model.mesh.data_rank)))


def peer(directory: Path, mesh: dict[str, int]) -> Step:
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in mesh.items()})
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, distributed_config=config)
    return their_step(model, repeat(document(1 + dist.get_rank() if "fsdp" in mesh else 1)))


def whole(directory: Path, _: dict[str, int]) -> Step:
    """Run without cp: each rank has the whole model and all tokens."""
    return ours(directory, {"replicate": 2})


def in_batches(memory: mw.MemoryOptions, directory: Path, mesh: dict[str, int]) -> Step:
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"), dtype=torch.float32, memory=memory)
    engine, batches = mw.Engine(model, lr=0.0), [mw.pack([part]) for part in quarters(model.mesh.data_rank)]
    with Recorder() as recorder:
        engine.step(batches)
    sent = sum(seen.num_bytes for seen in recorder.collectives if len(seen.ranks) > 1)
    billed = sum(charge.count * charge.num_bytes for charge in step_bill(model, TOKENS // 4, 4))
    if sent != billed:
        raise RuntimeError(f"a step sent {sent} bytes, the bill says {billed}")

    def step() -> float:
        loss = engine.backward(batches)
        engine.discard()
        return loss

    return step


def their_batches(directory: Path, mesh: dict[str, int]) -> Step:
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in mesh.items()})
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, distributed_config=config)

    def step() -> float:
        losses = []
        for part in quarters(dist.get_rank()):
            ids = torch.tensor([part])
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / 4
            loss.backward()
            losses.append(loss.item())
        model.zero_grad(set_to_none=True)
        return sum(losses)

    return step


def quarters(rank: int) -> list[list[int]]:
    tokens, num = document(1 + rank), TOKENS // 4
    return [tokens[at : at + num] for at in range(0, TOKENS, num)]


def pipeline(held: bool, directory: Path, mesh: dict[str, int]) -> Step:
    return side(directory, mw.Mesh(**mesh, device="cpu"), mw.Pipeline(hold=held))


def torch_pipeline(directory: Path, mesh: dict[str, int]) -> Step:
    return torchs(directory, mw.Mesh(**mesh, device="cpu"))


Sides = dict[str, Callable[[Path, dict[str, int]], Step]]
HF: Sides = {"meshwright": ours, "transformers": peer}
LAYOUTS: dict[str, tuple[str, dict[str, int], Sides]] = {
    "tp2": ("qwen3", {"tp": 2}, HF),
    "fsdp2": ("qwen3", {"fsdp": 2}, HF),
    "fsdp2+ep2": (
        "qwen3_moe", {"fsdp": 2, "ep": 2},
        {"meshwright": ours, "meshwright, tokens once": partial(ours, memory=mw.MemoryOptions(token_once=True)),
         "transformers": peer},
    ),
    "fsdp2x4": (
        "qwen3", {"fsdp": 2},
        {"meshwright, gathers and sums once": partial(in_batches, mw.MemoryOptions(gather_once=True, sum_once=True)),
         "meshwright, sums once": partial(in_batches, mw.MemoryOptions(sum_once=True)),
         "meshwright": partial(in_batches, mw.MemoryOptions()), "transformers": their_batches},
    ),
    "cp2": ("qwen3", {"cp": 2}, {"meshwright": ours, "meshwright, without cp": whole}),
    "pp2": (
        "qwen3", {"pp": 2},
        {"meshwright": partial(pipeline, False), "meshwright, held": partial(pipeline, True),
         "torch's Schedule1F1B": torch_pipeline},
    ),
}  # fmt: skip


def turns(directory: Path, layout: str, rounds: int) -> dict[str, Any]:
    """Run all contenders in turn on this rank. Return their losses, collectives and seconds."""
    dist.init_process_group("gloo")
    _, mesh, sides = LAYOUTS[layout]
    steps = {name: begin(directory, mesh) for name, begin in sides.items()}
    results: dict[str, Any] = {}
    for name, step in steps.items():
        loss = step()
        with Recorder() as recorder:
            step()
        seen = [s for s in recorder.collectives if len(s.ranks) > 1]
        kinds = {op: sum(s.op == op for s in seen) for op in sorted({s.op for s in seen})}
        results[name] = {"loss": loss, "kinds": kinds, "bytes": sum(s.num_bytes for s in seen), "seconds": []}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            results[name]["seconds"].append(time.perf_counter() - began)
    return results


def compare(layout: str, rounds: int) -> list[str]:
    model, _, sides = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps({**MODELS[model], "dtype": "bfloat16"}))
        run_ranks(1, make, recipe, seconds=300)
        ranks = run_ranks(2, turns, recipe / "m", layout, rounds, seconds=1800)
    seconds = {name: [max(s) for s in zip(*(r[name]["seconds"] for r in ranks), strict=True)] for name in sides}
    *own, last = seconds
    rows = [row(layout if n == 0 else "", name, ranks[-1][name], seconds[name]) for n, name in enumerate(sides)]
    return [*rows, *(f"| | last by {name} | {ratio(seconds[last], seconds[name])} | | | |" for name in own)]


def ratio(above: list[float], below: list[float]) -> str:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def row(what: str, name: str, result: dict[str, Any], seconds: list[float]) -> str:
    kinds = ", ".join(f"{count} {op}" for op, count in result["kinds"].items())
    return (
        f"| {what} | {name} | {statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f}) "
        f"| {sum(result['kinds'].values())}: {kinds} | {result['bytes'] / 1e6:.1f} | {result['loss']:.5f} |"
    )


def heading(rounds: int) -> str:
    return (
        f"\n## Layouts, {datetime.date.today()}\n\n"
        f"2 ranks, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, gloo; forward + backward of {TOKENS} tokens in float32, medians (min-max) of "
        f"{rounds} alternations, the slower rank.\n\n"
        "| layout | side | seconds | collectives | MB | loss of the last rank |\n|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    if any("transformers" in LAYOUTS[layout][2] for layout in options.layouts):
        needs("accelerate")
    torch.set_num_threads(1)
    lines = [heading(options.rounds)]
    print(lines[0], flush=True)
    for layout in options.layouts:
        lines += (rows := compare(layout, options.rounds))
        print("\n".join(rows), flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
