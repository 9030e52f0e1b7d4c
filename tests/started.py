"""The command as a process of its own, on a terminal or a pipe, and its ranks as forks: two starts of Python would take
longer than the rest of a test."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from meshwright.cli import main
from meshwright.train import processes

Main = Callable[[list[str]], int]


def become(main: Main, arguments: list[str], out: int, errors: int | None = None, **environment: str) -> None:
    """The rest of this process is the command, which has imported everything already."""
    code = 99
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # not as the launcher that this was forked from handles them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.isatty(out):
            fcntl.ioctl(out, termios.TIOCSCTTY, 0)
        for stream, to in ((0, out), (1, out), (2, out if errors is None else errors)):
            os.dup2(to, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, "utf-8", closefd=False) for stream in (1, 2))
        os.environ |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment}
        code = main(arguments)
    except SystemExit as left:
        code = int(str(left.code))
    except BaseException:  # noqa: BLE001 - a test that reads the output shows it
        traceback.print_exc()
    finally:
        os._exit(code)


class Rank:
    """Stand in for subprocess.Popen in a launcher. Ranks begin when all are forked: one that connected before would
    wake a thread of the launcher, and the next fork would inherit its locks."""

    gate = (-1, -1)

    def __init__(self, args: Sequence[str], environment: Mapping[str, str], out: int = 1, errors: int = 2) -> None:
        self.code: int | None = None
        program, *rest = (each for each in args if each != "-u")  # of torchrun
        assert (program, *rest[:2]) == (sys.executable, "-m", "meshwright")
        rank = int(environment["LOCAL_RANK"])
        if rank == 0:
            Rank.gate = os.pipe()
        begin, hold = Rank.gate
        self.pid = os.fork()
        if self.pid == 0:
            os.close(hold)
            os.read(begin, 1)
            become(main, rest[2:], out, errors, **environment)

        if rank + 1 == int(environment["LOCAL_WORLD_SIZE"]):
            os.close(begin)
            os.close(hold)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.02)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Let every launcher fork its ranks."""
    of_torchrun, ours = SubprocessHandler._popen, processes.start_process

    def popen(handler: SubprocessHandler, args: Sequence[str], environment: Mapping[str, str]) -> Rank:
        out, errors = (each.fileno() if each else at for at, each in ((1, handler._stdout), (2, handler._stderr)))
        return Rank(args, environment, out, errors)

    def start(args: Sequence[str], environment: Mapping[str, str], log: int) -> Any:
        return Rank(args, environment, log, log)

    SubprocessHandler._popen, processes.start_process = popen, start  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubprocessHandler._popen, processes.start_process = of_torchrun, ours  # type: ignore[method-assign]


class Command:
    """Stand in for `subprocess.Popen` of `python -m meshwright ...`: its fork, with stdout on a pipe or inherited."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], *, text: bool, stdout: int = 0, **_: int) -> None:
        assert (list(args[:3]), text) == ([sys.executable, "-m", "meshwright"], True)
        self.returncode: int | None = None
        self.read, write = os.pipe() if stdout else (-1, 1)
        self.pid = os.fork()
        if self.pid == 0:
            become(main, [*args[3:]], write, 2, **env)
        if stdout:
            os.close(write)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        output = ""
        if self.read >= 0:
            with os.fdopen(self.read) as stream:
                output = stream.read()
        self.poll(0)
        return output, ""


class Started:
    """Fork the command. Its streams are a terminal of `columns`, or a pipe."""

    def __init__(self, arguments: list[str], columns: int = 0, main: Main = main, **environment: str) -> None:
        self.read, write = pty.openpty() if columns else os.pipe()
        if columns:
            fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.output = ""
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.pop("COLUMNS", None)
            become(main, arguments, write, **environment)
        os.close(write)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        """A test that fails leaves nothing behind."""
        if not gone([self.pid], 0):
            for pid in (*self.ranks, self.pid):  # those of torchrun outlive it
                with suppress(ProcessLookupError):  # it may end between the look and the signal
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def until(self, result: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not result():
            assert time.monotonic() < end, self.output[-3000:]
            assert self.more(), self.output[-3000:]

    def more(self) -> bool:
        """Read new output; return False at its end."""
        if not select.select([self.read], [], [], 0.05)[0]:
            return True
        try:
            some = os.read(self.read, 65536)
        except OSError:  # a terminal without writers
            return False
        self.output += some.decode(errors="replace")
        return bool(some)

    def end(self, seconds: float = 60) -> int:
        """Its exit code."""
        until = time.monotonic() + seconds
        while self.more():
            assert time.monotonic() < until, self.output[-3000:]
        os.close(self.read)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def ranks(self) -> list[int]:
        return children(self.pid)

    @property
    def last_line(self) -> str:
        return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", self.output).strip().splitlines()[-1]


def children(pid: int) -> list[int]:
    """The processes that it has started, the first one first: their numbers begin anew at some time."""
    result = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return sorted((int(each) for each in result.stdout.split()), key=lambda each: (_started_at(each), each))


def _started_at(pid: int) -> int:
    """Return the start in ticks since the machine started, or the largest number where the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return sys.maxsize


def descendants(pid: int) -> list[int]:
    """Return its children and all below them."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def listening(pids: Sequence[int]) -> set[str]:
    """The addresses at which these processes listen, as /proc/net has them: `0100007F` for 127.0.0.1. Without sockets
    that they were forked with."""
    return {address for address, _ in ports(pids)}


def ports(pids: Sequence[int]) -> set[tuple[str, int]]:
    """The address and the port of each socket at which these processes listen, as `listening` has them."""
    inherited = _sockets(os.getpid())
    owned = {inode for pid in pids for inode in _sockets(pid)} - inherited
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    heard = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in owned]
    return {(address, int(port, 16)) for address, port in heard}


def _sockets(pid: int) -> set[str]:
    result, folder = set(), Path(f"/proc/{pid}/fd")
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended since
        for file in folder.iterdir():
            with suppress(FileNotFoundError):  # it was closed since
                result.add(os.readlink(file))
    return result


def gone(pids: list[int], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while any(running(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
