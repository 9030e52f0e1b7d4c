"""Measure what bfloat16 costs a model: the distance from the same run in a wider dtype, in one process and on a mesh.

    python -m bench.precision path/to/Qwen3-0.6B --mesh fsdp=2,tp=2
    python -m bench.precision path/to/critic --head value --wide float32

`meshwright verify` compares a dtype on a mesh with the same dtype in one process. This bench compares all runs with one
process in the wide dtype, so it separates the cost of precision from that of the mesh.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.axes import Axes
from meshwright.data import Batch
from meshwright.engine import gather, logits
from meshwright.log import quiet
from meshwright.mesh import Mesh
from meshwright.plan import mesh_of as sizes_of
from meshwright.recipe import Recipe
from meshwright.verify import FULL, Options, Plan, plan, run_ranks
from meshwright.verify.session import mesh_of, trial_of

_WORST = 5  # parameters to name


@dataclass(frozen=True)
class Snapshot:
    """The results of a run's first step. Other ranks than 0 have no gradients."""

    scores: Sequence[Tensor]  # of every micro-batch of data rank 0, without padding: [tokens, vocabulary], or values
    loss: float
    norm: float
    grads: Mapping[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """The distance of a run from the reference."""

    mean_kl: float | None  # nats a token; None for a value head
    max_score: float  # of the log-probabilities of labels, or of values
    loss: float  # relative
    norm: float  # relative, of the whole gradient
    worst: Sequence[tuple[str, float]]  # gradients of the largest relative errors


def measure(tried: Plan, dtype: str, source: Path, size: int) -> Snapshot:
    """Run one step: on the mesh, or in one process, which takes the data of all ranks."""
    trial = trial_of(tried, dtype, source)
    engine = trial.engine(Mesh(device="cpu") if size == 1 else mesh_of(tried))
    batches = trial.data(0)  # the same on all ranks, because all must run
    scores = [logits(engine.model, batch)[: len(batch) - batch.num_filler].cpu() for batch in batches]
    loss = engine.backward(trial.all_batches() if size == 1 else trial.batches(engine.model, 0))
    return Snapshot(scores, loss, engine.norm(engine.model.grads()), gather(engine.model, "grad"))


def cost_of(result: Snapshot, wide: Snapshot, batches: Sequence[Batch], head: str) -> Cost:
    both = list(zip(result.scores, wide.scores, batches, strict=True))
    if head == "lm":
        divergence = torch.cat([_divergence(a, b) for a, b, _ in both])
        apart = torch.cat([_label_gap(a, b, batch.labels[: len(a)]) for a, b, batch in both])
    else:
        divergence, apart = None, torch.cat([(a.double() - b.double()).abs().flatten() for a, b, _ in both])
    errors = {name: _error(result.grads[name], ref, wide.norm) for name, ref in wide.grads.items()}
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    return Cost(
        None if divergence is None else divergence.mean().item(), apart.max().item(),
        _relative(result.loss, wide.loss), _relative(result.norm, wide.norm), worst,
    )  # fmt: skip


def _divergence(result_TV: Tensor, wide_TV: Tensor) -> Tensor:
    q_TV, p_TV = (x.double().log_softmax(-1) for x in (result_TV, wide_TV))
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)


def _label_gap(result_TV: Tensor, wide_TV: Tensor, labels_T: Tensor) -> Tensor:
    rows = (labels_T >= 0).nonzero().flatten()
    result, wide = (x.double().log_softmax(-1)[rows, labels_T[rows]] for x in (result_TV, wide_TV))
    return (result - wide).abs()


def _error(result: Tensor, wide: Tensor, norm: float) -> float:
    floor = max(wide.double().norm().item(), 1e-6 * norm)  # a gradient near zero has no meaningful relative error
    return (result.double() - wide.double()).norm().item() / floor


def _relative(result: float, wide: float) -> float:
    return abs(result - wide) / max(abs(wide), 1e-30)


def costs(tried: Plan, wide: str, source: Path) -> dict[str, Cost]:
    """Return the cost of each run, by its description."""
    head, seconds = tried.options.recipe.head, tried.options.seconds

    def run(dtype: str, size: int) -> Snapshot:
        return run_ranks(size, measure, tried, dtype, source, size, seconds=seconds)[0]

    world, alone = tried.axes.world, run(wide, 1)
    runs = {"bfloat16, one process": ("bfloat16", 1)}
    runs |= {f"{dtype}, {tried.axes}": (dtype, world) for dtype in ("bfloat16", wide) if world > 1}
    batches = trial_of(tried, wide, source).data(0)
    return {name: cost_of(run(*which), alone, batches, head) for name, which in runs.items()}


def lines_of(cost_by_run: Mapping[str, Cost]) -> list[list[str]]:
    """Return the lines of a table with a column per run."""
    columns = list(cost_by_run.values())
    kl = [["mean KL, nats a token", *(f"{c.mean_kl:.1e}" for c in columns)]] if columns[0].mean_kl is not None else []
    score = "log-probability of a label" if kl else "value"
    return [
        *kl,
        [f"largest difference of a {score}", *(f"{c.max_score:.1e}" for c in columns)],
        ["relative difference of the loss", *(f"{c.loss:.1e}" for c in columns)],
        ["relative difference of the gradient's norm", *(f"{c.norm:.1e}" for c in columns)],
        *(
            [f"relative error of a gradient, worst {i + 1}", *(f"{c.worst[i][1]:.1e} {c.worst[i][0]}" for c in columns)]
            for i in range(len(columns[0].worst))
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory or a hub id; its weights are used unchanged")
    parser.add_argument("--mesh", default="", metavar="AXIS=N,...")
    parser.add_argument("--head", default="lm", choices=["lm", "value"])
    parser.add_argument(
        "--wide", default="float64", choices=["float64", "float32"], help="dtype of the reference (default float64)"
    )
    options = parser.parse_args()
    asked = Options(Recipe(head=options.head), (options.wide, "bfloat16"), FULL)
    tried = plan(options.model, Axes(**sizes_of(options.mesh)), asked)
    with quiet():
        cost_by_run = costs(tried, options.wide, tried.directory)
    print(" | ".join([f"against {options.wide}, one process", *cost_by_run]))
    for line in lines_of(cost_by_run):
        print(" | ".join(line))


if __name__ == "__main__":
    main()
