"""The training loop between steps: events and their order, early ends, skipped steps, evaluations, saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

import meshwright as mw
from meshwright.engine.step_results import MtpRecord
from meshwright.plan.step_time import Flops
from meshwright.train import loop
from meshwright.train.loop import Loop, LoopOptions, Speed, perplexity_of
from meshwright.train.resume_point import Position
from meshwright.train.step_metrics import BySource, Measured

of = SimpleNamespace
STEP_S = 10.0  # of each step, on a clock that stands still otherwise


class Run:
    """A loop over 7 steps of 4 streams with a fake engine, and the events that it has logged."""

    def __init__(self, patch: pytest.MonkeyPatch, *, fails: Sequence[int] = (), signal_at: int = 0, **options: Any):
        self.now, self.calls, self.events, self.saves = 0.0, 0, list[Any](), list[Any]()
        self.fails, self.signal_at, self.stop = fails, signal_at, of(signal=None)
        mesh = of(rank=0, broadcast_object=lambda value: value)
        self.engine: Any = of(
            step=self.step, steps=0, tokens=7, max_norm=1.0, saving=None, wait=Mock(), discard=Mock(), loss=None,
            model=of(mesh=mesh, small=of(directory=Path("m"))), metrics={}, evaluate=Mock(return_value=2.0),
        )  # fmt: skip
        feed = of(
            streams_per_step=4, step=lambda first: ([f"from {first}"], first + 4), place=lambda n: f"row {n}",
            documents=[], plan=of(epochs_before=lambda stream: stream / 10),
        )  # fmt: skip
        patch.setattr(loop, "gather_readings", lambda mesh, own, at: Measured(*own[:4], 10, 1, ()))
        patch.setattr(loop, "squares_of", lambda batches: 5.0)
        patch.setattr(loop, "save", self.save)
        sink = of(write=lambda kind, step, values: self.events.append((kind, step, values)))
        self.loop = Loop(
            self.engine, cast(Any, feed), 7, Position("plan"), Path("out"), LoopOptions(**{"save_every": 0, **options}),
            cast(Any, self.stop), Speed(Flops(0.0, 0.0)), [cast(Any, sink)], clock=lambda: self.now,
            prepare=lambda batches: [f"{batch}, prepared" for batch in batches],  # type: ignore[misc]
        )  # fmt: skip

    def step(self, batches: Any) -> mw.StepRecord:
        assert batches == [f"from {self.loop.position.stream}, prepared"]
        self.now += STEP_S
        self.calls += 1
        self.stop.signal = 15 if self.calls == self.signal_at else None
        if self.calls in self.fails:
            raise mw.NonFiniteError("the loss is nan.")
        self.engine.steps += 1
        return mw.StepRecord(self.engine.steps, 3.0, 1.5, 0.1, 5, 6)

    def save(self, engine: Any, folder: Path, **options: Any) -> Path:
        self.saves.append((folder.name, options))
        self.now += 0.25
        return folder / f"step-{engine.steps}"

    def kinds(self) -> list[tuple[str, int]]:
        return [(kind, step) for kind, step, _ in self.events]


def test_events_come_at_their_intervals_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background is logged when the next step is done."""
    run = Run(monkeypatch, save_every=3, eval_every=2, sample_every=5)
    run.loop.held_out, run.loop.sample = {"set": []}, lambda: [("a", "b"), ("c", "d")]
    assert run.loop.run() == ""
    samples = lambda step: [("sample", step)] * 2  # noqa: E731 - short
    assert run.kinds() == [
        ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("step", 4), ("save", 3), ("eval", 4), ("step", 5),
        *samples(5), ("step", 6), ("eval", 6), ("step", 7), ("save", 6), ("eval", 7), *samples(7), ("save", 7),
        ("end", 7),
    ]  # fmt: skip
    assert [options["wait"] for _, options in run.saves] == [False, False, True]
    assert [options["state"]["stream"] for _, options in run.saves] == [12, 24, 28]
    given = [values for kind, _, values in run.events if kind == "sample"][:2]
    assert given == [{"number": 0, "prompt": "a", "text": "b"}, {"number": 1, "prompt": "c", "text": "d"}]
    assert run.events[5][2] == {"path": "out/checkpoints/step-3", "seconds": 0.25}
    run.engine.wait.assert_called_once_with()


@pytest.mark.parametrize(
    ("options", "signal_at", "last", "why"),
    [
        ({"limit_s": 40.0}, 0, 4, "the time limit"),  # the next step would end at 50 s
        ({"limit_s": 39.9}, 0, 3, "the time limit"),
        ({"limit_s": 1.0}, 0, 1, "the time limit"),
        ({"limit_s": 1000.0}, 0, 7, ""),
        ({}, 5, 5, "signal 15"),
        ({"limit_s": 1.0}, 1, 1, "signal 15"),
    ],
)
def test_a_run_that_ends_early_saves_and_does_not_evaluate(
    options: dict[str, Any], signal_at: int, last: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, signal_at=signal_at, **options)
    run.loop.held_out, run.loop.sample = {"set": []}, lambda: [("a", "b")]
    assert run.loop.run() == why
    ends = [] if why else [("eval", 7), ("sample", 7)]
    assert run.kinds() == [*(("step", n + 1) for n in range(last)), *ends, ("save", last), ("end", last)]
    assert run.saves[0][1]["wait"]
    assert run.events[-1][2] == {"why": why}


def test_a_checkpoint_is_logged_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path in metrics.jsonl exists, whenever the run is killed."""
    run = Run(monkeypatch, save_every=2)
    for _, saving in zip(run.loop.steps(), [None, False, False, True, None, None, None], strict=True):
        run.engine.saving = None if saving is None else of(succeeded=saving)
    assert [each for each in run.kinds() if each[0] == "save" or each[1] in (4, 5, 6)] == [
        ("step", 4), ("save", 2), ("step", 5), ("save", 4), ("step", 6), ("save", 6), ("save", 7),
    ]  # fmt: skip


def test_the_clock_of_rank_0_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, limit_s=1000.0)
    run.engine.model.mesh.broadcast_object = lambda late: run.calls == 2
    assert run.loop.run() == "the time limit"
    assert run.calls == 2


def test_a_resumed_run_saves_only_new_positions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(monkeypatch)
    run.loop.position.stream, run.engine.steps = 28, 7
    assert run.loop.run() == ""
    run.loop.save(wait=True)
    assert (run.kinds(), run.saves) == ([("end", 7)], [])
    assert "nothing left to do: all 7 steps are done" in caplog.text
    run.loop.position.stream = 32
    run.loop.save(wait=True)
    run.loop.save(wait=True)
    assert len(run.saves) == 1


@pytest.mark.parametrize(("since", "steps", "why"), [(2, 7, ""), (3, 0, "early stopping"), (4, 0, "early stopping")])
def test_a_resumed_run_without_patience_left_ends(
    since: int, steps: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, patience=3)
    run.loop.position.since = since
    assert run.loop.run() == why
    assert run.calls == steps


def test_three_skipped_steps_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, fails=[2, 3, 5, 6], on_nan="skip")
    run.engine.loss = Mock(spec=BySource, take=Mock(return_value=[]))
    records = [record is None for record in run.loop.steps()]
    assert run.engine.loss.take.call_count == 7, "a skipped step leaves no sums to the next one"
    assert records == [False, True, True, False, True, True, False]
    assert (run.loop.position.skipped, run.engine.discard.call_count) == (4, 4)
    assert [step for kind, step in run.kinds() if kind == "step"] == [1, 4, 7]
    run = Run(monkeypatch, fails=[3, 4, 5], on_nan="skip")
    with pytest.raises(mw.NonFiniteError, match=r"nan\. The step's data: row 16; row 17; row 18; row 19$"):
        run.loop.run()
    assert (run.calls, run.loop.position.skipped, run.engine.discard.call_count) == (5, 2, 2)
    run = Run(monkeypatch, fails=[2])
    with pytest.raises(mw.NonFiniteError, match=r"row 4; row 5; row 6; row 7$"):
        run.loop.run()
    run.engine.discard.assert_not_called()


def test_evaluations_take_the_mean_over_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lower, finite mean is the best one."""
    run = Run(monkeypatch, best=True, patience=9)
    run.loop.held_out = {"one": ["batch 1"], "two": ["batch 2"]}  # type: ignore[dict-item]
    monkeypatch.setattr(run.loop, "_save_best", best := Mock())
    means = []
    for losses in ((1.0, 4.0), (1.5, 3.5), (2.0, math.nan), (math.inf, 1.0), (0.5, 4.25), (2.5, 2.5)):
        run.engine.evaluate = Mock(side_effect=losses)
        means.append(run.loop.evaluate())
        assert [call.args for call in run.engine.evaluate.call_args_list] == [
            (["batch 1, prepared"],),
            (["batch 2, prepared"],),
        ]
        run.events[-1] = (*run.events[-1], run.loop.position.lowest, run.loop.position.since, best.call_count)
    assert [event[3:] for event in run.events] == [
        (2.5, 0, 1),
        (2.5, 1, 1),
        (2.5, 2, 1),
        (2.5, 3, 1),
        (2.375, 0, 2),
        (2.375, 1, 2),
    ]
    assert means[:2] == [2.5, 2.5]
    assert run.events[0][2] == {
        "eval/one/loss": 1.0, "eval/one/perplexity": math.e, "eval/two/loss": 4.0,
        "eval/two/perplexity": pytest.approx(math.e**4),
    }  # fmt: skip
    run.engine.evaluate, run.engine.metrics = Mock(return_value=1.0), {"accuracy": 0.75}
    run.loop.evaluate()
    figures = {"loss": 1.0, "accuracy": 0.75}
    assert run.events[-1][2] == {f"eval/{name}/{f}": x for name in ("one", "two") for f, x in figures.items()}


def test_an_end_for_another_reason_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, patience=1)
    run.loop.held_out, run.loop.position.lowest, run.loop.why = {"set": []}, 1.0, "signal 15"
    run.loop.evaluate()
    assert run.loop.why == "signal 15"
    run.loop.why = ""
    run.loop.evaluate()
    assert run.loop.why == "early stopping"


@pytest.mark.parametrize(("wait", "logged"), [(True, 1), (False, 0)])
def test_the_best_checkpoint_has_its_own_options(wait: bool, logged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, keep=3, keep_every=100, wait=wait)
    monkeypatch.setattr(loop, "remove_later", lambda *_: None)
    run.loop._save_best()
    assert run.saves == [("best", dict(keep=1, keep_every=None, state=vars(run.loop.position), wait=wait))]
    assert len(run.events) == logged
    run.loop._saved_at = -1
    run.loop.save(wait=True)
    assert run.saves[1] == ("checkpoints", dict(keep=3, keep_every=100, state=vars(run.loop.position), wait=True))
    assert [values.get("best") for _, _, values in run.events] == [True, None]


def test_metrics_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.loop.position.stream, run.loop.speed = 44, Speed(Flops(2.0, 3.0), 50.0)  # step 11
    run.loop.feed.documents = [of(name=name) for name in "abc"]  # type: ignore[misc]
    load = torch.tensor([[1.0, 5.0, 0.0], [4.0, 4.0, 4.0]])
    record = mw.StepRecord(
        9, 3.5, 1.0, 0.25, 50, 60, load, router_loss=0.5, mtp=MtpRecord(1.5, 0.75), metrics={"accuracy": 0.5}
    )
    run.loop._log_step(record, Measured(0, 1.0, 4.0, 7.0, 99, 2, ((6.0, 4.0), (0.0, 0.0), (9.0, 2.0))))
    assert run.events[0] == ("experts", 11, {"load": load.long().tolist()})
    assert run.events[1] == ("step", 11, {
        "train/loss": 3.0, "train/grad_norm": 1.0, "train/clipped": 0, "train/learning_rate": 0.25,
        "train/epoch": 4.4, "train/tokens": 7, "train/targets": 50, "throughput/tokens_per_s": 15.0, "time/step_s": 4.0,
        "time/data_wait_share": 0.25, "memory/peak_bytes": 99, "memory/rank": 2, "train/accuracy": 0.5,
        "throughput/mfu": (2 * 60 + 3 * 7) / 4 / 50, "train/loss/a": 1.5, "train/loss/c": 4.5, "train/mtp_loss": 1.5,
        "train/mtp_acceptance": 0.75, "train/router_loss": 0.5, "experts/max_over_mean": [2.5, 1.0], "experts/dead": 1,
    })  # fmt: skip
    assert run.loop._unlogged_load is None
    run.loop.position.stream, run.engine.max_norm = 48, 0.75
    run.loop._log_step(record, Measured(0, 1.0, 4.0, 7.0, 99, 2, ()))
    assert [(kind, step) for kind, step, _ in run.events[2:]] == [("step", 12)]
    assert run.events[2][2]["train/clipped"] == 1
    assert run.loop._unlogged_load == {"load": load.long().tolist()}
    run.engine.max_norm = None
    run.loop._log_step(record, Measured(0, 1.0, 4.0, 7.0, 99, 2, ()))
    assert run.events[3][2]["train/clipped"] == 0


def test_the_load_of_the_last_step_is_logged_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped step has none, and the load of an earlier step is not that of the last."""
    for fails, logged in (([], [("experts", 1), ("experts", 7)]), ([7], [("experts", 1)])):
        run = Run(monkeypatch, fails=fails, on_nan="skip")
        step = run.step
        run.engine.step = lambda batches, step=step: replace(step(batches), expert_load=torch.ones(1, 2))
        run.loop.run()
        assert [each for each in run.kinds() if each[0] == "experts"] == logged


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, 1.0), (2.0, math.e**2), (699.5, math.exp(699.5)), (710.0, math.inf), (math.nan, math.nan)],
)
def test_a_perplexity_does_not_overflow(loss: float, expected: float) -> None:
    assert perplexity_of(loss) == pytest.approx(expected, nan_ok=True)
