"""The lock of an output directory: one run at a time writes into OUT.

Two runs in one directory would delete each other's checkpoints and mix their metrics. The lock is an flock on
OUT/train.lock. The kernel releases it when the process ends, however it ends, so no stale lock ever has to be removed.
The content of the file only says who holds it.
"""

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
_MOST_BYTES = 4096  # of the description of the holder


class OutInUse(ConfigError):
    """OUT is in use by another run: `runs/first is in use by another run, process 71 on node3; ...`."""


class Lock:
    """A held lock of OUT. Released by `close`, the end of a `with`, or the end of this process."""

    def __init__(self, fd: int) -> None:
        self.close = weakref.finalize(self, os.close, fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


# flock is per open file: a second descriptor of this process would conflict with its own first one.
_held: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


def hold(out: Path) -> Lock:
    """Lock OUT for this process, which may do so repeatedly. Raise `OutInUse` if another process holds it."""
    file = out.resolve() / LOCK
    if (held := _held.get(file)) is not None and held.close.alive:
        return held
    lock = Lock(_locked(file))
    _held[file] = lock
    return lock


def _locked(file: Path) -> int:
    """Lock the file, write this process's description into it, and return the descriptor.

    A file without a lock is left over from a process that has ended; its content is overwritten. File systems without
    flock (some network mounts) only cost the protection, so the run continues with a warning.
    """
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
        logger.warning("%s: %s. A second run with the same out would not be detected", file, error)
    os.truncate(fd, 0)
    os.write(fd, _description().encode())
    os.fsync(fd)  # for processes on other hosts that read it
    return fd


def _description() -> str:
    """Describe this process: id, host, start and command."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    program = Path(sys.argv[0]).name
    command = shlex.join(["meshwright" if program == "__main__.py" else program, *sys.argv[1:]])
    return f"process {os.getpid()} on {platform.node()}, since {since}: {command}"[:_MOST_BYTES] + "\n"


def _refusal(file: Path, holder: str) -> str:
    """Format the message for a lock that another process holds; `holder` is empty before it is written."""
    return (
        f"{file.parent} is in use by another run, {holder or 'which has just begun'}; wait for its end, end it on its "
        f"host, or choose another out. If that host is lost, and a network file system keeps its lock, remove {file}"
    )
