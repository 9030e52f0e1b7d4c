"""The terms of a user's loss: what it is offered, and what it must give."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, ValuesView

import torch
from torch import Tensor

from ..data import Batch
from ..errors import DataError
from ..ops import upcast
from .agreement import in_its_loss
from .forward import WEIGHT, counted, own, score
from .losses import Fields, Loss, Scores
from .model import Model

_MEANT = ("weights", "loss_weight", "loss_weights", "loss_mask")  # other libraries' names of the field WEIGHT


class Terms:
    """Of each of this rank's own tokens the weighted term; each token of a data rank is one rank's own."""

    def __init__(self, model: Model, want: str) -> None:
        self.model, self.want = model, want
        self._tried: Loss | None = None  # the loss that is known to look at what it may, and no less

    def __call__(self, loss: Loss, batch: Batch) -> Tensor:
        scores, fields = score(self.model, batch, self.want), own(self.model, batch, batch.fields)
        counted_T = own(self.model, batch, {"counted": counted(batch, self.want)})["counted"]
        # A loss may divide by a field that filler tokens do not have: no gradient can come back from those.
        scores = {name: torch.where(counted_T, x.t(), x.detach().t()).t() for name, x in scores.items()}
        terms_T, asked = self._of(loss, scores, fields)
        if self._tried is not loss:
            _refuse_unread({*fields} - asked)
            if self.model.mesh.size_of(("cp", "tp")) > 1:
                self._check_by_token(loss, scores, fields, counted_T)
            self._tried = loss
        if WEIGHT in fields:
            terms_T = terms_T * fields[WEIGHT]
        return terms_T.masked_fill(~counted_T, 0.0)

    def _of(self, loss: Loss, scores: Scores, fields: Fields) -> tuple[Tensor, set[str]]:
        """What the loss gives, and the fields that it asked for. It may write into its fields: those are copies."""
        offered = _Offered(scores, fields, {name: value.clone() for name, value in fields.items()})
        with in_its_loss(self.model):
            terms: object = loss(_Offered(scores, fields, scores), offered)
        wanted = next(iter(scores.values())).shape[:1]
        if not isinstance(terms, Tensor) or terms.shape != wanted:
            gave = tuple(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
            raise DataError(f"the loss gave {gave} for {tuple(wanted)} tokens: one term a token")
        if not terms.is_floating_point():
            raise DataError(f"the loss gave {terms.dtype}; its terms must be floating point numbers")
        return upcast(terms), offered.asked

    @torch.no_grad()
    def _check_by_token(self, loss: Loss, scores: Scores, fields: Fields, counted_T: Tensor) -> None:
        """Once for each loss: that it gives the same for half of the tokens, as a rank has a part of a document. Of
        other scores than the model's, which in a first step of RL are those of before: all ratios would be 1."""
        host = self.model.mesh.host
        draw = torch.rand(len(counted_T), generator=torch.Generator(host).manual_seed(0), device=host)
        moved = {name: (x.t() - 0.1 * draw.to(x)).t() for name, x in scores.items()}
        middle = len(counted_T) // 2
        halves = (slice(0, middle), slice(middle, None))
        whole_T = self._again(loss, moved, fields)
        try:
            both_T = torch.cat([self._again(loss, _of_rows(moved, half), _of_rows(fields, half)) for half in halves])
        except Exception as error:
            raise DataError(f"the loss fails on a part of its tokens ({error}); {self._way_out()}") from error
        same_T = torch.isclose(both_T, whole_T, rtol=1e-4, atol=1e-5, equal_nan=True)
        if not (same_T | ~counted_T).all():
            raise DataError(f"the loss of a token depends on others; {self._way_out()}")

    def _way_out(self) -> str:
        return (
            f"a rank of {self.model.mesh.axes} has only a part of a document. What concerns a whole one must come as a "
            "field, reckoned before the step (mw.logprobs), or choose tp=1"
        )

    def _again(self, loss: Loss, scores: Scores, fields: Fields) -> Tensor:
        """One more call, for scores that it may write into."""
        return self._of(loss, {name: x.clone() for name, x in scores.items()}, fields)[0]


def _of_rows(values: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: x[rows] for name, x in values.items()}


class _Offered(dict[str, Tensor]):
    """Scores or fields for a loss; it remembers which were asked for."""

    def __init__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
        super().__init__(mine)
        self.names, self.asked = (sorted(scores), sorted(fields)), set[str]()

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
            f"the loss asks for {key!r}; it has the scores {self.names[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self.names[1]} (pack(..., fields=))"
        )


def _refuse_unread(names: set[str]) -> None:
    """Fields that are to weigh the terms, but that neither the loss nor the engine reads."""
    for name in names & {*_MEANT}:
        raise DataError(
            f"nobody reads the field {name!r}: the loss did not ask for it, and the field that weighs the terms is "
            f"{WEIGHT!r}; rename it, or leave it out"
        )
