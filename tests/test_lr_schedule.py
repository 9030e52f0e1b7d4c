"""The learning rate of each schedule has the values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.train.config import OptimSection
from meshwright.train.lr_schedule import rate_jump, schedule, warmup_steps

WSD = dict(schedule="wsd", lr=8.0, warmup=2, decay=0.4, final=0.25)
RATES = {
    "wsd": (WSD, 10, [8 / 3, 16 / 3, 8, 8, 8, 8, 8, 6.5, 5, 3.5]),
    "cosine": (dict(schedule="cosine", lr=8.0, warmup=1, final=0.25), 5, [4, 8, 7.1213203, 5, 2.8786797]),
    "linear": (dict(schedule="linear", lr=8.0, warmup=1, final=0.5), 5, [4, 8, 7, 6, 5]),
    "constant": (dict(schedule="constant", lr=8.0, warmup=1, final=0.5), 3, [4, 8, 8]),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_follow_the_schedule(name: str) -> None:
    options, num_steps, expected = RATES[name]
    rate = schedule(OptimSection(**options), num_steps)
    assert [rate(step) for step in range(num_steps)] == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "num_steps", "expected"), [(3, 10, 3), (0.26, 10, 3), (0.9, 3, 2), (0.9, 1, 0)])
def test_a_share_of_warmup_leaves_one_full_step(warmup: Any, num_steps: int, expected: int) -> None:
    assert warmup_steps(OptimSection(warmup=warmup), num_steps) == expected


@pytest.mark.parametrize(("now", "step", "jumps"), [(20, 6, False), (20, 7, True), (10, 7, False), (9, 7, False)])
def test_a_longer_run_jumps_only_after_the_decay_began(now: int, step: int, jumps: bool) -> None:
    assert bool(rate_jump(OptimSection(**WSD), 10, now, step)) == jumps
