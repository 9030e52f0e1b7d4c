"""What is tried: a source, a mesh, data that differs on every data rank; and what one process says of the same data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..axes import DENSE, Axes
from ..data import IGNORE, Batch, cut, filled, joined_batches
from ..engine import Engine, Model, gather, init, load, losses
from ..mesh import Mesh
from ..ops import delta, loss
from ..ops.part_sizes import shrunk_part_sizes
from ..optim import AdamW, Optimizer
from ..recipe import ContextParallel, MemoryOptions, Pipeline, Recipe
from ..weights import whole_tensors
from . import entropy, independent_checks
from .diagnose.forward import scores_of, watched
from .recorder import Seen
from .results import Finding, Margin, Notes
from .small_data import LONG_STEP, Data

LR = 1e-3
MAX_NORM = 1.0  # norms of small models lie above and below it


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

# In 8 bits a value in the middle of two numbers falls to either side by the last bit of a sum, and may send a token to
# other experts: in float64 so rarely that the proof stands, else often, so that the others are a smoke.
_SMOKE = Tolerance(0.6, 2e-2, 1.0)
FP8_TOLERANCES = {**TOLERANCES, torch.float32: _SMOKE, torch.bfloat16: _SMOKE}


@dataclass(frozen=True)
class Trial:
    source: Path
    axes: Axes
    data: Data
    recipe: Recipe = Recipe(dtype=torch.float64)
    steps: int = 3
    router_aux: str = "pooled"
    keeps_all: bool = True  # gradients and weights of every step, for which a large model has no room
    draws: bool = False  # also new weights, which must not depend on the mesh
    optimizer: Optimizer = AdamW()
    thorough: bool = True  # also a loss with entropy and exports, where they can be
    small_parts: int = 0  # on the ranks of the mesh, times the sizes of parts that cut a tiny model; 0: as in real runs

    def with_options(self, **fields: Any) -> Trial:
        """Return the same trial, run with other fields of its recipe."""
        return replace(self, recipe=replace(self.recipe, **fields))

    @property
    def head(self) -> str:
        return self.recipe.head

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.dtype or torch.bfloat16

    @property
    def tolerance(self) -> Tolerance:
        return (FP8_TOLERANCES if self.recipe.fp8 else TOLERANCES)[self.dtype]

    @property
    def asks_products(self) -> bool:
        """Whether each product in 8 bits is held against its definition. In bfloat16 it is the kernel of the device."""
        return self.recipe.fp8 is not None and self.dtype != torch.float32 and self.keeps_all

    @property
    def is_proof(self) -> bool:
        """Whether gradients and weights of every step are known as wide as they are."""
        return self.dtype == torch.float64 and self.keeps_all

    @property
    def adds_up(self) -> bool:
        """Return whether updates are those of the plain optimizer, which rounds no state."""
        return self.is_proof and self.optimizer.state_dtype is None

    @property
    def has_entropy(self) -> bool:
        return self.exports and self.head == "lm"

    @property
    def exports(self) -> bool:
        """Whether exports are tried after training."""
        return self.is_proof and self.thorough

    @property
    def loss(self) -> losses.Loss:
        return squared_errors if self.head == "value" else losses.cross_entropy

    def engine(self, mesh: Mesh) -> Engine:
        return Engine(
            load(self.source, mesh, **vars(self.recipe)), lr=lr_of_trial, loss=self.loss, optimizer=self.optimizer,
            max_norm=MAX_NORM, router_aux=self.router_aux,
        )  # fmt: skip

    def drawn(self, mesh: Mesh) -> dict[str, Tensor]:
        """New weights, on rank 0."""
        if not self.draws:
            return {}
        return gather(init(self.source, mesh, seed=5, **vars(self.recipe.plain(train="**"))))

    def batches(self, model: Model, step: int) -> list[Batch]:
        return self.data(model.mesh.axes.data_rank(model.mesh.rank), step)

    def packed(self) -> list[Batch]:
        """Whose documents are also run alone: those of data rank 0 in the first step and in the long one."""
        long = self.data(0, LONG_STEP) if self.data.long and self.steps > LONG_STEP else []
        return self.data(0, 0) + long

    def all_batches(self, step: int = 0) -> list[Batch]:
        """The whole step for one process: each micro-batch of all data ranks as one longer stream, since the router's
        aux loss is pooled over them. It has hardly any filler, so that filler which counts shows."""
        ranks = (self.data(rank, step) for rank in range(self.axes.num_data_ranks))
        merged = [_merged(each) for each in zip(*ranks, strict=True)]
        return [_merged([each], max(map(len, merged))) for each in merged]


def lr_of_trial(step: int) -> float:
    """Neither constant nor monotonous, so that the lr of another step shows."""
    return LR * (1.0, 0.6, 1.3)[step % 3]


def squared_errors(scores: losses.Scores, fields: losses.Fields) -> Tensor:
    """Of every label, each with a weight of its own: labels that change places would show."""
    error_TL = scores["values"].view(len(fields["target"]), -1) - fields["target"][:, None]
    return (error_TL.square() * torch.arange(1, error_TL.shape[1] + 1, device=error_TL.device)).sum(1) / 2


@dataclass(frozen=True)
class StepOf:
    """What one process finds in a step."""

    loss: float
    norm: float  # before clipping
    loads: Tensor  # [layers of experts, experts]: tokens that each got
    grads: dict[str, Tensor]  # by Hugging Face name
    weights: dict[str, Tensor] = field(default_factory=dict)  # after the update, by the same, in float64 and unrounded


@dataclass(frozen=True)
class Reference:
    """What one process finds, in the same precision. Gradients or weights that were not kept are empty."""

    steps: Sequence[StepOf]
    alone: Sequence[Sequence[Tensor]] = ()  # scores of each document of `Trial.packed`, run alone, by batch
    prints: Sequence[dict[str, Tensor]] = ()  # what every part gave out for them, by batch and part
    sums: Sequence[Sequence[tuple[float, float]]] = ((),)  # by data rank and batch: loss terms and weight, without aux
    aux: tuple[float, dict[str, Tensor]] = (0.0, {})  # the router's part of the first loss, and of its gradients
    notes: Notes = field(default_factory=Notes)  # what is wrong with one process already
    drawn: dict[str, Tensor] = field(default_factory=dict)  # new weights
    entropy: entropy.Found = (0.0, {})  # the first loss with a term of entropy, and its gradients


def part_sizes_of(trial: Trial) -> AbstractContextManager[None]:
    """Return the context in which the ranks of the mesh run. One process keeps the sizes of real runs, so that the two
    differ at the bounds of parts."""
    return shrunk_part_sizes(trial.small_parts) if trial.small_parts else nullcontext()


def refer(trial: Trial) -> Reference:
    """Run the trial on one process (call it in a world of one), as plainly as can be."""
    with other_chunks():
        of_entropy, one = (
            Notes(),
            trial.with_options(memory=MemoryOptions(), pipeline=Pipeline(), context=ContextParallel()),
        )
        engine = one.engine(Mesh(device="cpu"))
        alone, prints = zip(*(_alone(engine.model, batch) for batch in trial.packed()), strict=True)
        sums, aux = _sums(trial, engine), _aux(trial, engine)
        with_entropy = (0.0, dict[str, Tensor]())
        if trial.has_entropy:
            with_entropy = entropy.backward_with_entropy(engine.model, trial.all_batches(), trial.router_aux)
            of_entropy.found("", entropy.h1_of_one(trial, engine.model, with_entropy, aux, of_entropy))
        before = unrounded(engine.model) if trial.keeps_all else {}
        steps = [_step(trial, engine, step) for step in range(trial.steps)]
        drawn = one.drawn(engine.model.mesh)
    notes = independent_checks.notes_of(trial, engine, before, steps, sums, aux[0])
    notes.add(of_entropy)
    return Reference(steps, alone, prints, sums, aux, notes, drawn, with_entropy)


@contextmanager
def other_chunks() -> Iterator[None]:
    """Chunks begin elsewhere than on the mesh, so that what is wrong at their bounds differs."""
    kept = delta.CHUNK, loss.CHUNK
    delta.CHUNK, loss.CHUNK = 48, 777
    try:
        yield
    finally:
        delta.CHUNK, loss.CHUNK = kept


def _step(trial: Trial, engine: Engine, step: int) -> StepOf:
    value = engine.backward(trial.all_batches(step))
    grads = gather(engine.model, "grad") if trial.keeps_all or step == 0 else {}
    loads, norm = engine.router.load_LE, engine.update()
    kept = trial.dtype == torch.float64 and (trial.keeps_all or step == trial.steps - 1)
    return StepOf(value, norm, loads, grads, unrounded(engine.model) if kept else {})


def unrounded(model: Model) -> dict[str, Tensor]:
    """Whole weights on rank 0, as `gather` gives them, but as wide as they are stored."""
    keys = [k for k in model.keymap.keys.values() if k.name not in model.keymap.carried]
    streamed = whole_tensors(model.stored_model(model.values()), model.keymap, keys, dtypes=model.kept)
    return {key.name: tensor for key, tensor in streamed}


def _alone(model: Model, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    scores, prints = [], []
    for one in split_documents(batch):
        with watched(model) as seen:
            scores.append(scores_of(model, one))
        prints.append(seen.prints)
    return scores, {name: torch.cat([each[name] for each in prints]) for name in prints[0]}


def _sums(trial: Trial, engine: Engine) -> list[list[tuple[float, float]]]:
    """The terms of the loss and their weights, added up here from what the model says of each token."""
    return [[_sum(trial, engine, batch) for batch in trial.data(rank, 0)] for rank in range(trial.axes.num_data_ranks)]


def _sum(trial: Trial, engine: Engine, batch: Batch) -> tuple[float, float]:
    scores_T = scores_of(engine.model, batch)
    terms_T = squared_errors({"values": scores_T}, batch.fields) if trial.head == "value" else -scores_T
    weight_T = batch.fields.get("weight", torch.ones(len(batch))).double() * (batch.labels != IGNORE)
    return float((terms_T.double() * weight_T).sum()), float(weight_T.sum())


def weight_of(batch: Batch) -> float:
    """What a mean over it is divided by."""
    return float(batch.fields.get("weight", torch.ones(len(batch)))[batch.labels != IGNORE].double().sum())


def _aux(trial: Trial, engine: Engine) -> tuple[float, dict[str, Tensor]]:
    if not engine.router.balance.coefficient:
        return 0.0, {}
    kept, engine.loss = engine.loss, lambda scores, fields: kept(scores, fields) * 0.0
    value, grads = engine.backward(trial.all_batches()), gather(engine.model, "grad")
    engine.discard()
    engine.loss = kept
    return value, grads


def split_documents(batch: Batch) -> list[Batch]:
    """Each document of a batch as a batch of its own."""
    return [cut(batch, [number], b - a) for number, (a, b) in enumerate(pairwise(batch.bounds))]


def _merged(batches: Sequence[Batch], length: int | None = None) -> Batch:
    """One stream of the documents of all, without their filler."""
    whole = joined_batches(batches)
    return filled(whole, len(whole) if length is None else length)


Findings = Iterator[Finding]


@dataclass
class Run:
    trial: Trial
    reference: Reference
    engine: Engine
    notes: Notes = field(default_factory=Notes)
    loading: list[Seen] = field(default_factory=list)
    stepping: list[Seen] = field(default_factory=list)
    routed: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # by door: passes, rows due, their width
    stored: dict[str, int] = field(default_factory=dict)  # bytes of this rank before the first update
    blame: str = ""  # what is wrong already, and makes all that comes later wrong too

    @property
    def model(self) -> Model:
        return self.engine.model

    def measured(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        """How right it is on this rank; what all ranks find alike, rank 0 notes alone (`measured_once`)."""
        self.notes.measured(Margin(oracle, what, count, worst, allowed, where))

    def measured_once(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        if self.model.mesh.rank == 0:
            self.measured(oracle, what, count, worst, allowed, where)


def everywhere(mesh: Mesh, numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    return mesh.gather_rows(torch.tensor([numbers], device=mesh.device), DENSE).tolist()
