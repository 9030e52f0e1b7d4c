"""Measure Muon against AdamW: the time of an update, and the held-out losses of a tiny mixture.

    python -m bench.muon --time                        # a dense model and a mixture, one process and fsdp=2: 5 minutes
    python -m bench.muon --train                       # two seeds, five lrs each or more: 10 minutes
    python -m bench.muon --time --models qwen3 --rounds 9 --append

--time: the clock runs during `engine.update` alone, which clips and updates. All sides live in the same processes, have
the same gradients, and take turns; on two ranks the slower one counts. The peer is torch.optim.Muon on copies of the
matrices of the files, with torch.optim.AdamW(fused=True) for all else. torch iterates in bfloat16 only. A step on two
ranks must send the bytes of its bill, or the bench refuses to go on.

--train: both optimizers train the same random weights on the same batches, and take turns step by step. Documents are
of a made-up language, a Markov chain of order 2: the next token follows either the last token or the one before it, and
spans of a document are repeated. lr warms up, then falls along a cosine to a tenth. A side gets more lrs while its best
one is the lowest or the highest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from bench.layouts import ratio
from meshwright.engine.step_bill import step_bill
from meshwright.verify import Recorder, run_ranks
from meshwright.verify.file_matrices import indices_of_matrices

TOKENS, LR = 256, 1e-3
VOCAB = 16000
COMMON = dict(
    vocab_size=VOCAB, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=64, intermediate_size=1536, tie_word_embeddings=False, max_position_embeddings=4096, dtype="float32",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_type="qwen3", **COMMON),
    "qwen3_moe": dict(
        model_type="qwen3_moe", **COMMON, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256,
        norm_topk_prob=True,
    ),
}  # fmt: skip
OPTIMIZERS: dict[str, mw.AdamW] = {
    "AdamW": mw.AdamW(),
    "Muon in bfloat16": mw.Muon(),
    "Muon in float32": mw.Muon(matrix_dtype=torch.float32),
}
ADAMW, MUON, _ = OPTIMIZERS
PEER = "torch.optim.Muon and AdamW"

TINY_VOCAB, SUCCESSORS = 200, (0.7, 0.3)
STEPS, WARM_UP, BATCHES, LENGTH, EVERY = 300, 30, 4, 256, 10
LRS = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
MAX_MORE = 4  # lrs that a side may get beyond LRS
TINY: dict[str, Any] = dict(
    model_type="qwen3_moe", vocab_size=TINY_VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=128, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=48, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=LENGTH,
    output_router_logits=True, router_aux_loss_coef=0.001, dtype="float32",
)  # fmt: skip
SIDES = {"AdamW": OPTIMIZERS[ADAMW], "Muon": OPTIMIZERS[MUON]}

Times = tuple[float, float]  # seconds, and seconds of CPU time


class Ours:
    """An engine whose updates are timed."""

    def __init__(self, recipe: Path, mesh: mw.Mesh, optimizer: mw.AdamW) -> None:
        model = mw.init(recipe, mesh, dtype=torch.float32)
        self.engine = mw.Engine(model, lr=LR, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1 + mesh.data_rank)
        self.batches = [mw.pack([torch.randint(VOCAB, (TOKENS,), generator=generator).tolist()])]
        self.num_billed = self._checked_bytes(step_bill(model, TOKENS, 1, optimizer=optimizer))
        self.times, self.before = list[Times](), list[float]()

    def _checked_bytes(self, charges: Sequence[Any]) -> int:
        """Take a step, which must send the bytes of its bill, and return them."""
        with Recorder() as recorder:
            self.engine.step(self.batches)
        sent = sum(seen.num_bytes for seen in recorder.collectives if len(seen.ranks) > 1)
        billed = sum(charge.count * charge.num_bytes for charge in charges)
        if sent != billed:
            raise RuntimeError(f"a step sent {sent} bytes, the bill says {billed}")
        return billed

    def turn(self) -> None:
        self.before.append(_times(lambda: self.engine.backward(self.batches))[0])
        self.times.append(_times(self.engine.update))


class Peer:
    """The optimizers of torch on copies of the weights of an engine, with the gradients of this engine."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.times = ours, list[Times]()
        weights, config = mw.gather(ours.engine.model, "weight"), ours.engine.model.config
        self.at = {key: indices_of_matrices(key, whole.shape, config) for key, whole in weights.items()}
        self.parts = {
            key: [torch.nn.Parameter(part.clone()) for part in self._parts(key, whole)]
            for key, whole in weights.items()
        }
        matrices, others = ([p for key in self.parts if bool(self.at[key]) == is_one for p in self.parts[key]]
                            for is_one in (True, False))  # fmt: skip
        self.num_matrices, self.every = len(matrices), [*matrices, *others]
        options: dict[str, Any] = dict(lr=LR, weight_decay=0.1)
        self.optimizers = [
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
            torch.optim.AdamW(others, betas=(0.9, 0.95), fused=True, **options),
        ]
        self.turn()
        self.times.clear()

    def _parts(self, key: str, whole: Tensor) -> list[Tensor]:
        return [whole.reshape(-1)[at] for at in self.at[key]] or [whole]

    def turn(self) -> None:
        engine = self.ours.engine
        engine.backward(self.ours.batches)
        for key, grad in mw.gather(engine.model, "grad").items():
            for param, part in zip(self.parts[key], self._parts(key, grad), strict=True):
                param.grad = part.clone()
        engine.discard()
        self.times.append(_times(self._update))

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.every, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for param in self.every:
            param.grad = None


def _times(act: Callable[[], object]) -> Times:
    """Return how long a call takes: seconds, and seconds of CPU time of this process."""
    if dist.is_initialized():
        dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


def turns(recipe: Path, rounds: int) -> dict[str, Any]:
    """Run all sides in turn on this rank. Return seconds and bytes."""
    dist.init_process_group("gloo")
    mesh = mw.Mesh(fsdp=dist.get_world_size(), device="cpu")
    ours = {name: Ours(recipe, mesh, optimizer) for name, optimizer in OPTIMIZERS.items()}
    peers = {PEER: Peer(ours[ADAMW])} if dist.get_world_size() == 1 else {}
    sides: Mapping[str, Ours | Peer] = {**ours, **peers}
    for _ in range(rounds):
        for side in sides.values():
            side.turn()
    return {
        "times": {name: side.times for name, side in sides.items()},
        "before": statistics.median(each for side in ours.values() for each in side.before),
        "bytes": {name: side.num_billed for name, side in ours.items()},
        "sizes": [(peer.num_matrices, sum(p.numel() for p in peer.every)) for peer in peers.values()],
    }


def timed(name: str, rounds: int) -> Iterator[str]:
    """Yield the lines of a model: one process, then two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        for ranks in (1, 2):
            results = run_ranks(ranks, turns, Path(folder), rounds, seconds=900)
            seconds, cpu = (
                {side: [max(t[which] for t in turn) for turn in zip(*(r["times"][side] for r in results), strict=True)]
                 for side in results[0]["times"]}
                for which in (0, 1)
            )  # fmt: skip
            num_bytes = {side: max(r["bytes"][side] for r in results) for side in results[0]["bytes"]}
            for num_matrices, numel in results[0]["sizes"]:
                yield f"| {name}: {numel / 1e6:.0f}M, {num_matrices} matrices | | | | | | |"
            before = max(r["before"] for r in results)
            for side, own in seconds.items():
                what = f"fsdp={ranks}" if ranks > 1 else "one process"
                yield f"| {what} | {side} | {spread(own)} | {ratio(own, seconds[ADAMW])} | {spread(cpu[side])} | " + (
                    sent(side, num_bytes) if ranks > 1 else " | |"
                )
            if PEER in seconds:
                last = ratio(cpu[PEER], cpu[MUON])
                yield f"| | {PEER} by our {MUON} | | {ratio(seconds[PEER], seconds[MUON])} | {last} | | |"
            yield f"| | forward and backward of {TOKENS} tokens | {before:.3f} | | | | |"


def sent(side: str, num_bytes: Mapping[str, int]) -> str:
    return f"{num_bytes[side] / 1e6:.1f} | {(num_bytes[side] - num_bytes[ADAMW]) / 1e6:.1f} |"


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


def language(seed: int) -> Iterator[list[int]]:
    """Yield documents of LENGTH tokens without end. 7 in 10 tokens follow one of two tables, the others repeat a span.

    Pairs of neighbours say little, so that most of what can be learned is in the matrices, not in embedding and head.
    """
    rng = random.Random(seed)
    tables = [[rng.sample(range(TINY_VOCAB), len(SUCCESSORS)) for _ in range(TINY_VOCAB)] for _ in range(2)]
    while True:
        tokens = [rng.randrange(TINY_VOCAB), rng.randrange(TINY_VOCAB)]
        while len(tokens) < LENGTH:
            if len(tokens) > 32 and rng.random() < 0.03:
                start = rng.randrange(len(tokens) - 16)
                tokens += tokens[start : start + rng.randrange(8, 17)]
            else:
                back = rng.randrange(2)
                tokens += rng.choices(tables[back][tokens[-1 - back]], SUCCESSORS)
        yield tokens[:LENGTH]


def lr_at(step: int, highest: float) -> float:
    if step < WARM_UP:
        return highest * (step + 1) / WARM_UP
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


class Run:
    """A training run: its held-out losses by the number of steps, and how long each step took."""

    def __init__(self, recipe: Path, seed: int, lr: float, optimizer: mw.AdamW) -> None:
        model = mw.init(recipe, mw.Mesh(device="cpu"), seed=seed, dtype=torch.float32)
        schedule = partial(lr_at, highest=lr)
        self.engine = mw.Engine(model, lr=schedule, optimizer=optimizer, on_nonfinite="skip")
        self.curve, self.times = dict[int, float](), list[Times]()

    def step(self, batches: Sequence[mw.Batch], held_out: Sequence[mw.Batch]) -> None:
        self.times.append(_times(lambda: self.engine.step(batches)))
        if len(self.times) % EVERY == 0:
            self.curve[len(self.times)] = self.engine.evaluate(held_out)

    def seconds(self, steps: int = STEPS) -> str:
        return " s, ".join(f"{sum(each):.1f}" for each in zip(*self.times[:steps], strict=True)) + " s of CPU"

    @property
    def final(self) -> float:
        return self.curve[STEPS] if math.isfinite(self.curve[STEPS]) else math.inf


Runs = dict[str, dict[float, Run]]


def pretrained(seed: int) -> Runs:
    """Train with both optimizers, side by side for each lr of the grid, and then with more lrs where needed."""
    documents = language(seed)
    held_out, *steps = [
        [mw.pack([next(documents)]) for _ in range(16 if at == 0 else BATCHES)] for at in range(STEPS + 1)
    ]
    runs: Runs = {side: {} for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        todo = [(lr, [*SIDES]) for lr in LRS]
        while todo:
            lr, sides = todo.pop(0)
            some = {side: Run(Path(folder), seed, lr, SIDES[side]) for side in sides}
            for batches in steps:
                for run in some.values():
                    run.step(batches, held_out)
            for side, run in some.items():
                runs[side][lr] = run
                print(f"seed {seed}, {side}, lr {lr:g}: {run.final:.4f}, {run.seconds()}", flush=True)
            todo = todo or [(lr, [side]) for side in SIDES for lr in _beyond(runs[side])]
    return runs


def _beyond(runs: Mapping[float, Run]) -> list[float]:
    """Return an lr beyond the best one, if that is the lowest or the highest."""
    best, num = _best(runs), len(runs)
    if num >= len(LRS) + MAX_MORE or min(runs) < best < max(runs):
        return []
    return [best / 2 if best == min(runs) else best * 2]


def _best(runs: Mapping[float, Run]) -> float:
    return min(runs, key=lambda lr: runs[lr].final)


def compared(seed: int) -> list[str]:
    """Return all final losses, the curves of the best runs, and when Muon is where AdamW ends."""
    runs = pretrained(seed)
    base, own = (side[_best(side)] for side in runs.values())
    lines = [
        f"\nSeed {seed}, held-out losses after {STEPS} steps:\n",
        "| lr | AdamW | Muon |\n|---|---|---|",
    ]
    for lr in sorted({lr for side in runs.values() for lr in side}):
        finals = [f"{side[lr].final:.4f}" if lr in side else "" for side in runs.values()]
        lines.append(f"| {lr:g} | {' | '.join(finals)} |")
    lines.append("\n| step | AdamW's best | Muon's best |\n|---|---|---|")
    lines += [f"| {at} | {base.curve[at]:.4f} | {own.curve[at]:.4f} |" for at in base.curve if at % 30 == 0]
    reached = next((at for at, loss in own.curve.items() if loss <= base.final), None)
    when = "never" if reached is None else f"at step {reached}, after {own.seconds(reached)}"
    lines.append(f"\nMuon's best run is at AdamW's best final loss {when}.")
    for name, side in runs.items():
        every = zip(*(step for run in side.values() for step in run.times), strict=True)
        wall, cpu = (1e3 * statistics.median(each) for each in every)
        lines.append(
            f"{name}'s best run (lr {_best(side):g}) took {side[_best(side)].seconds()}; the median step of all its "
            f"runs took {wall:.0f} ms, {cpu:.0f} ms of CPU."
        )
    return lines


def machine() -> str:
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, one thread a rank, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def timings(options: argparse.Namespace) -> Iterator[str]:
    yield (
        f"\n## Update of Muon, {datetime.date.today()}\n\n{machine()}; parameters in float32, clipping included, "
        f"medians (min-max) of {options.rounds} alternations, the slower rank.\n\n"
        "| mesh | side | update s | by our AdamW (min-max) | CPU s | MB of a step | MB more than AdamW |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name in options.models:
        yield from timed(name, options.rounds)


def trainings(options: argparse.Namespace) -> Iterator[str]:
    yield (
        f"\n## Pre-training with Muon, {datetime.date.today()}\n\n{machine()}. A mixture of {TINY['num_experts']} "
        f"experts, random weights, float32, Muon's iteration in bfloat16; {BATCHES} micro-batches of {LENGTH} tokens a "
        f"step, lr warms up for {WARM_UP} steps and falls to a tenth; weight decay 0.1, clipping at 1.0."
    )
    for seed in options.seeds:
        yield from compared(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="time updates")
    parser.add_argument("--train", action="store_true", help="compare losses")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="of --time")
    parser.add_argument("--rounds", type=int, default=7, help="of --time (default 7)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of --train (default 0 1)")
    parser.add_argument("--append", action="store_true", help="add the tables to bench/results.md")
    options = parser.parse_args()
    if not options.time and not options.train:
        parser.error("choose --time, --train or both")
    torch.set_num_threads(1)
    lines = list[str]()
    for is_wanted, sections in ((options.time, timings), (options.train, trainings)):
        for line in sections(options) if is_wanted else ():
            lines.append(line)
            print(line, flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
