"""Train: count the targets of the whole step, run its micro-batches, finish the sums once, update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import parallel
from ..data import Batch
from ..errors import ConfigError, DataError, NonFiniteError, RankError, StateError
from ..layout import missing
from ..mesh import DENSE, Axes, task, watched
from ..optim import AdamW, Settings, squares
from .fit import refuse_too_large
from .forward import WEIGHT, check, counted, own, score
from .losses import Loss, cross_entropy
from .model import Model
from .router import Router

COUNTED = 7  # numbers that every rank tells all others before a step


@dataclass(frozen=True)
class StepRecord:
    step: int
    loss: float
    grad_norm: float
    lr: float
    num_targets: int  # over all data ranks and micro-batches
    num_tokens: int  # without filler
    expert_load: Tensor | None = None  # [layers of experts, experts]: tokens that each got


class _Offered(dict[str, Tensor]):
    """Scores or fields for a loss."""

    def __init__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
        super().__init__(mine)
        self._all = sorted(scores), sorted(fields)

    def __missing__(self, key: str) -> Tensor:
        raise DataError(
            f"the loss asks for {key!r}; it has the scores {self._all[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self._all[1]} (pack(..., fields=))"
        )


@dataclass(frozen=True)
class _Count:
    """Of a whole step, over all data ranks."""

    weight: float
    targets: int
    tokens: int


class Engine:
    """Trains a model. `lr` is a number or a function of the step (0, 1, ...).

    >>> engine = Engine(model, lr=1e-5)                        # doctest: +SKIP
    >>> record = engine.step([batch, another])                 # doctest: +SKIP

    `entropy=True` gives the loss `scores["entropy"]` too. `router_aux`: see `engine.router`. `state_dtype`: of both
    moments of AdamW, as stored; torch.bfloat16 takes 4 bytes a parameter instead of 8.

    `step` is `backward` (gradients are then finished, the same on all their holders) and `update` (norm, clip, AdamW).
    """

    def __init__(
        self,
        model: Model,
        *,
        lr: float | Callable[[int], float],
        loss: Loss = cross_entropy,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float | None = 1.0,
        router_aux: str = "pooled",
        entropy: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        for name, value, fine in (
            ("lr", lr, callable(lr) or lr >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("max_norm", max_norm, max_norm is None or max_norm > 0),
            ("eps", eps, eps > 0),
            ("betas", betas, all(0 <= b < 1 for b in betas)),
        ):
            if not fine:
                raise ConfigError(f"{name}={value} is out of range")
        refuse_too_large(model.need(state_dtype), model.mesh.room)
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, max_norm
        self.steps = 0
        self.want = model.parts[0].scores[0]
        if entropy:
            self.want = "entropy"
        self.router = Router(model.parts[0].balance, model.mesh, router_aux)
        self._ready: tuple[float, _Count] | None = None
        self._unsummed = {name: missing(model.table[name], model.rules, model.mesh.axes) for name in model.pieces}
        trained = set(model.trainable)
        decayed = {p.name for p in model.table if p.decay}
        stored = {name: t for name, t in model.stored().items() if name in trained}
        self.optimizer = AdamW(stored, decayed, Settings(betas, eps, weight_decay, state_dtype))

    def step(self, batches: Sequence[Batch]) -> StepRecord:
        loss = self.backward(batches)
        assert self._ready is not None
        count, lr = self._ready[1], self._lr()
        norm = self.update()
        load = self.router.load_LE.cpu() if self.router.balance.num_layers else None
        return StepRecord(self.steps, loss, norm, lr, count.targets, count.tokens, load)

    @watched()
    def backward(self, batches: Sequence[Batch]) -> float:
        """Gradients of the loss over all micro-batches of all data ranks, left on the parameters. Returns the loss."""
        if self._ready is not None or self.model.grads():
            raise StateError("gradients of an earlier backward are waiting; call update() first, or discard()")
        task(f"step {self.steps}")
        count = self._count(batches)
        try:
            total = sum(self._run(batch, count, number, len(batches)) for number, batch in enumerate(batches))
            self.finish()
        except BaseException:
            self.discard()  # half a step of gradients must not be added to the next one
            raise
        self.router.close()
        task(f"step {self.steps}")
        loss = self.model.mesh.sum_(torch.as_tensor(total), DENSE, "the loss").item()
        self._ready = (loss, count)
        return loss

    def _run(self, batch: Batch, count: _Count, number: int, num_batches: int) -> Tensor:
        """Forward and backward of one micro-batch; this rank's share of the loss."""
        task(f"step {self.steps}, micro-batch {number + 1} of {num_batches}")
        parallel.expect_last(self.model.parts[0], number + 1 == num_batches)
        term, aux = self._loss(batch.to(self.model.mesh.device), count, num_batches, training=True)
        term.backward()
        return term.detach().double() + aux

    @watched()
    def update(self) -> float:
        """Clip and apply the gradients that `backward` left. Returns their norm before clipping."""
        if self._ready is None:
            raise StateError(f"update() of step {self.steps} found no gradients; call backward(batches) first")
        grads, lr = self.model.grads(), self._lr()
        norm = self.norm(grads)
        if not torch.isfinite(torch.tensor(norm)):  # the same number on all ranks: all raise or none
            self.discard()
            raise NonFiniteError(f"the gradient norm of step {self.steps} is {norm}; no parameter was changed")
        if self.max_norm is not None and norm > self.max_norm:
            for grad in grads.values():
                grad.mul_(self.max_norm / norm)
        self.optimizer.step(grads, lr)
        self.discard()
        task(f"step {self.steps} done")
        self.steps += 1
        return norm

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """Of finished gradients, given as each rank stores them: every element of the model counts once."""
        mesh = self.model.mesh
        return mesh.sum_(squares(grads, self.model.owned, mesh.device), DENSE, "the norm").sqrt().item()

    def discard(self) -> None:
        """Forget the gradients, also those of a step that failed half way, and what it counted."""
        parallel.rest(self.model.parts[0])
        self.router.forget()
        for parameter in self.model.parts[0].parameters():
            parameter.grad = None
        self._ready = None

    @watched()
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The loss over all data ranks; nothing changes."""
        task(f"evaluation before step {self.steps}")
        count = self._count(batches)
        total = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        try:
            for batch in batches:
                total += sum(self._loss(batch.to(self.model.mesh.device), count, len(batches), training=False))
        finally:
            parallel.rest(self.model.parts[0])
        return self.model.mesh.sum_(total, DENSE, "the loss").item()

    def finish(self) -> None:
        """The one place where the sums that FSDP leaves out are made: every gradient is then complete."""
        model = self.model
        grads = model.grads()
        trainable = model.trainable
        lacking = [name for name in trainable if name not in grads]
        if lacking:
            none_did = "FSDP was kept from its sums over fsdp, or from those over replicate that end a step"
            raise StateError(
                f"{lacking[0]} got no gradient, as {len(lacking)} of {len(trainable)} parameters; each must: "
                + (none_did if len(lacking) == len(trainable) else "zeros if it is unused")
            )
        parallel.finish([(self._unsummed[name], grad) for name, grad in grads.items()], model.mesh)

    def _loss(self, batch: Batch, count: _Count, num_batches: int, *, training: bool) -> tuple[Tensor, Tensor]:
        """This rank's share of the loss of a micro-batch, and of the router's, whose gradient is already attached."""
        self.router.begin(batch)
        term = self._terms(batch).sum() / count.weight
        return term, self.router.end(count.tokens, num_batches, training=training)

    def _terms(self, batch: Batch) -> Tensor:
        """Weighted loss terms of this rank's own tokens; each token of a data rank is one rank's own."""
        scores, fields = score(self.model, batch, self.want), own(self.model, batch, batch.fields)
        counted_T = own(self.model, batch, {"counted": counted(batch, self.want)})["counted"]
        # A loss may divide by a field that filler tokens do not have: no gradient can come back from those.
        scores = {name: torch.where(counted_T, x.t(), x.detach().t()).t() for name, x in scores.items()}
        terms_T = self.loss(_Offered(scores, fields, scores), _Offered(scores, fields, fields))
        if terms_T.shape != counted_T.shape:
            raise DataError(
                f"the loss gave {tuple(terms_T.shape)} for {tuple(counted_T.shape)} tokens: one term a token"
            )
        if WEIGHT in fields:
            terms_T = terms_T * fields[WEIGHT]
        return terms_T.masked_fill(~counted_T, 0.0)

    def _count(self, batches: Sequence[Batch]) -> _Count:
        """The targets of the step, counted before any work; and that all ranks are about to do the same."""
        problem: DataError | None = None
        try:
            row = [0.0, *_summary(self.model, batches, self.want)]
        except DataError as error:  # the others are waiting: they are told, and then all raise
            problem, row = error, [1.0] + [0.0] * (COUNTED - 1)
        mine = torch.tensor([row], dtype=torch.float64, device=self.model.mesh.device)
        rows = self.model.mesh.gather_rows(mine, DENSE, "the count of the step").tolist()
        if problem is not None:
            raise problem
        _check_alike(rows, self.model.mesh.axes)
        first = {self.model.mesh.axes.data_rank(rank): row for rank, row in reversed(list(enumerate(rows)))}
        weight, targets, tokens = (sum(row[i] for row in first.values()) for i in (1, 2, 5))
        if weight <= 0:
            raise DataError(f"the step's {int(targets)} targets weigh {weight}; there is nothing to learn from")
        return _Count(weight, int(targets), int(tokens))

    def _lr(self) -> float:
        lr = float(self.lr(self.steps)) if callable(self.lr) else float(self.lr)
        if not 0 <= lr < float("inf"):
            raise ConfigError(f"lr of step {self.steps} is {lr}; it must be 0 or more")
        return lr


def _check_alike(rows: list[list[float]], axes: Axes) -> None:
    """All ranks take part, with as many batches and tokens; the ranks of a data rank have the same data."""
    first: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if row[0]:
            raise RankError(f"rank {rank} was given data that it refuses; see its message")
        if row[3:5] != rows[0][3:5]:
            raise RankError(
                f"rank {rank} has {int(row[3])} batches of {int(row[4])} tokens, rank 0 {int(rows[0][3])} of "
                f"{int(rows[0][4])}; all ranks need the same number of batches and tokens"
            )
        other = first.setdefault(axes.data_rank(rank), rank)
        if row != rows[other]:
            raise RankError(f"ranks {other} and {rank} are one data rank ({axes}), but were given different batches")


def _summary(model: Model, batches: Sequence[Batch], want: str) -> list[float]:
    """Weight, targets, number of batches, tokens of each, tokens without filler, and a checksum of the data."""
    if not batches:
        raise DataError("a step needs at least one batch")
    for batch in batches:
        check(model, batch)
    sizes = {len(b) for b in batches}
    if len(sizes) > 1:
        raise DataError(f"the batches of a step have {sorted(sizes)} tokens; pack(..., length=) makes them equal")
    masks = [counted(b, want) for b in batches]
    targets = sum(int(mask.sum()) for mask in masks)
    weights = [b.fields.get(WEIGHT, mask)[mask] for b, mask in zip(batches, masks, strict=True)]
    weight = sum(float(w.double().sum()) for w in weights)
    crc = 0
    for b in batches:
        for tensor in (b.tokens, b.labels, torch.tensor(b.docs.bounds), *(b.fields[k] for k in sorted(b.fields))):
            crc = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
    return [weight, targets, len(batches), len(batches[0]), sum(len(b) - b.num_filler for b in batches), crc]
