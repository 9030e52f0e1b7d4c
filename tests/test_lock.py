"""The lock of OUT: who holds it, what its file says, and which errors of flock mean another holder."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.log import logger
from meshwright.train import lock


def num_open(file: Path) -> int:
    """Return how many descriptors of this process are open on a file."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.path.samefile(link, file) for link in links)


def test_the_file_holds_the_description_of_the_holder_alone(tmp_path: Path) -> None:
    """A longer description of an earlier run leaves no rest."""
    out = tmp_path / "runs" / "first"
    out.mkdir(parents=True)
    (out / lock.LOCK).write_text("an earlier run " * 200)
    with lock.hold(out):
        text = (out / lock.LOCK).read_text()
    assert text.startswith(f"process {os.getpid()} on {platform.node()}, since 20")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "earlier" not in text


def test_a_lock_is_shared_in_a_process_until_it_is_closed(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    held = lock.hold(first)
    (tmp_path / "link").symlink_to(first)
    assert lock.hold(tmp_path / "link") is held
    assert lock.hold(second) is not held
    held.close()
    assert num_open(first / lock.LOCK) == 0
    again = lock.hold(first)
    assert again is not held
    assert num_open(first / lock.LOCK) == 1
    with again:
        pass
    assert num_open(first / lock.LOCK) == 0


def test_a_lock_that_nobody_keeps_is_released(tmp_path: Path) -> None:
    lock.hold(tmp_path)
    assert num_open(tmp_path / lock.LOCK) == 0


@pytest.mark.parametrize(
    ("number", "in_use"),
    [(errno.EWOULDBLOCK, True), (errno.EACCES, True), (errno.ENOLCK, False), (errno.ENOTSUP, False)],
)
def test_only_a_held_lock_is_refused(
    number: int, in_use: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system without flock costs the protection, not the run."""
    asked: list[int] = []

    def flock(_: int, operation: int) -> None:
        asked.append(operation)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(logger, "propagate", True)
    (tmp_path / lock.LOCK).write_text(" process 7 on node3\n")
    if in_use:
        with pytest.raises(
            lock.OutInUse, match=f"^{re.escape(str(tmp_path))} is in use by another run, process 7 on node3; "
        ):
            lock.hold(tmp_path)
        assert (tmp_path / lock.LOCK).read_text() == " process 7 on node3\n"
        assert num_open(tmp_path / lock.LOCK) == 0
    else:
        with caplog.at_level(logging.WARNING), lock.hold(tmp_path):
            assert (tmp_path / lock.LOCK).read_text().startswith(f"process {os.getpid()} ")
        assert "would not be detected" in caplog.text
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB]


def test_a_holder_that_has_not_written_yet_has_just_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, "held")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(lock.OutInUse, match="in use by another run, which has just begun; wait"):
        lock.hold(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/x/meshwright/__main__.py", "train", "a b.toml"], "meshwright train 'a b.toml'"),
        (["/bin/torchrun", "--nproc", "2"], "torchrun --nproc 2"),
    ],
)
def test_a_description_ends_with_the_command(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    assert lock._description().endswith(f": {command}\n")
    monkeypatch.setattr(sys, "argv", [*arguments, "x" * 5000])
    assert len(lock._description()) == 4096 + 1
