"""The terms of a user's loss: what the loss is offered, and what the engine makes of its answer."""

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
    """The weighted term of each of this rank's own tokens. Every token of a data rank is one rank's own.

    A loss may fail on one rank alone, while the others go on to collectives that need this rank. So it takes part in
    them to the end of the step, with terms of zero, and `failure` is told to all then.
    """

    def __init__(self, model: Model, want: str) -> None:
        self.model, self.want = model, want
        self._names = ("logprobs", "entropy") if want == "entropy" else (want,)
        self._tried: Loss | None = None  # a loss that is known to read what it should, and no more
        self.failure: Exception | None = None

    def __call__(self, loss: Loss, batch: Batch, scores: Scores) -> Tensor:
        if self.failure is None:
            try:
                terms_T = self._weighted(loss, batch, scores)
                check_differentiable(terms_T, scores)
                return terms_T
            except Exception as error:  # noqa: BLE001 - whatever it is, all ranks are told
                self.failure = error
        return torch.stack([x.sum() for x in scores]) * 0.0

    def _weighted(self, loss: Loss, batch: Batch, scores: Scores) -> Tensor:
        lo, hi = self.model.mesh.token_range(len(batch))
        has_term_T = batch.is_target_T[lo:hi]
        fields = {name: x[lo:hi] for name, x in {"labels": batch.labels, **batch.fields}.items()}
        # A loss may divide by a field that filler tokens do not have: no gradient may come back from those.
        kept = (torch.where(has_term_T, x.t(), x.detach().t()).t() for x in scores)
        offered = dict(zip(self._names, kept, strict=True))
        terms_T, asked = self._ask(loss, offered, fields)
        if self._tried is not loss:
            check_read({*fields} - asked)
            if self.model.mesh.size_of(("cp", "tp")) > 1:
                self._try_by_token(loss, offered, fields, has_term_T)
            self._tried = loss
        if WEIGHT in fields:
            terms_T = terms_T * fields[WEIGHT]
        return terms_T.masked_fill(~has_term_T, 0.0)

    def _ask(self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> tuple[Tensor, set[str]]:
        """What the loss gives, and the fields that it asked for. It may write into its fields, so they are copies."""
        names = (sorted(scores), sorted(fields))
        offered = NamedTensors({name: value.clone() for name, value in fields.items()}, names)
        self.model.calls.in_loss = True
        try:
            terms = loss(NamedTensors(scores, names), offered)
        finally:
            self.model.calls.in_loss = False
        check_terms(terms, len(next(iter(scores.values()))))
        return upcast(terms), offered.asked

    @torch.no_grad()
    def _try_by_token(
        self, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], has_term_T: Tensor
    ) -> None:
        """Once for each loss. The scores are perturbed: in a first RL step every ratio is 1, and hides the mistake."""
        host = self.model.mesh.host
        draw = torch.rand(len(has_term_T), generator=torch.Generator(host).manual_seed(0), device=host)
        moved = {name: (x.t() - 0.1 * draw.to(x)).t() for name, x in scores.items()}

        def again(rows: slice) -> Tensor:
            of_rows = {name: x[rows] for name, x in fields.items()}
            return self._ask(loss, {name: x[rows].clone() for name, x in moved.items()}, of_rows)[0]

        way_out = (
            f"a rank of {self.model.mesh.axes} has only a part of a document. Compute what concerns a whole document "
            "before the step (mw.logprobs) and give it as a field, or choose tp=1 and cp=1"
        )
        check_by_token(again, len(has_term_T), has_term_T, way_out)


class NamedTensors(dict[str, Tensor]):
    """Scores or fields for a loss, as a dict. It remembers which were asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: tuple[list[str], list[str]]) -> None:
        super().__init__(tensors)
        self._names, self.asked = names, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override] # dict's are overloads
        self.asked.add(key)
        return super().get(key, default)

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override] # a view of dict's own kind
        self.asked.update(self)
        return super().items()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        self.asked.update(self)
        return super().values()

    def __missing__(self, key: str) -> Tensor:
        raise DataError(
            f"the loss asks for {key!r}; it has the scores {self._names[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self._names[1]} (pack(..., fields=))"
        )
