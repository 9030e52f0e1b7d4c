"""The loss of the MTP head (multi-token prediction) in a step: its terms, its divisor, and the load of its experts.

The head predicts the label of the next token. Its loss has a divisor of its own, the weight of these labels over all
micro-batches and ranks: with the divisor of the model, or a divisor per rank, a gradient would depend on where
documents are cut (Megatron-LM#7452), and would be 0/0 on a cp rank whose labels have all moved away (mcore-bridge#104).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import IGNORE, WEIGHT, Batch
from ..ops import has_next, next_in_document
from ..parallel import Scores
from ..sharding import MTP
from .model import Model
from .router import Router

LABEL = "the MTP head: "  # before the names of its collectives


@dataclass(frozen=True)
class MtpData:
    """The size of the MTP loss in the batches of a rank."""

    weight: float = 0.0  # the sum of the weights of its targets
    num_targets: int = 0
    num_followed: int = 0  # tokens that its router sees: those with a next token in their document


def unreached_embedding(model: Model) -> list[str]:
    """Return the embedding on a rank where it is trained and no gradient reaches it."""
    from_first = any(stage.number == 0 for stage in model.stages)
    detached = model.recipe.mtp == "head" and not model.blueprint.module.tied
    return ["embed.weight"] if detached and not from_first and "embed.weight" in model.trainable else []


@dataclass(frozen=True)
class MtpRecord:
    """The results of a step of the MTP head."""

    loss: float  # cross-entropy, before it is weighted
    acceptance: float  # the share of targets that are the likeliest token: drafts that greedy decoding accepts
    grad_norm: float | None = None  # of the head alone, where its gradients are clipped alone


def next_labels(batch: Batch) -> Tensor:
    """Return the label of the MTP head at each token."""
    return next_in_document(batch.labels, batch.docs, IGNORE)


def next_weights(batch: Batch) -> Tensor | None:
    """Return the weights of the MTP terms: the field `weight` of the next token, if the batch has it."""
    weights = batch.fields.get(WEIGHT)
    return None if weights is None else next_in_document(weights, batch.docs, 0)


def mtp_data(batches: Sequence[Batch]) -> MtpData:
    """Return the size of the MTP loss in batches."""
    weight, num_targets, num_followed = 0.0, 0, 0
    for batch in batches:
        is_target_T, weights_T = next_labels(batch) != IGNORE, next_weights(batch)
        num = int(is_target_T.sum())
        weight += num if weights_T is None else float(weights_T[is_target_T].double().sum())
        num_targets += num
        num_followed += int(has_next(batch.docs)[: len(batch) - batch.num_filler].sum())
    return MtpData(weight, num_targets, num_followed)


class MtpTraining:
    """Computes the loss of the MTP head of a model that trains it.

    `apart`: the parameters whose gradients are clipped by a norm of their own. With mtp="head" these are the head's. In
    the norm of the model they would change how the trunk is clipped, and the trunk must train as without MTP.
    """

    def __init__(self, model: Model, router_aux: str) -> None:
        head = model.blueprint.module.mtp
        assert head is not None, "the engine has looked"
        self.model, self.weight = model, model.recipe.mtp_weight
        self.router = Router(head.balance, model.mesh, router_aux, LABEL)
        self.names = frozenset(name for name in model.trained if name.startswith(MTP))
        self.apart = self.names if head.detached else frozenset()

    def loss(self, batch: Batch, scores: Scores, step: MtpData) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the weighted loss of a micro-batch, and of the reported figures: the unweighted
        loss and the acceptance.

        `step`: the size of the whole step. A step without targets has a loss of 0, not 0/0.
        """
        lo, hi = self.model.mesh.token_range(len(batch))
        is_target_T, (logprobs_T, hits_T) = next_labels(batch)[lo:hi] != IGNORE, scores
        weights_T, terms_T = next_weights(batch), -logprobs_T
        if weights_T is not None:
            terms_T = terms_T * weights_T[lo:hi]
        total = terms_T.masked_fill(~is_target_T, 0.0).sum()
        loss = total / step.weight if step.weight > 0 else total * 0.0
        hits = (hits_T & is_target_T).sum().double() / max(step.num_targets, 1)
        return loss * self.weight, torch.stack([loss.detach().double(), hits])
