"""AdamW and the gradient norm over local shards: each element is counted once, updated where it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


def squares(grads: Mapping[str, Tensor], owned: set[str], device: torch.device) -> Tensor:
    """Sum of squares of the gradient elements that this rank owns, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, grad in grads.items():
        if name in owned:
            total += grad.double().square().sum()
    return total


class AdamW:
    """Over views that share storage with the parameters, so that the next forward sees every update."""

    def __init__(self, stored: Mapping[str, Tensor], decayed: set[str], settings: Settings) -> None:
        self.views = {name: torch.nn.Parameter(t.detach()) for name, t in stored.items() if t.numel()}
        kept = [v for n, v in self.views.items() if n not in decayed]
        nothing = torch.nn.Parameter(torch.zeros(0))  # a rank may store no part of what is trained
        groups = [
            {"params": [v for n, v in self.views.items() if n in decayed], "weight_decay": settings.weight_decay},
            {"params": [*kept, nothing], "weight_decay": 0.0},
        ]
        self.torch = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)

    def step(self, grads: Mapping[str, Tensor], lr: float) -> None:
        for name, view in self.views.items():
            view.grad = grads[name]
        for group in self.torch.param_groups:
            group["lr"] = lr
        self.torch.step()
        self.torch.zero_grad(set_to_none=True)
