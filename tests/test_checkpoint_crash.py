"""Processes that are killed while they save, and power cuts: the last whole checkpoint is always there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.checkpoint import check_bytes, folder, newest_whole, opened_at
from meshwright.checkpoint.manifest import LOCK
from meshwright.watch import deferred_signal
from tests import parts, tiny, worlds
from tests.test_checkpoint import engine_of, train

KILLS = 100 if parts.ALL else 14


def saves_on_and_on(source: Path, out: Path, wait: bool) -> None:
    """Save five steps again and again, until it is killed."""
    engine = engine_of(source, {})
    while True:
        engine.steps = engine.optimizer.steps = engine.steps % 5
        train(engine, 1)
        mw.save(engine, out, wait=wait)


def forked(act: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            act()
        finally:
            os._exit(1)
    return pid


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("m"), "qwen3_tied")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("wait", [True, False], ids=["wait", "asynchronous"])
def test_a_killed_save_leaves_the_last_one(source: Path, tmp_path: Path, wait: bool) -> None:
    """Each process goes on where the last one was killed: it cleans what that one left."""
    out, drawn, seen = tmp_path / "run", random.Random(3), set()
    worlds.run(1, begins, source, out)  # on a busy machine none may get that far before it is killed
    for _ in range(KILLS // 2):
        pid = forked(lambda: saves_on_and_on(source, out, wait))
        before = time.monotonic() + 20
        began = {path.name for path in out.iterdir()} if out.exists() else set()
        while not out.exists() or {path.name for path in out.iterdir()} == began:  # it loads its model
            assert time.monotonic() < before, "it saves nothing"
            time.sleep(0.001)
        time.sleep(drawn.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        names = {path.name for path in out.iterdir()}
        seen |= {name.split(".")[2].partition("-")[0] for name in names if name.startswith(".")}
        if any(name.startswith("step") for name in began):
            result = newest_whole(out)
            assert result is not None, names
            assert check_bytes(opened_at(result)) == []
            assert all(check_bytes(opened_at(each.path)) == [] for each in folder.checkpoints(out) if each.visible)
    assert "unfinished" in seen, "no process was killed while it saved"
    an_hour_passes(out)
    worlds.run(1, ends_well, source, out)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def an_hour_passes(out: Path) -> None:
    """A directory without a lock may be new: no process removes it for an hour."""
    for path in out.iterdir():
        if path.name.startswith(".") and not (path / LOCK).exists():
            os.utime(path, (0, 0))


def begins(source: Path, out: Path) -> None:
    engine = engine_of(source, {})
    train(engine, 1)
    mw.save(engine, out)


def ends_well(source: Path, out: Path) -> None:
    engine = engine_of(source, {})
    mw.resume(engine, out)
    train(engine, 1)
    mw.save(engine, out)


def test_an_interrupt_is_raised_after_what_must_not_be_cut() -> None:
    """It is neither lost nor early, and the handler before is there again. Other threads get no signals."""
    before, reached = signal.getsignal(signal.SIGINT), list[str]()

    def cut(act: Callable[[], None]) -> None:
        with deferred_signal(signal.SIGINT) as came:
            act()
            reached.append(f"{len(came)} came")

    with pytest.raises(KeyboardInterrupt):
        cut(lambda: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=cut, args=(lambda: None,))
    thread.start()
    thread.join()
    assert reached == ["1 came", "0 came"]
    with pytest.raises(StopIteration):
        cut(lambda: next(iter(())))
    assert signal.getsignal(signal.SIGINT) is before
