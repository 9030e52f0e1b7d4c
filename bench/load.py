"""Time loading on 2 ranks against transformers and a bare read, alternating in one run, with files in the page cache.

    python -m bench.load                          # a mixture of experts with a key per matrix, and a dense model
    python -m bench.load --models moe --rounds 5 --append

Both models have about 300 million parameters, 600 MB in bfloat16; both libraries make them float32. Every measurement
uses 2 freshly forked processes. Times are those of the slower rank, from the call until its shards are filled; memory
is the peak above what the process had before. A mapped file counts as memory while it is mapped. That is part of
transformers' peak, and the system could reclaim it. The bare read takes each rank's half of the file through a buffer
of 4 MiB and drops it.
transformers needs accelerate: pip install -e '.[bench]' -c requirements/constraints.txt
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import queue
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import meshwright as mw
from bench.step import needs
from meshwright import models, weights
from meshwright.weights.keymap import file_header

RANKS, MB = 2, 1e6
COMMON = dict(num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=8000,
              tie_word_embeddings=False, dtype="bfloat16")  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "moe": dict(model_type="qwen3_moe", **COMMON, hidden_size=512, intermediate_size=1536, num_experts=64,
                num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True),
    "dense": dict(model_type="qwen3", **COMMON, hidden_size=1536, intermediate_size=7168),
}  # fmt: skip
MESHES: dict[str, list[dict[str, int]]] = {"moe": [dict(fsdp=2), dict(fsdp=2, ep=2)], "dense": [dict(fsdp=2)]}
Result = dict[str, float]


def make(at: Path, config: dict[str, Any]) -> int:
    """Write a model of repeated noise, with keys sorted by name as on the hub. Return the number of keys."""
    (at / "config.json").write_text(json.dumps(config))
    _, table = models.describe(config, models.prefix_of(config, None), "lm")
    keys = sorted(weights.of_table(table, torch.bfloat16).keys.values(), key=lambda k: k.name)
    noise = torch.randn(16_000_000, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16().view(torch.uint8)
    with (at / "model.safetensors").open("wb") as out:
        out.write(file_header(keys, {"format": "pt"}).header_bytes)
        for key in keys:
            assert key.num_bytes <= len(noise), key
            out.write(noise[: key.num_bytes].numpy().data)
    return len(keys)


def ours(directory: Path, mesh: dict[str, int]) -> Result:
    model = mw.load(directory, mw.Mesh(**mesh, device="cpu"))
    return {"bytes": model.bytes_read, "pieces": sum(t.nbytes for t in model.stored().values())}


def peer(directory: Path, mesh: dict[str, int]) -> Result:
    config = DistributedConfig(**{f"{axis}_size": size for axis, size in mesh.items()})
    kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, distributed_config=config)
    shards = [p.to_local() for p in model.parameters()]
    return {"bytes": math.nan, "pieces": sum(t.nbytes for t in shards)}


def bare(directory: Path, _: dict[str, int]) -> Result:
    """Read this rank's half of the file and drop it: the lower bound of loading."""
    path = directory / "model.safetensors"
    half, buffer = path.stat().st_size // RANKS, memoryview(bytearray(4 << 20))
    fd, at, left = os.open(path, os.O_RDONLY), dist.get_rank() * half, half
    while left:
        num = os.preadv(fd, [buffer[: min(left, len(buffer))]], at)
        at, left = at + num, left - num
    os.close(fd)
    return {"bytes": half, "pieces": 0}


SIDES: dict[str, Callable[[Path, dict[str, int]], Result]] = {"meshwright": ours, "transformers": peer, "read": bare}


def memory(field: str) -> int:
    """Return a memory field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def rank_of(rank: int, port: int, side: str, directory: Path, mesh: dict[str, int], results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)  # progress of both sides
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = memory("VmRSS"), time.perf_counter()
    result = SIDES[side](directory, mesh)
    results.put({**result, "seconds": time.perf_counter() - began, "peak": memory("VmHWM") - before})
    dist.barrier()
    results.close()
    results.join_thread()
    os._exit(0)  # no shutdown of either library inside the measurement


def measure(side: str, directory: Path, mesh: dict[str, int]) -> Result:
    """Measure one side in new processes. Return the worse of the two ranks in each figure."""
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [fork.Process(target=rank_of, args=(r, port, side, directory, mesh, results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    per_rank: list[Result] = []
    while len(per_rank) < RANKS:
        try:
            per_rank.append(results.get(timeout=1))
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode:
                    raise SystemExit((directory / f"rank{rank}.log").read_text()) from None
    for process in ranks:
        process.join()
    return {"over": max(f["peak"] - f["pieces"] for f in per_rank)} | {
        k: max(f[k] for f in per_rank) for k in per_rank[0]
    }


def compare(name: str, mesh: dict[str, int], directory: Path, rounds: int) -> list[str]:
    runs: dict[str, list[Result]] = {side: [] for side in SIDES}
    for side in SIDES:
        measure(side, directory, mesh)  # warms the page cache
    for _ in range(rounds):
        for side in SIDES:
            runs[side].append(measure(side, directory, mesh))
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(runs["meshwright"], runs["transformers"], strict=True)]
    what = f"{name} {','.join(f'{a}={n}' for a, n in mesh.items())}"
    rows = [row(what if side == "meshwright" else "", side, runs[side]) for side in SIDES]
    return [*rows, f"| | ratio | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | | | | |"]


def row(what: str, side: str, runs: list[Result]) -> str:
    middle = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    seconds = [r["seconds"] for r in runs]
    read = "-" if math.isnan(middle["bytes"]) else f"{middle['bytes']:,.0f}"
    return (
        f"| {what} | {side} | {middle['seconds']:.3f} ({min(seconds):.3f}-{max(seconds):.3f}) | {read} "
        f"| {middle['pieces'] / MB:.0f} | {middle['peak'] / MB:.0f} | {middle['over'] / MB:.0f} |"
    )


def heading(rounds: int) -> str:
    return (
        f"\n## Loading, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}\n\n"
        f"2 ranks, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}; medians (min-max) of {rounds} alternations, page cache warm. The worse rank; "
        "MB of 1e6 bytes.\n\n"
        "| model, mesh | side | seconds | bytes read | shards MB | peak MB | peak above shards MB |\n"
        "|---|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    needs("accelerate")
    torch.set_num_threads(1)
    lines = [heading(options.rounds)]
    print(lines[0], flush=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            num_keys = make(Path(folder), MODELS[name])
            for mesh in MESHES[name]:
                lines += compare(f"{name}, {num_keys} keys,", mesh, Path(folder), options.rounds)
                print("\n".join(lines[-len(SIDES) - 1 :]), flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
