"""H1: check a loss with an entropy term.

With tp, each rank has the logits of a slice of the vocabulary. Ranks combine statistics of the slices into the entropy,
in code that a plain loss never runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data import IGNORE, Batch
from ..engine import Engine, Model, gather, logits, losses
from ..sharding import MTP
from ..weights import chosen
from .results import Finding, Margin, Notes

if TYPE_CHECKING:
    from .reference import Run, Trial

_SHARE = 0.3  # coefficient of the entropy in the loss
_LAST = "head.norm.weight"
_DIFFERENCE = 1e-4  # step of the central difference: its error falls with the square of the step
_SLOPE = 1e-6  # allowed relative error of that difference
LossAndGrads = tuple[float, dict[str, Tensor]]  # a loss, and its gradients by key


def loss_of(scores: losses.Scores, _fields: losses.Fields) -> Tensor:
    """Return the loss of each token: cross-entropy minus a bonus for entropy, as in reinforcement learning."""
    return -scores["logprobs"] - _SHARE * scores["entropy"]


def backward_with_entropy(model: Model, batches: Sequence[Batch], router_aux: str) -> LossAndGrads:
    """Return the loss of a step and its gradients, and clear the gradients of the model."""
    engine = Engine(model, lr=0.0, loss=loss_of, entropy=True, router_aux=router_aux)
    value, grads = engine.backward(batches), gather(model, "grad")
    engine.discard()
    return value, grads


def h1_of_one(trial: Trial, model: Model, actual: LossAndGrads, aux: LossAndGrads, notes: Notes) -> Iterator[Finding]:
    """Compare the loss of one process, and its slope along a gradient, with a plain computation from logits.

    A mesh is compared with this process alone, so a mistake in the entropy itself would not show on it.
    """
    loss, (slope, expected_slope) = _loss_from_logits(trial, model) + aux[0], _slopes(trial, model, actual, aux)
    for what, one, expected, allowed in (
        ("loss of one process compared with the entropy of its logits", actual[0], loss, trial.tolerance.loss),
        ("slope of that loss along its gradient", slope, expected_slope, _SLOPE),
    ):
        error = abs(one - expected) / abs(expected)
        notes.add_margin(Margin("H1", what, 1, error, allowed))
        if not error <= allowed:
            text = f"{what}: {one!r}, expected {expected!r}"
            yield Finding("H1", "loss with entropy", text, "the entropy is wrong, on a mesh too")


def _slopes(trial: Trial, model: Model, actual: LossAndGrads, aux: LossAndGrads) -> tuple[float, float]:
    """Return the norm of a gradient, and the slope of the loss from logits in its direction. They should be equal.

    The gradient is that of the last norm, or with adapters that of the trunk's last adapter: the entropy does not
    depend on an MTP head. The function after it is smooth; a router or an FP8 matmul would jump.
    """
    of_trunk = [name for name in model.trained if not name.startswith(MTP)]
    name = _LAST if _LAST in of_trunk else of_trunk[-1]
    stored, grad = model.stored()[name], torch.zeros(model.table[name].shape, dtype=torch.float64)
    for block in chosen(model.table[name], model.keymap.choice).blocks:
        of_key = actual[1][block.key].double() - aux[1].get(block.key, torch.zeros(()))
        grad[block.ours.slices] = block.view(of_key)
    original, direction, losses_at = stored.clone(), (grad / grad.norm()).view(stored.shape), []
    for sign in (1, -1):
        stored.copy_(original + sign * _DIFFERENCE * direction)
        losses_at.append(_loss_from_logits(trial, model))
    stored.copy_(original)
    return grad.norm().item(), (losses_at[0] - losses_at[1]) / (2 * _DIFFERENCE)


def _loss_from_logits(trial: Trial, model: Model) -> float:
    """Return the mean loss over all data ranks, from log-probabilities of the whole vocabulary."""
    terms = weights = 0.0
    for batch in (each for rank in range(trial.axes.num_data_ranks) for each in trial.data(rank, 0)):
        logprobs_TV = logits(model, batch).double().log_softmax(-1)
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        labels_T = batch.labels.where(batch.labels != IGNORE, 0)
        term_T = -logprobs_TV.gather(1, labels_T[:, None])[:, 0] - _SHARE * entropy_T
        weight_T = batch.fields.get("weight", torch.ones(len(batch))).double() * (batch.labels != IGNORE)
        terms, weights = terms + float((term_T * weight_T).sum()), weights + float(weight_T.sum())
    return terms / weights


def h1_entropy(run: Run, actual: LossAndGrads) -> Iterator[Finding]:
    """A loss with an entropy term, and its gradients, are those of one process, which are those of its logits.

    `actual`: of this mesh, before the first step.
    """
    (value, grads), expected, limit = actual, run.reference.entropy, run.trial.tolerance
    error = abs(value - expected[0]) / abs(expected[0])
    run.record_once("H1", "loss with entropy", 1, error, limit.loss)
    if not error <= limit.loss:
        guess = "slices of the vocabulary are combined wrongly"
        yield Finding("H1", "loss with entropy", f"{value!r}, one process has {expected[0]!r}", guess)
    norm = torch.stack([grad.double().norm() for grad in expected[1].values()]).norm().item()
    worst, at = 0.0, ""
    for name in reversed(list(grads)):  # those nearest to the loss first
        wanted = expected[1][name].double()
        off = (grads[name].double() - wanted).norm().item() / max(wanted.norm().item(), 1e-6 * norm)
        worst, at = max((worst, at), (off, name))
        if not off <= limit.grad:
            yield Finding("H1", name, f"its gradient of a loss with entropy is {off:.1e} of its norm off")
    run.record_once("H1", "gradients of a loss with entropy", len(grads), worst, limit.grad, at)
