"""The rank processes of one machine: start, watch and end them.

They rendezvous at a TCP store in the launcher, which listens on loopback only, as the ranks do: no other machine can
reach them. torch's elastic launcher listens on all interfaces and unpickles the state of its rendezvous.

When a rank fails, the others get some seconds before they are killed. They need this time to notice the broken
collective, to find out which rank is lost (`watch/diagnosis.py`) and to write that down; a kill at once would destroy
the evidence.
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

_TICK_S = 0.05  # between two looks at the processes
_DIAGNOSIS_S = 5.0  # after a failure without a record, for the other ranks: a diagnosis takes half of it
_AFTER_RECORD_S = 2.0  # after a failure that a rank has recorded
_KILLED_S = 5.0  # for a killed process to be gone, unless it waits for a device or a disk


@dataclass(frozen=True)
class Ended:
    """The end of an attempt: normal, by a failure, or after a signal to the launcher."""

    failure: failure.Failure | None = None
    signal: int = 0


@dataclass
class _Ranks:
    """Processes by rank. `codes`: exit code and time of each that `kill` did not kill. `folder`: the folder of their
    logs."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[int, tuple[int, float]] = field(default_factory=dict)

    def poll(self) -> bool:
        """Record the processes that have ended since the last call. Return whether any still runs."""
        for rank, process in self.processes.items():
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = code, time.time()
        return len(self.codes) < len(self.processes)

    @property
    def has_record(self) -> bool:
        """Return whether a rank that ended has recorded its failure."""
        return any((self.folder / f"{rank}.json").is_file() for rank in self.codes)

    @property
    def running(self) -> list[int]:
        """The ranks that had not ended at the last `poll`."""
        return [rank for rank in self.processes if rank not in self.codes]

    def send(self, number: int) -> None:
        """Send a signal to all running ranks."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """Kill all running ranks, stopped ones too: SIGKILL is the only signal that ends a stopped process."""
        self.send(signal.SIGKILL)
        for rank in self.running:
            try:
                self.processes[rank].wait(timeout=_KILLED_S)
            except subprocess.TimeoutExpired:
                pid = self.processes[rank].pid
                logger.warning("rank %d, process %d, was killed but still exists: check its device or disk", rank, pid)


def run_ranks(
    world: int, arguments: Sequence[str], folder: Path, shutdown_timeout: int, signals: Sequence[int]
) -> Ended:  # fmt: skip
    """Start `python -m meshwright ARGUMENTS` on `world` ranks, and return how they ended.

    `folder` gets RANK.log of each rank, and RANK.json of a rank that fails. `signals` grows by each signal that this
    process receives. Whatever still runs at the end is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = serve_store()
    ranks = _Ranks(folder)
    try:
        for rank in range(world):
            ranks.processes[rank] = _start(rank, world, store.port, arguments, folder)
        _watch(ranks, signals, shutdown_timeout)
    finally:
        ranks.kill()
    number = signals[0] if signals else 0
    return Ended(failure.first(ranks.codes, folder, world, sent=_passed_on(number)), number)


def _watch(ranks: _Ranks, signals: Sequence[int], shutdown_timeout: int) -> None:
    """Wait until all ranks have ended, or until their time after a signal or a failure is over."""
    num_passed_on, deadline, terminating = 0, math.inf, False
    while ranks.poll():
        grace_s = _grace_s(ranks, signals, shutdown_timeout)
        deadline = min(deadline, time.monotonic() + grace_s)  # never later: each further failure would move it
        for number in signals[num_passed_on:]:
            ranks.send(_passed_on(number))
        num_passed_on = len(signals)
        if any(code for code, _ in ranks.codes.values()) and not (signals or terminating):
            # A rank that is still loading ends at once; one that diagnoses a lost peer ends after its record.
            ranks.send(signal.SIGTERM)
            terminating = True
        if time.monotonic() > deadline:
            if signals:
                logger.warning(
                    "%s did not end within launch.shutdown_timeout=%d s of signal %d, and %s killed",
                    named(ranks.running), shutdown_timeout, signals[0], "are" if len(ranks.running) > 1 else "is",
                )  # fmt: skip
            return
        time.sleep(_TICK_S)


def _grace_s(ranks: _Ranks, signals: Sequence[int], shutdown_timeout: int) -> float:
    """Return how long the running ranks may continue from now.

    Without limit as long as none has failed; after a signal, long enough to finish the step and save; after a failure,
    long enough to record what they know of its cause.
    """
    codes = [code for code, _ in ranks.codes.values()]
    after_signals = [0, *(128 + number for number in SIGNALS), *(-number for number in SIGNALS if signals)]
    if any(code not in after_signals for code in codes):
        return min(_AFTER_RECORD_S if ranks.has_record else _DIAGNOSIS_S, shutdown_timeout)
    return shutdown_timeout if signals or any(codes) else math.inf


def _passed_on(number: int) -> int:
    """Return the signal to send to ranks: one that they handle by saving, so SIGTERM instead of SIGHUP or SIGQUIT."""
    return number if number in (0, *SIGNALS) else signal.SIGTERM


def _start(rank: int, world: int, port: int, arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank with the environment that torchrun would set, its output in RANK.log."""
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
    """Start a process in a new session: Ctrl-C on the terminal reaches only the launcher, which passes it on once."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
