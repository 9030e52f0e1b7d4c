"""One run at a time writes into OUT: a lock that its process holds, and that dies with it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shlex
import sys
import time
import weakref
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from ..log import logger

LOCK = "train.lock"
_MOST_BYTES = 4096  # of what the holder says of itself


class OutInUse(ConfigError):
    """Another run has not ended: `runs/first is in use by another run, process 71 on node3; choose another out`."""


class Lock:
    """The lock of OUT, until `close`, the end of a `with`, or the end of this process, however it ends."""

    def __init__(self, fd: int) -> None:
        self.close = weakref.finalize(self, os.close, fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


_held: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


def hold(out: Path) -> Lock:
    """Take OUT for a run of this process, which may take it again. Refuse it while another process has it."""
    file = out.resolve() / LOCK
    if (held := _held.get(file)) is not None and held.close.alive:
        return held
    lock = Lock(_locked(file))
    _held[file] = lock
    return lock


def _locked(file: Path) -> int:
    """The descriptor of the file, which says who holds it. What a dead process has left in it is written over."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"out: {error}; choose a directory that this process can write") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            text = os.read(fd, _MOST_BYTES).decode(errors="replace").strip()
            os.close(fd)
            raise OutInUse(_refusal(file, text)) from None
        logger.warning("%s: %s. A second run with this out would not be noticed", file, error)
    os.truncate(fd, 0)
    os.write(fd, _about().encode())
    os.fsync(fd)  # a process of another host reads it
    return fd


def _about() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    program = Path(sys.argv[0]).name
    command = shlex.join(["meshwright" if program == "__main__.py" else program, *sys.argv[1:]])
    return f"process {os.getpid()} on {platform.node()}, since {since}: {command}"[:_MOST_BYTES] + "\n"


def _refusal(file: Path, holder: str) -> str:
    return (
        f"{file.parent} is in use by another run, {holder or 'which has just begun'}; wait for its end, end it on its "
        f"host, or choose another out. If that host is lost, and a network file system keeps its lock, remove {file}"
    )
