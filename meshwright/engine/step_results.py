"""The results of an optimizer step, and the all-reduces that make them equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..axes import DENSE, Sum
from ..recipe import Recipe
from .mtp import MtpRecord


def loss_sum(recipe: Recipe) -> Sum:
    """Return the all-reduce of the loss: three float64, the shares of the loss and of the router's aux loss, and the
    number of ranks on which the loss failed. A trained MTP head adds its loss and its acceptance. Metrics of a loss
    add 8 bytes each, which the bill does not know."""
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
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the loss, by the names of `mw.Loss(metrics=)`
    skipped: str = ""  # why no parameter was changed, with on_nonfinite="skip"; then `step` is the step not taken


@dataclass(frozen=True)
class Results:
    """The results of a step that the host has waited for."""

    loss: float = 0.0  # with the router's aux loss
    router_loss: float = 0.0
    norms: list[float] = field(default_factory=list)  # empty after `backward`
    load: Tensor = field(default_factory=lambda: torch.zeros(0))
    mtp: MtpRecord | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def nonfinite(self, step: int) -> str:
        """Name the first number that is not finite, with its value; empty if all are. Metrics may be anything."""
        numbers = {"loss": self.loss, "gradient norm": self.norms[0] if self.norms else 0.0}
        if self.mtp is not None:
            numbers["loss of the MTP head"] = self.mtp.loss
            numbers["gradient norm of the MTP head"] = self.norms[1] if len(self.norms) > 1 else 0.0
        return next(
            (f"the {name} of step {step} is {value}" for name, value in numbers.items() if not math.isfinite(value)), ""
        )


def results_of(
    shares: Sequence[float], norms: Sequence[float], load: Tensor, has_mtp: bool, names: Sequence[str]
) -> Results:  # fmt: skip
    """Return the results of a step from its reduced shares (`[loss, router's aux loss, MTP loss and acceptance,
    metrics]`) and its norms."""
    loss, router_loss, *more = shares
    mtp = MtpRecord(more[0], more[1], norms[1] if len(norms) > 1 else None) if has_mtp else None
    metrics = dict(zip(names, more[2 * has_mtp :], strict=True))
    return Results(loss + router_loss, router_loss, [*norms], load, mtp, metrics)


def norms_if_applied(reduced: Tensor, norms: Tensor, num_metrics: int = 0) -> Tensor:
    """Return the norms, NaN where the step raises: a loss or a norm is not finite, or the loss has failed on a rank."""
    failed, losses = reduced[0], reduced[1 : len(reduced) - num_metrics]
    return norms.where(losses.sum().isfinite() & norms.sum().isfinite() & (failed == 0), torch.nan)
