"""Losses: they turn what the model says of each token, and the fields of the batch, into one term a token.

The engine weights the terms (by the field `weight`, or 1), leaves out tokens without a label (of values: filler), sums
over the whole optimizer step and divides by the sum of the weights. A loss never averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..errors import DataError

# One number a token: "logprobs" (with Engine(entropy=True) "entropy"), or "values" (of several labels: [T, labels]).
Scores = Mapping[str, Tensor]
Fields = Mapping[str, Tensor]
Loss = Callable[[Scores, Fields], Tensor]


def cross_entropy(scores: Scores, _fields: Fields) -> Tensor:
    """Minus the log-probability of the label."""
    return -scores["logprobs"]


def squared_error(scores: Scores, fields: Fields) -> Tensor:
    """For `head="value"` of one label: half the squared distance to the field `target`."""
    if scores["values"].ndim > 1:
        raise DataError(
            f"squared_error is of one label, the model has {scores['values'].shape[1]}; give Engine a loss of your own"
        )
    return (scores["values"] - fields["target"]).square() / 2
