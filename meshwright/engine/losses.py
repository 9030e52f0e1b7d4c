"""Losses: functions of the model's scores and the batch's fields that return one term per token.

The engine weights the terms (by the field `weight`, or 1), leaves out tokens without a label, sums over the whole
optimizer step and divides by the sum of the weights. A loss never averages. `Loss` (loss.py) says what else a function
may look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..data import IGNORE
from ..errors import DataError

# One number per token: "logprobs" (and "entropy" with Engine(entropy=True)), or "values" ([T, labels] if several).
Scores = Mapping[str, Tensor]
Fields = Mapping[str, Tensor]
# (scores, fields) -> terms; with `Loss(per=)` other than "token", (scores, fields, docs) -> terms. With `metrics`, it
# returns (terms, {name: values}).
LossFunction = Callable[..., Any]


def cross_entropy(scores: Scores, _fields: Fields) -> Tensor:
    """Return minus the log-probability of the label."""
    return -scores["logprobs"]


def squared_error(scores: Scores, fields: Fields) -> Tensor:
    """Return half the squared distance to the field `target`, for `head="value"` with one label."""
    if scores["values"].ndim > 1:
        raise DataError(
            f"squared_error needs one label, and the model has {scores['values'].shape[1]}; give Engine another loss, "
            "such as mw.losses.classification"
        )
    return (scores["values"] - fields["target"]).square() / 2


def classification(scores: Scores, fields: Fields) -> Tensor:
    """Return minus the log-probability of the class in the batch's `labels`, for `head="value"` with several labels."""
    values_TL, labels_T = scores["values"], fields["labels"]
    if values_TL.ndim < 2 or labels_T.max() >= values_TL.shape[1]:
        num = values_TL.shape[1] if values_TL.ndim > 1 else 1
        raise DataError(
            f"classification got the label {labels_T.max().item()} for a head of {num}; labels of the batch are "
            "classes from 0, and config.json (id2label, num_labels) sets how many classes the head has"
        )
    return functional.cross_entropy(values_TL, labels_T, reduction="none", ignore_index=IGNORE)
