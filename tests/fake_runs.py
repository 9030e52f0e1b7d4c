"""Folders as runs leave them, with curves that look like those of a training, for tests of the report."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0
MESHES = ({"replicate": 1, "fsdp": 8, "tp": 2, "ep": 8}, {"pp": 2, "fsdp": 4, "tp": 2, "ep": 8})
FAILURE = (
    "rank 3 of 16 was killed (SIGKILL): by a user, or because the machine ran out of memory; its log is logs/0/3.log"
)
CONFIG = """model = "Qwen3-30B-A3B"
out = "runs/{name}"
seed = {seed}
[mesh]
fsdp = 8
tp = 2
ep = 8
[[data]]
path = "chats.jsonl"
[optim]
lr = {lr}
schedule = "{schedule}"
"""


def fake_run(folder: Path, *, steps: int = 1000, seed: int = 0, layers: int = 24, experts: int = 64) -> Path:
    """It was cut off once and went on, unless it is very short."""
    folder.mkdir(parents=True)
    lr = 1e-5 * (seed + 1)
    config = CONFIG.format(name=folder.name, seed=seed, lr=lr, schedule=["cosine", "linear", "wsd"][seed % 3])
    (folder / "config.toml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "device": "NVIDIA H200", "world": 16}))
    (folder / "layout.json").write_text(json.dumps(_layout()))
    if steps > 30:
        failed = datetime.fromtimestamp(BEGAN + 4.2 * (steps // 3 + 8), UTC)
        (folder / "overcome.txt").write_text(f"{failed:%Y-%m-%d %H:%M:%S %z}\n{FAILURE}\n\n")
    with (folder / "metrics.jsonl").open("w") as out:
        for line in _lines(steps, lr, random.Random(seed), layers, experts):
            out.write(json.dumps(line) + "\n")
    return folder


def _layout() -> dict[str, Any]:
    names = ("embed.weight", "layers.{i}.mixer.q.weight", "layers.{i}.mlp.experts.gate_up", "head.weight")
    rows = [
        {"name": name, "count": 48 if "{i}" in name else 1, "shape": [2048, 4096], "dtype": "float32", "trained": True,
         "cut": "heads by tp=2, stored over fsdp=8", "bytes_per_rank": 33_554_432}
        for name in names
    ]  # fmt: skip
    return {
        "model": "qwen3_moe", "parameters": 30_532_122_624, "trained": 30_532_122_624, "world": 16,
        "mesh": {"replicate": 1, "fsdp": 8, "tp": 2, "ep": 8}, "table": rows,
    }  # fmt: skip


def _lines(steps: int, lr: float, dice: random.Random, layers: int, experts: int) -> Iterator[dict[str, Any]]:
    begin, cut = BEGAN, steps // 3
    about = {"kind": "start", "num_steps": steps, "world": 16, "experts": {"num": experts, "top_k": 8}}
    yield {**about, "step": 0, "time": begin, "from": 0, "mesh": MESHES[0]}
    for first, last in ((1, cut + 7), (cut + 1, steps)) if steps > 30 else ((1, steps),):
        if first > 1:
            begin += 600
            yield {**about, "step": cut, "time": begin + 4.2 * cut, "from": cut, "mesh": MESHES[1]}
        for step in range(first, last + 1):
            yield from _step(step, steps, begin, lr, dice, layers, experts)
    yield {"kind": "end", "step": steps, "time": begin + 4.2 * steps, "why": ""}


def _step(
    step: int, steps: int, begin: float, lr: float, dice: random.Random, layers: int, experts: int
) -> Iterator[dict[str, Any]]:
    at = {"step": step, "time": begin + 4.2 * step}
    loss = 1.1 + 1.4 * math.exp(-step / 180) + dice.gauss(0, 0.05)
    skew = 1 + 1.5 * math.exp(-step / 300)
    yield {
        "kind": "step", **at, "train/loss": loss, "train/grad_norm": abs(dice.gauss(0.8, 0.2)) + 4 * 0.98**step,
        "train/learning_rate": lr * min(1, step / 30) * (1 + math.cos(math.pi * step / steps)) / 2,
        "train/tokens": 262_144 * step, "train/targets": 120_000, "train/epoch": step / 400, "train/clipped": 0,
        "train/loss/chats": loss + 0.1, "train/loss/code": loss - 0.2,
        "throughput/tokens_per_s": dice.gauss(62_000, 900), "throughput/mfu": dice.gauss(0.41, 0.006),
        "memory/peak_bytes": 71_300_000_000 + 10_000_000 * min(step, 50), "memory/rank": 3, "time/step_s": 4.2,
        "time/data_wait_share": abs(dice.gauss(0.001, 0.0006)), "train/router_loss": 0.001,
        "experts/max_over_mean": [skew + abs(dice.gauss(0, 0.1)) for _ in range(layers)], "experts/dead": 0,
    }  # fmt: skip
    if step % 10 == 1 or step == steps:
        load = [[max(0, int(dice.gauss(1000, 250 * skew))) for _ in range(experts)] for _ in range(layers)]
        yield {"kind": "experts", **at, "load": load}
    if step % 100 == 0 or step == steps:
        held = 1.25 + 1.3 * math.exp(-step / 200)
        yield {
            "kind": "eval", **at, "eval/held-out/loss": held, "eval/held-out/perplexity": math.exp(held),
            "eval/code/loss": held - 0.2, "eval/code/perplexity": math.exp(held - 0.2),
        }  # fmt: skip
        yield {"kind": "save", **at, "path": f"/data/runs/first/checkpoints/step-{step:06d}", "seconds": 3.41}
        for number, prompt in enumerate(("Why is the sky blue?", "</script><b>1 < 2 & 3?")):
            yield {
                "kind": "sample",
                **at,
                "number": number,
                "prompt": prompt,
                "text": "Because <b>light</b> </script> scatters.",
            }
