"""Contrastive losses over all documents of a step, and the same by hand: plain loops over one long forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.objectives import Embedding, last_token_labels

# Groups of a query, its positive and 0 to 3 hard negatives, documents of very unequal length, not in any order.
GROUPS = [[9, 2, 21], [5, 17], [3, 12, 6, 4, 7], [1, 14], [8, 8, 2, 11]]
SIZES = [size for group in GROUPS for size in group]
NUMBERS = [number for number, group in enumerate(GROUPS) for _ in group]


# name -> the objective, and the tokens of a batch: one batch on all ranks, so that all data ranks but one have padding
# alone; two; a batch for each group.
CASES = {
    "one batch": (Embedding(), 136),
    "two batches": (Embedding(temperature=0.1, dims=(36, 20, 7), symmetric=True, false_negative_margin=0.1), 72),
    "a batch for each group": (Embedding(temperature=0.2, false_negative_margin=0.05), 36),
}


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(11)
    return [torch.randint(0, 131, (size,), generator=draw).tolist() for size in SIZES]


def batches(mesh: mw.Mesh, length: int) -> list[mw.Batch]:
    given = documents()
    return mw.batches(given, mesh, length=length, labels=last_token_labels(given), groups=NUMBERS)


def by_hand(objective: Embedding, last: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss and the metrics of a step, from the last hidden state of each document: the formula in loops."""
    dims = objective.dims or (len(last[0]),)  # the widest is first
    each = [_of_prefix(objective, [x[:dim] for x in last]) for dim in dims]
    metrics = {name: sum(row[name] for row in each[0][1]) / len(GROUPS) for name in each[0][1][0]}
    terms = [term for terms, _ in each for term in terms]
    return torch.stack(terms).mean(), metrics


def _of_prefix(objective: Embedding, last: list[Tensor]) -> tuple[list[Tensor], list[dict[str, float]]]:
    starts = [sum(map(len, GROUPS[:number])) for number in range(len(GROUPS))]
    units = [x / x.square().sum().sqrt() for x in last]
    terms, metrics = list[Tensor](), list[dict[str, float]]()
    for start in starts:
        cosine = {n: (units[start] * units[n]).sum() for n in range(len(units)) if n not in starts}
        own = cosine.pop(start + 1)
        kept = [x for x in cosine.values() if x <= own + objective.false_negative_margin]
        term = _of(own, kept, objective.temperature)
        if objective.symmetric:
            back = [(units[query] * units[start + 1]).sum() for query in starts if query != start]
            kept = [x for x in back if x <= own + objective.false_negative_margin]
            term = (term + _of(own, kept, objective.temperature)) / 2
        terms.append(term)
        nearest = max(float(x.detach()) for x in cosine.values())
        positive = float(own.detach())
        metrics.append({
            "accuracy": float(positive > nearest), "positive_cosine": positive, "negative_cosine": nearest
        })  # fmt: skip
    return terms, metrics


def _of(positive: Tensor, others: list[Tensor], temperature: float) -> Tensor:
    total = sum([(other / temperature).exp() for other in others], (positive / temperature).exp())
    return -((positive / temperature).exp() / total).log()


# A loss of a language model: several tokens with a label, one document without any, fields, advantages of a whole step.
def whitened(scores: Any, fields: Any, docs: Any) -> Any:
    advantage = fields["advantage"]
    white = (advantage - advantage.mean()) / advantage.std()
    terms = -(scores["logprobs"] * white) - 0.01 * scores["entropy"]
    return docs.group_mean(docs.mean(terms)), {"num_targets": docs.group_sum(docs.num_targets_D)}


def whitened_by_hand(scores: Any, fields: Any, sizes: list[int], groups: list[int]) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss from all tokens of all documents, one after the other."""
    parts = {key: x.split(sizes) for key, x in {**scores, **fields}.items()}
    labelled = [x != -100 for x in parts["labels"]]
    chosen = torch.cat([x[mask] for x, mask in zip(parts["advantage"], labelled, strict=True)])
    of_groups: dict[int, list[Tensor]] = {}
    counts: dict[int, float] = {}
    for n, (mask, group) in enumerate(zip(labelled, groups, strict=True)):
        white = (parts["advantage"][n][mask] - chosen.mean()) / chosen.std()
        terms = -parts["logprobs"][n][mask] * white - 0.01 * parts["entropy"][n][mask]
        of_groups.setdefault(group, []).append(terms.mean() if mask.any() else terms.sum())
        counts[group] = counts.get(group, 0.0) + float(mask.sum())
    loss = torch.stack([torch.stack(terms).mean() for terms in of_groups.values()]).mean()
    return loss, {"num_targets": sum(counts.values()) / len(counts)}
