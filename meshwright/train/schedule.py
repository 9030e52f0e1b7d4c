"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from .config import OptimSection


def schedule(optim: OptimSection, num_steps: int) -> Callable[[int], float]:
    """Of a step of a run of `num_steps`. It rises over the first steps, and would be `final` of `lr` after the last:
    a last step at a rate of 0 would be for nothing."""
    warmup = warmup_steps(optim, num_steps)
    falling = max(1, num_steps - warmup)
    decay = max(1, round(optim.decay * num_steps))

    def lr(step: int) -> float:
        if step < warmup:
            return optim.lr * (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / falling)
        if optim.schedule == "wsd":
            done = min(1.0, max(0.0, (step - (num_steps - decay)) / decay))
        shape = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "wsd": 1 - done,
        }[optim.schedule]
        return optim.lr * (optim.final + (1 - optim.final) * shape)

    return lr


def warmup_steps(optim: OptimSection, num_steps: int) -> int:
    return optim.warmup if isinstance(optim.warmup, int) else round(optim.warmup * num_steps)
