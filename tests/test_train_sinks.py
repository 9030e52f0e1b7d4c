"""TensorBoard and Weights & Biases, by stand-ins: they get every event, and cannot stop a run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.train.metrics import Guarded, check_sinks, sinks_of

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
    for kind, values in (("step", STEP), ("sample", SAMPLE), ("end", {"why": ""})):
        sink.write(kind, 7, values)
    assert sink.sink.writer.events == [  # type: ignore[attr-defined]
        (str(tmp_path / "tensorboard"), 7), ("train/loss", 2.0, 7), ("experts/max_over_mean", 3.0, 7),
        ("sample/0", "Hi\n\nthere", 7), "flush",
    ]  # fmt: skip


def test_a_run_that_goes_on_is_the_same_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    logged: list[Any] = []

    def init(**args: Any) -> Any:
        begun.append(args)
        return SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for step in (1, 2):
        [sink] = sinks_of(config(tmp_path, wandb="runs"), tmp_path, step)
        sink.write("step", step, STEP)
    assert begun[0]["id"] == begun[1]["id"]
    assert (begun[0]["project"], begun[0]["resume"], begun[0]["config"]["model"]) == ("runs", "allow", "m")
    assert [step for step, _ in logged] == [1, 2]


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
