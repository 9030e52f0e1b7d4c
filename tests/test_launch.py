"""The launcher of `meshwright train` on one machine: what it prepares, whom it talks to, and how meshes shrink."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import meshwright as mw
from meshwright.data import BEGAN, RUN_BEGAN
from meshwright.train import failure, launch, lock, processes, rank
from meshwright.train.display import RunState
from meshwright.train.failure import Failure
from meshwright.train.processes import Ended

of = SimpleNamespace


def config_of(out: Path, **sections: Any) -> Any:
    return mw.train.config_of(model="m", out=str(out), data=[{"path": "x"}], **sections)


@pytest.mark.parametrize(
    ("cores", "world", "before", "threads"),
    [(11, 4, None, "2"), (8, 16, None, "1"), (None, 2, None, "1"), (8, 1, None, None), (8, 4, "7", "7")],
)
def test_ranks_share_the_cores(
    cores: int | None, world: int, before: str | None, threads: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The lock comes first, then the data and the position of the newest checkpoint, then the ranks."""
    steps: list[Any] = []
    data, config = of(num_steps=3), config_of(tmp_path, mesh={"fsdp": world})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("OMP_NUM_THREADS", before or "")
    if before is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launch, "hold", lambda out: steps.append(("hold", out)) or nullcontext())
    monkeypatch.setattr(launch, "prepared", lambda config: steps.append("data") or of(data=data))
    monkeypatch.setattr(launch, "check_position", lambda *given: steps.append(given))
    monkeypatch.setattr(launch, "_launch", lambda config, arguments, *_: steps.append(arguments) or "signal 2")
    assert launch.start(config, ["train", "x"]) == "signal 2"
    assert steps == [("hold", tmp_path), "data", (config, data), ["train", "x"]]
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("environment", "talks"),
    [({}, True), ({"WORLD_SIZE": "2", "RANK": "0"}, True), ({"WORLD_SIZE": "2", "RANK": "1"}, False),
     ({"WORLD_SIZE": "2", "RANK": "0", rank.LAUNCHER: "7"}, False)],
)  # fmt: skip
def test_one_process_talks_to_the_user(
    environment: dict[str, str], talks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", rank.LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.ends_at_the_terminal() == talks


def test_the_smaller_mesh_is_the_one_of_most_ranks(tmp_path: Path) -> None:
    """12 streams run on 4 ranks rather than with more replicas on 3."""
    train = {"tokens_per_step": 12 * 8192}
    smaller = launch.smaller_mesh(config_of(tmp_path, mesh={"replicate": 3, "fsdp": 2}, train=train))
    assert smaller is not None
    assert (smaller.mesh.replicate, smaller.mesh.fsdp) == (2, 2)


def test_failures_are_counted_anew_on_a_smaller_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails twice costs ranks. The view names the mesh of each start."""
    config, seen = config_of(tmp_path, mesh={"fsdp": 4}, launch={"max_restarts": 5}), list[Any]()
    failing = iter([1, 1, 1, 0, 0])
    view: Any = of(state=RunState("", launch.describe_mesh(config), 9), attempt_steps=0, starts=None)

    def starts(log: Path, *, again: bool) -> None:
        seen.append((log.parent.name, again, view.state.mesh))

    def ended(world: int, arguments: list[str], logs: Path, timeout: int, signals: list[int]) -> Ended:
        logs.mkdir(parents=True)
        view.attempt_steps = 1
        number = next(failing, None)
        return Ended() if number is None else Ended(Failure(number, world, "failed: x", logs / "0.log"))

    view.starts, view.follow = starts, lambda: None
    monkeypatch.setattr(processes, "run_ranks", ended)
    assert launch._launch(config, ["train"], tmp_path, view, []) == ""
    four, two, one = "4 ranks: fsdp=4", "2 ranks: fsdp=2", "1 rank"
    assert seen == [
        ("0", False, four), ("1", True, four), ("2", True, two), ("3", True, two), ("4", True, two), ("5", True, one),
    ]  # fmt: skip


def test_processes_of_ranks_are_sessions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C on the terminal reaches the launcher alone."""
    monkeypatch.setattr(subprocess, "Popen", started := Mock())
    processes.start_process(["x"], {"A": "1"}, 7)
    quiet = dict(stdin=subprocess.DEVNULL, stdout=7, stderr=7, start_new_session=True)
    started.assert_called_once_with(["x"], env={"A": "1"}, **quiet)


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("script", "sent"),  # at each look: the codes of the ranks that have ended, and the signals so far
    [
        ([({}, []), ({}, []), ({}, [])], []),
        ([({}, [INT]), ({0: 130}, [INT]), ({0: 130, 1: 130}, [INT])], [INT]),
        ([({}, [HUP]), ({}, [HUP]), ({}, [HUP, INT])], [TERM, INT]),
        ([({}, []), ({1: 1}, []), ({1: 1}, []), ({1: 1, 0: 1}, [])], [TERM]),
        ([({1: 0}, []), ({1: 0}, [])], []),
        ([({1: 1}, []), ({1: 1}, [INT])], [TERM, INT]),
    ],
)
def test_signals_to_ranks_are_sent_once(
    script: list[tuple[dict[int, int], list[int]]], sent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that saves after a signal gets no other one: a second signal would end it at once."""
    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    ranks, signals, looks, actual = processes._Ranks(tmp_path), list[int](), iter(script), list[int]()

    def poll() -> bool:
        look = next(looks, None)
        if look is not None:
            ranks.codes, signals[:] = {rank: (code, 0.0) for rank, code in look[0].items()}, look[1]
        return look is not None

    monkeypatch.setattr(ranks, "poll", poll)
    monkeypatch.setattr(ranks, "send", actual.append)
    processes._watch(ranks, signals, 100)
    assert actual == sent


def test_ranks_know_when_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches were checked by the launcher, so they need not check these again."""
    monkeypatch.setattr(processes, "start_process", lambda command, environment, log: environment)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    environment: Any = processes._start(0, 1, 1234, ["train"], tmp_path)
    assert float(environment[RUN_BEGAN]) == BEGAN
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "the user's choice stays"


def test_attempts_are_numbered(tmp_path: Path) -> None:
    assert launch.next_attempt(tmp_path / "logs").name == "0"
    for name in ("9", "10", "x", "1.old"):
        (tmp_path / name).mkdir()
    assert launch.next_attempt(tmp_path).name == "11"


@pytest.mark.parametrize(
    ("launched", "error", "message"),
    [
        (False, mw.DataError("x"), "x"), (True, mw.DataError("x"), "x"), (False, ValueError("x"), "ValueError: x"),
        (False, lock.OutInUse("x"), "x"), (False, RuntimeError("timed out"), "rank 2 is lost"),
    ],
)  # fmt: skip
def test_a_rank_records_its_failure(
    launched: bool, error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is rank 5 of the run, and rank 1 of its node. A collective that fails names the lost rank."""

    def run(_: Any) -> str:
        raise error

    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), (failure.ERROR_FILE, str(tmp_path / "5.json"))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(rank.LAUNCHER, raising=False)
    monkeypatch.setattr(rank, "leave_with", left := Mock())
    monkeypatch.setattr(rank, "_one_log", Mock())
    if launched:
        monkeypatch.setenv(rank.LAUNCHER, "77")
    if isinstance(error, RuntimeError):
        monkeypatch.setattr(rank, "_with_lost_rank", lambda raised: mw.RankError(message))
    with pytest.raises(SystemExit) as ended:
        rank.as_rank(config_of(tmp_path / "out"), run)
    assert ended.value.code == 2
    assert left.call_args_list == [((77,),)] * launched
    [actual] = [record for _, record in failure._records(tmp_path, 6)]
    assert (actual["message"]["message"].splitlines()[0], actual["meshwright"]["rank"]) == (message, 5)
    written, writes = tmp_path / "out" / "failure.txt", not (launched or isinstance(error, lock.OutInUse))
    assert written.exists() == writes
    assert not writes or written.read_text().startswith(f"rank 5 failed: {message}\n")
    assert (f"meshwright: {message}" in capsys.readouterr().err) == (not launched)
