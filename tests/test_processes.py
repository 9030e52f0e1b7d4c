"""The launcher watches and ends its ranks, which these tests replace by shell scripts; and the lock of OUT."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.train import failure, lock, processes, rank
from meshwright.train import rank as stop
from meshwright.train.metrics import JsonLines, last_step
from meshwright.train.run import run
from tests import worlds
from tests.runs import chats, file_of

BLAMES = mw.RankError("rank 1: stopped (SIGSTOP, a debugger)")
SAVES = "trap 'exit {}' {}; touch $READY; while :; do sleep 0.02; done"


def report(write: str) -> str:
    """Write the shell line of a rank that reports a failure from `written`."""
    return f'cp "$WRITTEN/{write}" "$TORCHELASTIC_ERROR_FILE"'


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the failure of a rank as a rank does."""
    for name, tell in {
        "blames": lambda: failure.record(BLAMES, 0),
        "fails": lambda: failure.record(ValueError("x"), 1),
        "signal": lambda: failure.record_signal(signal.SIGTERM, 1),
    }.items():
        monkeypatch.setenv(failure.ERROR_FILE, str(tmp_path / name))
        tell()
    return tmp_path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell that starts tests in the background lets them ignore SIGINT. Shells of ranks could not trap it then."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


LATER = "trap '' TERM INT; touch $READY; sleep 0.2; {}; exit 2"
HANGS = "trap '' TERM INT; touch $READY; while :; do sleep 0.02; done"
STOPPED = "trap '' TERM INT; touch $READY; kill -STOP $$"  # a signal may come before it has stopped
DIES = "trap '' TERM; touch $READY; kill -KILL $$"
AFTER_RANK_1 = 'until test -e "$WRITTEN/ready-1"; do sleep 0.02; done'  # the launcher ends a rank that starts late
KILLED = "failed: rank 1: stopped (SIGSTOP, a debugger)"
SENT = "got SIGTERM; the step was finished and the run saved. This command did not send that signal: "


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("ranks", "requested", "first", "says", "number"),
    [
        (["exit 0", "exit 0"], 0, None, "", 0),
        ([f"{report('blames')}; exit 2", STOPPED], 0, 0, KILLED, 0),
        ([f"{report('blames')}; exit 2", HANGS], 0, 0, KILLED, 0),
        ([f"{AFTER_RANK_1}; {report('blames')}; exit 2", DIES], 0, 1, "was killed (SIGKILL): by a user", 0),
        ([f"{AFTER_RANK_1}; sleep 0.1; exit 143", f"{report('signal')}; touch $READY; exit 143"], 0, 1, SENT, 0),
        ([SAVES.format(138, "USR1"), SAVES.format(138, "USR1")], signal.SIGUSR1, None, "", signal.SIGUSR1),
        ([SAVES.format(143, "TERM"), SAVES.format(143, "TERM")], signal.SIGHUP, None, "", signal.SIGHUP),
        ([HANGS, SAVES.format(143, "TERM")], signal.SIGTERM, None, "", signal.SIGTERM),
        ([LATER.format(report("blames")), SAVES.format(130, "INT")], 2, None, "", 2),
        ([LATER.format(report("blames")), STOPPED], 2, 0, KILLED, 2),
        ([SAVES.format(143, "TERM"), LATER.format(report("fails"))], 15, 1, "failed: Value", 15),
    ],
)  # fmt: skip
def test_how_ranks_end(
    tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch, ranks: Sequence[str], requested: int,
    first: int | None,
    says: str, number: int,
) -> None:  # fmt: skip
    """The launcher names the first rank to fail, never one that it has killed itself; no process stays."""
    started, signals = [], list[int]()

    def start(command: Sequence[str], environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        at = int(environment["RANK"])
        ready = {"WRITTEN": str(written), "READY": str(tmp_path / f"ready-{at}")}
        started.append(subprocess.Popen(["sh", "-c", ranks[at]], env={**environment, **ready}))
        while requested and at + 1 == len(ranks) and len([*tmp_path.glob("ready-*")]) < len(ranks):
            time.sleep(0.01)
        signals.extend([requested] if requested and at + 1 == len(ranks) else [])
        return started[-1]

    monkeypatch.setattr(processes, "start_process", start)
    waits = any(rank in (HANGS, STOPPED) for rank in ranks)  # lets others start on a busy machine
    monkeypatch.setattr(processes, "_AFTER_RECORD_S", 0.3 if waits else 3.0)
    began = time.monotonic()
    result = processes.run_ranks(2, ["train"], tmp_path / "logs", 1, signals)
    assert time.monotonic() - began < 5
    assert result.signal == number
    assert (result.failure and result.failure.rank) == first
    assert says in str(result.failure or "")
    assert all(process.poll() is not None for process in started)


def test_signals_are_noted_and_those_of_nohup_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.record_signals() as requested:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.raise_signal(number)
        assert requested == [signal.SIGTERM, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])


def refused(path: Path) -> str:
    with pytest.raises(SystemExit) as left:
        rank.as_rank(mw.train.read(path), run)
    return str(left.value.__cause__)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A dead process leaves no lock. Ranks of torchrun refuse an OUT in use before they load anything, and leave its
    failure.txt alone."""
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, tmp_path / "no model", mesh={"fsdp": 2})
    out = tmp_path / "out"
    out.mkdir()
    (out / lock.LOCK).write_text("process 7 on node3, since Monday: meshwright train run.toml\n")
    with lock.hold(out) as held:
        assert lock.hold(out) is held  # the same process
        assert f"process {os.getpid()} on " in (out / lock.LOCK).read_text()
    other = os.open(out / lock.LOCK, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.truncate(other, 0)
    os.write(other, b"process 8 on node3, since Monday: meshwright train run.toml\n")
    for message in worlds.run(2, refused, path):
        assert "process 8 on node3, since Monday: meshwright train run.toml; wait for its end" in message
    assert sorted(file.name for file in out.iterdir()) == [lock.LOCK]
    os.close(other)
    (tmp_path / "file").touch()
    with pytest.raises(mw.ConfigError, match=r"out: .*Not a directory"):
        lock.hold(tmp_path / "file" / "out")


def test_a_failure_that_was_overcome(tmp_path: Path) -> None:
    """Once a later attempt is past the step of the failure, or has ended; not before."""
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for words in ("rank 1 of 2 failed: x", "rank 0 of 2 failed: y"):
        for step in (4, 5):
            lines.write("step", step, {})
        failure.write(tmp_path, words)
        sink = failure.Overcome(tmp_path, last_step(tmp_path / "metrics.jsonl"))
        for kind, step in (("start", 3), ("step", 4), ("eval", 4), ("step", 5)):
            sink.write(kind, step, {})
        assert (tmp_path / "failure.txt").read_text() == f"{words}\n"
        sink.write(*(("step", 6, {}) if "x" in words else ("end", 5, {})))
        assert not (tmp_path / "failure.txt").exists()
        sink.write("step", 7, {})
    first, second = (tmp_path / "overcome.txt").read_text().strip().split("\n\n")
    assert first.startswith("20")
    assert first.splitlines()[1:] == ["rank 1 of 2 failed: x"]
    assert second.splitlines()[1:] == ["rank 0 of 2 failed: y"]
