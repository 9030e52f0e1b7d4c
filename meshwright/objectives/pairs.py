"""Objectives over pairs of a chosen and a rejected answer: DPO, IPO, ORPO, SimPO, and reward models.

A pair is a group of two documents, the chosen one first. Its log-probabilities are sums or means over the trained
tokens of an answer, so a term needs whole documents: `mw.Loss(per="group")`. The mean is over the pairs of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..engine import Loss, LossDocuments
from ..errors import ConfigError, DataError
from ..recipe import option
from .checks import check_number

REFERENCE = "reference"  # the field with the log-probability that the reference model gives the whole document
DPO_LOSSES = ("sigmoid", "sigmoid_norm", "ipo")
Result = tuple[Tensor, dict[str, Tensor]]


def halves(docs: LossDocuments, values_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of chosen and of rejected documents. -> `[G]` each"""
    if docs.num != 2 * docs.num_groups:
        raise DataError(
            f"a micro-batch has {docs.num} documents in {docs.num_groups} groups, and a pair has two: give groups= so "
            "that the chosen and the rejected answer share a number, the chosen one first"
        )
    pairs_G2 = values_D[docs.by_group].view(-1, 2)
    return pairs_G2[:, 0], pairs_G2[:, 1]


@dataclass(frozen=True)
class Dpo:
    """Direct preference optimisation (arXiv 2305.18290). The field `reference` holds the log-probability that the
    reference model gives each whole document."""

    head: ClassVar[str] = "lm"
    rows: ClassVar[str] = "pairs"

    beta: float = option(0.1, "How strongly the reference holds the model; IPO calls it tau.")
    kind: str = option(
        "sigmoid", 'The loss: "sigmoid" of DPO; "sigmoid_norm", the same with log-probabilities divided by the length '
        'of the answer; "ipo" (arXiv 2310.12036), a squared error, divided by lengths too.', choices=DPO_LOSSES,
    )  # fmt: skip
    label_smoothing: float = option(0.0, "The share of pairs that may be labelled the wrong way round, below 0.5.")
    sft_weight: float = option(
        0.0, "The weight of the cross-entropy of the chosen answer, a mean over its tokens, added to each pair."
    )

    def __post_init__(self) -> None:
        check_number("dpo.beta", self.beta, above=True)
        check_number("dpo.label_smoothing", self.label_smoothing, below=0.5)
        check_number("dpo.sft_weight", self.sft_weight)
        if self.kind not in DPO_LOSSES:
            raise ConfigError(f"dpo.kind={self.kind!r} is unknown; choose from {', '.join(DPO_LOSSES)}")
        if self.kind == "ipo" and self.label_smoothing:
            raise ConfigError('dpo.label_smoothing has no effect on kind="ipo"; leave one of them out')

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
        return Loss(self, per="group", metrics=(*_PAIR_METRICS, "margins"))

    def __call__(self, scores: Mapping[str, Tensor], fields: Mapping[str, Tensor], docs: LossDocuments) -> Result:
        if REFERENCE not in fields:
            raise DataError(
                f"the batch has no field {REFERENCE!r}: DPO needs the log-probability of each document under the "
                "reference model; docs/preferences.md shows how to make it"
            )
        sums_D, length_D = docs.sum(scores["logprobs"]), docs.num_targets_D
        ratio_D = sums_D - docs.mean(fields[REFERENCE])
        compared_D = ratio_D if self.kind == "sigmoid" else ratio_D / length_D.clamp(min=1)
        chosen_G, rejected_G = halves(docs, compared_D)
        delta_G = chosen_G - rejected_G
        if self.kind == "ipo":
            terms_G = (delta_G - 1 / (2 * self.beta)).square()
        else:
            kept, flipped = logsigmoid(self.beta * delta_G), logsigmoid(-self.beta * delta_G)
            terms_G = -(1 - self.label_smoothing) * kept - self.label_smoothing * flipped
        if self.sft_weight:
            terms_G = terms_G - self.sft_weight * halves(docs, sums_D / length_D.clamp(min=1))[0]
        rewards = halves(docs, self.beta * ratio_D)
        return terms_G, {**_metrics_of(*rewards), "margins": rewards[0] - rewards[1]}


@dataclass(frozen=True)
class Orpo:
    """Odds-ratio preference optimisation (arXiv 2403.07691): cross-entropy of the chosen answer, and the odds ratio of
    both. It needs no reference model."""

    head: ClassVar[str] = "lm"
    rows: ClassVar[str] = "pairs"

    weight: float = option(0.1, "The weight of the odds-ratio term (lambda in the paper).")

    def __post_init__(self) -> None:
        check_number("orpo.weight", self.weight, above=True)

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
        return Loss(self, per="group", metrics=(*_PAIR_METRICS, "log_odds"))

    def __call__(self, scores: Mapping[str, Tensor], _: Mapping[str, Tensor], docs: LossDocuments) -> Result:
        chosen_G, rejected_G = halves(docs, docs.mean(scores["logprobs"]))
        log_odds_G = _log_odds(chosen_G) - _log_odds(rejected_G)
        terms_G = -chosen_G - self.weight * logsigmoid(log_odds_G)
        metrics = _metrics_of(self.weight * chosen_G, self.weight * rejected_G)
        return terms_G, {**metrics, "log_odds": log_odds_G}


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)). `expm1` keeps digits where p is near 1, and the clamp a finite value at 1."""
    tiny = torch.finfo(logprob.dtype).tiny
    return logprob - (-torch.expm1(logprob)).clamp(min=tiny).log()


@dataclass(frozen=True)
class Simpo:
    """SimPO (arXiv 2405.14734): mean log-probabilities with a target margin, without a reference model."""

    head: ClassVar[str] = "lm"
    rows: ClassVar[str] = "pairs"

    beta: float = option(2.0, "The scale of mean log-probabilities.")
    margin: float = option(1.0, "The margin by which the chosen answer should win (gamma in the paper).")

    def __post_init__(self) -> None:
        check_number("simpo.beta", self.beta, above=True)
        check_number("simpo.margin", self.margin)

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine."""
        return Loss(self, per="group", metrics=(*_PAIR_METRICS, "margins"))

    def __call__(self, scores: Mapping[str, Tensor], _: Mapping[str, Tensor], docs: LossDocuments) -> Result:
        chosen_G, rejected_G = halves(docs, self.beta * docs.mean(scores["logprobs"]))
        margin_G = chosen_G - rejected_G
        return -logsigmoid(margin_G - self.margin), {**_metrics_of(chosen_G, rejected_G), "margins": margin_G}


@dataclass(frozen=True)
class Reward:
    """A reward model (Bradley-Terry): the value at the last token should be larger for the chosen answer."""

    head: ClassVar[str] = "value"
    rows: ClassVar[str] = "scored_pairs"

    centre: float = option(
        0.0, "The weight of the square of the sum of both values, which keeps rewards near 0 (arXiv 2312.09244)."
    )

    def __post_init__(self) -> None:
        check_number("reward.centre", self.centre)

    @property
    def loss(self) -> Loss:
        """Return the loss for an engine with `head="value"`."""
        return Loss(self, per="group", metrics=(*_PAIR_METRICS, "margins"))

    def __call__(self, scores: Mapping[str, Tensor], _: Mapping[str, Tensor], docs: LossDocuments) -> Result:
        if scores["values"].ndim > 1:
            raise DataError(
                f"a reward model has one label, and this one has {scores['values'].shape[1]}; num_labels in "
                "config.json says how many"
            )
        chosen_G, rejected_G = halves(docs, docs.sum(scores["values"]))
        margin_G = chosen_G - rejected_G
        terms_G = -logsigmoid(margin_G)
        if self.centre:
            terms_G = terms_G + self.centre * (chosen_G + rejected_G).square()
        return terms_G, {**_metrics_of(chosen_G, rejected_G), "margins": margin_G}


_PAIR_METRICS = ("rewards_chosen", "rewards_rejected", "accuracy")


def _metrics_of(chosen_G: Tensor, rejected_G: Tensor) -> dict[str, Tensor]:
    """Return the rewards of both halves, and whether the chosen one wins."""
    return {
        "rewards_chosen": chosen_G,
        "rewards_rejected": rejected_G,
        "accuracy": (chosen_G > rejected_G).to(chosen_G.dtype),
    }
