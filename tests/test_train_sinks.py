"""TensorBoard and Weights & Biases, by stand-ins: they get every event, and cannot stop a run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.train import metrics
from meshwright.train.metrics import Guarded, JsonLines, Lines, check_sinks, clock, last_step, sinks_of, tail_of

STEP = {"train/loss": 2.0, "train/grad_norm": float("nan"), "experts/max_over_mean": [1.0, 3.0], "path": "x"}
SAMPLE = {"number": 0, "prompt": "Hi", "text": "there"}


def config(tmp_path: Path, **log: Any) -> Any:
    return mw.train.config_of(model="m", out=str(tmp_path), data=[{"path": "x"}], log=log)


class Writer:
    def __init__(self, folder: str, purge_step: int) -> None:
        self.events: list[Any] = [(folder, purge_step)]

    def add_scalar(self, *message: Any) -> None:
        self.events.append(message)

    def add_text(self, *message: Any) -> None:
        self.events.append(message)

    def flush(self) -> None:
        self.events.append("flush")


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ModuleType("torch.utils.tensorboard")
    result.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", result)
    [sink] = sinks_of(config(tmp_path, tensorboard=True), tmp_path, 7)
    for kind, values in (("step", STEP), ("sample", SAMPLE), ("eval", {}), ("save", {}), ("end", {"why": ""})):
        sink.write(kind, 7, values)
    assert sink.sink.writer.events == [  # type: ignore[attr-defined]
        (str(tmp_path / "tensorboard"), 7), ("train/loss", 2.0, 7), ("experts/max_over_mean", 3.0, 7),
        ("sample/0", "Hi\n\nthere", 7), "flush", "flush", "flush",
    ]  # fmt: skip


def test_a_run_that_goes_on_is_the_same_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    logged: list[Any] = []
    finished: list[int] = []

    def init(**args: Any) -> Any:
        begun.append(args)
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(1)
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        [sink] = sinks_of(config(tmp_path, wandb="runs"), tmp_path, step)
        sink.write("step", step, STEP)
    assert begun[0]["id"] == begun[1]["id"]
    assert (begun[0]["project"], begun[0]["resume"], begun[0]["config"]["model"]) == ("runs", "allow", "m")
    assert (begun[0]["name"], begun[0]["dir"]) == (tmp_path.name, str(tmp_path))
    assert logged == [(step, {"train/loss": 2.0, "experts/max_over_mean": 3.0}) for step in (1, 2)]
    assert not finished
    sink.write("end", 3, {"why": ""})
    assert finished == [1]


def test_a_dead_sink_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the service is gone")

    sink = Guarded("It", lambda: SimpleNamespace(write=fail))
    for step in range(3):
        sink.write("step", step, STEP)
    assert [record.message for record in caplog.records] == [
        "It gets no more metrics: the service is gone; OUT/metrics.jsonl has them all"
    ]
    assert Guarded("It", fail).sink is None


@pytest.mark.parametrize(("field", "value"), [("tensorboard", True), ("wandb", "runs")])
def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(mw.ConfigError, match=f"log.{field} needs the package {field}: pip install {field}"):
        check_sinks(config(tmp_path, **{field: value}))
    check_sinks(config(tmp_path))


def test_one_missing_package_does_not_hide_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else name)
    both = [place for place, _ in metrics.missing_packages(config(tmp_path, tensorboard=True, wandb="runs"))]
    assert both == [("log", "wandb")]


# metrics.jsonl and the terminal


def test_numbers_that_json_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are added to those of an earlier start."""
    monkeypatch.setattr(metrics.time, "time", lambda: 12.34567)
    for values in ({"a": float("nan"), "b": 2, "c": -float("inf"), "d": [1.0], "e": "nan"}, {"a": 1.5}):
        JsonLines(tmp_path / "new" / "metrics.jsonl").write("step", 3, values)
    first, second = map(json.loads, (tmp_path / "new" / "metrics.jsonl").read_text().splitlines())
    event = {"kind": "step", "step": 3, "time": 12.346}
    assert first == {**event, "a": None, "b": 2, "c": None, "d": [1.0], "e": "nan", "nan": ["a", "c"]}
    assert second == {**event, "a": 1.5}


@pytest.mark.parametrize(
    ("num_bytes", "tail"),
    [(13, b"first\nsecond\n"), (14, b"first\nsecond\n"), (12, b"second\n"), (8, b"second\n"), (7, b"")],
)
def test_a_tail_has_no_line_that_is_cut(tmp_path: Path, num_bytes: int, tail: bytes) -> None:
    """The file has 13 bytes. A line that begins exactly at the cut may have been cut."""
    assert tail_of(tmp_path / "none", 9) == b""
    (tmp_path / "x").write_bytes(b"first\nsecond\n")
    assert tail_of(tmp_path / "x", num_bytes) == tail


def test_the_last_step_is_that_of_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run makes steps again."""
    file = tmp_path / "metrics.jsonl"
    assert last_step(file) == 0
    sink = JsonLines(file)
    sink.write("start", 2, {})
    assert last_step(file) == 0
    for kind, step in (("step", 8), ("step", 9), ("step", 5), ("eval", 6)):
        sink.write(kind, step, {})
    file.open("a").write('{"kind": "step", "st')
    assert last_step(file) == 5
    monkeypatch.setattr(metrics, "HISTORY", 90)
    assert last_step(file) == 0


PLAIN = {"train/loss": 2.0, "train/grad_norm": 1.25, "train/learning_rate": 1e-3, "throughput/tokens_per_s": 12_345.4}


def test_lines_of_the_terminal() -> None:
    said: list[str] = []
    lines = Lines(1007, 5, said.append)
    for step in (4, 5, 1006, 1007):
        lines.write("step", step, {**PLAIN, "time/step_s": 4.0})
    lines.write("step", 10, {**PLAIN, "time/step_s": 4.0, "train/accuracy": 0.5})
    lines.write("eval", 40, {"eval/a/loss": 1.0, "eval/b/loss": None})
    lines.write("sample", 40, SAMPLE)
    lines.write("save", 40, {"path": "out/step-40", "seconds": 1.5})
    lines.write("end", 40, {"why": "signal 15"})
    assert said == [
        "step    5/1007  loss 2.0000  norm 1.25  lr 1.00e-03  12,345 tok/s  1:06:48 left",
        "step 1007/1007  loss 2.0000  norm 1.25  lr 1.00e-03  12,345 tok/s  0:00:00 left",
        "step   10/1007  loss 2.0000  accuracy 0.50  norm 1.25  12,345 tok/s  1:06:28 left",
        "step 40  eval/a/loss 1.0000  eval/b/loss nan",
        "step 40  sample 0: 'Hi' -> 'there'",
        "step 40  save: out/step-40, 1.5 s",
        "step 40  ended by signal 15",
    ]
    said.clear()
    lines = Lines(1_000_000, 10, said.append)
    wild = {"train/loss": 123.45678, "train/grad_norm": 1.234e-05, "throughput/tokens_per_s": 12_345_678.0}
    lines.write("step", 999_990, {**PLAIN, **wild, "time/step_s": 9e4})
    lines.write("step", 1_000_000, {**PLAIN, "time/step_s": 4.0, "train/loss": None})
    lines.write("eval", 40, {f"eval/set number {n}/loss": 1.0 for n in range(5)})
    for kind, values in (("start", {"num_steps": 7}), ("experts", {"load": [[1]]}), ("end", {"why": ""})):
        lines.write(kind, 40, values)
    assert len(said) == 3
    assert all(len(row) <= 80 for each in said for row in each.splitlines())
    assert "loss nan" in said[1]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9, "0:00:00"), (59.9, "0:00:59"), (60, "0:01:00"), (3723.5, "1:02:03"), (359_999, "99:59:59"),
     (360_000, "4 days"), (432_000, "5 days")],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(12_345.4, "12,345"), (999_999.0, "999,999"), (1e6, "1.00M"), (12_345_678.0, "12.35M")]
)
def test_amounts_of_tokens(value: float, shown: str) -> None:
    assert metrics.token_amount(value) == shown


def test_scalars_for_services() -> None:
    """A list over layers becomes its largest value; tables and names without a group are no curves."""
    values = {
        "a/b": 3, "a/list": [1.5, 4.5, 2.0], "a/empty": [], "a/ids": [1, 2], "plain": 1.0, "a/inf": float("inf"),
        "a/none": None, "a/text": "x",
    }  # fmt: skip
    assert [*metrics._scalars(values)] == [("a/b", 3.0), ("a/list", 4.5)]
