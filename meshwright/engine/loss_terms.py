"""The terms of a loss in a step: the weights of its terms, and the gradient of a loss over whole documents.

A loss per token gets this rank's tokens only. It returns one term per token and never averages, so the engine can
divide by the weight of the whole step, and the result does not depend on how tokens are spread over ranks and
micro-batches.

A loss per document, group or micro-batch gets the scores of the whole micro-batch. They are all-gathered over cp x tp.
Every rank runs the loss on them as leaves, differentiates it with respect to them, and sends its own part of that
gradient (the cotangents) back through its own forward. By the chain rule this is exact for any loss, and the only
collective is one all-gather of a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import parallel
from ..data import WEIGHT, Batch
from ..models import Want
from ..parallel import Scores
from .loss import Loss
from .loss_call import call_loss, perturbed
from .loss_documents import LossDocuments
from .model import Model
from .step_terms import StepTerms
from .validation import check_apart, check_by_token, check_differentiable, check_read


class Terms:
    """Computes what this rank adds to a loss and its metrics. Each token of a data rank belongs to one rank.

    A user's loss may fail on one rank only, while the others enter collectives that need this rank. So this rank
    completes the step with terms of zero, and the all-reduce of the loss then carries the failure to all ranks.
    """

    def __init__(self, model: Model, want: str) -> None:
        self.model, self.want = model, want
        self._checked: tuple[Loss, set[frozenset[str]]] | None = None  # the loss, and with which fields
        self.failure: Exception | None = None
        self._of_step: StepTerms | None = None  # of a loss per step, for the running one

    def begin(
        self, loss: Loss, batches: Sequence[Batch], local: Sequence[Batch], temperature: float, *, grad: bool = True
    ) -> StepTerms | None:  # fmt: skip
        """Begin a step. Return the terms of a loss per step, else None. `local`: the batches on the device.

        A loss per step runs here, on the scores of a first forward without gradients, which does not count the load of
        experts. With one micro-batch on one stage it waits for the scores of the only forward. `grad`: there will be a
        backward.
        """
        self._of_step = None
        if loss.per != "step":
            return None
        self._of_step = of_step = StepTerms(self.model, loss, self.names(loss), (batches, local))
        if grad and len(local) == 1 and self.model.line.num_stages == 1:
            return of_step
        rows = parallel.run_forward(self.model, local, self.wanted(loss, temperature), of_step.pick)
        if rows:  # a pipeline stage without the head has none
            self._run(of_step, rows, grad=grad)
        return of_step

    def _run(self, of_step: StepTerms, own_rows: Sequence[Tensor], *, grad: bool) -> None:
        """Run a loss per step on the scores of the step. `own_rows`: the scores of this rank."""
        whole = of_step.gather(own_rows)  # not inside the error handling, as below
        try:
            of_step.run(whole, grad=grad)
        except Exception as error:  # noqa: BLE001 - as below
            self.failure = error

    def wanted(self, loss: Loss, temperature: float, mtp: bool = False) -> Want:
        """Return the request to the model for the scores of a loss."""
        own = temperature if loss.candidate_temperature is None else float(loss.candidate_temperature)
        return Want(
            self.want, mtp, temperature, candidates=loss.candidates, candidate_temperature=own, rest=loss.rest
        )  # fmt: skip

    def names(self, loss: Loss) -> tuple[str, ...]:
        """Return the names of the scores that a loss gets, in the order of the head."""
        own = ("logprobs", "entropy") if self.want == "entropy" else (self.want,)
        return (*own, *["candidate_logprobs"] * bool(loss.candidates), *["rest_logprobs"] * loss.rest)

    def __call__(self, loss: Loss, batch: Batch, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return a tensor that sums to this rank's part of the loss of a micro-batch, and its part of each metric
        `[M]`, before they are divided."""
        if self._of_step is not None:
            return self._share_of_step(self._of_step, loss, batch, scores)
        # Not inside the error handling: a rank whose loss has failed must still meet the others.
        whole = None if loss.per == "token" else self._gather(scores)
        if self.failure is None:
            try:
                if whole is None:
                    return self._of_tokens(loss, batch, scores)
                return self._of_documents(loss, batch, scores, whole)
            except Exception as error:  # noqa: BLE001 - any error of user code; the engine raises it on all ranks
                self.failure = error
        return self._nothing(loss, scores)

    def _share_of_step(
        self, of_step: StepTerms, loss: Loss, batch: Batch, scores: Scores
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows = of_step.pick(batch, scores)
        if not of_step.is_known and self.failure is None:  # no first forward
            self._run(of_step, [rows], grad=True)
        return self._nothing(loss, scores) if self.failure is not None else of_step.share(batch, rows)

    def _is_checked(self, loss: Loss, fields: Mapping[str, Tensor]) -> bool:
        """Return whether a loss was checked with these fields. The checks wait for the device, so they must not run
        again where micro-batches with and without weights alternate."""
        return self._checked is not None and self._checked[0] == loss and frozenset(fields) in self._checked[1]

    def _note_checked(self, loss: Loss, fields: Mapping[str, Tensor]) -> None:
        if self._checked is None or self._checked[0] != loss:
            self._checked = (loss, set())
        self._checked[1].add(frozenset(fields))

    @staticmethod
    def _nothing(loss: Loss, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return zeros that are connected to the scores: backward must reach every parameter, or some of FSDP's
        collectives would not run."""
        zeros = torch.stack([x.sum() for x in scores]) * 0.0
        return zeros, zeros.new_zeros(len(loss.metrics), dtype=torch.float64)

    def _of_tokens(self, loss: Loss, batch: Batch, scores: Scores) -> tuple[Tensor, Tensor]:
        """Run the loss on this rank's tokens; return its terms times the field `weight`, and 0 without a label."""
        lo, hi = self.model.mesh.token_range(len(batch))
        has_term_T = batch.is_target_T[lo:hi]
        fields = {name: x[lo:hi] for name, x in {"labels": batch.labels, **batch.fields}.items()}
        # A loss may divide by a field that is 0 at padding. `masked_fill` below drops the infinite term, but its
        # gradient would be 0 * inf = NaN. So scores without a label are detached.
        masked = (torch.where(has_term_T, x.t(), x.detach().t()).t() for x in scores)
        inputs = dict(zip(self.names(loss), masked, strict=True))
        terms_T, metrics_MT, names_read = call_loss(self.model, loss, inputs, fields)
        if not self._is_checked(loss, fields):
            check_read({*fields} - names_read)
            self._check_by_token(loss, inputs, fields, has_term_T)
            self._note_checked(loss, fields)
        if WEIGHT in fields:
            terms_T, metrics_MT = terms_T * fields[WEIGHT], metrics_MT * fields[WEIGHT]
        check_differentiable(terms_T, scores)
        metrics_M = metrics_MT.masked_fill(~has_term_T, 0.0).double().sum(1)
        return terms_T.masked_fill(~has_term_T, 0.0), metrics_M

    @torch.no_grad()
    def _check_by_token(
        self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], has_term_T: Tensor
    ) -> None:
        """Check that a term does not depend on other tokens, by running the loss on parts of the tokens.

        It runs once per loss. A mean over the sequence or a ratio of a whole answer inside the loss would be wrong
        under tp and cp without an error, and elsewhere would depend on how documents are packed.
        """
        other, changed = perturbed(self.model, loss, scores, fields)

        def terms_of_rows(rows: slice) -> Tensor:
            part = {name: x[rows] for name, x in changed.items()}
            return call_loss(self.model, loss, {name: x[rows].clone() for name, x in other.items()}, part).terms

        check_by_token(terms_of_rows, has_term_T)

    @torch.no_grad()
    def _gather(self, scores: Scores) -> list[Tensor]:
        """All-gather the scores of all tokens of a micro-batch over cp and tp."""
        at = "the scores for a loss of whole documents"
        return [self.model.mesh.gather_rows(x.detach().contiguous(), ("cp", "tp"), at) for x in scores]

    def _of_documents(
        self, loss: Loss, batch: Batch, scores: Scores, whole: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the loss on the whole micro-batch. Return a scalar that carries the gradient of the loss with respect to
        this rank's scores.

        The value of the loss and its metrics count on one rank of cp x tp, and are 0 on the others.
        """
        docs, mesh = LossDocuments.of(batch), self.model.mesh
        if not docs.num:  # padding alone, on a data rank without documents
            return self._nothing(loss, scores)
        has_grad = scores[0].requires_grad and torch.is_grad_enabled()
        leaves = [x.t().masked_fill(~batch.is_target_T, 0.0).t().requires_grad_(has_grad) for x in whole]
        # Copies, because a loss may write into its scores, and a leaf must not be written into.
        inputs = {name: leaf.clone() for name, leaf in zip(self.names(loss), leaves, strict=True)}
        fields = {"labels": batch.labels, **batch.fields}
        terms, metrics, names_read = call_loss(self.model, loss, inputs, fields, docs)
        if not self._is_checked(loss, fields):
            check_read({*fields} - names_read, per=loss.per)
            # A micro-batch of one document shows nothing about several.
            if self._check_apart(loss, inputs, fields, docs):
                self._note_checked(loss, fields)
        has_target = docs.has_target(loss.per)
        counts_here = float(not mesh.coords["cp"] and not mesh.coords["tp"])
        total = terms.masked_fill(~has_target, 0.0).sum()
        masked = metrics.masked_fill(~has_target, 0.0).double() * counts_here
        metrics_M = masked.sum(1) if masked.dim() > 1 else masked
        if not has_grad:
            return total * counts_here, metrics_M
        check_differentiable(total, leaves)
        return self._with_gradient(total.detach() * counts_here, total, leaves, scores, batch), metrics_M

    def _with_gradient(
        self, value: Tensor, total: Tensor, leaves: Sequence[Tensor], scores: Scores, batch: Batch
    ) -> Tensor:  # fmt: skip
        """Return `value`, with the gradient of `total` for the scores of this rank's tokens."""
        lo, hi = self.model.mesh.token_range(len(batch))
        has_term_T = batch.is_target_T[lo:hi]
        # A loss may read log-probabilities and no entropy. Materialised zeros keep every score connected.
        cotangents = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        # A field may be anything where a token has no label, and the gradient there 0 * inf = NaN.
        masked = lambda x: x.t().masked_fill(~has_term_T, 0.0).t()  # noqa: E731 - short
        parts = [(masked(x) * masked(c[lo:hi])).sum() for x, c in zip(scores, cotangents, strict=True)]
        surrogate = torch.stack(parts).sum()
        return surrogate + (value - surrogate).detach()

    @torch.no_grad()
    def _check_apart(
        self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], docs: LossDocuments
    ) -> bool:
        """Check that the term of a document, or of a group, does not depend on the others in its micro-batch. Return
        whether that could be checked."""
        if loss.per == "micro_batch" or docs.num_terms(loss.per) < 2:
            return loss.per == "micro_batch"
        other, changed = perturbed(self.model, loss, scores, fields, docs)

        def terms_of(numbers: Sequence[int]) -> Tensor:
            rows, part = docs.part(loss.per, numbers)
            inputs, of_rows = ({name: x[rows] for name, x in each.items()} for each in (other, changed))
            return call_loss(self.model, loss, inputs, of_rows, part).terms

        check_apart(terms_of, docs.has_target(loss.per), loss.per)
        return True
