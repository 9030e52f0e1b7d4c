"""The terms of a user's loss: what it is offered, and what it must give."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..data import Batch
from ..errors import DataError
from ..ops import upcast
from .agreement import in_its_loss
from .forward import WEIGHT, counted, own, score
from .losses import Fields, Loss, Scores
from .model import Model


class Terms:
    """Of each of this rank's own tokens the weighted term; each token of a data rank is one rank's own."""

    def __init__(self, model: Model, want: str) -> None:
        self.model, self.want = model, want
        self._by_token: Loss | None = None  # the loss that is known to look at each token alone

    def __call__(self, loss: Loss, batch: Batch) -> Tensor:
        scores, fields = score(self.model, batch, self.want), own(self.model, batch, batch.fields)
        counted_T = own(self.model, batch, {"counted": counted(batch, self.want)})["counted"]
        # A loss may divide by a field that filler tokens do not have: no gradient can come back from those.
        scores = {name: torch.where(counted_T, x.t(), x.detach().t()).t() for name, x in scores.items()}
        terms_T = self._of(loss, scores, fields)
        if self._by_token is not loss and self.model.mesh.size_of(("cp", "tp")) > 1:
            self._check_by_token(loss, scores, fields, counted_T)
        if WEIGHT in fields:
            terms_T = terms_T * fields[WEIGHT]
        return terms_T.masked_fill(~counted_T, 0.0)

    def _of(self, loss: Loss, scores: Scores, fields: Fields) -> Tensor:
        """What the loss gives. It may write into its fields: the batch and the weights are others."""
        copies = {name: value.clone() for name, value in fields.items()}
        with in_its_loss(self.model):
            terms: object = loss(_Offered(scores, fields, scores), _Offered(scores, fields, copies))
        wanted = next(iter(scores.values())).shape[:1]
        if not isinstance(terms, Tensor) or terms.shape != wanted:
            gave = tuple(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
            raise DataError(f"the loss gave {gave} for {tuple(wanted)} tokens: one term a token")
        if not terms.is_floating_point():
            raise DataError(f"the loss gave {terms.dtype}; its terms must be floating point numbers")
        return upcast(terms)

    @torch.no_grad()
    def _check_by_token(self, loss: Loss, scores: Scores, fields: Fields, counted_T: Tensor) -> None:
        """Once for each loss: that it gives the same for half of the tokens, as a rank has a part of a document. Of
        other scores than the model's, which in a first step of RL are those of before: all ratios would be 1."""
        host = self.model.mesh.host
        draw = torch.Generator(host).manual_seed(0)
        moved = {
            name: x - 0.1 * torch.rand(x.shape, generator=draw, device=host).to(x.device) for name, x in scores.items()
        }
        middle = len(counted_T) // 2
        halves = [
            self._of(loss, *({name: x[half].clone() for name, x in values.items()} for values in (moved, fields)))
            for half in (slice(0, middle), slice(middle, None))
        ]
        whole_T = self._of(loss, moved, fields)  # last: it may write into its scores
        same_T = torch.isclose(torch.cat(halves), whole_T, rtol=1e-4, atol=1e-5, equal_nan=True)
        if not (same_T | ~counted_T).all():
            raise DataError(
                f"the loss of a token depends on others, of which a rank of {self.model.mesh.axes} has only a part; "
                "what concerns a whole document must come as a field, reckoned before the step (mw.logprobs), "
                "or choose tp=1"
            )
        self._by_token = loss


class _Offered(dict[str, Tensor]):
    """Scores or fields for a loss."""

    def __init__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
        super().__init__(mine)
        self._all = sorted(scores), sorted(fields)

    def __missing__(self, key: str) -> Tensor:
        raise DataError(
            f"the loss asks for {key!r}; it has the scores {self._all[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self._all[1]} (pack(..., fields=))"
        )
