"""The launcher watches and ends its ranks, which these tests replace by shell scripts; and the lock of OUT."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright as mw
from meshwright.train import failure, lock, processes, rank
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


INT, TERM, USR1, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("codes", "signals", "recorded", "grace_s"),
    [
        ([], [], None, float("inf")),
        ([0, 0], [], None, float("inf")),
        ([], [HUP], None, 30),
        ([143], [], None, 30),  # it has saved: so will the others
        ([0, 138], [], None, 30),
        ([130, 0], [INT], None, 30),
        ([-15], [], None, 5.0),  # killed, not by this command
        ([-15], [TERM], None, 30),
        ([-9], [TERM], None, 5.0),
        ([143, 1], [TERM], None, 5.0),
        ([143, 1], [TERM], 1, 2.0),
        ([0, 2], [], 2, 5.0),  # the record of a rank that still runs
        ([2], [], 0, 2.0),
        ([129], [], None, 5.0),
    ],
)
@pytest.mark.parametrize("shutdown_timeout", [30, 1])
def test_how_long_ranks_may_go_on(
    tmp_path: Path, codes: list[int], signals: list[int], recorded: int | None, grace_s: float, shutdown_timeout: int
) -> None:
    ranks = processes._Ranks(tmp_path, {}, {rank: (code, 0.0) for rank, code in enumerate(codes)})
    if recorded is not None:
        (tmp_path / f"{recorded}.json").touch()
    expected = grace_s if grace_s == float("inf") else min(grace_s, shutdown_timeout)
    assert processes._grace_s(ranks, signals, shutdown_timeout) == expected


@pytest.mark.parametrize(
    ("codes", "signals", "sent"),
    [([], [], []), ([0], [], []), ([3], [], [TERM]), ([0, 3], [], [TERM]), ([3], [HUP], [TERM]), ([0], [USR1], [USR1])],
)
def test_a_failed_rank_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], signals: list[int], sent: list[int]
) -> None:
    """They get one signal however long they take, and none of their own beside that of the user."""
    polls, ranks = (
        iter([True] * 3 + [False]),
        processes._Ranks(Path(), {}, {rank: (code, 0.0) for rank, code in enumerate(codes)}),
    )
    received: list[int] = []
    monkeypatch.setattr(processes._Ranks, "poll", lambda _: next(polls))
    monkeypatch.setattr(processes._Ranks, "send", lambda _, number: received.append(number))
    monkeypatch.setattr(processes, "_TICK_S", 0.0)
    processes._watch(ranks, signals, 30)
    assert received == sent


def test_ranks_get_a_signal_that_they_handle() -> None:
    passed_on = {number: processes._passed_on(number) for number in (0, INT, TERM, USR1, HUP, signal.SIGQUIT)}
    assert passed_on == {0: 0, INT: INT, TERM: TERM, USR1: USR1, HUP: TERM, signal.SIGQUIT: TERM}


def test_ranks_that_have_ended_get_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    made: Any = {
        rank: SimpleNamespace(pid=100 + rank, poll=lambda code=code: code) for rank, code in enumerate([None, 3, None])
    }
    ranks = processes._Ranks(tmp_path, made)
    assert ranks.poll()
    assert ranks.codes[1][0] == 3
    ranks.send(TERM)
    assert (ranks.running, sent) == ([0, 2], [(100, TERM), (102, TERM)])
    made[0].poll = made[2].poll = lambda: 0
    assert not ranks.poll()
    assert {rank: code for rank, (code, _) in ranks.codes.items()} == {0: 0, 1: 3, 2: 0}


def test_a_rank_starts_as_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        processes, "start_process", lambda command, environment, log: started.append((command, environment))
    )
    monkeypatch.setattr(processes, "loopback_devices", lambda: {"DEVICE": "lo"})
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("RANK", "99")
    folder = tmp_path / "attempt-3"
    folder.mkdir()
    processes._start(2, 5, 1234, ["train", "x.toml"], folder)
    [(command, environment)] = started
    assert command == [sys.executable, "-m", "meshwright", "train", "x.toml"]
    expected = {
        "RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5", "MASTER_PORT": "1234",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "KEPT": "1", "DEVICE": "lo", failure.ERROR_FILE: str(folder / "2.json"), rank.LAUNCHER: str(os.getpid()),
        rank.ATTEMPT: "attempt-3",
    }  # fmt: skip
    assert {name: environment[name] for name in expected} == expected
    assert (folder / "2.log").exists()


@pytest.mark.parametrize(
    ("restarts", "store", "refused"),
    [(None, "True", False), ("0", "True", False), ("3", "True", True), ("3", "False", False), ("3", None, False)],
)
def test_restarts_with_an_old_store_are_refused(
    restarts: str | None, store: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", restarts), ("TORCHELASTIC_USE_AGENT_STORE", store)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if not refused:
        rank._refuse_old_keys()
        return
    with pytest.raises(mw.ConfigError, match="--max-restarts=3 of torchrun"):
        rank._refuse_old_keys()


@pytest.mark.parametrize(
    ("requests", "left"),
    [
        ([(TERM, 5.0)], None),
        ([(TERM, 5.0), (TERM, 6.9)], None),  # a scheduler and our launcher both send it
        ([(TERM, 5.0), (TERM, 7.1)], 143),
        ([(TERM, 5.0), (TERM, 6.9), (TERM, 7.1)], 143),
        ([(INT, 5.0), (TERM, 5.1)], 143),
        ([(USR1, 5.0), (INT, 99.0)], 130),
    ],
)
def test_a_second_request_ends_the_process(
    requests: list[tuple[signal.Signals, float]], left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    request = rank.Stop()
    for number, now in requests:
        monkeypatch.setattr(rank.time, "monotonic", lambda now=now: now)
        request.ask(number)
    assert request.signal == requests[0][0]
    assert ended == ([] if left is None else [left])


@pytest.fixture
def signals_not_ignored() -> Iterator[None]:
    """Give signals a handler: those that `nohup` or a background job ignores stay ignored."""
    before = {number: signal.signal(number, lambda *_: None) for number in (HUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_handled_in_the_main_thread_alone(signals_not_ignored: None) -> None:
    numbers = (INT, TERM, USR1, HUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    with rank.handle_signals() as request:
        inside = {number: signal.getsignal(number) == request.ask for number in numbers}
        signal.raise_signal(USR1)
    assert inside == {INT: True, TERM: True, USR1: True, HUP: False, signal.SIGQUIT: False}
    assert request.signal == USR1
    assert {number: signal.getsignal(number) for number in numbers} == before
    seen: list[Any] = []

    def elsewhere() -> None:
        for make in (rank.handle_signals, rank.record_signals):
            with make():
                seen.append({number: signal.getsignal(number) for number in numbers})

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before, before]
    with rank.record_signals() as received:
        signal.raise_signal(HUP)
        signal.raise_signal(signal.SIGQUIT)
    assert received == [HUP, signal.SIGQUIT]
    signal.signal(HUP, signal.SIG_IGN)  # as nohup does
    with rank.record_signals() as received:
        signal.raise_signal(HUP)
        signal.raise_signal(TERM)
    assert received == [TERM]
    assert signal.getsignal(TERM) == before[TERM]


def test_a_rank_dies_with_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(rank.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *args: called.append(args)))
    monkeypatch.setattr(os, "_exit", called.append)
    monkeypatch.setattr(sys, "platform", "linux")
    rank.leave_with(os.getppid())
    assert called == [(1, signal.SIGKILL)]
    rank.leave_with(os.getppid() + 1)  # it has died already
    assert called[1:] == [(1, signal.SIGKILL), 1]
    monkeypatch.setattr(sys, "platform", "darwin")
    rank.leave_with(os.getppid() + 1)
    assert len(called) == 3
