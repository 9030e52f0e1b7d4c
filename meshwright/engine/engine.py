"""The engine: agree on a step, run its micro-batches, reduce what FSDP leaves unreduced, clip, update.

A step divides each term by the weight of the whole step before backward. So gradients are plain sums over micro-batches
and ranks, and every split of a step into micro-batches gives the same result up to rounding. Averaging per micro-batch
or per rank would weigh tokens unequally wherever target counts differ (torchtitan#2206).

Every rank decides from the same numbers: the loss and the norm are all-reduced before any of them is compared with a
bound. So all ranks clip by the same factor, and all raise or none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from .. import parallel
from ..checkpoint import SaveJob
from ..data import Batch
from ..errors import CheckpointError, ConfigError, NonFiniteError, StateError
from ..memory.budget import refuse_too_large
from ..models import WITH_MTP
from ..optim import AdamW, Clip, LocalOptimizer, Optimizer, WholeMatrices, squares
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
from .mtp import MtpRecord, MtpTraining, unreached_embedding
from .optimizer_state import (
    COUNTERS,
    StateDict,
    check_same_keys,
    check_same_scale,
    planes_in_memory,
    state_layout,
    take_planes,
)
from .router import Router, refuse_pooled
from .sleep import OPTIMIZER, WEIGHTS, put_to_sleep, wake_up
from .step_results import Results, StepRecord, loss_sum, norm_sum, norms_if_applied
from .validation import (
    check_complete,
    check_engine,
    check_inference_mode,
    check_optimizer,
    check_tables,
    check_trainable,
    check_trains,
    lr_of_step,
    norm_bound,
)
from .vision_sync import forced_tower_runs, sync_pictures, unused_tower_parameters, zero_gradients


class Engine:
    """Trains a model. `lr` is a number or a function of the step (0, 1, ...).

    >>> engine = Engine(model, lr=1e-5)                        # doctest: +SKIP
    >>> record = engine.step([batch, another])                 # doctest: +SKIP

    `entropy=True` also passes `scores["entropy"]` to the loss. `router_aux`: "pooled" or "previous", which
    engine/router.py explains. `optimizer`: its options, such as `mw.AdamW(betas=(0.9, 0.99))`.

    `step` is `backward` (after it gradients are reduced, and equal on all ranks that hold them) and `update` (norm,
    clipping, optimizer).
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
        check_tables(optimizer, model.table, model.trained)
        self.state_layout = state_layout(model, optimizer)
        refuse_too_large(model.need(optimizer), model.mesh.memory)
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, norm_bound(max_norm)
        self.steps = self.tokens = 0  # trained so far; tokens without padding
        self.saving: SaveJob | None = None  # the running `mw.save(..., wait=False)`
        self.want = "entropy" if entropy else model.blueprint.scores[0]
        if self.want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise ConfigError(f"entropy=True, but the head of this model computes only {known}; leave it out")
        self.router = Router(model.blueprint.balance, model.mesh, router_aux)
        self.mtp = MtpTraining(model, router_aux) if model.trains_mtp else None
        decayed = {p.name for p in model.table if p.decay}
        spec, whole = model.blueprint.spec, optimizer.needs_whole_matrix
        matrices = WholeMatrices(spec, model.mesh, model.pieces) if whole else None
        by_rows = {p.name for p in model.table if p.by_rows}
        self.optimizer = LocalOptimizer(optimizer, decayed, self.state_layout.places(), matrices, by_rows)
        self._terms, self.trained = Terms(model, self.want), model.trained
        # The copy of the embedding on a last stage that only looks tokens up for a detached MTP head has no gradient of
        # its own. Zeros, summed with the first stage's, update both copies alike (Megatron-LM#4641).
        self._looked_up = unreached_embedding(model)
        rules, axes = model.blueprint.spec.rules, model.mesh.axes
        self._left_to_sum = {name: axes_left_to_sum(model.table[name], rules, axes) for name in model.pieces}
        refuse_pooled(self.router, axes.pp)

    def __repr__(self) -> str:
        lr = self.lr if isinstance(self.lr, int | float) else "a schedule"
        return f"Engine(step {self.steps}, lr {lr}, {self.model!r})"

    @names_lost_ranks()
    def step(self, batches: Sequence[Batch]) -> StepRecord:
        """Run `backward` and `update` of one optimizer step, and return its record.

        The host waits for the device once: loss, norm and expert load are copied together. Each wait drains the queue
        of kernels, and the device idles until the host has filled it again.
        """
        doing(f"step {self.steps}")
        step = self._agree(STEP, batches)
        with self._discards_on_error():
            with region("forward and backward"):
                reduced, grads = self._reduce_shares(self._backward(batches, step)), self.model.grads()
                results = [reduced, self._norms(grads), self.router.load_LE]
            waited = functools.cache(lambda: self._waited(results))
            self._apply(step, grads, lambda: norms_if_applied(reduced, results[1]), lambda: waited().norms)
        loss, norms, load, router_loss, mtp = waited()
        expert_load = load if self.router.balance.num_layers else None
        sizes = step.num_targets, step.num_tokens
        return StepRecord(self.steps, loss, norms[0], step.lr, *sizes, expert_load, router_loss, mtp)

    def _waited(self, results: Sequence[Tensor]) -> Results:
        """Wait for loss shares, norm and expert load. Raise unless all are finite: then no parameter was changed."""
        shares, norms, load = self.model.mesh.to_host(results)
        try:
            loss, router_loss, mtp = self._finite_loss(self._checked_shares(shares))
            finite_norms = self._finite_norms(norms)
            if mtp is not None and finite_norms[1:]:
                mtp = replace(mtp, grad_norm=finite_norms[1])
            return Results(loss, finite_norms, load, router_loss, mtp)
        except Exception:
            self.model.calls.half_updated = ""  # a fused update, queued before, has seen it too
            raise

    @names_lost_ranks()
    def backward(self, batches: Sequence[Batch]) -> float:
        """Compute the gradients of the loss over all micro-batches of all data ranks. Leave them on the parameters, and
        return the loss, without that of an MTP head."""
        doing(f"step {self.steps}")
        step = self._agree(STEP, batches)
        with self._discards_on_error():
            loss, router_loss, mtp = self._finite_loss(self._reduced_shares(self._backward(batches, step)))
        self.model.calls.pending = replace(step, router_loss=router_loss, mtp_record=mtp)
        return loss

    def _backward(self, batches: Sequence[Batch], step: Step) -> Tensor:
        """Leave reduced gradients on the parameters. Return this rank's shares of the loss and of the router's aux
        loss, on the device."""

        def term(batch: Batch, scores: Scores | None) -> tuple[Tensor | None, Tensor]:
            # Forward has counted the routed tokens. The gradient of the aux loss depends on these counts, and backward
            # reads it from `Balance.slope_E`.
            aux, mtp = self.router.set_slope(step.num_tokens, step.num_batches), self.mtp
            if scores is None:  # a pipeline stage without the head
                return None, torch.stack([torch.zeros_like(aux), aux, *([torch.zeros_like(aux)] * 2 if mtp else [])])
            if mtp is not None:  # only here: another stage of this rank would count once more what backward recomputed
                mtp.router.set_slope(step.mtp.num_followed, step.num_batches)
            num = self._terms.num_scores
            loss = self._share(batch, scores[:num], step)
            shares = torch.stack([loss.detach().double(), aux])
            if mtp is not None:
                mtp_loss, reported = mtp.loss(batch, scores[num:], step.mtp)
                loss, shares = loss + mtp_loss, torch.cat([shares, reported])
            check_trainable(loss)
            return loss, shares

        local, want = self._local_batches(batches, step), self.want + (WITH_MTP if self.mtp is not None else "")
        shares = parallel.run(self.model, local, want, term, f"step {self.steps}")
        doing(f"step {self.steps}")
        self._finish(step)
        for router in self._routers:
            router.sum_load()
        return shares

    @property
    def _routers(self) -> list[Router]:
        return [self.router, *([] if self.mtp is None else [self.mtp.router])]

    @names_lost_ranks()
    def update(self) -> float:
        """Clip and apply the gradients that `backward` left. Return their norm before clipping."""
        step, grads = self._pending(), self.model.grads()
        check_complete(grads, self.model.trainable)
        with self._discards_on_error():
            norms = self._finite_norms(self.model.mesh.to_host([self._norms(grads)])[0])
        on_device = lambda: torch.tensor(norms, dtype=torch.float64, device=self.model.mesh.device)  # noqa: E731 - short
        self._apply(step, grads, on_device, lambda: norms)
        return norms[0]

    def _apply(
        self, step: Step, grads: Mapping[str, Tensor], on_device: Callable[[], Tensor],
        finite: Callable[[], Sequence[float]],
    ) -> None:  # fmt: skip
        """Clip the gradients, update parameters and optimizer state, and count the step.

        The norm is of the whole model, so every rank scales by the same factor; an MTP head may have its own.
        torch's clip_grad_norm_ would count replicated elements several times. `on_device`: the norms for a fused
        update, which is queued before the host knows them. `finite` waits for them, and raises if nothing may be
        changed.
        """
        stored, max_norm = self.model.to_update(), math.inf if step.max_norm is None else step.max_norm
        clip = self._clip(on_device(), max_norm, finite) if self.optimizer.fuses(stored, grads) else None
        norms = [] if clip is not None else finite()  # before the mark, and before anything is changed
        with region("update"), self._marked_half_updated():
            for norm, group in zip(norms, self._clipped_together(grads), strict=False):
                if group and norm > max_norm:  # a pipeline stage may have no gradients
                    torch._foreach_mul_([*group.values()], max_norm / norm)
            self.optimizer.step(stored, grads, step.lr, clip)
            for router in self._routers:
                router.trained()
            self.discard()
            self.steps += 1
            self.tokens += step.num_tokens
        doing(f"step {self.steps - 1} done")

    def _clip(self, norms: Tensor, max_norm: float, finite: Callable[[], object]) -> Clip:
        """Return the clipping of a fused update."""
        return Clip(norms[0], max_norm, finite, dict.fromkeys(self._apart, norms[-1]))

    @property
    def _apart(self) -> frozenset[str]:
        """Return the parameters whose gradients have a norm of their own."""
        return frozenset() if self.mtp is None else self.mtp.apart

    def _clipped_together(self, grads: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return gradients in the groups that have a norm."""
        trunk = {name: grad for name, grad in grads.items() if name not in self._apart}
        return [trunk, {name: grads[name] for name in grads if name in self._apart}] if self._apart else [trunk]

    @names_lost_ranks()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the loss over all data ranks, without the router's aux loss. Change nothing."""
        doing(f"evaluation before step {self.steps}")
        step = self._agree(EVALUATE, batches)
        term = lambda batch, scores: self._share(batch, scores, step).double()  # noqa: E731 - one line reads better
        shares = torch.zeros(2, dtype=torch.float64, device=self.model.mesh.device)
        # A pipeline stage without the head has no terms: its share stays 0.
        shares[0] = sum(parallel.run_forward(self.model, self._local_batches(batches, step), self.want, term))
        return self._reduced_shares(shares)[0]

    def sleep(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move weights, and optimizer state with waiting gradients, to host memory until `wake`. Return how many bytes
        of this rank's device were freed. With `weights=False` scoring and streaming still work."""
        wanted = {WEIGHTS: weights, OPTIMIZER: optimizer}
        return put_to_sleep(self.model, wanted, self.optimizer, self.settle_saving)

    def wake(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move it back to the device, bit for bit, and return its bytes there. If a rank lacks memory, all raise
        `StateError` and nothing wakes: free some memory, and call it again."""
        return wake_up(self.model, {WEIGHTS: weights, OPTIMIZER: optimizer})

    def wait(self) -> None:
        """Wait until an asynchronous save is complete. Raise if it failed."""
        if self.saving is not None:
            self.saving.wait()
            failure, self.saving = self.saving.failure, None
            if failure is not None:
                raise failure

    def settle_saving(self, *, wait: bool = False) -> None:
        """Raise on rank 0 if an asynchronous save has failed; `wait`: wait for it first.

        It runs inside of an agreement, which raises on the other ranks too.
        """
        if self.saving is not None and (wait or not self.saving.is_running):
            self.saving.wait()
            failure, self.saving = self.saving.failure, None
            if failure is not None and not self.model.mesh.rank:
                raise failure

    def state_dict(self) -> StateDict:
        """Return weights, optimizer state and counters by the names of the files, for `torch.distributed.checkpoint`.

        Its tensors are live memory: loading into them changes the engine, and `load_state_dict` then reads the
        counters.
        """
        check_ready(self.model, self.trained)
        counters = {"step": torch.tensor(self.steps), "tokens": torch.tensor(self.tokens)}
        counters |= {"router_load": self.router.trained_load.clone()}
        if self.mtp is not None:
            counters["mtp_router_load"] = self.mtp.router.trained_load.clone()
        if (lora := self.model.recipe.lora) is not None:
            counters["adapter_scale"] = torch.tensor(lora.scale, dtype=torch.float64)
        return {**planes_in_memory(self.model, self.optimizer, self.state_layout), COUNTERS: counters}

    @names_lost_ranks()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the result of `state_dict`, filled by `torch.distributed.checkpoint.load`. All ranks call it.

        Whole tensors of the same names and shapes are accepted too.
        """

        self.model.calls.asleep.check()

        def take() -> None:
            own = self.state_dict()
            check_same_keys(own, state)
            counters = state[COUNTERS]
            check_same_scale(self.model.recipe.lora, counters)
            take_planes({name: own[name] for name in own if name != COUNTERS}, state)
            self.steps = self.optimizer.steps = int(counters["step"])
            self.tokens = int(counters["tokens"])
            self.router.resume(counters["router_load"].tolist())
            if self.mtp is not None:
                self.mtp.router.resume(counters["mtp_router_load"].tolist())

        self.model.mesh.together(take, "load_state_dict", CheckpointError, "the state dict was not loaded")

    def discard(self) -> None:
        """Drop the gradients and the expert counts, also of a step that failed half-way. No collective."""
        for router in self._routers:
            router.forget()
        self.model.forget_grads()

    def norm(self, grads: Mapping[str, Tensor]) -> float:
        """Return the global norm of reduced gradients, from the pieces that each rank stores. With mtp="head" it is
        that of the trunk.

        Every element of the model counts once: its owner adds it, and other holders of the same element do not.
        """
        return self.norms(grads)[0]

    def norms(self, grads: Mapping[str, Tensor]) -> list[float]:
        """Return the norms by which gradients are clipped: one, and with mtp="head" another of the MTP head."""
        (norms,) = self.model.mesh.to_host([self._norms(grads)])
        numbers: list[float] = norms.tolist()
        return numbers

    def _norms(self, grads: Mapping[str, Tensor]) -> Tensor:
        mesh, groups = self.model.mesh, self._clipped_together(grads)
        sums = torch.stack([squares(group, self.model.owned, mesh.device) for group in groups])
        return mesh.all_reduce_(sums, norm_sum(self.model.recipe)).sqrt()

    def _finish(self, step: Step) -> None:
        """Reduce gradients over the axes that FSDP leaves out, such as tp for norms. Do so once a step: a second
        all-reduce would multiply the gradients by the number of ranks."""
        zero_gradients(self.model, self._looked_up)
        grads, unused = self.model.grads(), unused_tower_parameters(self.model, step.pictures)
        check_complete(grads, [name for name in self.model.trainable if name not in unused])
        parallel.finish([(self._left_to_sum[name], grad) for name, grad in grads.items()], self.model.mesh)
        zero_gradients(self.model, unused)

    def _share(self, batch: Batch, scores: Scores, step: Step) -> Tensor:
        """Return this rank's share of the loss of a micro-batch, without the router's aux loss.

        The divisor is the weight of the whole step, so shares add up to the loss, and no reduction averages.
        """
        return self._terms(self.loss, batch, scores).sum() / step.weight

    def _reduced_shares(self, shares: Tensor) -> list[float]:
        """Return the loss shares summed over all ranks, on the host."""
        (reduced,) = self.model.mesh.to_host([self._reduce_shares(shares)])
        return self._checked_shares(reduced)

    def _reduce_shares(self, shares: Tensor) -> Tensor:
        """All-reduce the loss shares, and the number of ranks on which the loss failed. The result stays on the
        device."""
        failed = shares.new_full((1,), float(self._terms.failure is not None))
        return self.model.mesh.all_reduce_(torch.cat([shares, failed]), loss_sum(self.model.recipe))

    def _checked_shares(self, reduced: Tensor) -> list[float]:
        """Return the reduced shares. If the loss failed on any rank, raise on all ranks.

        All collectives of the step are over by now, so raising leaves no rank waiting.
        """
        *shares, num_failed = reduced.tolist()
        if num_failed:
            failure, self._terms.failure = self._terms.failure, None
            self.model.mesh.all_or_none(failure, f"the loss of step {self.steps}")
        return shares

    def _local_batches(self, batches: Sequence[Batch], step: Step) -> list[Batch]:
        """Copy this rank's batches to the device, with pictures in the micro-batches in which any rank has some."""
        synced = sync_pictures(batches, step.pictures, self.model.blueprint.module.tower)
        return [batch.to(self.model.mesh.device) for batch in synced]

    def _agree(self, call: str, batches: Sequence[Batch]) -> Step:
        """Compare settings and data between ranks, and return the step that they make together."""

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
        proposal, gathered = agree(self.model, call, propose)
        if not self.model.mesh.rank:
            warn_of_same_data(gathered, self.model.mesh.num_data_ranks)
        step = whole_step(proposal, gathered, self.model.mesh)
        runs = forced_tower_runs(self.model, step.num_batches) if call == STEP else 0
        return replace(step, pictures=step.pictures | runs, owner=self)

    def _settings(self) -> dict[str, object]:
        """Return what must be the same on all ranks in addition to the model, by the name that an error shows."""
        loss = self.loss if inspect.isroutine(self.loss) else type(self.loss)
        return {
            "the step": self.steps,
            "the loss": loss.__qualname__,
            "router_aux": self.router.mode,
            "the score that the loss gets": self.want,
            "the optimizer's kernel (a warning says why a rank has none)": self._has_kernel,
        }

    @functools.cached_property
    def _has_kernel(self) -> bool:
        """Tell whether the optimizer's fused update works on this rank's device.

        Ranks compare it: copies of a parameter would drift apart if one rank updated its copy by the formula.
        """
        piece = torch.zeros(16, device=self.model.mesh.device, dtype=torch.float32)
        return self.optimizer.options.fuses(piece, piece)

    def _pending(self) -> Step:
        """Return the step whose gradients wait for an update. Refuse gradients of another engine."""
        check_inference_mode()
        self.model.calls.asleep.check()
        self.model.check_whole()
        step = self.model.calls.pending
        if not isinstance(step, Step) or step.owner is not self:
            pending = "gradients of another engine" if step else "no gradients"
            raise StateError(f"update() of step {self.steps} has {pending}; call backward(batches) first")
        return step

    def _finite_loss(self, shares: Sequence[float]) -> tuple[float, float, MtpRecord | None]:
        """Return the loss, the router's aux loss in it, and what the MTP head reports, from reduced shares."""
        term_loss, router_loss, *reported = shares
        loss = self._finite(term_loss + router_loss, "loss")
        mtp = MtpRecord(self._finite(reported[0], "loss of the MTP head"), reported[1]) if reported else None
        return loss, router_loss, mtp

    def _finite_norms(self, norms: Tensor) -> list[float]:
        whats = ("gradient norm", "gradient norm of the MTP head")
        return [self._finite(norm, what) for norm, what in zip(norms.tolist(), whats, strict=False)]

    def _finite(self, number: float, what: str) -> float:
        """Return the number, or raise before any parameter changes. It is equal on all ranks, so all raise or none."""
        if not math.isfinite(number):
            raise NonFiniteError(f"the {what} of step {self.steps} is {number}; no parameter was changed")
        return number

    @contextlib.contextmanager
    def _discards_on_error(self) -> Iterator[None]:
        """Drop all gradients if the body raises: else the next step would add to the gradients of half a step."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def _marked_half_updated(self) -> Iterator[None]:
        """Mark the model as half updated while the body runs. If an error or Ctrl-C ends it, the mark stays, and
        `Model.check_whole` refuses all later calls."""
        calls = self.model.calls
        calls.half_updated = f"the update of step {self.steps} was interrupted, and some parameters may be changed"
        yield
        calls.half_updated = ""
