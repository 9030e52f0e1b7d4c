"""Time steps of `meshwright train` against steps of the bare engine on the same batches, alternating in one run.

    python -m bench.trainer                       # one process, the models of bench.step
    python -m bench.trainer --ranks 2 --models qwen3 --rounds 10

In each round both run a few steps. A step of the trainer takes its batches from the data plan, writes metrics.jsonl and
agrees with the other ranks on whether to go on; nothing is saved or evaluated. The bare engine gets the batches that
the trainer has just used. `ratio` is bare time / trainer time, the median over all rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import meshwright as mw
from bench.step import MODELS
from meshwright.verify import run_ranks

LENGTH = 1024
STEPS = 4  # of each in a round


def documents(file: Path, num: int) -> None:
    """Write documents with log-normal lengths, as chats have."""
    dice = random.Random(0)
    with file.open("w") as out:
        for _ in range(num):
            ids = [dice.randrange(32000) for _ in range(min(LENGTH, max(4, int(dice.lognormvariate(5.3, 0.8)))))]
            out.write(json.dumps({"ids": ids}) + "\n")


def measure(at: Path, ranks: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    config = mw.train.config_of(
        model=str(at / "model"), out=str(at / "out"), cache=str(at / "cache"), mesh={"fsdp": ranks},
        data=[{"path": str(at / "ids.jsonl"), "kind": "tokens"}],
        train={
            "length": LENGTH, "tokens_per_step": 2 * ranks * LENGTH, "dtype": "float32", "steps": STEPS * (rounds + 1),
        },
        save={"export": False, "every": 10**6},
    )  # fmt: skip
    trainer, ratios, served = mw.Trainer(config), [], list[Any]()
    give = trainer.feed.step
    trainer.feed.step = lambda first: served.append(step := give(first)) or step  # type: ignore[method-assign, func-returns-value] # keep the batches
    steps = trainer.steps()
    for number in range(rounds + 1):
        served.clear()
        began = time.perf_counter()
        for _ in range(STEPS):
            next(steps)
        trainer_s = time.perf_counter() - began
        batches = [each.batches for each in served]
        began = time.perf_counter()
        for each in batches:
            trainer.engine.step(each)
        bare = time.perf_counter() - began
        if number:  # the first round warms up
            ratios.append(bare / trainer_s)
    steps.close()
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "step_s": bare / STEPS}


def figures(model: str, ranks: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        (at / "config").mkdir()
        (at / "config" / "config.json").write_text(json.dumps(MODELS[model]))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_ranks(1, functools.partial(new_weights, at), seconds=120)
            documents(at / "ids.jsonl", 40 * ranks * (rounds + 1))
            result = run_ranks(ranks, functools.partial(measure, at, ranks, rounds), seconds=1800)[0]
        lines = [json.loads(line) for line in (at / "out" / "metrics.jsonl").open()]
    waits = [line["time/data_wait_share"] for line in lines if line["kind"] == "step"][STEPS:]
    return {**result, "wait": statistics.median(waits), "most_wait": max(waits)}


def new_weights(at: Path) -> None:
    mw.export(mw.init(str(at / "config"), mw.Mesh()), at / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{'model':<10} {'ranks':>5} {'ratio':>7} {'least':>7} {'most':>7} {'step':>8} {'data wait':>10} {'most':>7}")
    for name in options.models.split(","):
        got = figures(name, options.ranks, options.rounds)
        print(
            f"{name:<10} {options.ranks:>5} {got['ratio']:7.3f} {got['least']:7.3f} {got['most']:7.3f} "
            f"{got['step_s']:6.2f} s {got['wait']:10.3%} {got['most_wait']:7.3%}",
            flush=True,
        )
