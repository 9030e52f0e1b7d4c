"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import ConfigError
from .config import OptimSection


def schedule(optim: OptimSection, num_steps: int) -> Callable[[int], float]:
    """Of a step of a run of `num_steps`. It rises over the first steps, and would be `final` of `lr` after the last:
    a last step at a rate of 0 would be for nothing."""
    if wrong := refusal(optim, num_steps):
        raise ConfigError(f"optim.{wrong[0]}: {wrong[1]}")
    warmup, falls_from = warmup_steps(optim, num_steps), _falls_from(optim, num_steps)

    def lr(step: int) -> float:
        if step < warmup:
            return optim.lr * (step + 1) / (warmup + 1)
        done = min(1.0, max(0.0, (step - falls_from) / max(1, num_steps - falls_from)))
        shape = {
            "constant": 1.0,
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "wsd": 1 - done,
        }[optim.schedule]
        return optim.lr * (optim.final + (1 - optim.final) * shape)

    return lr


def warmup_steps(optim: OptimSection, num_steps: int) -> int:
    """A share leaves a step at the full rate, however short the run is."""
    return optim.warmup if isinstance(optim.warmup, int) else min(round(optim.warmup * num_steps), num_steps - 1)


def _decay_steps(optim: OptimSection, num_steps: int) -> int:
    return max(1, round(optim.decay * num_steps))


def _falls_from(optim: OptimSection, num_steps: int) -> int:
    """Return the last step at the full rate."""
    warmup = warmup_steps(optim, num_steps)
    return max(warmup, num_steps - _decay_steps(optim, num_steps)) if optim.schedule == "wsd" else warmup


def jump_of(optim: OptimSection, before: int, now: int, step: int) -> str:
    """Say how the rate of `wsd` would rise again in a run of `before` steps that is made `now` steps long; "" where it
    does not. Until it begins to fall, such a run may get longer."""
    if optim.schedule != "wsd" or refusal(optim, before) or step <= _falls_from(optim, before):
        return ""
    old, new = schedule(optim, before)(step), schedule(optim, now)(step)
    if new <= old * (1 + 1e-9):
        return ""
    return (
        f'the rate of "wsd" has fallen since step {_falls_from(optim, before)} of {before}: in a run of {now} steps it '
        f"would jump from {old:.3g} to {new:.3g}"
    )


def refusal(optim: OptimSection, num_steps: int | None) -> tuple[str, str] | None:
    """The field that does not fit into the run, and why. `num_steps`: None where only the data knows."""
    warmup, decay = optim.warmup, optim.decay
    if isinstance(warmup, float):
        if optim.schedule == "wsd" and warmup + decay > 1:
            return (
                "decay",
                f"warmup = {warmup:g} and decay = {decay:g} are more than the whole run; take less of either",
            )
    elif num_steps is not None and warmup >= num_steps:
        return "warmup", f"{warmup} steps of warm-up, and the run has {num_steps}; take fewer, or a share such as 0.03"
    elif num_steps is not None and optim.schedule == "wsd" and warmup + _decay_steps(optim, num_steps) > num_steps:
        return (
            "decay",
            f"{warmup} steps of warm-up and {_decay_steps(optim, num_steps)} of decay are more than the {num_steps} "
            "of the run; take less of either",
        )
    return None
