"""Measurements of a step: sums by source of one rank, and what all ranks make of their readings."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import meshwright as mw
from meshwright.train import step_metrics
from meshwright.train.step_metrics import BySource, Measured, Reading, gather_readings, squares_of

of = SimpleNamespace


def test_terms_are_summed_by_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum over tokens with a label, in micro-batches with gradients, in float64."""
    monkeypatch.setattr(step_metrics.losses, "cross_entropy", lambda scores, fields: scores)
    loss = BySource(3)
    fields: Any = {"source": torch.tensor([0, 2, 2, 0, 2]), "labels": torch.tensor([5, 6, -100, 0, 7])}
    terms = torch.tensor([2.0**24, 4.0, float("nan"), 1.0, 8.0], requires_grad=True)
    assert loss(cast(Any, terms), fields) is terms
    with torch.no_grad():
        loss(cast(Any, terms), fields)
    loss(cast(Any, torch.full((5,), 0.5, requires_grad=True)), fields)
    assert loss.take() == [2.0**24 + 2, 4.0, 0.0, 0.0, 13.0, 4.0]
    assert loss.take() == [0.0] * 6


def test_readings_of_ranks_make_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 6 ranks read different data."""
    monkeypatch.setattr(step_metrics, "_peak_bytes", lambda device: 4000)
    rows, given = torch.zeros(6, 9, dtype=torch.float64), list[Any]()
    rows[2, 0], rows[4, 1], rows[1, 2], rows[5, 4] = 15, 0.5, 3.0, 7000
    rows[:, 3] = torch.tensor([10.0, 10.0, 10.0, 20.0, 20.0, 20.0])
    rows[:, 5:] = torch.arange(24.0).view(6, 4)

    def all_or_none(failure: Any, at: str, error: Any, numbers: Any) -> torch.Tensor:
        given.append((failure, at, error, numbers))
        return rows

    mesh: Any = of(device=torch.device("cpu"), num_data_ranks=2, all_or_none=all_or_none)
    own = Reading(2, 0.25, 1.5, 9.0, [1.0, 2.0, 3.0, 4.0])
    result = gather_readings(mesh, own, "here")
    assert given == [(None, "here", mw.errors.RankError, [2.0, 0.25, 1.5, 9.0, 4000.0, 1.0, 2.0, 3.0, 4.0])]
    assert result == Measured(15, 0.5, 3.0, 30.0, 7000, 5, ((60.0, 66.0), (72.0, 78.0)))


def test_squares_of_documents_leave_out_padding() -> None:
    batches = [mw.pack([[1], [2, 3, 4], [5, 6]], length=7), mw.pack([[1, 2, 3, 4]])]
    assert squares_of(batches) == 1 + 9 + 4 + 16
    assert squares_of([]) == 0.0


@pytest.mark.parametrize(("platform", "factor"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_a_process_is_in_bytes(platform: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(step_metrics.resource, "getrusage", lambda who: of(ru_maxrss=77))
    assert step_metrics._peak_bytes(torch.device("cpu")) == 77 * factor


def test_the_peak_of_a_device_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = of(max_memory_allocated=lambda device: 5 if device.index == 1 else 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert step_metrics._peak_bytes(torch.device("cuda", 1)) == 5
