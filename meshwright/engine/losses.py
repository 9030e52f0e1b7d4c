"""Losses: functions of the model's scores and the batch's fields that return one term per token.

The engine weights the terms (by the field `weight`, or 1), leaves out tokens without a label, sums over the whole
optimizer step and divides by the sum of the weights. A loss never averages. `Loss` says what else a function may look
at, and what a term of it is about: a document, a group of documents, or a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from ..data import IGNORE
from ..errors import ConfigError, DataError

# One number per token: "logprobs" (and "entropy" with Engine(entropy=True)), or "values" ([T, labels] if several).
Scores = Mapping[str, Tensor]
Fields = Mapping[str, Tensor]
# (scores, fields) -> terms; with `Loss(per=)` other than "token", (scores, fields, docs) -> terms. With `metrics`, it
# returns (terms, {name: values}).
LossFunction = Callable[..., Any]

PER = ("token", "document", "group", "micro_batch")


@dataclass(frozen=True)
class Loss:
    """A loss function, and what one term of it is about.

    >>> engine = Engine(model, lr=1e-6, loss=Loss(gspo, per="document", metrics=("kl",)))      # doctest: +SKIP

    `per`: "token", a term depends on its token alone. With "document", "group" and "micro_batch" the function is called
    as `function(scores, fields, docs)` with the whole micro-batch, on any mesh: scores are all-gathered over cp and tp,
    and `docs` (`LossDocuments`) sums and splits them by document. It returns a term for each document, for each group
    (`mw.batches(groups=)`), or one number.

    `normalise`: the engine divides by the number of tokens, documents or groups with a label in the whole step (of
    tokens: by the sum of their weights). With False it does not divide: the function has.

    `metrics`: names of figures. The function then returns `(terms, {name: values})`, with values in the shape of its
    terms, and `record.metrics` has their mean over the step, or their sum with `normalise=False`.
    """

    function: LossFunction
    per: str = "token"
    normalise: bool = True
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"loss={self.function!r} must be a function of scores and fields, such as cross_entropy")
        if self.per not in PER:
            raise ConfigError(f"per={self.per!r} is unknown; choose from {', '.join(map(repr, PER))}")
        if not isinstance(self.normalise, bool):
            raise ConfigError(f"normalise={self.normalise!r} must be True or False")
        if self.per == "micro_batch" and self.normalise:
            raise ConfigError(
                'a loss per="micro_batch" is a number that the engine cannot divide: a mean over micro-batches would '
                "depend on how documents are packed; divide it yourself and give normalise=False"
            )
        names: object = self.metrics
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f'metrics={names!r} must be a tuple of names, such as ("kl", "clip_fraction")')

    @classmethod
    def of(cls, loss: Loss | LossFunction) -> Loss:
        """Return a loss of which a user may have given the function alone."""
        return loss if isinstance(loss, Loss) else cls(loss)


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
