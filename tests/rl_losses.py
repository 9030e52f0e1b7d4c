"""Losses of reinforcement learning over whole documents, and the same by hand: plain loops over one long forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshwright as mw

# Documents of very unequal length, one without a target, in pairs and groups that no order of lengths keeps together.
SIZES = [9, 2, 31, 5, 17, 3, 12, 26, 4, 7, 1, 14]
GROUPS = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4]
PAIRS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
NO_TARGET = 5


def documents(vocab: int = 131, sizes: list[int] = SIZES) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (size,), generator=draw).tolist() for size in sizes]


def masks(sizes: list[int] = SIZES) -> list[list[int]]:
    """A prompt of a third of each document is not trained on."""
    return [
        [0] * size if n == NO_TARGET else [int(t >= size // 3) for t in range(size)] for n, size in enumerate(sizes)
    ]


def fields(sizes: list[int] = SIZES) -> dict[str, list[Tensor]]:
    """Values over the terms: old log-probabilities, those of a reference, advantages of whole answers, targets."""
    draw = torch.Generator().manual_seed(4)
    noise = lambda size: torch.randn(size, generator=draw, dtype=torch.float64)  # noqa: E731 - short
    old = [-4.9 + 0.3 * noise(size) for size in sizes]
    for values, mask in zip(old, masks(sizes), strict=True):
        values[~torch.tensor([*mask[1:], 0], dtype=torch.bool)] = -9999.0  # as rollouts mark tokens without one
    return {
        "old": old,
        "reference": [-4.9 + 0.3 * noise(size) for size in sizes],
        "advantage": [noise(1).expand(size).clone() for size in sizes],
        "target": [noise(size) for size in sizes],
    }


def ppo(scores: Any, fields: Any) -> Any:
    """PPO's clipped objective per token, with the share of clipped tokens and the KL (k3) to a reference."""
    ratio = (scores["logprobs"] - fields["old"]).exp()
    gain = (ratio * fields["advantage"]).minimum(ratio.clamp(0.8, 1.2) * fields["advantage"])
    log_ratio = fields["reference"] - scores["logprobs"]
    kl = log_ratio.exp() - log_ratio - 1
    return -gain + 0.02 * kl, {"kl": kl, "clip_fraction": ((ratio - 1).abs() > 0.2).double()}


def grpo(scores: Any, fields: Any, docs: Any) -> Tensor:
    """GRPO: the mean over answers of the mean over the tokens of an answer, with advantages of groups made here."""
    reward_D = docs.mean(fields["advantage"])
    mean_D = docs.group_spread(docs.group_mean(reward_D))
    std_D = docs.group_spread(docs.group_mean((reward_D - mean_D).square())).sqrt()
    advantage_T = docs.spread((reward_D - mean_D) / (std_D + 1e-4))
    ratio = (scores["logprobs"] - fields["old"]).exp()
    terms_T = -(ratio * advantage_T).minimum(ratio.clamp(0.8, 1.2) * advantage_T)
    return docs.group_mean(docs.mean(terms_T))


def gspo(scores: Any, fields: Any, docs: Any) -> Any:
    """GSPO (arXiv 2507.18071): one ratio a sequence, the geometric mean over its tokens; with an entropy bonus."""
    log_ratio_D, advantage_D = docs.mean(scores["logprobs"] - fields["old"]), docs.mean(fields["advantage"])
    ratio_D = log_ratio_D.exp()
    gain_D = (ratio_D * advantage_D).minimum(ratio_D.clamp(0.9, 1.1) * advantage_D)
    terms_D = -gain_D - 0.01 * docs.mean(scores["entropy"])
    return terms_D, {"ratio": ratio_D.detach()}


def dapo(scores: Any, fields: Any, docs: Any) -> Tensor:
    """DAPO-like (arXiv 2503.14476): a sum over the tokens of all answers that the caller divides, asymmetric clips, and
    answers that are too long left out."""
    keep_T = docs.spread((docs.num_targets_D <= 18).double())
    ratio = (scores["logprobs"] - fields["old"]).exp()
    terms_T = -(ratio * fields["advantage"]).minimum(ratio.clamp(0.8, 1.28) * fields["advantage"])
    return (terms_T * keep_T).masked_fill(~docs.is_target_T, 0).sum() / 77


def critic(scores: Any, fields: Any, docs: Any) -> Tensor:
    """A clipped value loss, the mean over answers of a sum over tokens."""
    values, old = scores["values"], fields["old"]
    clipped = old + (values - old).clamp(-0.2, 0.2)
    error = (values - fields["target"]).square().maximum((clipped - fields["target"]).square())
    return 0.5 * docs.sum(error)


def pairwise(scores: Any, fields: Any, docs: Any) -> Any:
    """A sigmoid loss over pairs of documents, as in DPO: the first of each pair is the chosen one."""
    margin_D = docs.sum(scores["logprobs"] - fields["reference"])
    chosen, rejected = torch.stack(docs.group_split(margin_D)).unbind(1)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)), {"accuracy": (chosen > rejected).double()}


# Objectives of the package, and their formulas once more: from the lists of log-probabilities of each pair.
DPO = mw.objectives.Dpo(beta=0.3, label_smoothing=0.1, sft_weight=0.2)
OBJECTIVES: dict[str, Any] = {
    "dpo": DPO, "dpo_norm": mw.objectives.Dpo(beta=2.0, kind="sigmoid_norm"),
    "ipo": mw.objectives.Dpo(beta=0.4, kind="ipo"), "orpo": mw.objectives.Orpo(weight=0.5),
    "simpo": mw.objectives.Simpo(beta=2.0, margin=0.7), "reward": mw.objectives.Reward(centre=0.05),
}  # fmt: skip


def _pair(name: str, scores: list[Tensor], reference: list[Tensor]) -> tuple[Tensor, float]:
    """The loss of a pair and its margin. `scores`: at the labels of the chosen and of the rejected answer."""
    sigmoid, num = torch.sigmoid, [max(1, len(x)) for x in scores]
    if name == "reward":
        good, bad = (x.sum() for x in scores)
        return -sigmoid(good - bad).log() + 0.05 * (good + bad) ** 2, float(good - bad)
    mean = [x.sum() / n for x, n in zip(scores, num, strict=True)]
    if name == "orpo":
        tiny = torch.finfo(mean[0].dtype).tiny  # an answer without a label has the probability 1
        log_odds = [x - (1 - x.exp()).clamp(min=tiny).log() for x in mean]
        difference = log_odds[0] - log_odds[1]
        return -mean[0] - 0.5 * torch.nn.functional.logsigmoid(difference), float(difference)
    if name == "simpo":
        return -sigmoid(2 * (mean[0] - mean[1]) - 0.7).log(), float(2 * (mean[0] - mean[1]))
    ratio = [x.sum() - (r.sum() / max(1, len(r))) for x, r in zip(scores, reference, strict=True)]
    each = [r / n for r, n in zip(ratio, num, strict=True)]
    if name == "dpo":
        margin = 0.3 * (ratio[0] - ratio[1])
        return -0.9 * sigmoid(margin).log() - 0.1 * sigmoid(-margin).log() - 0.2 * mean[0], float(margin)
    if name == "dpo_norm":
        return -sigmoid(2 * (each[0] - each[1])).log(), float(2 * (ratio[0] - ratio[1]))
    return (each[0] - each[1] - 1 / 0.8) ** 2, float(0.4 * (ratio[0] - ratio[1]))


def pairs_by_hand(name: str, scores: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss of an objective of pairs over a whole step, and its mean margin."""
    target = [torch.tensor([*mask[1:], 0], dtype=torch.bool) for mask in masks()]
    values = next(iter(scores.values())).split(SIZES)
    at_labels = [[x[mask] for x, mask in zip(each, target, strict=True)] for each in (values, fields()["reference"])]
    results = [_pair(name, [x[n], x[n + 1]], [r[n], r[n + 1]]) for x, r in [at_labels] for n in range(0, len(SIZES), 2)]
    margin = "log_odds" if name == "orpo" else "margins"
    return torch.stack([loss for loss, _ in results]).mean(), {margin: sum(m for _, m in results) / len(results)}


# name -> (loss, head, the groups that go together)
LOSSES: dict[str, tuple[mw.Loss, str, list[int] | None]] = {
    "ppo": (mw.Loss(ppo, metrics=("kl", "clip_fraction")), "lm", None),
    "grpo": (mw.Loss(grpo, per="group"), "lm", GROUPS),
    "gspo": (mw.Loss(gspo, per="document", metrics=("ratio",)), "lm", None),
    "dapo": (mw.Loss(dapo, per="micro_batch", normalise=False), "lm", None),
    "critic": (mw.Loss(critic, per="document"), "value", None),
    "pairwise": (mw.Loss(pairwise, per="group", metrics=("accuracy",)), "lm", PAIRS),
    **{name: (each.loss, each.head, PAIRS) for name, each in OBJECTIVES.items()},
}


class _Lists:
    """Stand for `docs` of a loss, by loops over lists of tensors: all documents of a step at once."""

    def __init__(self, masks: list[Tensor], groups: list[int]) -> None:
        self.masks, self.groups = masks, groups
        self.units = [[n for n, each in enumerate(groups) if each == group] for group in dict.fromkeys(groups)]
        self.is_target_T = torch.cat(masks)
        self.num_targets_D = torch.stack([mask.sum().double() for mask in masks])

    def split(self, x_T: Tensor) -> list[Tensor]:
        return list(x_T.split([len(mask) for mask in self.masks]))

    def sum(self, x_T: Tensor) -> Tensor:
        return torch.stack([(x[mask]).sum() for x, mask in zip(self.split(x_T), self.masks, strict=True)])

    def mean(self, x_T: Tensor) -> Tensor:
        return torch.stack([
            x[mask].mean() if mask.any() else x[:0].sum() for x, mask in zip(self.split(x_T), self.masks, strict=True)
        ])  # fmt: skip

    def spread(self, x_D: Tensor) -> Tensor:
        return torch.cat([x.expand(len(mask)) for x, mask in zip(x_D, self.masks, strict=True)])

    def group_split(self, x_D: Tensor) -> list[Tensor]:
        return [torch.stack([x_D[n] for n in unit]) for unit in self.units]

    def group_mean(self, x_D: Tensor) -> Tensor:
        return torch.stack([x.mean() for x in self.group_split(x_D)])

    def group_spread(self, x_G: Tensor) -> Tensor:
        return torch.stack(
            [x_G[next(g for g, unit in enumerate(self.units) if n in unit)] for n in range(len(self.masks))]
        )


def by_hand(name: str, scores: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss of a whole step and its metrics, from the scores of all documents one after the other."""
    if name in OBJECTIVES:
        return pairs_by_hand(name, scores)
    loss, _, groups = LOSSES[name]
    target = [torch.tensor([*mask[1:], 0], dtype=torch.bool) for mask in masks()]  # a mask over tokens moves to terms
    docs, of_step = _Lists(target, groups or list(range(len(SIZES)))), {k: torch.cat(v) for k, v in fields().items()}
    is_target_T = docs.is_target_T
    scores = {key: x.where(is_target_T, 0.0) for key, x in scores.items()}
    function: Callable[..., Any] = loss.function
    result = function(scores, of_step) if loss.per == "token" else function(scores, of_step, docs)
    terms, metrics = result if loss.metrics else (result, {})
    counts = {
        "token": is_target_T, "document": docs.num_targets_D > 0,
        "group": torch.stack([docs.num_targets_D[unit].sum() > 0 for unit in docs.units]),
    }.get(loss.per, torch.ones((), dtype=torch.bool))  # fmt: skip
    num = counts.sum() if loss.normalise else 1
    return terms[counts].sum() / num, {key: float(x[counts].double().sum() / num) for key, x in metrics.items()}
