"""The results of an optimizer step, and the all-reduces that make them equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..axes import DENSE, Sum
from ..recipe import Recipe
from .mtp import MtpRecord


def loss_sum(recipe: Recipe) -> Sum:
    """Return the all-reduce of the loss: three float64, the shares of the loss and of the router's aux loss, and the
    number of ranks on which the loss failed. A trained MTP head adds its loss and its acceptance."""
    return Sum("the loss", DENSE, 24 if recipe.mtp == "carried" else 40)


def norm_sum(recipe: Recipe) -> Sum:
    """Return the all-reduce of the gradient norm, and of that of an MTP head which is clipped alone."""
    return Sum("the norm", DENSE, 16 if recipe.mtp == "head" else 8)


@dataclass(frozen=True)
class StepRecord:
    """The results of one optimizer step, the same on all ranks."""

    step: int  # counted from 1
    loss: float
    grad_norm: float
    lr: float
    num_targets: int  # over all data ranks and micro-batches
    num_tokens: int  # without padding
    expert_load: Tensor | None = None  # [MoE layers, experts]: tokens routed to each expert
    router_loss: float = 0.0  # the router's aux loss, which `loss` includes
    mtp: MtpRecord | None = None  # of a trained MTP head, whose loss `loss` does not include


class Results(NamedTuple):
    """The results of a step that the host waits for, all of them finite."""

    loss: float
    norms: list[float]
    load: Tensor
    router_loss: float
    mtp: MtpRecord | None


def norms_if_applied(reduced: Tensor, norms: Tensor) -> Tensor:
    """Return the norms, NaN where the step raises: a loss or a norm is not finite, or the loss has failed on a rank."""
    return norms.where(reduced[:-1].sum().isfinite() & norms.sum().isfinite() & (reduced[-1] == 0), torch.nan)
