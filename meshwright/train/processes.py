"""The ranks of one machine: processes that the launcher starts, watches and ends.

They meet at a store of the launcher. It listens on loopback alone, as they do: no other machine reaches them.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..data import BEGAN, RUN_BEGAN
from ..log import logger
from ..mesh.loopback import ADDRESS, loopback_devices, serve_store
from ..watch.diagnosis import named
from . import failure
from .rank import ATTEMPT, LAUNCHER, SIGNALS

_TICK_S = 0.05
_LAST_WORDS_S = 5.0  # that the others have once a rank has failed without a word: a diagnosis takes half of it
_AFTER_WORDS_S = 2.0  # and once a rank has told why
_KILLED_S = 5.0  # in which a killed process is gone, unless a device or a disk holds it


@dataclass(frozen=True)
class Ended:
    """How the ranks of an attempt ended: by themselves, because one failed, or because somebody asked them to."""

    failure: failure.Failure | None = None
    signal: int = 0


@dataclass
class _Ranks:
    """Processes by rank. `codes`: the exit code of each that ended by itself, and when. `folder`: of their logs."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, tuple[int, float]] = field(default_factory=dict)

    def look(self) -> bool:
        """Note who has ended since. Whether some still run."""
        for rank, process in self.processes.items():
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = code, time.time()
        return len(self.codes) < len(self.processes)

    @property
    def told(self) -> bool:
        """Whether a rank has said why it fails."""
        return any((self.folder / f"{rank}.json").is_file() for rank in self.codes)

    @property
    def running(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.codes]

    def send(self, number: int) -> None:
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """A stopped process too, which heeds no other signal."""
        self.send(signal.SIGKILL)
        for rank in self.running:
            try:
                self.processes[rank].wait(timeout=_KILLED_S)
            except subprocess.TimeoutExpired:
                pid = self.processes[rank].pid
                logger.warning("rank %d, process %d, was killed and is still there: see its device or disk", rank, pid)


def ended(
    world: int, arguments: Sequence[str], folder: Path, shutdown_timeout: int, asked: Sequence[int]
) -> Ended:  # fmt: skip
    """Start `python -m meshwright ARGUMENTS` on `world` ranks, and wait for their end.

    `folder` gets RANK.log, and RANK.json of a rank that fails. `asked` grows by each signal that this process gets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = serve_store()
    ranks = _Ranks(folder)
    try:
        for rank in range(world):
            ranks.processes[rank] = _started(rank, world, store.port, arguments, folder)
        _watch(ranks, asked, shutdown_timeout)
    finally:
        ranks.kill()
    number = asked[0] if asked else 0
    return Ended(failure.first(ranks.codes, folder, world, asked=_passed_on(number)), number)


def _watch(ranks: _Ranks, asked: Sequence[int], shutdown_timeout: int) -> None:
    """Until all have ended, or what they were given after a signal or a failure is over."""
    heard, deadline, leaving = 0, math.inf, False
    while ranks.look():
        patience_s = _patience_s(ranks, asked, shutdown_timeout)
        deadline = min(deadline, time.monotonic() + patience_s)
        for number in asked[heard:]:
            ranks.send(_passed_on(number))
        heard = len(asked)
        if any(code for code, _ in ranks.codes.values()) and not (asked or leaving):
            ranks.send(signal.SIGTERM)  # who still loads ends at once, who diagnoses when it has told
            leaving = True
        if time.monotonic() > deadline:
            if asked:
                logger.warning(
                    "%s did not end within launch.shutdown_timeout=%d s of signal %d, and %s killed",
                    named(ranks.running), shutdown_timeout, asked[0], "are" if len(ranks.running) > 1 else "is",
                )  # fmt: skip
            return
        time.sleep(_TICK_S)


def _patience_s(ranks: _Ranks, asked: Sequence[int], shutdown_timeout: int) -> float:
    """For how long those that still run may go on: after a signal until they have saved, after a failure until it is
    known who was first."""
    codes = [code for code, _ in ranks.codes.values()]
    after_signals = [0, *(128 + number for number in SIGNALS), *(-number for number in SIGNALS if asked)]
    if any(code not in after_signals for code in codes):
        return min(_AFTER_WORDS_S if ranks.told else _LAST_WORDS_S, shutdown_timeout)
    return shutdown_timeout if asked or any(codes) else math.inf


def _passed_on(number: int) -> int:
    """Return the signal to send to ranks: one that they handle, so that they save."""
    return number if number in (0, *SIGNALS) else signal.SIGTERM


def _started(rank: int, world: int, port: int, arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as torchrun
        failure.ERROR_FILE: str(folder / f"{rank}.json"), LAUNCHER: str(os.getpid()), ATTEMPT: folder.name,
        RUN_BEGAN: str(BEGAN),
    }  # fmt: skip
    command = [sys.executable, "-m", "meshwright", *arguments]
    with (folder / f"{rank}.log").open("wb") as log:
        return start_process(command, {**os.environ, **loopback_devices(), **environment}, log.fileno())


def start_process(command: Sequence[str], environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C of the terminal reaches the launcher alone, which passes it on once."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
