"""What bfloat16 adds: how far a run in it is from the same run in a wider dtype, on one process and on the mesh.

The oracles compare like with like, a dtype on a mesh with the same dtype on one process. Here one process in the wide
dtype is the measure of all, so that what precision costs is seen apart from what the mesh costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Batch
from ..engine import gather, logits
from ..mesh import Mesh
from .trial import Trial

_WORST = 5  # parameters that are named


@dataclass(frozen=True)
class Portrait:
    """What a run says in its first step. On rank 0 whole, elsewhere without gradients."""

    scores: Sequence[Tensor]  # of every micro-batch of data rank 0, without filler: [tokens, vocabulary], or values
    loss: float
    norm: float
    grads: Mapping[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """How far a run is from the measure."""

    mean_kl: float | None  # nats a token; None of a value head
    max_score: float  # of the log-probabilities of labels, or of values
    loss: float  # relative
    norm: float  # relative, of the whole gradient
    worst: Sequence[tuple[str, float]]  # gradients of the largest relative errors


@dataclass(frozen=True)
class Precision:
    """Costs by what ran; `measure` is what they are measured by."""

    measure: str
    costs: Mapping[str, Cost]


def portray(trial: Trial, mesh: Mesh | None = None) -> Portrait:
    """Of one process, which takes the data of all ranks, or of a mesh."""
    engine = trial.engine(mesh or Mesh(device="cpu"))
    batches = trial.data(0)  # the same on all ranks, for all must run
    scores = [logits(engine.model, batch)[: len(batch) - batch.num_filler].cpu() for batch in batches]
    loss = engine.backward(trial.all_batches() if mesh is None else trial.batches(engine.model))
    return Portrait(scores, loss, engine.norm(engine.model.grads()), gather(engine.model, "grad"))


def cost_of(found: Portrait, measure: Portrait, batches: Sequence[Batch], head: str) -> Cost:
    both = list(zip(found.scores, measure.scores, batches, strict=True))
    if head == "lm":
        divergence = torch.cat([_divergence(a, b) for a, b, _ in both])
        apart = torch.cat([_label_gap(a, b, batch.labels[: len(a)]) for a, b, batch in both])
    else:
        divergence, apart = None, torch.cat([(a.double() - b.double()).abs().flatten() for a, b, _ in both])
    errors = {name: _error(found.grads[name], ref, measure.norm) for name, ref in measure.grads.items()}
    worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
    return Cost(
        None if divergence is None else divergence.mean().item(), apart.max().item(),
        _relative(found.loss, measure.loss), _relative(found.norm, measure.norm), worst,
    )  # fmt: skip


def _divergence(found_TV: Tensor, measure_TV: Tensor) -> Tensor:
    q_TV, p_TV = (x.double().log_softmax(-1) for x in (found_TV, measure_TV))
    return (p_TV.exp() * (p_TV - q_TV)).sum(-1)


def _label_gap(found_TV: Tensor, measure_TV: Tensor, labels_T: Tensor) -> Tensor:
    rows = (labels_T >= 0).nonzero().flatten()
    found, measure = (x.double().log_softmax(-1)[rows, labels_T[rows]] for x in (found_TV, measure_TV))
    return (found - measure).abs()


def _error(found: Tensor, measure: Tensor, norm: float) -> float:
    floor = max(measure.double().norm().item(), 1e-6 * norm)  # what is nothing of the whole is not judged by itself
    return (found.double() - measure.double()).norm().item() / floor


def _relative(found: float, measure: float) -> float:
    return abs(found - measure) / max(abs(measure), 1e-30)


def lines_of(precision: Precision) -> list[list[str]]:
    """A table: what, then a column a run."""
    costs = list(precision.costs.values())
    kl = [["mean KL, nats a token", *(f"{c.mean_kl:.1e}" for c in costs)]] if costs[0].mean_kl is not None else []
    score = "log-probability of a label" if kl else "value"
    return [
        *kl,
        [f"largest difference of a {score}", *(f"{c.max_score:.1e}" for c in costs)],
        ["relative difference of the loss", *(f"{c.loss:.1e}" for c in costs)],
        ["relative difference of the gradient's norm", *(f"{c.norm:.1e}" for c in costs)],
        *(
            [f"relative error of a gradient, worst {i + 1}", *(f"{c.worst[i][1]:.1e} {c.worst[i][0]}" for c in costs)]
            for i in range(len(costs[0].worst))
        ),
    ]
