"""Train: count the targets of the whole step, run its micro-batches, finish the sums once, update."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from .. import parallel
from ..data import Batch
from ..errors import ConfigError, DataError, NonFiniteError, RankError, StateError
from ..layout import missing
from ..mesh import DENSE, task, watched
from ..optim import AdamW, Settings, squares
from .agreement import agree, check_data
from .fit import refuse_too_large
from .forward import summary
from .losses import Loss, cross_entropy
from .model import Model, refuse_inference_mode, refuse_other_than_a_model
from .router import Router
from .terms import Terms

_TINY = torch.finfo(torch.float32).tiny  # an eps below it would be 0
STEP, EVALUATE = "a step", "evaluate"


@dataclass(frozen=True)
class StepRecord:
    step: int
    loss: float
    grad_norm: float
    lr: float
    num_targets: int  # over all data ranks and micro-batches
    num_tokens: int  # without filler
    expert_load: Tensor | None = None  # [layers of experts, experts]: tokens that each got
    router_loss: float = 0.0  # the part of `loss` that is the router's


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _two_shares(betas: object) -> bool:
    return isinstance(betas, tuple | list) and [_number(b) and 0 <= b < 1 for b in betas] == [True, True]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype


@dataclass(frozen=True)
class _Count:
    """Of a whole step, over all data ranks."""

    weight: float
    targets: int
    tokens: int


@dataclass(frozen=True)
class _Ready:
    """What `backward` leaves for `update`, beside the gradients: whose they are, and what all ranks agreed on."""

    engine: Engine
    count: _Count
    lr: float
    schedule: float | Callable[[int], float]  # that lr is of: it is asked once a step
    max_norm: float | None
    router_loss: float = 0.0


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
        refuse_inference_mode()
        for name, value, fine, wanted in (
            ("lr", lr, callable(lr) or (_number(lr) and lr >= 0), "a number of 0 or more, or a function of the step"),
            ("weight_decay", weight_decay, _number(weight_decay) and weight_decay >= 0, "a number of 0 or more"),
            ("eps", eps, _number(eps) and eps >= _TINY, f"a number of {_TINY:.2g} or more"),
            ("betas", betas, _two_shares(betas), "two numbers from 0 to below 1"),
            ("loss", loss, callable(loss), "a function of scores and fields, such as mw.losses.cross_entropy"),
            ("entropy", entropy, isinstance(entropy, bool), "True or False"),
        ):
            if not fine:
                raise ConfigError(f"{name}={value!r} must be {wanted}")
        refuse_other_than_a_model(model)
        settings = Settings((betas[0], betas[1]), eps, weight_decay, state_dtype)
        refuse_too_large(model.need(state_dtype), model.mesh.room)
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, max_norm
        self._bound()
        self.steps, self._lr = 0, 0.0
        self.want = model.parts[0].scores[0]
        if entropy:
            self.want = "entropy"
        if self.want not in model.parts[0].scores:
            raise ConfigError(f"entropy=True, but this model's head gives {', '.join(model.parts[0].scores)} alone")
        self.router = Router(model.parts[0].balance, model.mesh, router_aux)
        self._terms = Terms(model, self.want)
        self._unsummed = {name: missing(model.table[name], model.rules, model.mesh.axes) for name in model.pieces}
        trained = set(model.trainable)
        decayed = {p.name for p in model.table if p.decay}
        stored = {name: t for name, t in model.stored().items() if name in trained}
        self.optimizer = AdamW(stored, decayed, settings)

    def step(self, batches: Sequence[Batch]) -> StepRecord:
        loss = self.backward(batches)
        ready = self._ready()
        norm = self.update()
        load = self.router.load_LE.to(self.model.mesh.host, copy=True) if self.router.balance.num_layers else None
        count = ready.count
        return StepRecord(self.steps, loss, norm, ready.lr, count.targets, count.tokens, load, ready.router_loss)

    @watched()
    def backward(self, batches: Sequence[Batch]) -> float:
        """Gradients of the loss over all micro-batches of all data ranks, left on the parameters. Returns the loss."""
        task(f"step {self.steps}")
        count = self._count(batches, STEP)
        ready, parts = _Ready(self, count, self._lr, self.lr, self._bound()), self._zeros()
        try:
            for number, batch in enumerate(self._here(batches)):
                parts += self._run(batch, count, number, len(batches))
            self.finish()
        except BaseException:
            self.discard()  # half a step of gradients must not be added to the next one
            raise
        self.router.close()
        task(f"step {self.steps}")
        of_terms, of_router = self.model.mesh.sum_(parts, DENSE, "the loss").tolist()
        loss = of_terms + of_router
        if not math.isfinite(loss):  # the same number on all ranks, as below
            self.discard()
            raise NonFiniteError(f"the loss of step {self.steps} is {loss}; no parameter was changed")
        self.model.waiting = replace(ready, router_loss=of_router)
        return loss

    def _run(self, batch: Batch, count: _Count, number: int, num_batches: int) -> Tensor:
        """Forward and backward of one micro-batch; this rank's share of the loss: of its terms, and of the router's."""
        task(f"step {self.steps}, micro-batch {number + 1} of {num_batches}")
        parallel.expect_last(self.model.parts[0], number + 1 == num_batches)
        term = self._term(batch, count)
        aux = self.router.end(count.tokens, num_batches)  # its gradient is already attached
        if not term.requires_grad:
            raise StateError(
                "the loss depends on no trained parameter: it is detached or constant, torch.no_grad() is on, or "
                "train= of mw.load leaves out all that it depends on"
            )
        term.backward()
        return torch.stack([term.detach().double(), aux])

    @watched()
    def update(self) -> float:
        """Clip and apply the gradients that `backward` left. Returns their norm before clipping."""
        ready, grads = self._ready(), self.model.grads()
        self._refuse_changed(ready)
        self._refuse_lacking(grads)
        norm = self.norm(grads)
        if not math.isfinite(norm):  # the same number on all ranks: all raise or none
            self.discard()
            raise NonFiniteError(f"the gradient norm of step {self.steps} is {norm}; no parameter was changed")
        self.model.torn = f"the update of step {self.steps} was cut off, and a part of the parameters may be changed"
        if ready.max_norm is not None and norm > ready.max_norm:
            for grad in grads.values():
                grad.mul_(ready.max_norm / norm)
        self.optimizer.step(grads, ready.lr)
        self.router.trained()
        self.discard()
        task(f"step {self.steps} done")
        self.steps += 1
        self.model.torn = ""
        return norm

    def _ready(self) -> _Ready:
        ready = self.model.waiting
        if not isinstance(ready, _Ready) or ready.engine is not self:
            whose = "those of another engine" if ready else "no gradients"
            raise StateError(f"update() of step {self.steps} found {whose}; call backward(batches) first")
        return ready

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
        self.model.waiting = None

    @watched()
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The loss over all data ranks, without the router's; nothing changes."""
        task(f"evaluation before step {self.steps}")
        count = self._count(batches, EVALUATE)
        parts = self._zeros()
        try:
            for batch in self._here(batches):
                parts[0] += self._term(batch, count)
        finally:
            parallel.rest(self.model.parts[0])
        return self.model.mesh.sum_(parts, DENSE, "the loss")[0].item()

    def _zeros(self) -> Tensor:
        """Of the loss: what its terms make, and what the router adds."""
        return torch.zeros(2, dtype=torch.float64, device=self.model.mesh.device)

    def finish(self) -> None:
        """The one place where the sums that FSDP leaves out are made: every gradient is then complete."""
        model, grads = self.model, self.model.grads()
        self._refuse_lacking(grads)
        parallel.finish([(self._unsummed[name], grad) for name, grad in grads.items()], model.mesh)

    def _refuse_lacking(self, grads: Mapping[str, Tensor]) -> None:
        trainable = self.model.trainable
        lacking = [name for name in trainable if name not in grads]
        if lacking:
            none_did = "FSDP was kept from its sums over fsdp, or from those over replicate that end a step"
            raise StateError(
                f"{lacking[0]} got no gradient, as {len(lacking)} of {len(trainable)} parameters; each must: "
                + (none_did if len(lacking) == len(trainable) else "zeros if it is unused")
            )

    def _term(self, batch: Batch, count: _Count) -> Tensor:
        """This rank's share of the loss of a micro-batch, but for the router's."""
        self.router.begin(batch)
        return self._terms(self.loss, batch).sum() / count.weight

    def _here(self, batches: Sequence[Batch]) -> list[Batch]:
        """All at once, before the first forward: a copy to a device waits for all that it was asked to do before."""
        return [batch.to(self.model.mesh.device) for batch in batches]

    def _count(self, batches: Sequence[Batch], call: str) -> _Count:
        """The targets of the step, counted before any work; and that all ranks are about to do the same."""
        rows = agree(self.model, call, lambda: (self._settings(call), summary(self.model, batches, self.want)))
        axes = self.model.mesh.axes
        for rank, row in enumerate(rows):
            if row[2:4] != rows[0][2:4]:
                raise RankError(
                    f"rank {rank} has {int(row[2])} batches of {int(row[3])} tokens, rank 0 {int(rows[0][2])} of "
                    f"{int(rows[0][3])}; all ranks need the same number of batches and tokens"
                )
        check_data(rows, tuple(range(axes.world)), axes)
        first = {axes.data_rank(rank): row for rank, row in reversed(list(enumerate(rows)))}
        weight, targets, tokens = (sum(row[i] for row in first.values()) for i in (0, 1, 4))
        if weight <= 0:
            raise DataError(f"the step's {int(targets)} targets weigh {weight}; there is nothing to learn from")
        return _Count(weight, int(targets), int(tokens))

    def _settings(self, call: str) -> dict[str, object]:
        """What must be the same on all ranks, beside the model."""
        loss = self.loss if inspect.isroutine(self.loss) else type(self.loss)
        settings = self.optimizer.settings
        shared = {
            "the step": self.steps,
            "the loss": loss.__qualname__,
            "router_aux": self.router.mode,
            "what the loss wants": self.want,
        }
        if call == EVALUATE:
            return shared
        if self.model.waiting is not None or self.model.grads():
            raise StateError("gradients of an earlier backward are waiting; call update() first, or discard()")
        self._refuse_exchanged()
        self._lr = self._ask_lr()
        return {**shared, "max_norm": self._bound(), "lr of this step": self._lr, **asdict(settings)}

    def _refuse_changed(self, ready: _Ready) -> None:
        """What was changed between backward and update, and would be applied to a part of the model."""
        refuse_inference_mode()
        self.model.refuse_torn()
        self._refuse_exchanged()
        for name, now, agreed in (("lr", self.lr, ready.schedule), ("max_norm", self._bound(), ready.max_norm)):
            if now != agreed:
                raise StateError(
                    f"{name} of step {self.steps} is {now}, but was {agreed} before its backward, when all ranks "
                    "agreed on it; change it before backward, or discard()"
                )
        changed = set(self.model.trainable) ^ self.optimizer.trained
        if changed:
            raise StateError(
                f"{min(changed)} and {len(changed) - 1} more changed requires_grad since the engine was made; choose "
                "what is trained with train= of mw.load"
            )

    def _refuse_exchanged(self) -> None:
        """Parameters whose memory is another one by now: the optimizer would go on with the old one."""
        views = self.optimizer.views
        moved = [n for n, t in self.model.stored().items() if n in views and not _same_memory(t, views[n])]
        if moved:
            raise StateError(
                f"{moved[0]} and {len(moved) - 1} more lie elsewhere than when the engine was made, as after "
                "parameter.data = ..., or .to(); write into them instead, model.stored()[name].copy_(...), or make "
                "a new engine"
            )

    def _ask_lr(self) -> float:
        """Once a step: a schedule may count how often it is asked."""
        lr = self.lr(self.steps) if callable(self.lr) else self.lr
        try:
            number = float(lr)
        except (TypeError, ValueError, RuntimeError):
            number = -1.0
        if isinstance(lr, bool) or not 0 <= number < float("inf"):
            raise ConfigError(f"lr of step {self.steps} is {lr!r}; it must be a number of 0 or more")
        return number

    def _bound(self) -> float | None:
        bound = self.max_norm
        if bound is None or (_number(bound) and bound > 0):
            return bound
        raise ConfigError(f"max_norm={bound!r} must be a number above 0, or None")
