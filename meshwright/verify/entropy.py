"""H1: a loss that has a term of entropy, which ranks combine from slices of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data import IGNORE, Batch
from ..engine import Engine, Model, gather, logits, losses
from ..weights import blocks_by_key
from .results import Finding, Margin, Notes

if TYPE_CHECKING:
    from .reference import Run, Trial

_SHARE = 0.3  # of the entropy in the loss
_LAST = "head.norm.weight"
_DIFFERENCE = 1e-4  # between two losses and the one between them
_SLOPE = 1e-6  # what such a difference is off
Found = tuple[float, dict[str, Tensor]]  # a loss, and its gradients by key


def loss_of(scores: losses.Scores, _fields: losses.Fields) -> Tensor:
    return -scores["logprobs"] - _SHARE * scores["entropy"]


def backward_with_entropy(model: Model, batches: Sequence[Batch], router_aux: str) -> Found:
    """Return the loss of a step and its gradients, and leave none behind."""
    engine = Engine(model, lr=0.0, loss=loss_of, entropy=True, router_aux=router_aux)
    value, grads = engine.backward(batches), gather(model, "grad")
    engine.discard()
    return value, grads


def h1_of_one(trial: Trial, model: Model, found: Found, aux: Found, notes: Notes) -> Iterator[Finding]:
    """Compare the loss of one process, and its slope along a gradient, with plain sums over logits."""
    loss, (slope, due_slope) = _by_logits(trial, model) + aux[0], _slopes(trial, model, found, aux)
    for what, one, due, allowed in (
        ("loss of one process beside the entropy of its logits", found[0], loss, trial.tolerance.loss),
        ("slope of that loss along its gradient", slope, due_slope, _SLOPE),
    ):
        error = abs(one - due) / abs(due)
        notes.measured(Margin("H1", what, 1, error, allowed))
        if not error <= allowed:
            said = f"the {what} is {one!r}, {due!r} is due"
            yield Finding("H1", "loss with entropy", said, "the entropy is wrong, on a mesh too")


def _slopes(trial: Trial, model: Model, found: Found, aux: Found) -> tuple[float, float]:
    """Return the norm of a gradient, and the slope of plain sums over logits in its direction.

    It is that of the last norm: what comes after it is smooth, no router and no product in 8 bits.
    """
    made_of = blocks_by_key(model.table, model.keymap.choice)
    key = next(key for key, parts in made_of.items() if parts[0][0].name == _LAST)
    grad, stored = found[1][key].double() - aux[1].get(key, torch.zeros(())), model.stored()[_LAST]
    kept, direction, losses_at = stored.clone(), (grad / grad.norm()).view(stored.shape), []
    for sign in (1, -1):
        stored.copy_(kept + sign * _DIFFERENCE * direction)
        losses_at.append(_by_logits(trial, model))
    stored.copy_(kept)
    return grad.norm().item(), (losses_at[0] - losses_at[1]) / (2 * _DIFFERENCE)


def _by_logits(trial: Trial, model: Model) -> float:
    """Return the mean over all data ranks, by the log-probabilities of all words."""
    terms = weights = 0.0
    for batch in (each for rank in range(trial.axes.num_data_ranks) for each in trial.data(rank, 0)):
        words_TV = logits(model, batch).double().log_softmax(-1)
        entropy_T = -(words_TV.exp() * words_TV).sum(-1)
        labels_T = batch.labels.where(batch.labels != IGNORE, 0)
        term_T = -words_TV.gather(1, labels_T[:, None])[:, 0] - _SHARE * entropy_T
        weight_T = batch.fields.get("weight", torch.ones(len(batch))).double() * (batch.labels != IGNORE)
        terms, weights = terms + float((term_T * weight_T).sum()), weights + float(weight_T.sum())
    return terms / weights


def h1_entropy(run: Run, found: Found) -> Iterator[Finding]:
    """A loss with a term of entropy, and its gradients, are those of one process; they are those of its logits.
    `found`: before the first step."""
    (value, grads), due, limit = found, run.reference.entropy, run.trial.tolerance
    error = abs(value - due[0]) / abs(due[0])
    run.measured_once("H1", "loss with entropy", 1, error, limit.loss)
    if not error <= limit.loss:
        guess = "slices of the vocabulary are combined wrongly"
        yield Finding("H1", "loss with entropy", f"{value!r}, one process finds {due[0]!r}", guess)
    norm = torch.stack([grad.double().norm() for grad in due[1].values()]).norm().item()
    worst, at = 0.0, ""
    for name in reversed(list(grads)):
        wanted = due[1][name].double()
        off = (grads[name].double() - wanted).norm().item() / max(wanted.norm().item(), 1e-6 * norm)
        worst, at = max((worst, at), (off, name))
        if not off <= limit.grad:
            yield Finding("H1", name, f"its gradient of a loss with entropy is {off:.1e} of its norm off")
    run.measured_once("H1", "gradients of a loss with entropy", len(grads), worst, limit.grad, at)
