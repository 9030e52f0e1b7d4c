"""What is tried: a source, a mesh, data that differs on every data rank; and what one process says of the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..data import Batch, pack
from ..engine import Engine, Model, Savings, gather, load, logprobs, losses
from ..mesh import Axes, Mesh

LR = 1e-3

DataOf = Callable[[int], list[Batch]]  # a data rank's micro-batches


@dataclass(frozen=True)
class Tolerance:
    """What rounding alone may do: to a gradient relative to its norm, to a loss relatively, to a log-probability."""

    grad: float
    loss: float
    logprob: float


TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-9, 1e-9),
    torch.float32: Tolerance(2e-5, 1e-5, 2e-5),
    torch.bfloat16: Tolerance(0.3, 5e-3, 0.2),  # a smoke, A_log is the noisiest: the float64 run is the proof
}


@dataclass(frozen=True)
class Trial:
    source: Path
    axes: Axes
    data: DataOf
    head: str = "lm"
    dtype: torch.dtype = torch.float64
    steps: int = 3
    savings: Savings = Savings()

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype]

    def engine(self, mesh: Mesh) -> Engine:
        model = load(self.source, mesh, head=self.head, dtype=self.dtype, savings=self.savings)
        loss = squared_errors if self.head == "value" else losses.cross_entropy
        return Engine(model, lr=LR, loss=loss)

    def batches(self, model: Model) -> list[Batch]:
        return self.data(model.mesh.axes.data_rank(model.mesh.rank))

    def all_batches(self) -> list[Batch]:
        """Of all data ranks: the whole step, for one process."""
        return [batch for rank in range(self.axes.num_data_ranks) for batch in self.data(rank)]


def squared_errors(scores: losses.Scores, fields: losses.Fields) -> Tensor:
    """Of every label, each with a weight of its own: labels that change places would show."""
    error_TL = scores["values"].view(len(fields["target"]), -1) - fields["target"][:, None]
    return (error_TL.square() * torch.arange(1, error_TL.shape[1] + 1, device=error_TL.device)).sum(1) / 2


@dataclass(frozen=True)
class Reference:
    """What one process finds, in the same precision."""

    losses: Sequence[float]  # of the first steps
    norm: float  # of the first gradient
    grads: dict[str, Tensor]  # of the first step, by Hugging Face name
    alone: Sequence[Tensor]  # log-probabilities of each document of the first batch, run alone
    loads: Tensor  # [layers of experts, experts]: tokens that each got in the first step


def refer(trial: Trial) -> Reference:
    """Run the trial on one process (call it in a world of one), as plainly as can be."""
    engine = replace(trial, savings=Savings()).engine(Mesh(device="cpu"))
    alone = [logprobs(engine.model, one) for one in documents_of(trial.data(0)[0])] if trial.head == "lm" else []
    batches, found, norm, grads, loads = trial.all_batches(), [], 0.0, {}, torch.zeros(0)
    for step in range(trial.steps):
        found.append(engine.backward(batches))
        if step == 0:
            grads, loads = gather(engine.model, "grad"), engine.router.load_LE
        norm_here = engine.update()
        norm = norm if step else norm_here
    return Reference(found, norm, grads, alone, loads)


def documents_of(batch: Batch) -> list[Batch]:
    """Each document of a batch as a batch of its own."""
    bounds = batch.docs.bounds
    return [pack([batch.tokens[a:b].tolist()], [batch.labels[a:b].tolist()]) for a, b in pairwise(bounds)]
