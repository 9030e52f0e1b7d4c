"""Forward and backward over documents of unequal length, with a loss that a framework calls on whole micro-batches.

Frameworks hand over jagged tensors: the tokens of all documents of a micro-batch, one after the other, without padding.
They become batches of one length on all data ranks, and scores come back without padding, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import api as mw
from ..engine.loss_documents import LossDocuments

# The scores `[tokens]` of a micro-batch by name, and its number -> one number to be minimised.
JaggedLoss = Callable[[int, dict[str, Tensor]], Tensor]
_NOTHING = torch.zeros(1, dtype=torch.int64)
_NUMBER = "number_of_micro_batch"  # a field of each batch: a pipeline may call the loss out of order


def packed(
    mesh: mw.Mesh, micro_batches: Sequence[Sequence[Tensor]], multiple: int = 1, least: int = 0, values: bool = False
) -> list[mw.Batch]:
    """Pack the documents of each micro-batch. All batches get the length of the fullest one on any data rank.

    `multiple`: the length is rounded up to a multiple of this: fewer lengths mean fewer compilations. `least`: the
    smallest length. `values`: for a value head, which scores all tokens, the last one of a document too. If data ranks
    have different numbers of micro-batches, all ranks raise. A micro-batch without any token gets one token.
    """
    micro_batches = [[each for each in documents if len(each)] or [_NOTHING] for documents in micro_batches]
    sizes = [sum(len(tokens) for tokens in documents) for documents in micro_batches]
    rows = mesh.all_or_none(None, "the sizes of micro-batches", numbers=(len(sizes), max(sizes, default=0)))
    counts = rows[:, 0].long().unique().tolist()
    if counts == [0] or len(counts) > 1:
        raise mw.DataError(f"the ranks have {counts} micro-batches; give all data ranks the same number, at least one")
    share = multiple * mesh.axes.cp * mesh.axes.tp
    length = -(-max(least, int(rows[:, 1].max())) // share) * share
    return [_packed(documents, number, length, values) for number, documents in enumerate(micro_batches)]


def _packed(documents: Sequence[Tensor], number: int, length: int, values: bool) -> mw.Batch:
    """Pack one micro-batch. Every token predicts the next one of its document, since a framework masks in its loss. For
    a value head every token gets a label that nothing reads, because the score of a token without one would be 0.
    """
    numbers = [torch.full((len(tokens),), number) for tokens in documents]
    tokens = [each.tolist() for each in documents]
    return mw.pack(tokens, labels=tokens if values else None, length=length, fields={_NUMBER: numbers})


def scores(model: mw.Model, batches: Sequence[mw.Batch], temperature: float) -> list[dict[str, Tensor]]:
    """Return the scores of each batch by name, without padding: `[tokens]`. No gradients."""
    actual = mw.scores(model, batches, temperature=temperature)
    return [
        {name: x[: len(batch) - batch.num_filler] for name, x in each.items()}
        for batch, each in zip(batches, actual, strict=True)
    ]


def losses_of(mesh: mw.Mesh, loss: JaggedLoss, actual: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """Call a loss on the scores of each micro-batch. If it fails on one rank, all ranks raise."""
    call = lambda: [loss(number, each) for number, each in enumerate(actual)]  # noqa: E731 - short
    return mesh.together(call, "the loss of a framework", mw.DataError, "no loss was computed")


def backward(engine: mw.Engine, batches: Sequence[mw.Batch], loss: JaggedLoss, temperature: float) -> None:
    """Sum the losses of all micro-batches of all data ranks, and leave the gradient on the parameters.

    `loss` is called on the ranks with the head, once for each micro-batch. On any mesh it gets all scores of the
    micro-batch.
    """
    engine.loss = mw.Loss(_Loss(loss), per="micro_batch", normalise=False)
    engine.temperature = temperature
    engine.backward(batches)


@dataclass(frozen=True, eq=False)
class _Loss:
    """A framework's loss in the form that `mw.Loss` takes."""

    loss: JaggedLoss

    def __call__(self, scores: dict[str, Tensor], fields: dict[str, Tensor], docs: LossDocuments) -> Tensor:
        num_tokens = sum(docs.sizes)
        return self.loss(int(fields[_NUMBER][0]), {name: x[:num_tokens] for name, x in scores.items()})
