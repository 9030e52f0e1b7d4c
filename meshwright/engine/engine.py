"""Train: count the targets of the whole step, run its micro-batches, finish the sums once, update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import parallel
from ..data import IGNORE, Batch
from ..errors import ConfigError, DataError, NonFiniteError, RankError, StateError
from ..layout import missing
from ..mesh import DENSE
from ..optim import AdamW, Settings, squares
from .forward import check, own, score
from .losses import Loss, cross_entropy
from .model import Model
from .router import Router

COUNTED = 6  # numbers that every rank tells all others before a step


@dataclass(frozen=True)
class StepRecord:
    step: int
    loss: float
    grad_norm: float
    lr: float
    num_targets: int  # over all data ranks and micro-batches
    num_tokens: int  # without filler
    expert_load: Tensor | None = None  # [layers of experts, experts]: tokens that each got


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
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, max_norm
        self.steps = 0
        self.router = Router(model.parts[0].balance, model.mesh, router_aux)
        self._ready: tuple[float, _Count] | None = None
        trained = set(model.trainable)
        decayed = {p.name for p in model.table if p.decay}
        stored = {name: t for name, t in model.stored().items() if name in trained}
        self.optimizer = AdamW(stored, decayed, Settings(betas, eps, weight_decay))

    def step(self, batches: Sequence[Batch]) -> StepRecord:
        loss = self.backward(batches)
        assert self._ready is not None
        count, lr = self._ready[1], self._lr()
        norm = self.update()
        load = self.router.load_LE.cpu() if self.router.balance.num_layers else None
        return StepRecord(self.steps, loss, norm, lr, count.targets, count.tokens, load)

    def backward(self, batches: Sequence[Batch]) -> float:
        """Gradients of the loss over all micro-batches of all data ranks, left on the parameters. Returns the loss."""
        if self._ready is not None:
            raise StateError("gradients of an earlier backward are waiting; call update() first, or discard()")
        count = self._count(batches)
        total = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        for number, batch in enumerate(batches):
            parallel.expect_last(self.model.parts[0], number + 1 == len(batches))
            on_device = batch.to(self.model.mesh.device)
            term, aux = self._loss(on_device, count, len(batches), training=True)
            term.backward()
            total += term.detach().double() + aux
        self.finish()
        self.router.close()
        loss = self.model.mesh.sum_(total, DENSE).item()
        self._ready = (loss, count)
        return loss

    def update(self) -> float:
        """Clip and apply the gradients that `backward` left. Returns their norm before clipping."""
        if self._ready is None:
            raise StateError(f"update() of step {self.steps} found no gradients; call backward(batches) first")
        grads = self.model.grads()
        norm = self.norm(grads)
        if not torch.isfinite(torch.tensor(norm)):  # the same number on all ranks: all raise or none
            self.discard()
            raise NonFiniteError(f"the gradient norm of step {self.steps} is {norm}; no parameter was changed")
        if self.max_norm is not None and norm > self.max_norm:
            for grad in grads.values():
                grad.mul_(self.max_norm / norm)
        self.optimizer.step(grads, self._lr())
        self.discard()
        self.steps += 1
        return norm

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """Of finished gradients, given as each rank stores them: every element of the model counts once."""
        mesh = self.model.mesh
        return mesh.sum_(squares(grads, self.model.owned, mesh.device), DENSE).sqrt().item()

    def discard(self) -> None:
        """Forget the gradients."""
        for parameter in self.model.parts[0].parameters():
            parameter.grad = None
        self._ready = None

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The loss over all data ranks; nothing changes."""
        count = self._count(batches)
        total = torch.zeros((), dtype=torch.float64, device=self.model.mesh.device)
        for batch in batches:
            total += sum(self._loss(batch.to(self.model.mesh.device), count, len(batches), training=False))
        parallel.rest(self.model.parts[0])
        return self.model.mesh.sum_(total, DENSE).item()

    def finish(self) -> None:
        """The one place where the sums that FSDP leaves out are made: every gradient is then complete."""
        model = self.model
        grads = model.grads()
        lacking = [name for name in model.trainable if name not in grads]
        if lacking:
            raise StateError(
                f"{lacking[0]} got no gradient ({len(lacking)} such parameters); each must, zeros if unused"
            )
        axes = {name: missing(model.table[name], model.rules, model.mesh.axes) for name in grads}
        parallel.finish([(axes[name], grad) for name, grad in grads.items()], model.mesh)

    def _loss(self, batch: Batch, count: _Count, num_batches: int, *, training: bool) -> tuple[Tensor, Tensor]:
        """This rank's share of the loss of a micro-batch, and of the router's, whose gradient is already attached."""
        self.router.begin(batch)
        term = self._terms(batch).sum() / count.weight
        return term, self.router.end(count.tokens, num_batches, training=training)

    def _terms(self, batch: Batch) -> Tensor:
        """Weighted loss terms of this rank's own tokens; each token of a data rank is one rank's own."""
        want = self.model.parts[0].scores[0]
        scores = score(self.model, batch, want)
        labels_T, fields = own(self.model, batch)
        terms_T = self.loss(scores, fields)
        if terms_T.shape != labels_T.shape:
            raise DataError(
                f"the loss gave {tuple(terms_T.shape)} for {tuple(labels_T.shape)} tokens: one term a token"
            )
        weights = fields.get("weight")
        terms_T = terms_T if weights is None else terms_T * weights
        return terms_T.masked_fill(labels_T == IGNORE, 0.0)

    def _count(self, batches: Sequence[Batch]) -> _Count:
        """The targets of the step, counted before any work; and that all ranks are about to do the same."""
        if not batches:
            raise DataError("a step needs at least one batch")
        for batch in batches:
            check(self.model, batch)
        mine = torch.tensor([_summary(batches)], dtype=torch.float64, device=self.model.mesh.device)
        table = self.model.mesh.gather_rows(mine, DENSE).tolist()
        axes = self.model.mesh.axes
        for rank, row in enumerate(table):
            first = next(r for r in range(axes.world) if axes.data_rank(r) == axes.data_rank(rank))
            if row[2:4] != table[0][2:4]:
                raise RankError(
                    f"rank {rank} has {int(row[2])} batches of {int(row[3])} tokens, rank 0 {int(table[0][2])} of "
                    f"{int(table[0][3])}; all ranks need the same number of batches and tokens"
                )
            if row != table[first]:
                raise RankError(
                    f"ranks {first} and {rank} are one data rank ({axes}), but were given different batches"
                )
        once = [row for rank, row in enumerate(table) if not any(axes.coords(rank)[a] for a in ("pp", "cp", "tp"))]
        count = _Count(sum(r[0] for r in once), int(sum(r[1] for r in once)), int(sum(r[4] for r in once)))
        if count.weight <= 0:
            raise DataError(f"the step's {count.targets} targets weigh {count.weight}; there is nothing to learn from")
        return count

    def _lr(self) -> float:
        return float(self.lr(self.steps)) if callable(self.lr) else float(self.lr)


def _summary(batches: Sequence[Batch]) -> list[float]:
    """Weight, targets, number of batches, tokens of each, tokens without filler, and a checksum of the data."""
    sizes = {len(b) for b in batches}
    if len(sizes) > 1:
        raise DataError(f"the batches of a step have {sorted(sizes)} tokens; pack(..., length=) makes them equal")
    weight, targets, crc = 0.0, 0, 0
    for b in batches:
        has = b.labels != IGNORE
        targets += int(has.sum())
        weight += float(b.fields["weight"][has].double().sum()) if "weight" in b.fields else float(has.sum())
        for tensor in (b.tokens, b.labels, torch.tensor(b.docs.bounds), *b.fields.values()):
            crc = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), crc)
    num_tokens = sum(len(b) - b.num_filler for b in batches)
    return [weight, targets, len(batches), len(batches[0]), num_tokens, crc]
