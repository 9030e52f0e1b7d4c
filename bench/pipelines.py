"""Time the pipeline schedules on 2 local ranks, and compare how long ranks wait with the bubble of the schedule.

    python -m bench.pipelines                        # Qwen3 of 8 layers on pp=2, 8 micro-batches
    python -m bench.pipelines --mesh pp=2,fsdp=2 --rounds 3 --append
    python -m bench.pipelines --mesh cp=2            # one row: context parallelism, against one process

Forward + backward of the model of bench/step.py in float32, one thread per rank, all contenders in the same processes.

- waited: the average share of the time in which a rank used no CPU.
- on paper: the bubble of the schedule if all stages cost the same, and backward twice as much as forward.
- by cost: the bubble if stages cost what their parameters say, as in `meshwright plan`. The head is 40 % of the work of
  this model, so no split balances the stages.

torch runs its own Schedule1F1B over the same stages.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import meshwright as mw
from bench.step import MODELS, make
from meshwright.axes import Axes
from meshwright.plan import mesh_of
from meshwright.sharding import ORDERS, Action, costs_of_stages, times
from meshwright.sharding.schedules import BACKWARD
from meshwright.verify import run_ranks

TOKENS, BATCHES = 256, 8
SIDES: dict[str, mw.Pipeline] = {
    "1F1B": mw.Pipeline(hold=False),
    "1F1B, held": mw.Pipeline(hold=True),
    "interleaved, 2 stages a rank": mw.Pipeline(stages=2),
    "zero bubble": mw.Pipeline("zero-bubble"),
    "V": mw.Pipeline("v"),
}
Results = dict[str, dict[str, Any]]


def batches(data_rank: int) -> list[mw.Batch]:
    g = torch.Generator().manual_seed(data_rank)
    return [mw.pack([torch.randint(32000, (TOKENS,), generator=g).tolist()]) for _ in range(BATCHES)]


def side(directory: Path, mesh: mw.Mesh, pipeline: mw.Pipeline) -> Callable[[], float]:
    engine = mw.Engine(mw.load(directory, mesh, dtype=torch.float32, pipeline=pipeline), lr=1e-3)
    data = batches(mesh.data_rank)

    def step() -> float:
        loss = engine.backward(data)
        engine.discard()
        return loss

    return step


class Numbered(nn.Module):
    """A stage for torch's schedules, which pass activations on and the index of a micro-batch as a keyword."""

    def __init__(self, part: Any, data: list[mw.Batch]) -> None:
        super().__init__()
        self.part, self.data = part, data

    def forward(self, x: Tensor | None = None, *, mb: Tensor) -> Tensor:
        batch = self.data[int(mb)]
        self.part.balance.begin(torch.ones(TOKENS, dtype=torch.bool))
        (y,) = self.part(batch.tokens, batch.labels, batch.docs, "logprobs", x)
        return y  # type: ignore[no-any-return] # scores, or what the next stage gets


def torchs(directory: Path, mesh: mw.Mesh) -> Callable[[], float]:
    model, data = mw.load(directory, mesh, dtype=torch.float32), batches(mesh.data_rank)
    at, num = mesh.coords["pp"], mesh.axes.pp
    hidden = torch.empty(TOKENS, 512, device="meta", requires_grad=True)
    out = torch.empty(TOKENS, device="meta", requires_grad=True) if at == num - 1 else hidden
    part = Numbered(model.parts[0], data)
    stage = PipelineStage(
        part, at, num, mesh.device, group=mesh.process_group(("pp",)), input_args=() if at == 0 else (hidden,),
        output_args=out,
    )  # fmt: skip
    weight = sum(int(batch.num_targets) for batch in data)

    def loss(scores: Tensor, number: Tensor) -> Tensor:
        return -scores.masked_fill(~data[int(number)].is_target_T, 0.0).sum() / weight

    schedule = Schedule1F1B(stage, BATCHES, loss_fn=loss, scale_grads=False)
    numbers = torch.arange(BATCHES)

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(mb=numbers, target=numbers, losses=losses, return_outputs=False)
        part.zero_grad(set_to_none=True)
        return sum(each.item() for each in losses)

    return step


def turns(directory: Path, sizes: dict[str, int], rounds: int) -> Results:
    """Run all contenders in turn on this rank. Return their losses, seconds, and shares of waiting."""
    mesh = mw.Mesh(**sizes, device="cpu")
    sides = {name: side(directory, mesh, pipeline) for name, pipeline in (SIDES if mesh.axes.pp > 1 else {}).items()}
    if mesh.axes.pp == mesh.axes.world > 1:
        sides["torch's Schedule1F1B"] = torchs(directory, mesh)
    if mesh.axes.pp == 1:
        sides[str(mesh.axes)] = side(directory, mesh, mw.Pipeline())
    results: Results = {name: {"loss": step(), "seconds": [], "waited": []} for name, step in sides.items()}
    for _ in range(rounds):
        for name, step in sides.items():
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            step()
            took = time.perf_counter() - began
            results[name]["seconds"].append(took)
            results[name]["waited"].append(max(0.0, 1 - (time.process_time() - used) / took))
    return results


def on_paper(directory: Path, pipeline: mw.Pipeline, pp: int) -> tuple[float, float]:
    """Return the bubble if all stages cost the same, and if they cost what their matmuls do."""
    from meshwright.blueprint import Blueprint

    blueprint = Blueprint.of(json.loads((directory / "config.json").read_text())).with_options(pipeline=pipeline)
    line = blueprint.spec.line(pp)
    costs = costs_of_stages(blueprint.table, blueprint.module, line)

    def bubble(of_stages: Sequence[float]) -> float:
        def cost(action: Action) -> float:
            return (2.0 if action.kind == BACKWARD else 1.0) * of_stages[action.stage]

        return times(line, ORDERS[pipeline.schedule](line, BATCHES), cost).bubble

    return bubble([1.0] * len(costs)), bubble(costs)


def compare(sizes: dict[str, int], rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder)
        (recipe / "config.json").write_text(json.dumps({**MODELS["qwen3"], "dtype": "bfloat16"}))
        run_ranks(1, make, recipe, seconds=300)
        world = Axes(**sizes).world
        ranks = run_ranks(world, turns, recipe / "m", sizes, rounds, seconds=1800)
        bubbles = {n: on_paper(recipe / "m", p, sizes.get("pp", 1)) for n, p in SIDES.items() if sizes.get("pp", 1) > 1}
    rows = []
    for name in ranks[0]:
        seconds = [max(times) for times in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)]
        waited = statistics.fmean(statistics.median(rank[name]["waited"]) for rank in ranks)
        loss = max(rank[name]["loss"] for rank in ranks)
        paper, by_cost = (f"{each:.1%}" for each in bubbles[name]) if name in bubbles else "--"
        timing = f"{statistics.median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
        rows.append(f"| {name} | {timing} | {waited:.1%} | {paper} | {by_cost} | {loss:.5f} |")
    return rows


def heading(mesh: str, rounds: int) -> str:
    return (
        f"\n## Pipelines, {datetime.date.today()}\n\n"
        f"{mesh}, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo; Qwen3 of 8 layers in "
        f"float32, forward + backward of {BATCHES} micro-batches of {TOKENS} tokens, medians (min-max) of {rounds} "
        "alternations, the slowest rank.\n\n"
        "| schedule | seconds | waited | on paper | by cost | loss |\n|---|---|---|---|---|---|"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="pp=2", metavar="AXIS=N,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--append", action="store_true", help="add the table to bench/results.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [heading(options.mesh, options.rounds), *compare(mesh_of(options.mesh), options.rounds)]
    print("\n".join(lines), flush=True)
    if options.append:
        with (Path(__file__).parent / "results.md").open("a") as out:
            out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
