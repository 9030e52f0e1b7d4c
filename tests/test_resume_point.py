"""Where a run resumes: from which checkpoint, with which position, and what it refuses or warns of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

import meshwright as mw
from meshwright.train import resume_point
from meshwright.train.config import OptimSection
from meshwright.train.resume_point import Position

of = SimpleNamespace
CONFIG = """
model = "m"
out = "o"
[[data]]
path = "x"
"""
MESH = of(rank=0, broadcast_object=lambda value: value)
STATE = asdict(Position("p", 40, 2, 1.5, 3, 100, "r"))


def config_in(at: Path, **fields: Any) -> Any:
    optim = OptimSection(schedule="cosine", lr=2e-3, warmup=0)
    return of(**{"out": str(at / "out"), "resume": "auto", "optim": optim, **fields})


def data_of(num_steps: int = 100, plan: str = "p") -> Any:
    return of(plan=of(fingerprint=plan), num_steps=num_steps)


def changed(may: bool) -> Any:
    field = Mock(may=may)
    field.__str__ = lambda _: f"changed {may}"  # type: ignore[method-assign,assignment,misc]
    return field


@pytest.mark.parametrize(
    ("own", "resume", "changes", "source", "refusal"),
    [
        (False, "auto", [], None, ""),
        (False, "never", [], None, ""),
        (False, "there", [False], "there", ""),
        (True, "auto", [], "out/checkpoints", ""),
        (True, "there", [], "out/checkpoints", ""),  # the run has begun: its own checkpoints come first
        (True, "never", [], None, "step-000009 exists"),
        (True, "auto", [True, True], "out/checkpoints", ""),
        (True, "there", [True, False], "out/checkpoints", "out/config.toml:\n  changed False"),
    ],
)
def test_where_a_run_resumes_from(
    tmp_path: Path, own: bool, resume: str, changes: list[bool], source: str | None, refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def actual(folder: Path) -> Any:
        assert folder == tmp_path / "out" / "checkpoints"
        return [of(path=folder / "step-000009"), of(path=folder / "step-000003")] if own else []

    monkeypatch.setattr(resume_point, "checkpoints", actual)
    monkeypatch.setattr(resume_point, "_changes", lambda config, file: ([changed(may) for may in changes], ""))
    config = config_in(tmp_path, resume=resume if resume in ("auto", "never") else str(tmp_path / resume))
    where, message = resume_point._resume_source(config, tmp_path / "out")
    assert where == (None if source is None else tmp_path / source)
    assert message.endswith(refusal) if "config.toml" in refusal else refusal in message
    assert bool(message) == bool(refusal)


def test_changes_since_a_run_began(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    now, unchanged = mw.train.read(file, ["optim.lr=0.5", "seed=7"]), mw.train.read(file)
    assert resume_point._changes(now, tmp_path / "none.toml") == ([], "")
    assert resume_point._changes(unchanged, file) == ([], "")
    changes, unknown = resume_point._changes(now, file)
    assert {".".join(map(str, each.place)): (each.before, each.after) for each in changes} == {
        "optim.lr": (1e-5, 0.5), "seed": (0, 7),
    }  # fmt: skip
    assert unknown == ""
    resume_point._log_changes(now, file)
    assert len(caplog.records) == 2
    file.write_text(CONFIG + "colour = 1\n")
    changes, unknown = resume_point._changes(now, file)
    assert changes == []
    assert "colour" in unknown
    resume_point._log_changes(now, file)
    assert "changes of the config since the run began are unknown" in caplog.records[2].message


@pytest.mark.parametrize("state", [None, [1], {}, {**STATE, "plan": "q"}])
def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(mw.CheckpointError, match="c was trained on other data"):
        resume_point._position_in(config_in(tmp_path), data_of(), Path("c"), state, 5)


def test_a_position_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    position = resume_point._position_in(config_in(tmp_path), data_of(70), Path("c"), STATE, 5)
    assert position == Position("p", 40, 2, 1.5, 3, 70, "r")
    earlier = {name: value for name, value in STATE.items() if name not in ("num_steps", "reference")}
    wsd = config_in(tmp_path, optim=OptimSection(schedule="wsd", lr=2e-3, warmup=0))
    assert resume_point._position_in(wsd, data_of(200), Path("c"), earlier, 90).num_steps == 200
    with pytest.raises(mw.ConfigError, match="it would jump"):
        resume_point._position_in(wsd, data_of(200), Path("c"), STATE, 90)
    resume_point._position_in(wsd, data_of(200), Path("c"), STATE, 80)


@pytest.mark.parametrize(
    ("state", "reference", "message"),
    [
        (STATE, "r", ""), (STATE, "s", "c was trained with a reference model with other weights"), (STATE, "", ""),
        ({**STATE, "reference": ""}, "r", "c was trained with a reference"),
        ({name: value for name, value in STATE.items() if name != "reference"}, "r", "c was trained with a reference"),
        (None, "r", ""),
        (mw.CheckpointError("it is broken"), "r", ""),
    ],
)  # fmt: skip
def test_another_reference_is_refused_before_anything_is_loaded(
    tmp_path: Path, state: Any, reference: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Mock(return_value=of(directory=Path("c"), trainer={"state": state}))
    opened.side_effect = state if isinstance(state, Exception) else None
    monkeypatch.setattr(resume_point, "opened_at", opened)
    monkeypatch.setattr(resume_point, "_resume_source", lambda config, out: (out / "checkpoints", ""))
    config = config_in(tmp_path)
    receiver: Any = of(rank=1, broadcast_object=lambda value: "sent by rank 0")
    with pytest.raises(mw.CheckpointError, match="sent by rank 0"):
        resume_point.check_reference(config, receiver, reference)
    opened.assert_not_called()
    if message:
        with pytest.raises(mw.CheckpointError, match=message):
            resume_point.check_reference(config, cast(Any, MESH), reference)
        return
    resume_point.check_reference(config, cast(Any, MESH), reference)


def resumed(at: Path, patch: pytest.MonkeyPatch, now: int, reference: str = "r", **state: Any) -> Position:
    """Resume after 60 steps, with `now` steps in all."""
    engine = of(model=of(mesh=MESH), steps=0)

    def resume(engine: Any, source: Path) -> Any:
        assert source == at / "out" / "checkpoints"
        engine.steps = 60
        return of(directory=Path("step-000060"), state={**STATE, **state})

    patch.setattr(resume_point, "resume", resume)
    patch.setattr(resume_point, "_resume_source", lambda config, out: (out / "checkpoints", ""))
    return resume_point.position_of(config_in(at), cast(Any, engine), data_of(now), reference)


@pytest.mark.parametrize(
    ("before", "now", "rises"), [(100, 100, False), (100, 80, False), (100, 120, True), (None, 120, False)]
)
def test_a_rate_that_rises_is_logged(
    tmp_path: Path, before: int | None, now: int, rises: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    position = resumed(tmp_path, monkeypatch, now, num_steps=before)
    assert position == Position("p", 40, 2, 1.5, 3, now, "r")
    wanted = "at step 61: the curve of cosine depends on the number of steps, 100 before and 120 now"
    assert [wanted in each.message for each in caplog.records] == [False] + [True] * rises


def test_a_checkpoint_with_another_reference_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mw.CheckpointError, match="step-000060 was trained with a reference"):
        resumed(tmp_path, monkeypatch, 100, "another")


@pytest.mark.parametrize(("rank", "source", "logs"), [(0, "x", True), (1, "x", False), (0, None, False)])
def test_rank_0_logs_changes_of_a_run_that_resumes(
    tmp_path: Path, rank: int, source: str | None, logs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, mesh = config_in(tmp_path), of(rank=rank, broadcast_object=lambda _: (source and Path(source), ""))
    resumed = Mock(return_value=of(directory=Path("x"), state=STATE))
    monkeypatch.setattr(resume_point, "_resume_source", lambda *_: None)
    monkeypatch.setattr(resume_point, "resume", resumed)
    monkeypatch.setattr(resume_point, "_log_changes", logged := Mock())
    resume_point.position_of(config, cast(Any, of(model=of(mesh=mesh), steps=5)), data_of(), "r")
    assert [each.args for each in logged.call_args_list] == [(config, tmp_path / "out" / "config.toml")] * logs
    assert resumed.call_count == (source is not None)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_new_run_begins_at_its_first_stream(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone looks."""
    monkeypatch.setattr(resume_point, "_resume_source", looked := Mock(return_value=(None, "")))
    mesh = of(rank=rank, broadcast_object=lambda value: (None, ""))
    engine: Any = of(model=of(mesh=mesh))
    position = resume_point.position_of(config_in(tmp_path), engine, data_of(70), "r")
    assert position == Position("p", num_steps=70, reference="r")
    assert looked.call_count == (rank == 0)
    mesh.broadcast_object = lambda value: (Path("x"), "it has changed")
    with pytest.raises(mw.ConfigError, match="it has changed"):
        resume_point.position_of(config_in(tmp_path), engine, data_of(70), "r")


def test_a_lowest_loss_counts_for_its_own_held_out_data(caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of an earlier version does not name them."""
    sets = {"one": "a", "two": "b"}
    first = resume_point.with_held_out(Position("p", lowest=1.5, since=3), sets, 0)
    assert (first.lowest, first.since) == (1.5, 3)
    assert resume_point.with_held_out(first, dict(reversed(sets.items())), 0) == first
    assert not caplog.records
    for other in ({**sets, "two": "c"}, {"one": "a"}, {"one": "b", "two": "a"}, {}):
        for rank in (0, 1):
            now = resume_point.with_held_out(first, other, rank)
            assert (now.lowest, now.since) == (None, 0)
            assert now.held_out != first.held_out
    assert len(caplog.records) == 4
