"""Measure host time: what a rank does between the operations of a step, on a model with almost no arithmetic.

    python -m bench.host                  # one process: forward and backward a layer, the update a parameter
    python -m bench.host --rounds 20

The model has as many layers as a real one, but only 16 features and 32 tokens. So nearly all of the time is Python,
dispatch and autograd, which a GPU would have to wait for. Times are CPU time of one thread, medians of rounds that
alternate between kinds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import meshwright as mw

LAYERS, TOKENS = 24, 32
COMMON = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, intermediate_size=16, tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(model_type="qwen3", **COMMON),
    "experts": dict(
        model_type="qwen3_moe", **COMMON, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=8,
        norm_topk_prob=True,
    ),
}  # fmt: skip
KINDS = {
    "none": mw.MemoryOptions(),
    "selective": mw.MemoryOptions(recompute="selective"),
    "full": mw.MemoryOptions(recompute="full"),
}


class Timed:
    """An engine, and the milliseconds of backward and of the update in each of its steps."""

    def __init__(self, recipe: Path, memory: mw.MemoryOptions) -> None:
        self.engine = mw.Engine(mw.init(recipe, mw.Mesh(device="cpu"), memory=memory, dtype=torch.float32), lr=1e-3)
        self.num = sum(1 for _ in self.engine.model.trainable)
        self.batch = mw.pack([[n % 64 for n in range(TOKENS)]])
        self.both: list[float] = []
        self.update: list[float] = []

    def step(self) -> None:
        self.both.append(_ms(lambda: self.engine.backward([self.batch])))
        self.update.append(_ms(self.engine.update))


def _ms(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return 1e3 * (time.process_time() - start)


def measured(at: Path, rounds: int) -> Mapping[tuple[str, str], Timed]:
    runs = {}
    for name, config in MODELS.items():
        (at / name).mkdir()
        (at / name / "config.json").write_text(json.dumps(config))
        runs |= {(name, kind): Timed(at / name, memory) for kind, memory in KINDS.items()}
    for _ in range(rounds + 2):
        for run in runs.values():
            run.step()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as at:
        runs = measured(Path(at), options.rounds)
    print("| model | recompute | forward + backward, ms a layer | update, us a parameter |\n|---|---|---|---|")
    for (name, kind), run in runs.items():
        both, update = (statistics.median(times[2:]) for times in (run.both, run.update))
        print(f"| {name} | {kind} | {both / LAYERS:.2f} | {1e3 * update / run.num:.1f} ({run.num}) |")


if __name__ == "__main__":
    main()
