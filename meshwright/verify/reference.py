"""A trial (source, mesh, data, options), and the reference: the same training steps on one process.

Data differs on every data rank, and ranks have different numbers of targets, so a mistake in a divisor or a reduction
changes the result. The reference runs without the options that serve a mesh or a memory budget, with other chunk and
part sizes, and with hardly any padding. So everything that must not change the result differs between the two.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import parallel
from ..axes import DENSE, Axes
from ..data import IGNORE, Batch, cut, filled, joined_batches
from ..engine import Engine, Model, MtpRecord, gather, init, load, losses
from ..mesh import Mesh
from ..models import Want
from ..ops import delta, loss
from ..ops.part_sizes import shrunk_part_sizes
from ..optim import AdamW, Optimizer
from ..recipe import ContextParallel, MemoryOptions, Pipeline, Recipe
from ..weights import chosen, whole_tensors
from . import entropy, independent_checks
from .diagnose.forward import recorded_forward, scores_of
from .recorder import RecordedCollective
from .results import Finding, Margin, Notes
from .small_data import LONG_STEP, Data
from .whole_state import whole_state

LR = 1e-3
MAX_NORM = 1.0  # small models have gradient norms above and below it, so clipping is tried on and off


@dataclass(frozen=True)
class Tolerance:
    """The error that rounding alone may cause: of a gradient relative to its norm, of a loss (relative), and of a
    log-probability (absolute)."""

    grad: float
    loss: float
    logprob: float


# float64 is the proof. The order of reductions changes a result by about its machine epsilon, 2.2e-16, times a small
# factor, while a wrong one is off by far more than 1e-9. In bfloat16 rounding also sends tokens to other experts.
TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-9, 1e-9),
    torch.float32: Tolerance(2e-5, 1e-5, 2e-5),
    torch.bfloat16: Tolerance(0.3, 5e-3, 0.2),  # only a smoke test; A_log is the noisiest
}

# FP8 rounds a value halfway between two codes up or down by the last bit of a reduction, which may send a token to
# other experts. In float64 that is so rare that the proof stands. In float32 and bfloat16 it is common: a smoke test.
_SMOKE = Tolerance(0.6, 2e-2, 1.0)
FP8_TOLERANCES = {**TOLERANCES, torch.float32: _SMOKE, torch.bfloat16: _SMOKE}


def uncompiled(recipe: Recipe) -> Recipe:
    """Leave layers uncompiled unless `compiled` is set: compiling them takes minutes for each model."""
    return replace(recipe, memory=replace(recipe.memory, compiled=recipe.memory.compiled or False))


@dataclass(frozen=True)
class Trial:
    """Everything that defines a run: the same on one process and on the mesh, up to the mesh and its options.

    `keeps_all`: store gradients and weights of every step; a large model has no room for them. `draws`: also draw new
    weights, which must not depend on the mesh. `thorough`: also check a loss with entropy, and exports, where possible.
    `small_parts`: on the mesh, multiply the part sizes that split a tiny model by this; 0: sizes of real runs.
    `checkpoint`: where the mesh saves before its last step; None: nowhere.
    """

    source: Path
    axes: Axes
    data: Data
    recipe: Recipe = Recipe(dtype=torch.float64)
    steps: int = 3
    router_aux: str = "pooled"
    keeps_all: bool = True
    draws: bool = False
    optimizer: Optimizer = AdamW()
    thorough: bool = True
    small_parts: int = 0
    checkpoint: Path | None = None

    def with_options(self, **fields: Any) -> Trial:
        """Return the same trial with other fields of its recipe."""
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
    def checks_fp8_matmuls(self) -> bool:
        """True where Q1 compares each FP8 matmul with its definition. In bfloat16 that checks the device's kernel."""
        return self.recipe.fp8 is not None and self.dtype != torch.float32 and self.keeps_all

    @property
    def is_proof(self) -> bool:
        """True in float64 with gradients and weights of every step."""
        return self.dtype == torch.float64 and self.keeps_all

    @property
    def checks_updates(self) -> bool:
        """True where O1 can recompute the updates: in a proof whose optimizer state is not rounded."""
        return self.is_proof and self.optimizer.state_dtype is None

    @property
    def checks_entropy(self) -> bool:
        return self.checks_exports and self.head == "lm"

    @property
    def checks_exports(self) -> bool:
        """True where exports are checked after training."""
        return self.is_proof and self.thorough

    @property
    def checks_resuming(self) -> bool:
        """True where E3 resumes a checkpoint: runs with adapters, whose checkpoints hold only adapters."""
        return self.is_proof and self.recipe.lora is not None and self.checkpoint is not None

    @property
    def loss(self) -> losses.LossFunction:
        return squared_errors if self.head == "value" else losses.cross_entropy

    def engine(self, mesh: Mesh) -> Engine:
        """Load the model on a mesh and return its engine."""
        return Engine(
            load(self.source, mesh, **vars(uncompiled(self.recipe))), lr=lr_of_trial, loss=self.loss,
            optimizer=self.optimizer, max_norm=MAX_NORM, router_aux=self.router_aux,
        )  # fmt: skip

    def new_weights(self, mesh: Mesh) -> dict[str, Tensor]:
        """Draw new weights and gather them on rank 0."""
        if not self.draws:
            return {}
        return gather(init(self.source, mesh, seed=5, **vars(self.recipe.plain(train="**"))), "weight")

    def batches(self, model: Model, step: int) -> list[Batch]:
        """Return the micro-batches of this rank."""
        return self.data(model.mesh.axes.data_rank(model.mesh.rank), step)

    def packed(self) -> list[Batch]:
        """Return the batches whose documents are also run alone: those of data rank 0 in the first and in the long
        step."""
        long = self.data(0, LONG_STEP) if self.data.long and self.steps > LONG_STEP else []
        return self.data(0, 0) + long

    def all_batches(self, step: int = 0) -> list[Batch]:
        """Return the whole step for one process.

        Each micro-batch joins those of all data ranks into one stream, since the router's aux loss is pooled over data
        ranks. It has hardly any padding, so a mesh that counts padding differs.
        """
        ranks = (self.data(rank, step) for rank in range(self.axes.num_data_ranks))
        joined = [_joined(each) for each in zip(*ranks, strict=True)]
        return [_joined([each], max(map(len, joined))) for each in joined]


def lr_of_trial(step: int) -> float:
    """Return a learning rate that rises and falls, so that the rate of a neighbouring step shows."""
    return LR * (1.0, 0.6, 1.3)[step % 3]


def squared_errors(scores: losses.Scores, fields: losses.Fields) -> Tensor:
    """Return the loss of a value head. Each label has a different weight, so that labels in the wrong order show.

    Shapes: T tokens, L labels per token.
    """
    error_TL = scores["values"].view(len(fields["target"]), -1) - fields["target"][:, None]
    return (error_TL.square() * torch.arange(1, error_TL.shape[1] + 1, device=error_TL.device)).sum(1) / 2


@dataclass(frozen=True)
class ReferenceStep:
    """One step of one process.

    `norms`: the norm of all gradients before clipping; with mtp="head" that of the trunk, and that of the MTP head.
    `loads`: the tokens that each expert got, [layers of experts, experts]. `grads`: by Hugging Face name. `mtp`: what a
    trained MTP head reports. `slopes`: of the routers of the trunk and of an MTP head, by micro-batch. `weights`: after
    the update, also by name, in float64. `state`: the optimizer state after the last update, in float64.
    """

    loss: float
    norms: list[float]
    loads: Tensor
    grads: dict[str, Tensor]
    mtp: MtpRecord | None = None
    slopes: Sequence[Sequence[independent_checks.Slope]] = ()
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """The results of one process, in the same precision. Gradients and weights that were not stored are empty.

    `document_scores`: the scores of each document of `Trial.packed`, run alone, by batch. `fingerprints`: those of the
    outputs of all submodules for these documents, by batch. `loss_sums`: the sums of the first step's loss terms and of
    their weights, by data rank and batch. `aux`: the router's part of the first loss; of its gradients, also that of an
    MTP head. `notes`: findings and margins of one process. `new_weights`: drawn weights, if the trial draws some.
    `fresh`: the weights that the source lacks, as loading drew them. `entropy`: the first loss with an entropy term,
    and its gradients.
    """

    steps: Sequence[ReferenceStep]
    document_scores: Sequence[Sequence[Tensor]] = ()
    fingerprints: Sequence[dict[str, Tensor]] = ()
    loss_sums: Sequence[Sequence[tuple[float, float]]] = ((),)
    aux: tuple[float, dict[str, Tensor]] = (0.0, {})
    notes: Notes = field(default_factory=Notes)
    new_weights: dict[str, Tensor] = field(default_factory=dict)
    fresh: dict[str, Tensor] = field(default_factory=dict)
    entropy: entropy.LossAndGrads = (0.0, {})


def part_sizes_of(trial: Trial) -> AbstractContextManager[None]:
    """Return the context in which the ranks of the mesh run. One process keeps the part sizes of real runs, so that a
    mistake at the bounds of parts makes the two differ."""
    return shrunk_part_sizes(trial.small_parts) if trial.small_parts else nullcontext()


def run_reference(trial: Trial) -> Reference:
    """Run the trial on one process, in a world of one, without memory options, pipeline or context parallelism."""
    with other_chunks():
        entropy_notes, plain = (
            Notes(),
            trial.with_options(memory=MemoryOptions(), pipeline=Pipeline(), context=ContextParallel()),
        )
        engine = plain.engine(Mesh(device="cpu"))
        fresh = fresh_weights(engine.model)
        # Everything that needs the untrained model comes before the first step, which changes the weights.
        document_scores, fingerprints = zip(*(_alone(engine.model, batch) for batch in trial.packed()), strict=True)
        loss_sums, aux = _loss_sums(trial, engine), _aux(trial, engine)
        mtp = mtp_alone(trial, engine.model)
        with_entropy = (0.0, dict[str, Tensor]())
        if trial.checks_entropy:
            with_entropy = entropy.backward_with_entropy(engine.model, trial.all_batches(), trial.router_aux)
            entropy_notes.add_findings("", entropy.h1_of_one(trial, engine.model, with_entropy, aux, entropy_notes))
        before = unrounded(engine.model) if trial.keeps_all else {}
        steps = [_step(trial, engine, step) for step in range(trial.steps)]
        new_weights = plain.new_weights(engine.model.mesh)
    notes = independent_checks.notes_of(trial, engine, before, steps, loss_sums, aux[0])
    notes.add_findings("S1", independent_checks.mtp_of_one(trial, steps[0].mtp, mtp, notes))
    notes.add_findings("G1", independent_checks.new_weights_are_trained(fresh, steps[0].grads, notes))
    notes.add(entropy_notes)
    return Reference(steps, document_scores, fingerprints, loss_sums, aux, notes, new_weights, fresh, with_entropy)


@contextmanager
def other_chunks() -> Iterator[None]:
    """Use chunk sizes that no mesh uses, so that a mistake at the bounds of chunks makes the two differ."""
    original = delta.CHUNK, loss.CHUNK
    delta.CHUNK, loss.CHUNK = 48, 777
    try:
        yield
    finally:
        delta.CHUNK, loss.CHUNK = original


def _step(trial: Trial, engine: Engine, step: int) -> ReferenceStep:
    """Run one step. A large model stores only the first gradients and the last weights."""
    with independent_checks.recorded_slopes(engine) as slopes:
        value = engine.backward(trial.all_batches(step))
    grads = gather(engine.model, "grad") if trial.keeps_all or step == 0 else {}
    loads, mtp, norms = loads_of(engine), engine._pending().results.mtp, engine.norms(engine.model.grads())
    engine.update()
    stores_weights = trial.dtype == torch.float64 and (trial.keeps_all or step == trial.steps - 1)
    state = whole_state(engine) if trial.checks_updates and step == trial.steps - 1 else {}
    weights = unrounded(engine.model) if stores_weights else {}
    return ReferenceStep(value, norms, loads, grads, mtp, slopes, weights, state)


def loads_of(engine: Engine) -> Tensor:
    """Return the load of all experts in the last step; the experts of an MTP head come last."""
    loads = engine.router.load_LE
    return loads if engine.mtp is None else torch.cat([loads, engine.mtp.router.load_LE])


def mtp_alone(trial: Trial, model: Model) -> tuple[float, float] | None:
    """Return the loss and the acceptance of the MTP head in the first step, from each document alone.

    Labels and weights come from lists, and a plain product scores the states: `next_in_document`, the chunked loss and
    the engine's divisors take no part.
    """
    mtp = model.blueprint.module.mtp
    if mtp is None:
        return None
    states, want = list[Tensor](), Want(model.blueprint.scores[0], mtp=True)
    hook = mtp.register_forward_hook(lambda _module, _given, state_TD: states.append(state_TD))
    terms = weight = hits = num = 0.0
    vocab_VD = model.parameter(model.blueprint.module.vocabulary).detach()
    for batch in (batch for rank in range(trial.axes.num_data_ranks) for batch in trial.data(rank, 0)):
        for document in split_documents(batch):
            parallel.run_forward(model, [document], want, lambda _, scores: scores[0])
            logprobs_TV = (states.pop().to(vocab_VD.dtype) @ vocab_VD.T).double().log_softmax(-1)
            weights = document.fields.get("weight", torch.ones(len(document))).tolist()
            for at, label in enumerate(document.labels.tolist()[1:]):
                if label != IGNORE:
                    terms -= float(logprobs_TV[at, label]) * weights[at + 1]
                    weight, num = weight + weights[at + 1], num + 1
                    hits += bool(logprobs_TV[at].argmax() == label)
    hook.remove()
    return (terms / weight, hits / num) if weight else (0.0, 0.0)


def unrounded(model: Model, only: Container[str] | None = None) -> dict[str, Tensor]:
    """Return whole weights on rank 0, like `gather`, but in the dtype in which they are stored. `only`: the keys to
    return."""
    keys = [k for k in model.keymap.keys.values() if k.name not in model.keymap.carried]
    keys = keys if only is None else [key for key in keys if key.name in only]
    streamed = whole_tensors(model.stored_model(model.values()), model.keymap, keys, dtypes=model.kept)
    return {key.name: tensor for key, tensor in streamed}


def fresh_weights(model: Model) -> dict[str, Tensor]:
    """Return, on rank 0, the weights that the source lacks: adapters, or a new head."""
    made = {key for name in model.keymap.fresh for key in chosen(model.table[name], model.keymap.choice).keys}
    return unrounded(model, made) if made else {}


def _alone(model: Model, batch: Batch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run each document of a batch by itself. -> its scores; fingerprints of submodules, joined over documents"""
    scores, prints = [], []
    for document in split_documents(batch):
        with recorded_forward(model) as record:
            scores.append(scores_of(model, document))
        prints.append(record.fingerprints)
    return scores, {name: torch.cat([each[name] for each in prints]) for name in prints[0]}


def _loss_sums(trial: Trial, engine: Engine) -> list[list[tuple[float, float]]]:
    """Return the sums of loss terms and of weights, computed from the model's scores of each token, without the
    engine."""
    return [
        [_loss_sum(trial, engine, batch) for batch in trial.data(rank, 0)] for rank in range(trial.axes.num_data_ranks)
    ]


def _loss_sum(trial: Trial, engine: Engine, batch: Batch) -> tuple[float, float]:
    """Return the sum of the weighted loss terms of a batch, and the sum of their weights."""
    scores_T = scores_of(engine.model, batch)
    terms_T = squared_errors({"values": scores_T}, batch.fields) if trial.head == "value" else -scores_T
    weight_T = batch.fields.get("weight", torch.ones(len(batch))).double() * (batch.labels != IGNORE)
    return float((terms_T.double() * weight_T).sum()), float(weight_T.sum())


def weight_of(batch: Batch) -> float:
    """Return the sum of the weights of a batch's targets, by which a mean over it is divided."""
    return float(batch.fields.get("weight", torch.ones(len(batch)))[batch.labels != IGNORE].double().sum())


def _aux(trial: Trial, engine: Engine) -> tuple[float, dict[str, Tensor]]:
    """Return the router's aux loss alone, and its gradients with those of an MTP head's loss: those of a step whose
    other loss terms are 0.

    This splits a wrong gradient into its two parts, and often only one is wrong.
    """
    if not engine.router.balance.coefficient and engine.model.recipe.mtp != "all":
        return 0.0, {}
    engine.loss = lambda scores, fields: trial.loss(scores, fields) * 0.0
    value, grads = engine.backward(trial.all_batches()), gather(engine.model, "grad")
    engine.discard()
    engine.loss = trial.loss
    return value, grads


def split_documents(batch: Batch) -> list[Batch]:
    """Return each document of a batch as a batch."""
    return [cut(batch, [number], b - a) for number, (a, b) in enumerate(pairwise(batch.bounds))]


def _joined(batches: Sequence[Batch], length: int | None = None) -> Batch:
    """Join the documents of batches into one stream, without their padding."""
    whole = joined_batches(batches)
    return filled(whole, len(whole) if length is None else length)


Findings = Iterator[Finding]


@dataclass
class Run:
    """A trial in progress on one rank of the mesh: oracles read it and record their margins in it.

    `loading_collectives`, `step_collectives`: the collectives that this rank issued while loading and in the first
    step. `routed`: for each door of experts, how often it was passed, how many rows had to be sent, and their width.
    `stored`: bytes of this rank before the first update. `blame`: the first failed oracle, which later findings name as
    their cause.
    """

    trial: Trial
    reference: Reference
    engine: Engine
    notes: Notes = field(default_factory=Notes)
    loading_collectives: list[RecordedCollective] = field(default_factory=list)
    step_collectives: list[RecordedCollective] = field(default_factory=list)
    routed: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    blame: str = ""

    @property
    def model(self) -> Model:
        return self.engine.model

    def record(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        """Record a margin of this rank. `record_once` is for results that are equal on all ranks."""
        self.notes.add_margin(Margin(oracle, what, count, worst, allowed, where))

    def record_once(
        self, oracle: str, what: str, count: int, worst: float = 0.0, allowed: float = 0.0, where: str = ""
    ) -> None:
        """Record a margin on rank 0 alone, so that its count is not multiplied by the number of ranks."""
        if self.model.mesh.rank == 0:
            self.record(oracle, what, count, worst, allowed, where)


def everywhere(mesh: Mesh, numbers: list[int]) -> list[list[int]]:
    """All-gather a row of numbers: those of every rank, on every rank.

    Oracles call it to agree before they decide what to run next. Ranks that decided alone would issue different
    collectives, and hang.
    """
    return mesh.gather_rows(torch.tensor([numbers], device=mesh.device), DENSE).tolist()
