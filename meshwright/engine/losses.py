"""Losses: from what the model says of each token, and the batch's fields, to one term a token.

The engine weights the terms (field `weight`, else 1), leaves out tokens without a label, sums over the whole optimizer
step and divides by the sum of the weights. A loss never averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ..errors import DataError

Scores = Mapping[str, Tensor]  # "logprobs" and "entropy", or "values": one number a token
Fields = Mapping[str, Tensor]
Loss = Callable[[Scores, Fields], Tensor]


def cross_entropy(scores: Scores, _fields: Fields) -> Tensor:
    """Minus the log-probability of the label."""
    return -scores["logprobs"]


def squared_error(scores: Scores, fields: Fields) -> Tensor:
    """For `head="value"`: half the squared distance to the field `target`."""
    if "target" not in fields:
        raise DataError(
            f"squared_error needs the field 'target'; the batch has {sorted(fields)}: pack(..., fields=...)"
        )
    return (scores["values"] - fields["target"]).square() / 2
