"""Run the micro-batches of a step: forward and backward through pipeline stages, with gradient accumulation.

Each rank executes a list of actions that the pipeline schedule wrote (`sharding/schedules.py`): 1F1B (PipeDream,
arXiv:1806.03377), interleaved 1F1B (arXiv:2104.04473), zero bubble (arXiv:2401.10241). With one stage the list is F0 B0
F1 B1 ..., the plain loop, through the same code.

The loss of each micro-batch is divided by the target count of the whole step inside of `term`, before backward.
Dividing after the schedule is too late: pipeline gradients came out `global_valid_tokens` times too large
(torchtitan#2972). A mean per micro-batch weighs tokens unequally (torchtitan#2206).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from .. import ops
from ..data import Batch
from ..mesh import Mesh
from ..models import Decoder, Want
from ..recipe import LATE, Pipeline
from ..sharding import Line, Stage, forward_program, program_of
from ..sharding.schedules import BACK, FORWARD, SEND, THERE, WEIGHT, Action, Transfer
from ..watch import doing
from .fp8_gather import Fp8Gather
from .fsdp import before_backward, reset_after_forward, sum_late, sum_replicas
from .stage_transfers import StageTransfers
from .vision_encoder import sight_of

Scores = tuple[Tensor, ...]


class Staged(Protocol):
    """The part of a model on a mesh that a pass reads."""

    stages: tuple[Stage, ...]  # of this rank
    mesh: Mesh
    low: Fp8Gather

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def line(self) -> Line: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def gathers_once(self) -> bool: ...
    @property
    def sums_once(self) -> bool: ...
    @property
    def trained_from(self) -> int: ...


# (batch, scores) -> (the scalar that backward starts from, this rank's shares of the loss terms). Scores and scalar are
# None on a stage without a head.
Term = Callable[[Batch, Scores | None], tuple[Tensor | None, Tensor]]


def run(model: Staged, batches: Sequence[Batch], want: Want, term: Term, task: str) -> Tensor:
    """Run forward and backward of every micro-batch, and return the summed loss shares of this rank."""
    passes = _Passes(model, batches, want)
    total: Tensor | None = None
    program = program_of(model.line, model.pipeline.schedule, len(batches), model.trained_from)
    with passes.transfers, model.low.quantised():
        for step in program[model.mesh.coords["pp"]]:
            passes.note(task, step)
            if isinstance(step, Transfer):
                passes.transfer(step)
            elif step.kind == FORWARD:
                scores = passes.forward(step)
                loss, share = term(batches[step.batch], scores)
                if loss is not None:
                    passes.start(step, loss)
                total = share if total is None else total + share
            elif step.kind == WEIGHT:
                passes.weights(step)
            else:
                passes.backward(step)
    # Frozen stages before the first trained one run no backward, where FSDP would free what forward has gathered.
    reset_after_forward([stage.module for stage in model.stages if stage.number < model.trained_from])
    assert total is not None, "a step has at least one batch"
    return total


@torch.no_grad()
def run_forward(
    model: Staged, batches: Sequence[Batch], want: Want, term: Callable[[Batch, Scores], Tensor]
) -> list[Tensor]:
    """Run forward alone, and return `term(batch, scores)` of each batch: on the last stage; other stages return
    nothing."""
    passes, results = _Passes(model, batches, want), dict[int, Tensor]()
    try:
        with passes.transfers, model.low.quantised():
            for step in forward_program(model.line, len(batches))[model.mesh.coords["pp"]]:
                if isinstance(step, Transfer):
                    passes.transfer(step)
                    continue
                scores = passes.forward(step)
                if scores is not None:
                    results[step.batch] = term(batches[step.batch], scores)
        return [results[number] for number in sorted(results)]
    finally:
        reset_after_forward([stage.module for stage in model.stages])


class _Passes:
    """The state of one step: inputs and outputs of each (stage, micro-batch) between its forward and its backward."""

    def __init__(self, model: Staged, batches: Sequence[Batch], want: Want) -> None:
        self.model, self.batches, self.want = model, batches, want
        self.parts: dict[int, Decoder] = {stage.number: stage.module for stage in model.stages}
        shape = next(iter(self.parts.values())).shape
        lo, hi = model.mesh.token_range(len(batches[0]))
        self.transfers = StageTransfers(model.mesh, (hi - lo, shape.stream_width), model.dtype)
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._jobs: dict[tuple[int, int], ops.Jobs] = {}
        self._defers = model.pipeline.schedule in LATE
        tower = self.parts[0].tower if 0 in self.parts else None
        self._vision = [None if tower is None else sight_of(batch, tower, model.mesh) for batch in batches]
        self._last_with_images = max((n for n, vision in enumerate(self._vision) if vision is not None), default=-1)

    def note(self, task: str, step: Action | Transfer) -> None:
        """Note the task and micro-batch for the heartbeat, which a diagnosis of a hang prints."""
        at = f", stage {step.stage}" if self.model.line.num_stages > 1 else ""
        doing(f"{task}, micro-batch {step.batch + 1} of {len(self.batches)}{at}")

    def transfer(self, step: Transfer) -> None:
        """Start a send or a receive."""
        if step.kind == SEND:
            self.transfers.send(step)
        else:
            self.transfers.receive(step)

    def forward(self, step: Action) -> Scores | None:
        """Run the forward of one stage and micro-batch, and return the scores if it is the last stage.

        Input and output are detached: each stage has its own autograd graph, and `backward` joins them by hand.
        """
        batch, number = self.batches[step.batch], step.stage
        x_TD = self.transfers.take(THERE, number, step.batch) if number else None
        if x_TD is not None and number > self.model.trained_from and torch.is_grad_enabled():
            self._inputs[number, step.batch] = x_TD.requires_grad_()
        self._count(batch, number)
        with self._deferring_weight_grads(step):
            vision = None if number else self._vision[step.batch]
            want = self.want.of(batch.fields)
            out = self.parts[number](batch.tokens, batch.labels, batch.docs, want, x_TD, vision)
        if number == self.model.line.last:
            return tuple(out)
        (y_TD,) = out
        self.transfers.put(THERE, number + 1, step.batch, y_TD.detach())
        if y_TD.requires_grad:
            self.start(step, y_TD)
        return None

    def start(self, step: Action, start_from: Tensor) -> None:
        """Keep the tensor that backward of this stage and micro-batch starts from: the loss, or the stage's output."""
        self._outputs[step.stage, step.batch] = start_from

    def backward(self, step: Action) -> None:
        """Run the backward of one stage and micro-batch, and queue the gradient of its input for the stage before."""
        number, is_last = step.stage, step.batch == len(self.batches) - 1
        self._count(self.batches[step.batch], number)  # recompute must mask the padding of its own micro-batch
        before_backward(self.parts[number], self.model, last=is_last, late=self._defers)
        if not self.model.sums_once:  # with sum_once everything is reduced after the last micro-batch anyway
            sum_replicas(self.parts[number].tower, now=step.batch == self._last_with_images)
        gradient = None if number == self.model.line.last else self.transfers.take(BACK, number, step.batch)
        with self._deferring_weight_grads(step):
            torch.autograd.backward(self._outputs.pop((number, step.batch)), gradient)
        x_TD = self._inputs.pop((number, step.batch), None)
        if x_TD is not None:
            assert x_TD.grad is not None, "every token of a stage has a gradient"
            self.transfers.put(BACK, number - 1, step.batch, x_TD.grad)

    def weights(self, step: Action) -> None:
        """Compute the weight gradients that `backward` deferred (action W of zero bubble), and reduce them."""
        for job in self._jobs.pop((step.stage, step.batch), []):
            job()
        sum_late(self.parts[step.stage], last=step.batch == len(self.batches) - 1)

    def _deferring_weight_grads(self, step: Action) -> AbstractContextManager[None]:
        """Return a context in which backward defers weight gradients as jobs, if the schedule wants that."""
        if not self._defers or not torch.is_grad_enabled():
            return nullcontext()
        return ops.deferring_weight_grads(self._jobs.setdefault((step.stage, step.batch), []))

    def _count(self, batch: Batch, number: int) -> None:
        """Exclude padding tokens from expert counts and the aux loss of this micro-batch (transformers#28505)."""
        mesh = self.model.mesh
        lo, hi = mesh.token_range(len(batch))
        is_real_T = torch.arange(lo, hi, device=mesh.device) < len(batch) - batch.num_filler
        self.parts[number].balance.begin(is_real_T, None if batch.experts is None else batch.experts[lo:hi])
        if (mtp := self.parts[number].mtp) is not None:  # the last token of a document has no next one to predict from
            mtp.balance.begin(is_real_T & ops.has_next(batch.docs)[lo:hi])
