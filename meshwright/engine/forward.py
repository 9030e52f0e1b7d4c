"""What a model says of a batch, for whoever looks: one forward without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import parallel
from ..axes import REPLICA, Sum
from ..data import IGNORE, Batch
from ..errors import StateError
from ..watch import names_lost_ranks
from .agreement import Proposal, agree, check_same_data, data_of
from .model import Model
from .pictures import as_all_see

SCORES = Sum("the scores of the last stage", ("pp",))


@names_lost_ranks()
def logprobs(model: Model, batch: Batch) -> Tensor:
    """`[T]` log-probabilities of the labels of this data rank's tokens (0 where there is no label), no gradients."""
    own_T = score_without_grad(model, batch, "logprobs", "logprobs")
    labels = batch.labels.to(own_T.device)
    return model.mesh.gather_rows(own_T, ("cp", "tp")).masked_fill(labels == IGNORE, 0.0)


@names_lost_ranks()
def logits(model: Model, batch: Batch) -> Tensor:
    """`[T, V]` of this data rank's tokens (head "value": `[T]`, or `[T, labels]` of several), at least float32, no
    gradients."""
    if "values" in model.blueprint.scores:
        return model.mesh.gather_rows(score_without_grad(model, batch, "values", "logits"), ("cp", "tp"))
    of_tokens_TV = over_vocabulary(model, score_without_grad(model, batch, "logits", "logits"))
    return model.mesh.gather_rows(of_tokens_TV, ("cp",))


def over_vocabulary(model: Model, local_TV: Tensor) -> Tensor:
    """This rank's part of the vocabulary -> all of it."""
    vocab, tp = model.blueprint.vocab, model.mesh.axes.tp
    widest = -(-vocab // tp)  # the last slice of the vocabulary may be shorter
    padded = torch.nn.functional.pad(local_TV.t(), (0, 0, 0, widest - local_TV.shape[1]))
    return model.mesh.gather_rows(padded, ("tp",))[:vocab].t()


def score_without_grad(model: Model, batch: Batch, want: str, call: str) -> Tensor:
    """Scores of this rank's own tokens (logits: of those of its tp group, this rank's part of the vocabulary).

    The ranks of one replica call it together. Replicas may look at other times, or not at all.
    """

    def propose() -> Proposal:
        if want not in model.blueprint.scores:
            known = ", ".join(model.blueprint.scores)
            raise StateError(f"the head of this model gives {known}, not {want}; choose head= of mw.load")
        return Proposal(data_of(model, [batch], want))

    _, told = agree(model, call, propose, REPLICA)
    check_same_data(told, model.mesh, REPLICA)
    (seen,) = as_all_see([batch], told.pictures, model.blueprint.module.tower)
    here = seen.to(model.mesh.device)
    found = parallel.run_forward(model, [here], want, lambda _batch, scores: scores[0])
    return _of_last_stage(model, found, _shape(model, len(batch), want))


def _shape(model: Model, num_tokens: int, want: str) -> tuple[int, ...]:
    """Of the scores of a rank, known to those that have no head too."""
    axes = model.mesh.axes
    if want == "logits":
        return num_tokens // axes.cp, vocab_width(model)
    labels = model.blueprint.module.shape.labels.num if want == "values" else 1
    return (num_tokens // (axes.cp * axes.tp), *((labels,) if labels > 1 else ()))


def vocab_width(model: Model) -> int:
    """How many words this rank scores, if it has a head."""
    start, stop = model.blueprint.spec.rules.span(
        "vocab", model.blueprint.vocab, model.mesh.axes, model.mesh.coords, "the head"
    )
    return stop - start


def _of_last_stage(model: Model, found: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The same on all stages: those without a head add zeros."""
    wide = torch.promote_types(model.dtype, torch.float32)
    scores = found[0] if found else torch.zeros(shape, dtype=wide, device=model.mesh.device)
    return model.mesh.sum_(scores, SCORES)
