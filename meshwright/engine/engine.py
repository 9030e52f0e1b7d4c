"""Train: agree on a step, run its micro-batches, finish the sums once, update."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from .. import parallel
from ..axes import DENSE, Sum
from ..checkpoint import SaveJob
from ..data import Batch
from ..errors import CheckpointError, ConfigError, NonFiniteError, StateError
from ..memory.budget import refuse_too_large
from ..optim import AdamW, LocalOptimizer, Optimizer, WholeMatrices, squares
from ..parallel import Scores
from ..sharding import axes_left_to_sum
from ..watch import doing, names_lost_ranks, region
from .agreement import (
    EVALUATE,
    STEP,
    Proposal,
    Step,
    agree,
    check_is_model,
    check_ready,
    data_of,
    warn_of_same_data,
    whole_step,
)
from .loss_terms import Terms
from .losses import Loss, cross_entropy
from .model import Model
from .optimizer_state import COUNTERS, StateDict, check_same_keys, kept_by, planes_in_memory, take_planes
from .router import Router, refuse_pooled
from .validation import (
    check_complete,
    check_engine,
    check_inference_mode,
    check_optimizer,
    check_trainable,
    check_trains,
    lr_of_step,
    norm_bound,
)
from .vision_sync import as_all_see, at_least, give_zeros, unused_in

LOSS, NORM = Sum("the loss", DENSE, 24), Sum("the norm", DENSE, 8)


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


class Engine:
    """Trains a model. `lr` is a number or a function of the step (0, 1, ...).

    >>> engine = Engine(model, lr=1e-5)                        # doctest: +SKIP
    >>> record = engine.step([batch, another])                 # doctest: +SKIP

    `entropy=True` gives the loss `scores["entropy"]` too. `router_aux`: "pooled" or "previous", which
    engine/router.py explains. `optimizer`: its options, such as `mw.AdamW(betas=(0.9, 0.99))`.

    `step` is `backward` (gradients are then finished, the same on all their holders) and `update` (norm, clip, the
    optimizer).
    """

    def __init__(
        self,
        model: Model,
        *,
        lr: float | Callable[[int], float],
        loss: Loss = cross_entropy,
        optimizer: Optimizer = AdamW(),
        max_norm: float | None = 1.0,
        router_aux: str = "pooled",
        entropy: bool = False,
    ) -> None:
        check_is_model(model)
        check_inference_mode()
        check_engine(lr, loss, entropy)
        check_optimizer(optimizer)
        self.kept = kept_by(model, optimizer)  # optimizer state
        refuse_too_large(model.need(optimizer), model.mesh.memory)
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, norm_bound(max_norm)
        self.steps = self.tokens = 0  # that were trained
        self.saving: SaveJob | None = None  # what `mw.save(..., wait=False)` left
        self.want = "entropy" if entropy else model.blueprint.scores[0]
        if self.want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise ConfigError(f"entropy=True, but the head of this model gives only {known}")
        self.router = Router(model.blueprint.balance, model.mesh, router_aux)
        decayed = {p.name for p in model.table if p.decay}
        spec, whole = model.blueprint.spec, optimizer.needs_whole_matrix
        matrices = WholeMatrices(spec, model.mesh, model.pieces) if whole else None
        self.optimizer = LocalOptimizer(optimizer, decayed, self.kept.places(), matrices)
        self._terms, self.trained = Terms(model, self.want), model.trained
        rules, axes = model.blueprint.spec.rules, model.mesh.axes
        self._left_to_sum = {name: axes_left_to_sum(model.table[name], rules, axes) for name in model.pieces}
        refuse_pooled(self.router, axes.pp)

    def __repr__(self) -> str:
        lr = self.lr if isinstance(self.lr, int | float) else "a schedule"
        return f"Engine(step {self.steps}, lr {lr}, {self.model!r})"

    @names_lost_ranks()
    def step(self, batches: Sequence[Batch]) -> StepRecord:
        """`backward` and `update`. The host waits for the device once, for all that it must know before the update."""
        doing(f"step {self.steps}")
        step = self._agree(STEP, batches)
        with self._discards_on_error(), region("forward and backward"):
            sums, grads = self._sum(self._backward(batches, step)), self.model.grads()
            found = self.model.mesh.to_host([sums, self._norm(grads), self.router.load_LE])
            of_terms, of_router = self._told(found[0])
            loss = self._finite(of_terms + of_router, "loss")
            norm = self._finite(found[1].item(), "gradient norm")
        with region("update"):
            self._apply(step, grads, norm)
        load = found[2] if self.router.balance.num_layers else None
        return StepRecord(self.steps, loss, norm, step.lr, step.num_targets, step.num_tokens, load, of_router)

    @names_lost_ranks()
    def backward(self, batches: Sequence[Batch]) -> float:
        """Gradients of the loss over all micro-batches of all data ranks, left on the parameters. Returns the loss."""
        doing(f"step {self.steps}")
        step = self._agree(STEP, batches)
        with self._discards_on_error():
            of_terms, of_router = self._summed(self._backward(batches, step))
            loss = self._finite(of_terms + of_router, "loss")
        self.model.calls.pending = replace(step, router_loss=of_router)
        return loss

    def _backward(self, batches: Sequence[Batch], step: Step) -> Tensor:
        """The same up to the loss: this rank's shares of it, on the device."""

        def term(batch: Batch, scores: Scores | None) -> tuple[Tensor | None, Tensor]:
            aux = self.router.set_slope(step.num_tokens, step.num_batches)  # backward takes it from there
            if scores is None:  # a stage without a head
                return None, torch.stack([torch.zeros_like(aux), aux])
            loss = self._share(batch, scores, step)
            check_trainable(loss)
            return loss, torch.stack([loss.detach().double(), aux])

        here = self._here(batches, step)
        shares = parallel.run(self.model, here, self.want, term, f"step {self.steps}")
        doing(f"step {self.steps}")
        self._finish(step)
        self.router.sum_load()
        return shares

    @names_lost_ranks()
    def update(self) -> float:
        """Clip and apply the gradients that `backward` left. Returns their norm before clipping."""
        step, grads = self._pending(), self.model.grads()
        check_complete(grads, self.model.trainable)
        with self._discards_on_error():
            norm = self._finite(self.norm(grads), "gradient norm")
        self._apply(step, grads, norm)
        return norm

    def _apply(self, step: Step, grads: Mapping[str, Tensor], norm: float) -> None:
        with self._marked_half_updated():
            if grads and step.max_norm is not None and norm > step.max_norm:  # a stage may have none
                torch._foreach_mul_([*grads.values()], step.max_norm / norm)
            self.optimizer.step(self.model.to_update(), grads, step.lr)
            self.router.trained()
            self.discard()
            self.steps += 1
            self.tokens += step.num_tokens
        doing(f"step {self.steps - 1} done")

    @names_lost_ranks()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The loss over all data ranks, without the router's; nothing changes."""
        doing(f"evaluation before step {self.steps}")
        step = self._agree(EVALUATE, batches)
        term = lambda batch, scores: self._share(batch, scores, step).double()  # noqa: E731 - one line reads better
        shares = torch.zeros(2, dtype=torch.float64, device=self.model.mesh.device)
        shares[0] = sum(
            parallel.run_forward(self.model, self._here(batches, step), self.want, term)
        )  # 0 without a head
        return self._summed(shares)[0]

    def wait(self) -> None:
        """Until the save that runs beside the training is a checkpoint. Raises if it failed."""
        if self.saving is not None:
            self.saving.wait()
            failure, self.saving = self.saving.failure, None
            if failure is not None:
                raise failure

    def settle_saving(self, *, wait: bool = False) -> None:
        """Raise if the save beside the training has failed: on rank 0, which all others hear."""
        if self.saving is not None and (wait or not self.saving.is_running):
            self.saving.wait()
            failure, self.saving = self.saving.failure, None
            if failure is not None and not self.model.mesh.rank:
                raise failure

    def state_dict(self) -> StateDict:
        """Weights, optimizer state and counters under the names of the files, for `torch.distributed.checkpoint` alone.

        Its tensors are live: what is loaded into them is in the engine, and `load_state_dict` then takes the counters.
        """
        check_ready(self.model, self.trained)
        numbers = {"step": torch.tensor(self.steps), "tokens": torch.tensor(self.tokens)}
        numbers |= {"router_load": self.router.trained_load.clone()}
        return {**planes_in_memory(self.model, self.optimizer, self.kept), COUNTERS: numbers}

    @names_lost_ranks()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `state_dict` returned, filled by `torch.distributed.checkpoint.load`. All ranks call it."""

        def take() -> None:
            mine = self.state_dict()
            check_same_keys(mine, state)
            numbers = state[COUNTERS]
            take_planes({name: mine[name] for name in mine if name != COUNTERS}, state)
            self.steps = self.optimizer.steps = int(numbers["step"])
            self.tokens = int(numbers["tokens"])
            self.router.resume(numbers["router_load"].tolist())

        self.model.mesh.together(take, "the taking of a state dict", CheckpointError, "the state dict was not taken")

    def discard(self) -> None:
        """Forget the gradients, also those of a step that failed half way, and what it counted."""
        self.router.forget()
        self.model.forget_grads()

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """The norm of finished gradients, given as each rank stores them: every element of the model counts once."""
        (norm,) = self.model.mesh.to_host([self._norm(grads)])
        return norm.item()

    def _norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        mesh = self.model.mesh
        return mesh.all_reduce_(squares(grads, self.model.owned, mesh.device), NORM).sqrt()

    def _finish(self, step: Step) -> None:
        """Make the sums that FSDP leaves out, once: a second time would multiply what copies hold."""
        grads, unused = self.model.grads(), unused_in(self.model, step.pictures)
        check_complete(grads, [name for name in self.model.trainable if name not in unused])
        parallel.finish([(self._left_to_sum[name], grad) for name, grad in grads.items()], self.model.mesh)
        give_zeros(self.model, unused)

    def _share(self, batch: Batch, scores: Scores, step: Step) -> Tensor:
        """This rank's share of the loss of a micro-batch, without the router's."""
        return self._terms(self.loss, batch, scores).sum() / step.weight

    def _summed(self, shares: Tensor) -> list[float]:
        """The shares of all ranks."""
        (found,) = self.model.mesh.to_host([self._sum(shares)])
        return self._told(found)

    def _sum(self, shares: Tensor) -> Tensor:
        """The shares of all ranks, and on how many ranks the loss has failed: on the device."""
        failed = shares.new_full((1,), float(self._terms.failure is not None))
        return self.model.mesh.all_reduce_(torch.cat([shares, failed]), LOSS)

    def _told(self, sums: Tensor) -> list[float]:
        """The shares. Where the loss failed on a rank, every rank raises now: no rank waits any more."""
        *summed, num_failed = sums.tolist()
        if num_failed:
            failure, self._terms.failure = self._terms.failure, None
            self.model.mesh.all_or_none(failure, f"the loss of step {self.steps}")
        return summed

    def _here(self, batches: Sequence[Batch], step: Step) -> list[Batch]:
        """All batches on the device."""
        seen = as_all_see(batches, step.pictures, self.model.blueprint.module.tower)
        return [batch.to(self.model.mesh.device) for batch in seen]

    def _agree(self, call: str, batches: Sequence[Batch]) -> Step:
        """What all ranks must have in common and know of each other before a step."""

        def propose() -> Proposal:
            self.settle_saving()
            if call == EVALUATE:
                return Proposal(data_of(self.model, batches, self.want), settings=self._settings())
            check_ready(self.model, self.trained)
            check_trains(self.trained)
            lr = lr_of_step(self.lr(self.steps) if callable(self.lr) else self.lr, self.steps)
            options = self.optimizer.options
            settings = {**self._settings(), "optimizer": type(options).__name__, **asdict(options)}
            return Proposal(data_of(self.model, batches, self.want), lr, norm_bound(self.max_norm), settings)

        self._terms.failure = None
        proposal, told = agree(self.model, call, propose)
        if not self.model.mesh.rank:
            warn_of_same_data(told, self.model.mesh.num_data_ranks)
        step = whole_step(proposal, told, self.model.mesh)
        runs = at_least(self.model, step.num_batches) if call == STEP else 0
        return replace(step, pictures=step.pictures | runs, owner=self)

    def _settings(self) -> dict[str, object]:
        loss = self.loss if inspect.isroutine(self.loss) else type(self.loss)
        return {
            "the step": self.steps,
            "the loss": loss.__qualname__,
            "router_aux": self.router.mode,
            "what the loss gets": self.want,
        }

    def _pending(self) -> Step:
        """The step whose gradients wait for an update, if they are this engine's."""
        check_inference_mode()
        self.model.check_whole()
        step = self.model.calls.pending
        if not isinstance(step, Step) or step.owner is not self:
            whose = "those of another engine" if step else "no gradients"
            raise StateError(f"update() of step {self.steps} found {whose}; call backward(batches) first")
        return step

    def _finite(self, number: float, what: str) -> float:
        """It is the same number on all ranks, so all raise or none."""
        if not math.isfinite(number):
            raise NonFiniteError(f"the {what} of step {self.steps} is {number}; no parameter was changed")
        return number

    @contextlib.contextmanager
    def _discards_on_error(self) -> Iterator[None]:
        """Half a step of gradients must not be added to the next one."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def _marked_half_updated(self) -> Iterator[None]:
        """No call goes on with a model whose update was cut off, by Ctrl-C for example: an error leaves the mark."""
        calls = self.model.calls
        calls.half_updated = f"the update of step {self.steps} was cut off, and some parameters may be changed"
        yield
        calls.half_updated = ""
