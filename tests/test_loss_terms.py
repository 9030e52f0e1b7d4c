"""The terms of a loss of whole documents by hand: values, metrics and gradients on each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine.loss_terms import Terms
from meshwright.errors import DataError

of: Any = SimpleNamespace

# Two documents with targets at tokens 0, 1 and 3; token 5 is padding.
INF = float("inf")
BATCH = mw.pack([[5, 6, 7], [8, 9]], labels=[[6, 7, -100], [9, -100]], length=6,
    fields={"factor": [[1.0, 2.0, INF], [4.0, INF]]})  # fmt: skip


def terms_on(rank: int, want: str = "entropy") -> Terms:
    """Return the terms of a model on one of two ranks of tp, each with three tokens."""
    mesh = of(coords=dict(cp=0, tp=rank), token_range=lambda num: (3 * rank, 3 * rank + 3), host="cpu")
    return Terms(of(mesh=mesh, calls=of(in_loss=False)), want)


def of_documents(rank: int, function: Any, *, grad: bool = True, **options: Any) -> Any:
    """Return value, metrics, and the gradients of the scores of this rank's tokens."""
    whole = [torch.arange(1.0, 7.0), torch.full((6,), 0.5)]
    own = [x[3 * rank : 3 * rank + 3].clone().requires_grad_(grad) for x in whole]
    loss = mw.Loss(function, **{"per": "document", **options})
    value, metrics = terms_on(rank)._of_documents(loss, BATCH, tuple(own), whole)
    if value.requires_grad:
        value.backward()
    return value.item(), metrics.tolist(), [None if x.grad is None else x.grad.tolist() for x in own]


def weighted(scores: Any, fields: Any, docs: Any) -> torch.Tensor:
    """Return a sum for each document; tokens without a label have infinite factors."""
    parts = (scores["logprobs"] * fields["factor"]).nan_to_num(0.0)[: sum(docs.sizes)].split(docs.sizes)
    return torch.stack([part.sum() for part in parts]) + 0 * fields["labels"][0]


@pytest.mark.parametrize(
    ("rank", "value", "grads"),
    [(0, 1 * 1 + 2 * 2 + 4 * 4, [[1, 2, 0], [0, 0, 0]]), (1, 0, [[4, 0, 0], [0, 0, 0]])],
)
def test_a_rank_differentiates_its_own_tokens(rank: int, value: float, grads: list[list[float]]) -> None:
    """The value counts on the first rank of tp. A score that the loss leaves out stays connected."""
    assert of_documents(rank, weighted) == (value, [], grads)
    assert of_documents(rank, weighted, grad=False) == (value, [], [None, None])


def with_metrics(scores: Any, fields: Any, docs: Any) -> Any:
    terms = weighted(scores, fields, docs)
    return terms, {"twice": 2 * terms, "one": torch.ones(docs.num)}


def test_metrics_count_on_one_rank() -> None:
    both = [of_documents(rank, with_metrics, metrics=("one", "twice"))[1] for rank in (0, 1)]
    assert both == [[2, 2 * 21], [0, 0]]
    one = lambda scores, fields, docs: weighted(scores, fields, docs).sum()  # noqa: E731 - short
    assert of_documents(0, one, per="micro_batch", normalise=False)[0] == 21


def test_documents_without_a_target_have_no_term() -> None:
    batch = mw.pack([[5, 6, 7], [8, 9]], labels=[[6, 7, -100], [-100, -100]], length=6)
    whole = [torch.arange(1.0, 7.0), torch.zeros(6)]
    by_size = lambda scores, fields, docs: (torch.tensor(docs.sizes).float(), {"m": torch.tensor(docs.sizes) + 4.0})  # noqa: E731 - short
    loss = mw.Loss(by_size, per="document", metrics=("m",))
    value, metrics = terms_on(0)._of_documents(loss, batch, (whole[0][:3], whole[1][:3]), whole)
    assert (value.item(), metrics.tolist()) == (3, [7])


def test_a_loss_must_read_the_weights_of_its_documents() -> None:
    """`weight` multiplies the terms of a loss per token alone."""
    terms, scores = terms_on(0), (torch.zeros(3), torch.zeros(3))
    batch = BATCH.with_fields(weight=torch.ones(6))
    with pytest.raises(DataError, match="'weight' is not read"):
        terms._of_documents(mw.Loss(weighted, per="document"), batch, scores, [torch.zeros(6)] * 2)
