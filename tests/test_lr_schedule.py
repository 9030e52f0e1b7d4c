"""Learning rates at the boundaries of warm-up and decay, and lengths of a run that they do not fit."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.train.config import OptimSection
from meshwright.train.lr_schedule import (
    _decay_start,
    _decay_steps,
    rate_jump,
    rate_rise,
    refusal,
    schedule,
    warmup_steps,
)


@pytest.mark.parametrize(
    ("optim", "num_steps", "field"),
    [
        (dict(warmup=5), 5, "warmup"),
        (dict(warmup=4), 5, None),
        (dict(warmup=50), None, None),
        (dict(warmup=0.9), 2, None),
        (dict(warmup=0), 1, None),
        (dict(schedule="wsd", warmup=7, decay=0.25), 10, None),  # 7 and round(2.5) = 2
        (dict(schedule="wsd", warmup=8, decay=0.25), 10, None),
        (dict(schedule="wsd", warmup=9, decay=0.25), 10, "decay"),
        (dict(schedule="wsd", warmup=9, decay=0.25), None, None),
        (dict(schedule="cosine", warmup=9, decay=0.25), 10, None),
        (dict(schedule="wsd", warmup=9, decay=0.01), 10, None),  # at least one step of decay
        (dict(schedule="wsd", warmup=0.5, decay=0.5), 10, None),
        (dict(schedule="wsd", warmup=0.5, decay=0.75), 10, "decay"),
        (dict(schedule="wsd", warmup=0.5, decay=0.75), None, "decay"),
        (dict(schedule="linear", warmup=0.5, decay=0.75), 10, None),
    ],
)
def test_warm_up_and_decay_fit_into_the_run(optim: dict[str, Any], num_steps: int | None, field: str | None) -> None:
    answer = refusal(OptimSection(**optim), num_steps)
    assert (answer and answer[0]) == field


@pytest.mark.parametrize(
    ("warmup", "num_steps", "steps"),
    [(3, 100, 3), (0.05, 50, 2), (0.07, 50, 4), (0.99, 3, 2), (0.5, 1, 0), (0.0, 9, 0)],
)
def test_steps_of_warm_up(warmup: float, num_steps: int, steps: int) -> None:
    """A fraction leaves one step at the full rate."""
    assert warmup_steps(OptimSection(warmup=warmup), num_steps) == steps


def test_steps_of_decay() -> None:
    wsd = OptimSection(schedule="wsd", warmup=4, decay=0.3)
    assert [_decay_steps(wsd, num) for num in (1, 12, 15)] == [1, 4, 4]
    assert [_decay_start(wsd, num) for num in (5, 12, 30)] == [4, 8, 21]
    assert _decay_start(OptimSection(schedule="linear", warmup=4, decay=0.3), 30) == 4


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("constant", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [0.5, 1.0, 1.5, 2.0, 1.7429, 1.4857, 1.2286, 0.9714, 0.7143, 0.4571]),
        ("cosine", [0.5, 1.0, 1.5, 2.0, 1.9109, 1.6611, 1.3003, 0.8997, 0.5389, 0.2891]),
        ("wsd", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 1.55, 1.1, 0.65]),
    ],
)
def test_rates_of_a_run_of_10_steps(name: Any, rates: list[float]) -> None:
    """3 of them warm up, and "wsd" decays over 4. The final rate of 0.2 would be that of the next step."""
    rate = schedule(OptimSection(schedule=name, lr=2.0, warmup=3, decay=0.35, final=0.1), 10)
    end = 2.0 if name == "constant" else 0.2
    assert [rate(step) for step in range(12)] == pytest.approx([*rates, end, end], abs=1e-4)
    assert schedule(OptimSection(schedule=name, lr=2.0, warmup=0), 1)(0) == 2.0


def test_a_rate_is_compared_at_the_same_step() -> None:
    linear = OptimSection(schedule="linear", lr=2.0, warmup=0, final=0.0)
    assert rate_rise(linear, 10, 20, 5) == "from 1 to 1.5"
    assert rate_rise(linear, 10, 20, 12) == "from 0.2 to 0.8"  # from the last step of the shorter run
    assert rate_rise(linear, 20, 10, 5) == ""
    assert rate_rise(linear, 20, 10, 12) == ""
    warming = OptimSection(schedule="linear", lr=2.0, warmup=0.5, final=0.0)
    assert rate_rise(warming, 20, 8, 3) == "from 0.727 to 1.6"  # a shorter run warms up faster


def test_a_jump_needs_a_decay_that_has_begun() -> None:
    wsd = OptimSection(schedule="wsd", lr=2.0, warmup=0, decay=0.25, final=0.0)
    assert rate_jump(wsd, 20, 40, 15) == rate_jump(wsd, 20, 19, 18) == ""
    others = [wsd.model_copy(update=each) for each in ({"schedule": "cosine"}, {"final": 1.0})]
    assert [rate_jump(each, 20, 40, 18) for each in others] == ["", ""]
    assert "has decayed since step 15 of 20" in rate_jump(wsd, 20, 40, 16)
    assert "from 1.6 to 2" in rate_jump(wsd, 20, 40, 16)
    many = OptimSection(schedule="wsd", lr=2.0, warmup=19, decay=0.25, final=0.0)
    assert rate_jump(many, 20, 40, 20) == ""  # no run of 20 steps had this rate
