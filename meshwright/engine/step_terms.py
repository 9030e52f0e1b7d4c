"""The terms of a loss per step: every document of the step may depend on every other, as in contrastive learning.

Micro-batches are too many to keep their activations, so a first forward without gradients collects the scores of the
tokens with a label (GradCache, arXiv 2101.06983). They are all-gathered, and the loss runs once on all of them as
leaves, and is differentiated with respect to them. Then forward and backward run as usual, and each rank sends the
gradient of its own scores (the cotangents) back through them. By the chain rule this is exact for any loss. A step of
one micro-batch on one pipeline stage needs no extra forward: it gathers during its only one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..axes import TOKENS
from ..data import Batch
from ..ops import upcast
from ..parallel import Scores
from .loss import Loss
from .loss_call import call_loss
from .model import Model
from .step_rows import StepRows
from .validation import check_differentiable, check_read


class StepTerms:
    """Computes what this rank adds to a loss per step in each micro-batch of one step."""

    def __init__(
        self, model: Model, loss: Loss, names: Sequence[str], batches: tuple[Sequence[Batch], Sequence[Batch]]
    ) -> None:
        """`names`: the scores' names. `batches`: this rank's, on the host and on the device. Hosts exchange sizes
        here."""
        self._model, self._loss, self._names = model, loss, names
        on_host, self._local = batches
        self._rows = StepRows(model.mesh, on_host)
        self._number_of = {id(batch): number for number, batch in enumerate(self._local)}
        self._shapes: list[torch.Size] = []  # of the scores of a token
        self._cotangents: Tensor | None = None
        self.is_known = False  # whether the loss has run
        self.value = torch.zeros((), device=model.mesh.device)
        self.metrics_M = torch.zeros(len(loss.metrics), dtype=torch.float64, device=model.mesh.device)

    def pick(self, batch: Batch, scores: Scores) -> Tensor:
        """Return the scores of this rank's tokens with a label, as columns. -> `[n, C]`"""
        self._shapes = [x.shape[1:] for x in scores]
        columns = torch.cat([x.reshape(len(x), -1) for x in scores], 1)
        return self._rows.pick(self._number_of[id(batch)], columns)

    def gather(self, own_rows: Sequence[Tensor]) -> Tensor:
        """All-gather the scores of the step from those of this rank's micro-batches."""
        return self._rows.gather([rows.detach() for rows in own_rows])

    def run(self, whole: Tensor, *, grad: bool) -> None:
        """Run the loss on the scores of the step, and differentiate it with respect to them.

        The value of the loss and its metrics count on one rank of a pipeline stage, and are 0 on the others.
        """
        leaf = upcast(whole).detach().requires_grad_(grad)
        columns = zip(leaf.split([shape.numel() for shape in self._shapes], 1), self._shapes, strict=True)
        # Copies, because a loss may write into its scores, and a leaf must not be written into.
        inputs = [part.reshape(-1, *shape).clone() for part, shape in columns]
        by_name = dict(zip(self._names, inputs, strict=True))
        rows, coords = self._rows, self._model.mesh.coords
        terms, metrics, names_read = call_loss(self._model, self._loss, by_name, rows.fields, rows.docs)
        check_read({*rows.fields} - names_read, per="step")
        has_no_target_G = ~rows.docs.has_target("step")
        total = terms.masked_fill(has_no_target_G, 0.0).sum()
        if grad:
            check_differentiable(total, [leaf])
            (self._cotangents,) = torch.autograd.grad(total, leaf)
        counts_here = float(not any(coords[axis] for axis in TOKENS))
        self.metrics_M = metrics.masked_fill(has_no_target_G, 0.0).double().sum(1) * counts_here
        self.value = total.detach() * counts_here
        self.is_known = True

    def share(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a scalar that carries the gradient of the loss with respect to the scores of a micro-batch, and this
        rank's part of each metric. That of the first micro-batch has the value of the whole step."""
        assert self._cotangents is not None, "the loss has run, with gradients"
        number = self._number_of[id(batch)]
        surrogate = (upcast(rows) * self._rows.own(number, self._cotangents)).sum()
        value = self.value if number == 0 else torch.zeros_like(self.value)
        metrics_M = self.metrics_M if number == 0 else torch.zeros_like(self.metrics_M)
        return surrogate + (value - surrogate).detach(), metrics_M
