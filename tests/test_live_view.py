"""The thread that shows a run: what it says once, what an earlier start has left, and how a second signal ends it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.train import display
from meshwright.train.display import Display, RunState, Screen
from meshwright.train.metrics import JsonLines
from tests.screenshot import step_line

of = SimpleNamespace


def test_a_resumed_run_shows_the_curves_of_earlier_starts(tmp_path: Path) -> None:
    """Its own first step is still to come, and earlier ones are not counted for it."""
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        sink.write("step", step, {**step_line(step), "train/loss": float(step)})
    state = RunState("", "", 9)
    view = Display(state, tmp_path, plain=True, every=1)
    assert (state.losses, state.begun, state.restarts) == ({1: 1.0, 2: 2.0, 3: 3.0}, False, 0)
    view.follow()
    assert view.attempt_steps == 0
    view.starts(tmp_path / "0.log", again=True)
    for step in (3, 4):
        sink.write("step", step, step_line(step))
    sink.write("eval", 4, {})
    view.follow()
    assert (view.attempt_steps, state.step, state.begun, state.restarts) == (2, 4, True, 1)
    view.starts(tmp_path / "1.log", again=False)
    assert (view.attempt_steps, state.begun, state.restarts) == (0, False, 1)


def test_plain_lines_say_a_signal_and_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, state, signals = list[str](), RunState("", "", 9), list[int]()
    monkeypatch.setattr(display, "say", said.append)
    state.experts = cast(Any, of(take=lambda line: None, warning=lambda: "experts idle" if state.step > 1 else ""))
    view = Display(state, tmp_path, plain=True, every=100, signals=signals)
    view._announce_signal()
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        sink.write("step", step, step_line(step))
        view.follow()
    assert said == ["warning: experts idle"]
    signals += [15, 2]
    for _ in range(3):
        view._announce_signal()
    assert said[1:] == ["signal 15: finishing the step and saving; a second signal ends the run at once"]
    view.starts(tmp_path / "0.log", again=True)
    assert view.status().startswith("signal 15: the ranks end before their first step")


@pytest.mark.parametrize(
    ("signals", "ends", "code"), [([2, 15], False, 143), ([15, 2], False, 130), ([2, 15], True, 0)]
)
def test_a_second_signal_ends_the_process_with_its_own_code(
    signals: list[int], ends: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the run has ended by itself meanwhile."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(display, "_TICK_S", 0.0)
    monkeypatch.setattr(display, "_GRACE_S", 0.0)
    view = Display(RunState("", "", 9), tmp_path, plain=True, every=1, signals=signals)
    if ends:
        view._ends.set()
    view.run()
    assert left == [code] * (not ends)


def test_figures_of_an_objective_have_their_names() -> None:
    figures = {"train/accuracy": 0.5, "train/margins": 1.25, "train/other": 1.0}
    shown = [(name, str(text)) for name, text in display._figures_of_objective(figures)]
    assert shown == [("accuracy", "0.500"), ("margin", "1.250")]


@pytest.mark.parametrize(
    ("losses", "text", "bad"),
    [
        ({}, "not yet", False), ({2: 1.5, 4: 1.25}, "1.2500 at step 4", False),
        ({2: 1.25, 4: 1.5}, "1.5000 at step 4, best 1.2500", True),
        ({2: 1.5, 4: math.nan}, "nan at step 4, best 1.5000", True), ({2: math.nan, 4: 1.0}, "1.0000 at step 4", False),
    ],
)  # fmt: skip
def test_a_held_out_loss_stands_with_the_best_one(losses: dict[int, float], text: str, bad: bool) -> None:
    made = display._held_out(losses)
    assert (str(made), made.style == "yellow") == (text, bad)


def test_held_out_losses_follow_the_last_attempt() -> None:
    """A step that is made again removes its own loss too. One set needs no name."""
    state = RunState("", "", 9)
    losses: list[dict[str, float | None]] = [{"a": 0.0}, {"a": None}, {"a": 1.0, "b": 2.0}]
    seen = list[Any]()
    for step, values in enumerate(losses, 1):
        state.take(step_line(step))
        state.take({"kind": "eval", "step": step, "time": 0, **{f"eval/{n}/loss": x for n, x in values.items()}})
        names = [name for name, _ in Screen(state, "")._cells(40, curve=False)]
        seen.append((names[1:3], str(display._held_out(state.held_out["a"])).partition(",")[0]))
    assert seen == [
        (["held out", "grad norm"], "0.0000 at step 1"), (["held out", "grad norm"], "nan at step 2"),
        (["a", "b"], "1.0000 at step 3"),
    ]  # fmt: skip
    state.starts(again=True)
    state.take(step_line(3))
    assert {name: [*each] for name, each in state.held_out.items()} == {"a": [1, 2], "b": []}


def test_norms_and_speeds() -> None:
    norms = [
        display._norm({"train/grad_norm": n, "train/clipped": c}) for n, c in ((1.25, 0), (20_000.0, 1), (None, 0))
    ]
    assert [str(each) for each in norms] == ["1.25", "2.00e+04  clipped", "nan"]
    speeds = [display._speed({"throughput/tokens_per_s": 1234.0, **more}) for more in ({}, {"throughput/mfu": 0.25})]
    assert [str(each) for each in speeds] == ["1,234", "1,234  MFU 25.0%"]
    experts = [display._experts({"experts/max_over_mean": [1.0, most, 2.0]}) for most in (4.0, 4.5)]
    assert [(str(each), each.style) for each in experts] == [
        ("max 4.00 of the mean", ""), ("max 4.50 of the mean", "yellow"),
    ]  # fmt: skip
