"""What is tried: a source, a mesh, data that differs on every data rank; and what one process says of the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..axes import Axes
from ..data import IGNORE, Batch, pack
from ..engine import Engine, Model, gather, load, losses
from ..mesh import Mesh
from ..parallel import Savings
from ..weights import whole_tensors
from .diagnose.forward import scores_of, watched

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
        """The whole step for one process: each micro-batch of all data ranks as one longer stream, since the router's
        aux loss is pooled over them."""
        return [_merged(each) for each in zip(*map(self.data, range(self.axes.num_data_ranks)), strict=True)]


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
    alone: Sequence[Tensor]  # scores of each document of the first batch, run alone
    prints: dict[str, Tensor]  # what every part gave out for them, by part
    sums: Sequence[Sequence[tuple[float, float]]]  # by data rank and micro-batch: loss terms and weight, without aux
    aux: tuple[float, dict[str, Tensor]]  # the router's part of the first loss, and of its gradients (if any)
    loads: Tensor  # [layers of experts, experts]: tokens that each got in the first step
    trained: dict[str, Tensor]  # in float64: the weights after the steps, by Hugging Face name, unrounded


def refer(trial: Trial) -> Reference:
    """Run the trial on one process (call it in a world of one), as plainly as can be."""
    engine = replace(trial, savings=Savings()).engine(Mesh(device="cpu"))
    alone, prints = _alone(trial, engine.model)
    sums, aux = _sums(trial, engine), _aux(trial, engine)
    batches, found, norm, grads, loads = trial.all_batches(), [], 0.0, {}, torch.zeros(0)
    for step in range(trial.steps):
        found.append(engine.backward(batches))
        if step == 0:
            grads, loads = gather(engine.model, "grad"), engine.router.load_LE
        norm_here = engine.update()
        norm = norm if step else norm_here
    trained = unrounded(engine.model) if trial.dtype == torch.float64 else {}
    return Reference(found, norm, grads, alone, prints, sums, aux, loads, trained)


def unrounded(model: Model) -> dict[str, Tensor]:
    """Whole weights on rank 0, as `gather` gives them, but as wide as they are stored."""
    keys = [k for k in model.keymap.keys.values() if k.name not in model.keymap.carried]
    streamed = whole_tensors(model.stored_model(model.stored()), model.keymap, keys, as_filed=False)
    return {key.name: tensor for key, tensor in streamed}


def _alone(trial: Trial, model: Model) -> tuple[list[Tensor], dict[str, Tensor]]:
    scores, prints = [], []
    for one in documents_of(trial.data(0)[0]):
        with watched(model) as seen:
            scores.append(scores_of(model, one))
        prints.append(seen.prints)
    return scores, {name: torch.cat([each[name] for each in prints]) for name in prints[0]}


def _sums(trial: Trial, engine: Engine) -> list[list[tuple[float, float]]]:
    """With these it can be told what a wrong loss was divided by."""
    ranks = [trial.data(rank) for rank in range(trial.axes.num_data_ranks)]
    weighed = [[(b, weight_of(b)) for b in batches] for batches in ranks]
    return [[(engine.evaluate([b]) * weight, weight) for b, weight in batches] for batches in weighed]


def weight_of(batch: Batch) -> float:
    """What a mean over it is divided by."""
    return float(batch.fields.get("weight", torch.ones(len(batch)))[batch.labels != IGNORE].double().sum())


def _aux(trial: Trial, engine: Engine) -> tuple[float, dict[str, Tensor]]:
    if not engine.router.balance.coefficient:
        return 0.0, {}
    kept, engine.loss = engine.loss, lambda scores, fields: kept(scores, fields) * 0.0
    loss, grads = engine.backward(trial.all_batches()), gather(engine.model, "grad")
    engine.discard()
    engine.loss = kept
    return loss, grads


def documents_of(batch: Batch) -> list[Batch]:
    """Each document of a batch as a batch of its own."""
    bounds = batch.bounds
    return [pack([batch.tokens[a:b].tolist()], [batch.labels[a:b].tolist()]) for a, b in pairwise(bounds)]


def _merged(batches: Sequence[Batch]) -> Batch:
    """One stream of the documents of all, their filler at its end."""
    documents: list[list[int]] = []
    labels: list[list[int]] = []
    fields: dict[str, list[Tensor]] = {name: [] for name in batches[0].fields}
    for batch in batches:
        bounds = [at for at in batch.bounds if at <= len(batch) - batch.num_filler]
        for a, b in pairwise(bounds):
            documents.append(batch.tokens[a:b].tolist())
            labels.append(batch.labels[a:b].tolist())
            for name, values in batch.fields.items():
                fields[name].append(values[a:b])
    return pack(documents, labels, length=sum(map(len, batches)), fields=fields)
