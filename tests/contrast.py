"""Contrastive losses over all documents of a step, and the same by hand: plain loops over one long forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.objectives import Embedding, last_token_labels

# Groups of a query, its positive and 0 to 3 hard negatives, documents of very unequal length, not in any order.
GROUPS = [[9, 2, 21], [5, 17], [3, 12, 6, 4, 7], [1, 14], [8, 8, 2, 11]]
SIZES = [size for group in GROUPS for size in group]
NUMBERS = [number for number, group in enumerate(GROUPS) for _ in group]


@dataclass(frozen=True)
class Case:
    """A loss, and how many groups of the step go to each micro-batch of each data rank."""

    objective: Embedding
    length: int  # of a batch: a longer one has more groups


CASES = {
    "one batch": Case(Embedding(), 130),
    "few batches": Case(Embedding(temperature=0.1, dims=(36, 20, 7), symmetric=True), 72),
    "a group a batch": Case(Embedding(temperature=0.2, false_negative_margin=0.05), 36),
}


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(11)
    return [torch.randint(0, 131, (size,), generator=draw).tolist() for size in SIZES]


def batches(mesh: mw.Mesh, length: int) -> list[mw.Batch]:
    given = documents()
    return mw.batches(given, mesh, length=length, labels=last_token_labels(given), groups=NUMBERS)


def by_hand(objective: Embedding, last: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics of a step, from the last hidden state of each document: the formula in loops."""
    starts = [sum(map(len, GROUPS[:number])) for number in range(len(GROUPS))]
    terms: list[Tensor] = []
    metrics: dict[str, list[float]] = {"accuracy": [], "positive_cosine": [], "negative_cosine": []}
    for dim in objective.dims or (len(last[0]),):
        units = [x[:dim] / x[:dim].square().sum().sqrt() for x in last]
        candidates = [n for n in range(len(last)) if n not in starts]
        for start in starts:
            own = start + 1
            cosine = {n: (units[start] * units[n]).sum() for n in candidates}
            others = [n for n in candidates if n != own]
            kept = [n for n in others if cosine[n] <= cosine[own] + objective.false_negative_margin]
            term = _of(cosine[own], [cosine[n] for n in kept], objective.temperature)
            if objective.symmetric:
                back = [(units[query] * units[own]).sum() for query in starts if query != start]
                term = (term + _of(cosine[own], back, objective.temperature)) / 2
            terms.append(term)
            if dim == max(objective.dims or (dim,)):
                nearest = max(float(cosine[n]) for n in others)
                metrics["accuracy"].append(float(cosine[own] > nearest))
                metrics["positive_cosine"].append(float(cosine[own]))
                metrics["negative_cosine"].append(nearest)
    return sum(terms) / len(terms), {k: sum(x) / len(x) for k, x in metrics.items()}  # type: ignore[return-value] # of tensors


def _of(positive: Tensor, others: list[Tensor], temperature: float) -> Tensor:
    total = (positive / temperature).exp()
    for other in others:
        total = total + (other / temperature).exp()
    return -((positive / temperature).exp() / total).log()


def last_states(scores: Any, docs: Any) -> list[Tensor]:
    """The last hidden state of each document of a micro-batch, in the order of `documents`."""
    return [rows[-1] for rows in docs.split(scores["hidden"])]
