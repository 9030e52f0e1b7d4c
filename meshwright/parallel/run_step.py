"""Passes: forward and backward of the micro-batches of a step, through the stages of a model.

What a rank does is a list of actions that the schedule has written (`sharding/schedules.py`). With one stage it is the
plain loop: forward and backward of the first micro-batch, then of the second, and so on.
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
from ..models import Decoder
from ..recipe import LATE, Pipeline
from ..sharding import Line, Stage, forward_program, program_of
from ..sharding.schedules import BACK, FORWARD, SEND, THERE, WEIGHT, Action, Transfer
from ..watch import doing
from .fp8_gather import LowGathers
from .fsdp import before_backward, reset_after_forward, sum_late, sum_replicas
from .stage_transfers import Post
from .vision_encoder import sight_of

Scores = tuple[Tensor, ...]


class Staged(Protocol):
    """A model on a mesh, as far as a pass must know it."""

    stages: tuple[Stage, ...]  # of this rank
    mesh: Mesh
    low: LowGathers

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


# Of a batch and its scores, the number that backward starts from and this rank's shares. The scores are None on a stage
# without a head, and so is the number.
Term = Callable[[Batch, Scores | None], tuple[Tensor | None, Tensor]]


def run(model: Staged, batches: Sequence[Batch], want: str, term: Term, task: str) -> Tensor:
    """Forward and backward of every micro-batch; the sum of the shares."""
    passes = _Passes(model, batches, want)
    total: Tensor | None = None
    program = program_of(model.line, model.pipeline.schedule, len(batches), model.trained_from)
    with passes.post:
        model.low.begin()
        for step in program[model.mesh.coords["pp"]]:
            passes.tell(task, step)
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
    # Stages before the first that is trained make no backward, after which FSDP would free what a forward has gathered.
    reset_after_forward([stage.module for stage in model.stages if stage.number < model.trained_from])
    assert total is not None, "a step has at least one batch"
    return total


@torch.no_grad()
def run_forward(
    model: Staged, batches: Sequence[Batch], want: str, term: Callable[[Batch, Scores], Tensor]
) -> list[Tensor]:
    """What `term` makes of each batch and its scores, without gradients: on the last stage, nothing on others."""
    passes, found = _Passes(model, batches, want), dict[int, Tensor]()
    try:
        with passes.post:
            model.low.begin()
            for step in forward_program(model.line, len(batches))[model.mesh.coords["pp"]]:
                if isinstance(step, Transfer):
                    passes.transfer(step)
                    continue
                scores = passes.forward(step)
                if scores is not None:
                    found[step.batch] = term(batches[step.batch], scores)
        return [found[number] for number in sorted(found)]
    finally:
        reset_after_forward([stage.module for stage in model.stages])


class _Passes:
    """What is under way in a step: of each stage and micro-batch what came in, and what its backward starts from."""

    def __init__(self, model: Staged, batches: Sequence[Batch], want: str) -> None:
        self.model, self.batches, self.want = model, batches, want
        self.parts: dict[int, Decoder] = {stage.number: stage.module for stage in model.stages}
        shape = next(iter(self.parts.values())).shape
        lo, hi = model.mesh.token_range(len(batches[0]))
        self.post = Post(model.mesh, (hi - lo, shape.width), model.dtype)
        self._came: dict[tuple[int, int], Tensor] = {}
        self._starts: dict[tuple[int, int], Tensor] = {}
        self._jobs: dict[tuple[int, int], ops.Jobs] = {}
        self._late = model.pipeline.schedule in LATE
        tower = self.parts[0].tower if 0 in self.parts else None
        self._sights = [None if tower is None else sight_of(batch, tower, model.mesh) for batch in batches]
        self._last_seen = max((n for n, sight in enumerate(self._sights) if sight is not None), default=-1)

    def tell(self, task: str, step: Action | Transfer) -> None:
        at = f", stage {step.stage}" if self.model.line.num_stages > 1 else ""
        doing(f"{task}, micro-batch {step.batch + 1} of {len(self.batches)}{at}")

    def transfer(self, step: Transfer) -> None:
        if step.kind == SEND:
            self.post.send(step)
        else:
            self.post.receive(step)

    def forward(self, step: Action) -> Scores | None:
        """The scores of the last stage. What another stage made is given to the next one."""
        batch, number = self.batches[step.batch], step.stage
        x_TD = self.post.take(THERE, number, step.batch) if number else None
        if x_TD is not None and number > self.model.trained_from and torch.is_grad_enabled():
            self._came[number, step.batch] = x_TD.requires_grad_()
        self._count(batch, number)
        with self._waiting_with_weights(step):
            sight = None if number else self._sights[step.batch]
            out = self.parts[number](batch.tokens, batch.labels, batch.docs, self.want, x_TD, sight)
        if number == self.model.line.last:
            return tuple(out)
        (y_TD,) = out
        self.post.put(THERE, number + 1, step.batch, y_TD.detach())
        if y_TD.requires_grad:
            self.start(step, y_TD)
        return None

    def start(self, step: Action, at: Tensor) -> None:
        """Where backward of this stage and micro-batch will start."""
        self._starts[step.stage, step.batch] = at

    def backward(self, step: Action) -> None:
        number, is_last = step.stage, step.batch == len(self.batches) - 1
        self._count(self.batches[step.batch], number)  # what is recomputed leaves out the filler of its own batch
        before_backward(self.parts[number], self.model, last=is_last, late=self._late)
        if not self.model.sums_once:  # else all is summed at the end, whatever ran last
            sum_replicas(self.parts[number].tower, now=step.batch == self._last_seen)
        gradient = None if number == self.model.line.last else self.post.take(BACK, number, step.batch)
        with self._waiting_with_weights(step):
            torch.autograd.backward(self._starts.pop((number, step.batch)), gradient)
        x_TD = self._came.pop((number, step.batch), None)
        if x_TD is not None:
            assert x_TD.grad is not None, "every token of a stage has a gradient"
            self.post.put(BACK, number - 1, step.batch, x_TD.grad)

    def weights(self, step: Action) -> None:
        """The gradients of weights that backward has left."""
        for job in self._jobs.pop((step.stage, step.batch), []):
            job()
        sum_late(self.parts[step.stage], last=step.batch == len(self.batches) - 1)

    def _waiting_with_weights(self, step: Action) -> AbstractContextManager[None]:
        if not self._late or not torch.is_grad_enabled():
            return nullcontext()
        return ops.weights_late(self._jobs.setdefault((step.stage, step.batch), []))

    def _count(self, batch: Batch, number: int) -> None:
        """Tokens of filler count nothing in the balance of the experts."""
        mesh = self.model.mesh
        lo, hi = mesh.token_range(len(batch))
        filler_at = len(batch) - batch.num_filler
        self.parts[number].balance.begin(torch.arange(lo, hi, device=mesh.device) < filler_at)
