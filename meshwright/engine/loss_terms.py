"""The terms of a user's loss: its inputs, the checks of its result, and the weights of its terms.

A loss gets this rank's tokens only. It returns one term per token and never averages, so the engine can divide by the
weight of the whole step, and the result does not depend on how tokens are spread over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, ValuesView

import torch
from torch import Tensor

from ..data import WEIGHT, Batch
from ..errors import DataError
from ..ops import upcast
from ..parallel import Scores
from .losses import Loss
from .model import Model
from .validation import check_by_token, check_differentiable, check_read, check_terms


class Terms:
    """Computes the weighted term of each of this rank's tokens. Each token of a data rank belongs to one rank.

    A user's loss may fail on one rank only, while the others enter collectives that need this rank. So this rank goes
    on to the end of the step with terms of zero. Then the all-reduce of the loss carries the failure to all ranks.
    """

    def __init__(self, model: Model, want: str) -> None:
        self.model, self.want = model, want
        self._names = ("logprobs", "entropy") if want == "entropy" else (want,)
        self.num_scores = len(self._names)
        self._checked_loss: Loss | None = None  # the last loss whose fields and terms were checked
        self.failure: Exception | None = None

    def __call__(self, loss: Loss, batch: Batch, scores: Scores) -> Tensor:
        if self.failure is None:
            try:
                terms_T = self._weighted(loss, batch, scores)
                check_differentiable(terms_T, scores)
                return terms_T
            except Exception as error:  # noqa: BLE001 - any error of user code; the engine raises it on all ranks
                self.failure = error
        # Zero, but connected to the scores: backward must reach every parameter, or FSDP's collectives are missing.
        return torch.stack([x.sum() for x in scores]) * 0.0

    def _weighted(self, loss: Loss, batch: Batch, scores: Scores) -> Tensor:
        """Run the loss on this rank's tokens; return its terms times the field `weight`, and 0 without a label."""
        lo, hi = self.model.mesh.token_range(len(batch))
        has_term_T = batch.is_target_T[lo:hi]
        fields = {name: x[lo:hi] for name, x in {"labels": batch.labels, **batch.fields}.items()}
        # A loss may divide by a field that is 0 at padding. `masked_fill` below drops the infinite term, but its
        # gradient would be 0 * inf = NaN. So scores without a label are detached.
        masked = (torch.where(has_term_T, x.t(), x.detach().t()).t() for x in scores)
        inputs = dict(zip(self._names, masked, strict=True))
        terms_T, names_read = self._run_loss(loss, inputs, fields)
        if self._checked_loss is not loss:
            check_read({*fields} - names_read)
            if self.model.mesh.size_of(("cp", "tp")) > 1:
                self._check_on_parts(loss, inputs, fields, has_term_T)
            self._checked_loss = loss
        if WEIGHT in fields:
            terms_T = terms_T * fields[WEIGHT]
        return terms_T.masked_fill(~has_term_T, 0.0)

    def _run_loss(
        self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, set[str]]:
        """Run the loss; return its terms and the names of the fields that it read. It may write into its fields, so it
        gets copies."""
        names = (sorted(scores), sorted(fields))
        copies = NamedTensors({name: value.clone() for name, value in fields.items()}, names)
        self.model.calls.in_loss = True  # `agree` refuses calls on the model meanwhile
        try:
            terms = loss(NamedTensors(scores, names), copies)
        finally:
            self.model.calls.in_loss = False
        check_terms(terms, len(next(iter(scores.values()))))
        return upcast(terms), copies.names_read

    @torch.no_grad()
    def _check_on_parts(
        self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], has_term_T: Tensor
    ) -> None:
        """Check that a term does not depend on the tokens of other ranks, by running the loss on parts of the tokens.

        It runs once per loss. A mean over the sequence or a per-document advantage inside the loss would be wrong under
        tp and cp without an error. Scores are perturbed: in the first step of RL every probability ratio is 1, and any
        mean of ones would pass.
        """
        host = self.model.mesh.host
        draw = torch.rand(len(has_term_T), generator=torch.Generator(host).manual_seed(0), device=host)
        perturbed = {name: (x.t() - 0.1 * draw.to(x)).t() for name, x in scores.items()}

        def terms_of_rows(rows: slice) -> Tensor:
            part = {name: x[rows] for name, x in fields.items()}
            return self._run_loss(loss, {name: x[rows].clone() for name, x in perturbed.items()}, part)[0]

        hint = (
            f"on {self.model.mesh.axes} a rank has only part of a document. Compute values of a whole document before "
            "the step (mw.logprobs) and pass them as a field, or choose tp=1 and cp=1"
        )
        check_by_token(terms_of_rows, len(has_term_T), has_term_T, hint)


class NamedTensors(dict[str, Tensor]):
    """The scores or fields that a loss gets: a dict that records which names are read."""

    def __init__(self, tensors: Mapping[str, Tensor], names: tuple[list[str], list[str]]) -> None:
        super().__init__(tensors)
        self._names, self.names_read = names, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.names_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override] # dict's are overloads
        self.names_read.add(key)
        return super().get(key, default)

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override] # a view of dict's own kind
        self.names_read.update(self)
        return super().items()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        self.names_read.update(self)
        return super().values()

    def __missing__(self, key: str) -> Tensor:
        raise DataError(
            f"the loss reads {key!r}, but it gets the scores {self._names[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self._names[1]} (add more with pack(..., fields=))"
        )
