"""Learning-rate schedules: linear warm-up, then constant, linear, cosine (arXiv:1608.03983) or WSD (arXiv:2404.06395).

A schedule is a pure function of the step and the length of the run, so nothing of it is stored. A run that resumes with
another length gets another curve; for "wsd" the rate could jump up in the middle of its decay, which `rate_jump` finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import ConfigError
from .config import OptimSection


def schedule(optim: OptimSection, num_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, for a run of `num_steps`.

    Both ends are shifted by one step, because a step at a rate of 0 would change nothing: the first step has a rate
    above 0, and `final` would only be reached by the step after the last.
    """
    if mistake := refusal(optim, num_steps):
        raise ConfigError(f"optim.{mistake[0]}: {mistake[1]}")
    warmup, decay_start = warmup_steps(optim, num_steps), _decay_start(optim, num_steps)

    def lr(step: int) -> float:
        if step < warmup:
            return optim.lr * (step + 1) / (warmup + 1)
        progress = min(1.0, max(0.0, (step - decay_start) / max(1, num_steps - decay_start)))
        shape = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "wsd": 1 - progress,
        }[optim.schedule]
        return optim.lr * (optim.final + (1 - optim.final) * shape)

    return lr


def warmup_steps(optim: OptimSection, num_steps: int) -> int:
    """Return the steps of warm-up. A fraction leaves at least one step at the full rate in the shortest run."""
    return optim.warmup if isinstance(optim.warmup, int) else min(round(optim.warmup * num_steps), num_steps - 1)


def _decay_steps(optim: OptimSection, num_steps: int) -> int:
    """Return the steps over which "wsd" decays."""
    return max(1, round(optim.decay * num_steps))


def _decay_start(optim: OptimSection, num_steps: int) -> int:
    """Return the last step at the full rate, after which the rate decays."""
    warmup = warmup_steps(optim, num_steps)
    return max(warmup, num_steps - _decay_steps(optim, num_steps)) if optim.schedule == "wsd" else warmup


def rate_jump(optim: OptimSection, before: int, now: int, step: int) -> str:
    """Describe how the rate of "wsd" would jump up at `step` if a run of `before` steps gets `now` steps; "" if not.

    A jump undoes the decay. Before the decay the rate is constant, so until then the run may get longer: this is the
    advantage of "wsd" over a cosine.
    """
    if optim.schedule != "wsd" or refusal(optim, before) or step <= _decay_start(optim, before):
        return ""
    rise = rate_rise(optim, before, now, step)
    since = f'the rate of "wsd" has decayed since step {_decay_start(optim, before)} of {before}'
    return f"{since}: in a run of {now} steps it would jump {rise}" if rise else ""


def rate_rise(optim: OptimSection, before: int, now: int, step: int) -> str:
    """Return "from X to Y" if the rate of `step` is higher in a run of `now` steps than in one of `before`, else "".

    After the end of the shorter run X is the rate of its last step.
    """
    old, new = schedule(optim, before)(min(step, before - 1)), schedule(optim, now)(step)
    return f"from {old:.3g} to {new:.3g}" if new > old * (1 + 1e-9) else ""


def refusal(optim: OptimSection, num_steps: int | None) -> tuple[str, str] | None:
    """Return the field that does not fit the length of the run and why, None if all fit.

    `num_steps`: None if it depends on the data.
    """
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
