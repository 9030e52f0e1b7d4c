"""The training engine: an optimizer step over micro-batches (gradient accumulation), clipping, update, evaluation.

A step divides each term by the weight of the whole step before backward. So gradients are plain sums over micro-batches
and ranks, and every split of a step into micro-batches gives the same result up to rounding. Averaging per micro-batch
or per rank would weigh tokens unequally wherever target counts differ (torchtitan#2206).

Every rank decides from the same numbers: the loss and the norm are all-reduced before any of them is compared with a
bound. So all ranks clip by the same factor, and all raise or none.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from .. import parallel
from ..checkpoint import SaveJob
from ..data import Batch
from ..errors import ConfigError, NonFiniteError, StateError
from ..memory.budget import refuse_too_large
from ..optim import AdamW, LocalOptimizer, Optimizer, WholeMatrices
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
from .engine_state import state_of, take_state
from .gradient_norms import GradientNorms
from .loss import Loss
from .loss_terms import Terms
from .losses import LossFunction, cross_entropy
from .model import Model
from .mtp import MtpTraining, unreached_embedding
from .optimizer_state import StateDict, state_layout
from .router import Router, refuse_pooled
from .sleep import OPTIMIZER, WEIGHTS, put_to_sleep, wake_up
from .step_results import Results, StepRecord, loss_sum, norms_if_applied, results_of
from .step_rows import fields_of_step
from .validation import (
    check_candidates,
    check_complete,
    check_engine,
    check_inference_mode,
    check_on_nonfinite,
    check_optimizer,
    check_temperature,
    check_trainable,
    check_trains,
    lr_of_step,
    norm_bound,
)
from .vision_sync import forced_tower_runs, sync_images, unused_tower_parameters, zero_gradients


class Engine:
    """Trains a model. `lr` is a number or a function of the step (0, 1, ...).

    >>> engine = Engine(model, lr=1e-5)                        # doctest: +SKIP
    >>> record = engine.step([batch, another])                 # doctest: +SKIP

    `loss`: a function of scores and fields, or `mw.Loss(function, per="document")`. `entropy=True` also passes
    `scores["entropy"]` to it. `temperature` divides the logits first, as the sampler of the answers did. `router_aux`:
    "pooled" or "previous", which engine/router.py explains. `optimizer`: its options, such as `mw.AdamW(betas=(0.9,
    0.99))`. `on_nonfinite`: "raise", or "skip" to return a record whose `skipped` says why nothing was changed.

    `lr`, `loss` and `temperature` may be assigned between steps, the same on all ranks.

    `step` runs `backward`, which leaves gradients reduced and equal on all ranks that hold them, and then `update`:
    norm, clipping, optimizer.
    """

    def __init__(
        self,
        model: Model,
        *,
        lr: float | Callable[[int], float],
        loss: Loss | LossFunction = cross_entropy,
        optimizer: Optimizer = AdamW(),
        max_norm: float | None = 1.0,
        router_aux: str = "pooled",
        entropy: bool = False,
        temperature: float = 1.0,
        on_nonfinite: str = "raise",
    ) -> None:
        check_is_model(model)
        check_inference_mode()
        check_engine(lr, loss, entropy, temperature, on_nonfinite)
        check_optimizer(optimizer)
        optimizer.check(model.table, model.trained)
        self.state_layout = state_layout(model, optimizer)
        refuse_too_large(model.need(optimizer), model.mesh.memory)
        self.model, self.lr, self.loss, self.max_norm = model, lr, loss, norm_bound(max_norm)
        self.temperature, self.on_nonfinite = temperature, on_nonfinite
        self.steps = self.tokens = 0  # trained so far; tokens without padding
        self.metrics: dict[str, float] = {}  # of the loss, in the last `backward`, `step` or `evaluate`
        self.saving: SaveJob | None = None  # the running `mw.save(..., wait=False)`
        self.want = "entropy" if entropy else model.blueprint.scores[0]
        if self.want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise ConfigError(f"entropy=True, but the head of this model computes only {known}; leave it out")
        self.router = Router(model.blueprint.balance, model.mesh, router_aux)
        self.mtp = MtpTraining(model, router_aux) if model.trains_mtp else None
        whole, spec = optimizer.needs_whole_matrix, model.blueprint.spec
        matrices = WholeMatrices(optimizer, spec, model.mesh, model.pieces) if whole else None
        self.optimizer = LocalOptimizer(optimizer, self.state_layout.spec.table, self.state_layout.places(), matrices)
        self._norms = GradientNorms(model, frozenset() if self.mtp is None else self.mtp.apart)
        self._terms, self.trained = Terms(model, self.want), model.trained
        self._metrics_M = torch.zeros(0)  # of the micro-batch whose loss was computed last, before they are divided
        # The copy of the embedding on a last stage that only looks tokens up for a detached MTP head has no gradient of
        # its own. Zeros, summed with the first stage's, update both copies equally (Megatron-LM#4641).
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
        results, skipped = list[Results](), ""
        try:
            self._step(batches, step, results)
        except NonFiniteError as error:
            if self.on_nonfinite == "raise" or not results:  # a loss may raise this error too
                raise
            skipped = str(error)
        (result,) = results
        self.metrics = dict(result.metrics)
        expert_load = result.load if self.router.balance.num_layers else None
        numbers = self.steps + bool(skipped), result.loss, result.norms[0], step.lr, step.num_targets, step.num_tokens
        return StepRecord(*numbers, expert_load, result.router_loss, result.mtp, result.metrics, skipped)

    def _step(self, batches: Sequence[Batch], step: Step, results: list[Results]) -> None:
        """Take a step, and append its results; raise if they are not finite, before anything is changed."""
        with self._discards_on_error():
            with region("forward and backward"):
                reduced, grads = self._reduce_shares(self._backward(batches, step)), self.model.grads()
                on_device = [reduced, self._norms.reduced(grads), self.router.load_LE]

            waited = functools.cache(lambda: self._waited(on_device, results))
            norms = lambda: norms_if_applied(reduced, on_device[1], self._num_metrics)  # noqa: E731 - short
            self._apply(step, grads, norms, lambda: waited().norms)

    def _waited(self, on_device: Sequence[Tensor], results: list[Results]) -> Results:
        """Wait for loss shares, norm and expert load, and append them. Raise unless all are finite: then no parameter
        was changed."""
        shares, norms, load = self.model.mesh.to_host(on_device)
        try:
            results.append(self._results(self._checked_shares(shares), norms.tolist(), load))
            self._refuse_nonfinite(results[0].nonfinite(self.steps))
            return results[0]
        except Exception:
            self.model.calls.half_updated = ""  # a fused update, queued before, has seen it too
            raise

    def _results(self, shares: Sequence[float], norms: Sequence[float], load: Tensor) -> Results:
        return results_of(shares, norms, load, self.mtp is not None, Loss.of(self.loss).metrics)

    def _refuse_nonfinite(self, reason: str) -> None:
        """Raise before any parameter changes. Results are equal on all ranks, so all raise or none."""
        if reason:
            raise NonFiniteError(f"{reason}; no parameter was changed")

    @property
    def _num_metrics(self) -> int:
        return len(Loss.of(self.loss).metrics)

    @names_lost_ranks()
    def backward(self, batches: Sequence[Batch]) -> float:
        """Compute the gradients of the loss over all micro-batches of all data ranks. Leave them on the parameters, and
        return the loss, without that of an MTP head."""
        doing(f"step {self.steps}")
        step = self._agree(STEP, batches)
        with self._discards_on_error():
            shares = self._reduced_shares(self._backward(batches, step))
            results = self._results(shares, [], self.router.load_LE)
            if self.on_nonfinite == "raise":
                self._refuse_nonfinite(results.nonfinite(self.steps))
        self.model.calls.pending, self.metrics = replace(step, results=results), dict(results.metrics)
        return results.loss

    def _backward(self, batches: Sequence[Batch], step: Step) -> Tensor:
        """Leave reduced gradients on the parameters. Return this rank's shares of the loss and of the router's aux
        loss, on the device."""

        def term(batch: Batch, scores: Scores | None) -> tuple[Tensor | None, Tensor]:
            # Forward has counted the routed tokens. The gradient of the aux loss depends on these counts, and backward
            # reads it from `Balance.slope_E`.
            aux, mtp = self.router.set_slope(step.num_tokens, step.num_batches), self.mtp
            if scores is None:  # a pipeline stage without the head
                num_zeros = (2 if mtp else 0) + self._num_metrics
                return None, torch.stack([torch.zeros_like(aux), aux, *[torch.zeros_like(aux)] * num_zeros])
            if mtp is not None:  # not on other stages of this rank: they would count recomputed tokens again
                mtp.router.set_slope(step.mtp.num_followed, step.num_batches)
            num = len(self._terms.names(Loss.of(self.loss)))
            loss = self._share(batch, scores[:num], step)
            shares = torch.stack([loss.detach().double(), aux])
            if mtp is not None:
                mtp_loss, reported = mtp.loss(batch, scores[num:], step.mtp)
                loss, shares = loss + mtp_loss, torch.cat([shares, reported])
            check_trainable(loss)
            return loss, torch.cat([shares, self._metrics_M / step.weight])

        want = self._terms.wanted(Loss.of(self.loss), float(self.temperature), self.mtp is not None)
        local = self._local_batches(batches, step)
        self._terms.begin(Loss.of(self.loss), batches, local, float(self.temperature))
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
        """Clip and apply the gradients that `backward` left. Return their norm before clipping.

        With on_nonfinite="skip", a norm that is not finite says that nothing was changed.
        """
        step, grads = self._pending(), self.model.grads()
        check_complete(grads, self.model.trainable)
        norms = self._norms.on_host(grads)
        if reason := replace(step.results, norms=norms).nonfinite(self.steps):
            self.discard()
            if self.on_nonfinite == "raise":
                self._refuse_nonfinite(reason)
            return math.nan if math.isfinite(norms[0]) else norms[0]
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
        clip = self._norms.clip(on_device(), max_norm, finite) if self.optimizer.fuses(stored, grads) else None
        norms = [] if clip is not None else finite()  # before the mark, and before anything is changed
        with region("update"), self._marked_half_updated():
            for norm, group in zip(norms, self._norms.groups(grads), strict=False):
                if group and norm > max_norm:  # a pipeline stage may have no gradients
                    torch._foreach_mul_([*group.values()], max_norm / norm)
            self.optimizer.step(stored, grads, step.lr, clip)
            for router in self._routers:
                router.trained()
            self.discard()
            self.steps += 1
            self.tokens += step.num_tokens
        doing(f"step {self.steps - 1} done")

    @names_lost_ranks()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Return the loss over all data ranks, without the router's aux loss. Change nothing but `metrics`."""
        doing(f"evaluation before step {self.steps}")
        step = self._agree(EVALUATE, batches)
        local, loss = self._local_batches(batches, step), Loss.of(self.loss)
        of_step = self._terms.begin(loss, batches, local, float(self.temperature), grad=False)

        def term(batch: Batch, scores: Scores) -> Tensor:
            loss = self._share(batch, scores, step).detach().double()
            return torch.cat([loss.view(1), self._metrics_M / step.weight])

        shares = torch.zeros(1 + self._num_metrics, dtype=torch.float64, device=self.model.mesh.device)
        if of_step is not None:
            shares += torch.cat([of_step.value.double().view(1), of_step.metrics_M]) / step.weight
        else:  # a pipeline stage without the head has no terms: its shares stay 0
            want = self._terms.wanted(loss, float(self.temperature))
            for part in parallel.run_forward(self.model, local, want, term):
                shares += part
        # The place of the router's aux loss is empty.
        total, _, *metrics = self._reduced_shares(torch.cat([shares[:1], shares.new_zeros(1), shares[1:]]))
        self.metrics = dict(zip(loss.metrics, metrics, strict=True))
        return total

    def sleep(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move weights, and optimizer state with waiting gradients, to host memory until `wake`. Return how many bytes
        of this rank's device were freed. With `weights=False` scoring and streaming still work."""
        wanted = {WEIGHTS: weights, OPTIMIZER: optimizer}
        return put_to_sleep(self.model, wanted, self.optimizer, self.settle_saving)

    def wake(self, *, weights: bool = True, optimizer: bool = True) -> int:
        """Move what sleeps back to the device, bit for bit, and return its bytes there. If a rank lacks memory, all
        ranks raise `StateError` and nothing wakes: free some memory, and call it again."""
        return wake_up(self.model, {WEIGHTS: weights, OPTIMIZER: optimizer})

    def wait(self) -> None:
        """Wait until an asynchronous save is complete. Raise if it failed."""
        if (failure := self._failed_save(wait=True)) is not None:
            raise failure

    def settle_saving(self, *, wait: bool = False) -> None:
        """Raise on rank 0 if an asynchronous save has failed; `wait`: wait for it first.

        It runs inside of an agreement, which raises on the other ranks too.
        """
        failure = self._failed_save(wait)
        if failure is not None and not self.model.mesh.rank:
            raise failure

    def _failed_save(self, wait: bool) -> BaseException | None:
        """Return what ended an asynchronous save, once; None while it runs, and if it is complete."""
        if self.saving is None or (self.saving.is_running and not wait):
            return None
        self.saving.wait()
        failure, self.saving = self.saving.failure, None
        return failure

    def state_dict(self) -> StateDict:
        """Return weights, optimizer state and counters by the names of the files, for `torch.distributed.checkpoint`.

        Its tensors are live memory: loading into them changes the engine, and `load_state_dict` then reads the
        counters.
        """
        return state_of(self)

    @names_lost_ranks()
    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the result of `state_dict`, filled by `torch.distributed.checkpoint.load`. All ranks call it.

        Whole tensors of the same names and shapes are accepted too.
        """
        take_state(self, state)

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
        return self._norms.on_host(grads)

    def _finish(self, step: Step) -> None:
        """Reduce gradients over the axes that FSDP leaves out, such as tp for norms. Do so once a step: a second
        all-reduce would multiply the gradients by the number of ranks."""
        zero_gradients(self.model, self._looked_up)
        grads, unused = self.model.grads(), unused_tower_parameters(self.model, step.images_mask)
        check_complete(grads, [name for name in self.model.trainable if name not in unused])
        parallel.finish([(self._left_to_sum[name], grad) for name, grad in grads.items()], self.model.mesh)
        zero_gradients(self.model, unused)

    def _share(self, batch: Batch, scores: Scores, step: Step) -> Tensor:
        """Return this rank's share of the loss of a micro-batch, without the router's aux loss.

        The divisor is the weight of the whole step, so shares add up to the loss, and no reduction averages.
        """
        terms, self._metrics_M = self._terms(Loss.of(self.loss), batch, scores)
        return terms.sum() / step.weight

    def _reduced_shares(self, shares: Tensor) -> list[float]:
        """Return the loss shares summed over all ranks, on the host."""
        (reduced,) = self.model.mesh.to_host([self._reduce_shares(shares)])
        return self._checked_shares(reduced)

    def _reduce_shares(self, shares: Tensor) -> Tensor:
        """All-reduce the loss shares, and the number of ranks on which the loss failed. The result stays on the
        device."""
        failed = shares.new_full((1,), float(self._terms.failure is not None))
        return self.model.mesh.all_reduce_(torch.cat([failed, shares]), loss_sum(self.model.recipe))

    def _checked_shares(self, reduced: Tensor) -> list[float]:
        """Return the reduced shares. If the loss failed on any rank, raise on all ranks.

        All collectives of the step are over by now, so raising leaves no rank waiting.
        """
        num_failed, *shares = reduced.tolist()
        if num_failed:
            failure, self._terms.failure = self._terms.failure, None
            self.model.mesh.all_or_none(failure, f"the loss of step {self.steps}")
        return shares

    def _local_batches(self, batches: Sequence[Batch], step: Step) -> list[Batch]:
        """Copy this rank's batches to the device, with images in the micro-batches in which any rank has some."""
        synced = sync_images(batches, step.images_mask, self.model.blueprint.module.tower)
        return [batch.to(self.model.mesh.device) for batch in synced]

    def _agree(self, call: str, batches: Sequence[Batch]) -> Step:
        """Compare settings and data between ranks, and return the step that they make together."""

        def propose() -> Proposal:
            loss = Loss.of(self.loss)
            per = loss.per if loss.normalise else "micro_batch"
            self.settle_saving()
            check_temperature(self.temperature, self.model.blueprint.scores)
            check_candidates(loss, float(self.temperature), self.model.blueprint.scores)
            check_on_nonfinite(self.on_nonfinite)
            if call != EVALUATE:
                check_ready(self.model, self.trained)
                check_trains(self.trained, in_base=self.model.calls.in_base)
            data = data_of(self.model, batches, self.want, per, loss.candidates)
            settings = {**self._settings(), **fields_of_step(loss, batches)}
            if call == EVALUATE:
                return Proposal(data, settings=settings)
            lr = lr_of_step(self.lr(self.steps) if callable(self.lr) else self.lr, self.steps)
            options = self.optimizer.options
            settings |= {"optimizer": type(options).__name__, **asdict(options)}
            return Proposal(data, lr, norm_bound(self.max_norm), settings)

        self._terms.failure = None
        proposal, gathered = agree(self.model, call, propose)
        if not self.model.mesh.rank:
            warn_of_same_data(gathered, self.model.mesh.num_data_ranks)
        step = whole_step(proposal, gathered, self.model.mesh)
        step = step if Loss.of(self.loss).normalise else replace(step, weight=1.0)
        runs = forced_tower_runs(self.model, step.num_batches) if call == STEP else 0
        return replace(step, images_mask=step.images_mask | runs, owner=self)

    def _settings(self) -> dict[str, object]:
        """Return what must be the same on all ranks in addition to the model, by the name that an error shows."""
        loss, kernel = Loss.of(self.loss), self.optimizer.has_kernel(self.model.mesh.device)
        return {
            "the step": self.steps,
            "the loss": loss.name,
            "what the loss is of": (loss.per, loss.normalise, loss.metrics),
            "the candidates of the loss": (loss.candidates, loss.candidate_temperature, loss.rest),
            "temperature": float(self.temperature),
            "on_nonfinite": self.on_nonfinite,
            "router_aux": self.router.mode,
            "the score that the loss gets": self.want,
            "the optimizer's kernel (a warning says why a rank has none)": kernel,
        }

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
