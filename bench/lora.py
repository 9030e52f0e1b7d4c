"""Time a LoRA step against peft + transformers, on one process and on two FSDP ranks, alternating in one run.

    python -m bench.lora                               # three models, float32 and bfloat16
    python -m bench.lora --models qwen3 --dtypes float32 --ranks 2 --rounds 9 --append

The models are those of bench/step.py, with adapters of rank 16 on all linear layers and routed experts, in float32. A
step is forward, backward and AdamW's update of the adapters, on 1024 new tokens. Both sides live in the same processes
and take turns; times are medians of the slower rank. Peak memory is that of fresh processes during two steps, weights
and libraries included. On two ranks the peer is torch's `fully_shard` of each decoder layer and of the model.
It needs peft: pip install -e '.[dev]' -c requirements/constraints.txt
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
from itertools import count
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import transformers

import meshwright as mw
from bench.layouts import ratio
from bench.step import MODELS, TOKENS, Step, document, make, needs
from meshwright.verify import run_ranks

RANK, ALPHA, LR = 16, 32, 1e-4
LINEAR = "all-linear"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def ours(directory: Path, dtype: torch.dtype) -> Step:
    mesh = mw.Mesh(fsdp=dist.get_world_size(), device="cpu")
    model = mw.load(directory, mesh, dtype=dtype, lora=mw.Lora(rank=RANK, alpha=ALPHA))
    engine, documents = mw.Engine(model, lr=LR, max_norm=None), documents_of_rank()
    return lambda: engine.step([mw.pack([next(documents)])]).loss


def peer(directory: Path, dtype: torch.dtype) -> Step:
    import peft
    from torch.distributed.fsdp import fully_shard

    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    experts = EXPERTS if "experts" in str(base) else None
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR, target_parameters=experts)
    model: Any = peft.get_peft_model(base, config)
    if dist.get_world_size() > 1:
        for layer in base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    documents = documents_of_rank()

    def step() -> float:
        ids = torch.tensor([next(documents)])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return step


SIDES: dict[str, Callable[[Path, torch.dtype], Step]] = {"meshwright": ours, "peft": peer}


def documents_of_rank() -> Any:
    """Yield a new document for each step, another one on each rank."""
    return map(document, count(1 + dist.get_rank(), dist.get_world_size()))


def turns(directory: Path, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Run both sides in turn on this rank. Return the first losses and all seconds."""
    dist.init_process_group("gloo")
    steps = {name: begin(directory, dtype) for name, begin in SIDES.items()}
    losses = {name: step() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {"losses": losses, "seconds": seconds}


def peak_megabytes(directory: Path, dtype: torch.dtype, name: str) -> float:
    """Return the peak memory of this rank during two steps."""
    dist.init_process_group("gloo")
    step = SIDES[name](directory, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    for _ in range(2):
        step()
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def compare(name: str, dtype: torch.dtype, ranks: int, rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
        run_ranks(1, make, recipe, seconds=300)
        results = run_ranks(ranks, turns, recipe / "m", dtype, rounds, seconds=1800)
        peaks = {side: max(run_ranks(ranks, peak_megabytes, recipe / "m", dtype, side, seconds=900)) for side in SIDES}
    own, of_peft = ([max(s) for s in zip(*(r["seconds"][side] for r in results), strict=True)] for side in SIDES)
    losses = results[0]["losses"]
    return (
        f"| {name} | {str(dtype).removeprefix('torch.')} | {ranks} | {statistics.median(own):.3f} "
        f"| {statistics.median(of_peft):.3f} | {ratio(of_peft, own)} | {peaks['meshwright']:.0f} | {peaks['peft']:.0f} "
        f"| {losses['meshwright']:.5f} {losses['peft']:.5f} |"
    )


def heading(rounds: int) -> str:
    import peft

    return (
        f"\n## LoRA, {datetime.date.today()}\n\n"
        f"{os.cpu_count()} cores, {platform.machine()}, one thread a rank, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, peft {peft.__version__}; rank {RANK}, a step of {TOKENS} tokens a rank with the "
        f"update, medians of {rounds} alternations.\n\n"
        "| model | dtype | ranks | meshwright s | peft s | peft / meshwright (min-max) | peak MB meshwright | peft "
        "| losses |\n|---|---|---|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=[1, 2], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    needs("peft")
    torch.set_num_threads(1)
    lines = [heading(options.rounds)]
    print(lines[0], flush=True)
    for name in options.models:
        for dtype in options.dtypes:
            for ranks in options.ranks:
                lines.append(compare(name, getattr(torch, dtype), ranks, options.rounds))
                print(lines[-1], flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
