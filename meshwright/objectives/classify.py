"""Sequence classification: one class for a whole document, predicted at its last token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..engine import Loss, losses
from ..recipe import option


@dataclass(frozen=True)
class Classify:
    """Cross-entropy over the classes of a value head."""

    head: ClassVar[str] = "value"
    rows: ClassVar[str] = "labelled"

    labels: Sequence[str] = option(
        (), "Names of the classes, for a model without a classifier's head. By default those of `id2label` in "
        "config.json.",
    )  # fmt: skip

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine with `head="value"`."""
        return Loss(self, metrics=("accuracy",))

    def __call__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        terms_T, values_TL = losses.classification(scores, fields), scores["values"]
        return terms_T, {"accuracy": (values_TL.argmax(-1) == fields["labels"]).to(values_TL.dtype)}
