"""Call a user's loss: its inputs, and the checks of its result."""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, ValuesView
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from ..ops import upcast
from .loss import Loss
from .loss_documents import LossDocuments
from .model import Model
from .validation import check_metrics, check_terms


class Result(NamedTuple):
    """The result of a loss for a micro-batch: terms, metrics `[M, terms]`, and the names of the fields it read."""

    terms: Tensor
    metrics: Tensor
    names_read: set[str]


def call_loss(
    model: Model, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor],
    docs: LossDocuments | None = None,
) -> Result:  # fmt: skip
    """Run a loss on tokens, or with `docs` on whole documents. It may write into its fields, so it gets copies."""
    names = (sorted(scores), sorted(fields))
    copies = NamedTensors({name: value.clone() for name, value in fields.items()}, names)
    model.calls.in_loss = True  # `agree` refuses calls on the model meanwhile
    try:
        result = loss.function(NamedTensors(scores, names), copies, *([] if docs is None else [docs]))
    finally:
        model.calls.in_loss = False
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and not loss.metrics and isinstance(result[1], Mapping):
        raise DataError(
            f"the loss returned metrics {sorted(result[1])}, which it must declare: mw.Loss(function, "
            f"metrics={(*sorted(result[1]),)})"
        )
    terms, metrics = result if is_pair and loss.metrics else (result, {})
    shape = (len(next(iter(scores.values()))),) if docs is None else (docs.num_terms(loss.per),)
    check_terms(terms, () if loss.per == "micro_batch" else shape, "group" if loss.per == "step" else loss.per)
    check_metrics(metrics, loss.metrics, terms)
    wide = upcast(terms)
    values = [metrics[name].detach().to(torch.promote_types(wide.dtype, torch.float32)) for name in loss.metrics]
    return Result(wide, torch.stack(values) if values else wide.new_zeros(0, *wide.shape), copies.names_read)


@torch.no_grad()
def perturbed(
    model: Model, loss: Loss, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor],
    docs: LossDocuments | None = None,
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:  # fmt: skip
    """Return perturbed scores and fields, to test what a term depends on. In the first step of RL every probability
    ratio is 1, and all tokens of a micro-batch may have one advantage, so a wrong mean over equal numbers would
    pass."""
    host, num = model.mesh.host, len(next(iter(scores.values())))
    draw = torch.rand(num, generator=torch.Generator(host).manual_seed(0), device=host)
    others = {name: (x.t() - 0.1 * draw.to(x)).t() for name, x in scores.items()}
    factors = torch.rand(num, generator=torch.Generator(host).manual_seed(1), device=host)
    changed = {
        name: (x.t() * (1 + factors.to(x)) + 0.1 * draw.to(x)).t() if x.is_floating_point() else x
        for name, x in fields.items()
    }
    try:
        call_loss(model, loss, others, changed, docs)
    except Exception:  # noqa: BLE001 - a field may be a number of something, such as a class
        return others, fields
    return others, changed


class NamedTensors(dict[str, Tensor]):
    """The scores or fields that a loss gets: a dict that records which names are read."""

    def __init__(self, tensors: Mapping[str, Tensor], names: tuple[list[str], list[str]]) -> None:
        super().__init__(tensors)
        self._names, self.names_read = names, set[str]()

    def __getitem__(self, key: str) -> Tensor:
        self.names_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override] # dict's are overloads
        self.names_read.add(key)
        return super().get(key, default)

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override] # a view of dict's own kind
        self.names_read.update(self)
        return super().items()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        self.names_read.update(self)
        return super().values()

    def __missing__(self, key: str) -> Tensor:
        raise DataError(
            f"the loss reads {key!r}, but it gets the scores {self._names[0]} (entropy with Engine(entropy=True)) "
            f"and the fields {self._names[1]} (add more with pack(..., fields=))"
        )
