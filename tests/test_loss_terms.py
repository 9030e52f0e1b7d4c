"""The terms of losses by hand: values, metrics and gradients on each rank, and what was checked of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.engine.loss_documents import LossDocuments
from meshwright.engine.loss_terms import Terms
from meshwright.engine.step_terms import StepTerms
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
    figures = lambda *each: (one(*each), {"a": one(*each) * 2, "b": torch.tensor(0.5)})  # noqa: E731 - short
    assert of_documents(0, figures, per="micro_batch", normalise=False, metrics=("a", "b"))[1] == [42, 0.5]


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


# Losses per token


def of_tokens(function: Any, rank: int = 1, **options: Any) -> Any:
    """Return terms, metrics and the gradients of the scores of three tokens: the last one of rank 1 is padding."""
    terms, own = terms_on(rank, "logprobs"), torch.tensor([1.0, 2.0, 3.0]).requires_grad_()
    batch = BATCH.with_fields(weight=torch.tensor([1.0, 2.0, 100.0, 0.5, 100.0, 100.0]))
    made, metrics = terms._of_tokens(mw.Loss(function, **options), batch, (own,))
    made.sum().backward()
    assert own.grad is not None
    return made.tolist(), metrics.tolist(), own.grad.tolist()


def test_terms_and_metrics_of_tokens_have_the_weights_of_the_batch() -> None:
    """Where no token has a label, a factor is infinite, and the gradient is 0 all the same."""
    function = lambda s, f: (s["logprobs"] * f["factor"], {"m": s["logprobs"] + f["labels"] * 0})  # noqa: E731 - short
    assert of_tokens(function, 0, metrics=("m",)) == ([1, 8, 0], [1 + 2 * 2], [1, 4, 0])
    assert of_tokens(function, 1, metrics=("m",)) == ([2, 0, 0], [0.5], [2, 0, 0])


# What was checked of a loss


def test_a_loss_is_checked_once_with_each_set_of_fields() -> None:
    """The check waits for the device, so micro-batches with and without weights may alternate."""
    terms, one, two = terms_on(0), mw.Loss(mw.losses.cross_entropy), mw.Loss(mw.losses.squared_error)
    fields = [dict.fromkeys(names, torch.zeros(1)) for names in (("a",), ("a", "weight"), ("weight", "a"))]
    checked = lambda loss: [terms._is_checked(loss, each) for each in fields]  # noqa: E731 - short
    assert checked(one) == [False, False, False]
    terms._note_checked(one, fields[0])
    assert (checked(one), checked(two)) == ([True, False, False], [False] * 3)
    terms._note_checked(one, fields[1])
    assert checked(one) == [True, True, True]
    terms._note_checked(two, fields[1])
    assert (checked(one), checked(two)) == ([False] * 3, [False, True, True])


@pytest.mark.parametrize(
    ("sizes", "per", "checked"),
    [([2, 1], "document", True), ([3], "document", False), ([2, 1], "group", False), ([3], "micro_batch", True)],
)
def test_one_document_shows_nothing_about_several(sizes: list[int], per: str, checked: bool) -> None:
    docs = LossDocuments(sizes, [0] * len(sizes), torch.ones(3, dtype=torch.bool))
    one_number = dict(normalise=False) if per == "micro_batch" else {}
    loss = mw.Loss(lambda s, f, d: d.sum(s["logprobs"]), per=per, **one_number)  # type: ignore[arg-type]
    assert terms_on(0)._check_apart(loss, {"logprobs": torch.zeros(3)}, {}, docs) == checked


# Losses per step

# Five rows: two groups of two documents, the second without a row, and a group with one document.
STEP_DOCS = LossDocuments([2, 1, 0, 0, 2], [0, 0, 1, 1, 2], torch.ones(5, dtype=torch.bool))
WHOLE = torch.tensor([[1.0, 2.0, 7.0], [3.0, 4.0, 7.0], [5.0, 6.0, 7.0], [2.0, 0.5, 7.0], [4.0, 0.25, 7.0]])


def of_step(axis: str, function: Any, **fields: torch.Tensor) -> StepTerms:
    """Return the terms of a rank with the first row in its first micro-batch, and rows 3 and 4 in its second."""
    step: Any = object.__new__(StepTerms)
    coords = {"pp": 1, "replicate": 0, "fsdp": 0, "cp": 0, "tp": 0, **({axis: 1} if axis else {})}
    step._model = of(calls=of(in_loss=False), mesh=of(coords=coords))
    step._loss = mw.Loss(function, per="step", metrics=("m",))
    step._names, step._shapes, step._number_of = ("values", "hidden"), [torch.Size([]), torch.Size([2])], {}
    own = lambda number, rows: rows[:1] if number == 0 else rows[3:]  # noqa: E731 - short
    step._rows = of(docs=STEP_DOCS, fields={"labels": torch.zeros(5), **fields}, own=own)
    return step


def product(scores: Any, fields: Any, docs: Any) -> Any:
    """Return the sum of values times the first column for each group, plus 1. It writes into its scores."""
    rows = scores["values"] * scores["hidden"].mul_(2)[:, 0] / 2
    terms = docs.group_sum(docs.sum(rows)) + 1
    return terms, {"m": 2 * terms.detach()}


@pytest.mark.parametrize("axis", ["", "replicate", "fsdp", "cp", "tp"])
def test_terms_of_a_step_count_once(axis: str) -> None:
    """On one rank of a stage, in its first micro-batch. Each rank sends the gradients of its own rows."""
    step = of_step(axis, product)
    step.run(WHOLE.bfloat16(), grad=True)
    assert step.is_known
    assert step._cotangents is not None
    assert step._cotangents.dtype == step.value.dtype == torch.float32
    total, batches = (2 + 12 + 30 + 1) + (1 + 1 + 1), [of(), of()]
    step._number_of = {id(batch): number for number, batch in enumerate(batches)}
    for number, (whole, grads) in enumerate(((WHOLE[:1], [[2, 1, 0]]), (WHOLE[3:], [[0.5, 2, 0], [0.25, 4, 0]]))):
        rows = whole.clone().requires_grad_()
        value, metrics = step.share(batches[number], rows)  # type: ignore[arg-type]
        value.backward()
        assert rows.grad is not None
        assert rows.grad.tolist() == grads
        counts = int(number == 0 and not axis)
        assert (value.item(), metrics.tolist()) == (total * counts, [2 * total * counts])


def test_an_evaluation_of_a_step_needs_no_gradients() -> None:
    step = of_step("", product)
    step._cotangents = None
    step.run(WHOLE, grad=False)
    assert (step.value.item(), step.metrics_M.tolist(), step._cotangents) == (48, [96], None)


def test_a_loss_of_a_step_reads_its_weights() -> None:
    with pytest.raises(DataError, match="'weight' is not read"):
        of_step("", product, weight=torch.ones(5)).run(WHOLE, grad=True)


# Names of losses


def test_the_name_of_a_loss_holds_the_options_of_its_objective() -> None:
    """Other objects may hold data that differ between ranks."""
    one, other = (mw.objectives.Dpo(beta=beta).loss for beta in (0.1, 0.2))
    assert one.name == mw.objectives.Dpo(beta=0.1).loss.name != other.name
    assert mw.Loss(mw.losses.cross_entropy).name == "cross_entropy"
    assert mw.Loss(max).name == "max", "some built-in functions have no signature"

    class Own:
        def __call__(self, scores: Any, fields: Any) -> Any: ...

    @dataclass(frozen=True)
    class WithData(mw.objectives.Dpo):
        rows_of_rank: int = 0

    assert WithData(rows_of_rank=1) != WithData(rows_of_rank=2)
    assert mw.Loss(WithData(rows_of_rank=1), per="group").name == mw.Loss(WithData(rows_of_rank=2), per="group").name
    assert mw.Loss(Own()).name.endswith("Own")
    assert mw.Loss(Own().__call__).name.endswith("Own.__call__")
