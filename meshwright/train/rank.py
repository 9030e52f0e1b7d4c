"""A run as one rank under a launcher, ours or torchrun: its log, the record of its failure, and signals.

A rank must never end silently and never outlive its launcher. Its failure goes to the error file (`failure.py`), and on
Linux the kernel kills it when its launcher dies. Signals (Ctrl-C, a scheduler's SIGTERM) end a run after the current
step and a save; a second one ends it at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ..errors import ConfigError, MeshwrightError
from ..log import logger
from ..watch import names_lost_ranks
from ..weights import path_of
from . import failure
from .config import Config
from .lock import OutInUse

LAUNCHER, ATTEMPT = "MESHWRIGHT_LAUNCHER", "MESHWRIGHT_ATTEMPT"  # process id of the launcher; number of the attempt
PREFIX = "meshwright: "  # of the lines in a rank's log that the launcher shows on the terminal
_PR_SET_PDEATHSIG = 1


def as_rank(config: Config, run: Callable[[Config], str]) -> str:
    """Run on this rank, under our launcher or torchrun. Return why the run ended early; exit with 2 on an error."""
    began = time.time()
    launched = LAUNCHER in os.environ  # by our launcher
    if launched:
        leave_with(int(os.environ[LAUNCHER]))
        _one_log()
    try:
        _refuse_old_keys()
        return run(config)
    except Exception as raised:  # noqa: BLE001 - the launcher needs a record of any error
        error = _with_lost_rank(raised)
        rank, out = int(os.environ["RANK"]), path_of(config.out)
        message = failure.record(error, rank)
        if launched or not isinstance(error, MeshwrightError):
            traceback.print_exception(error)
        if not launched:
            sys.stderr.write(f"{PREFIX}{message}\n")
        if not (launched or isinstance(error, OutInUse)):  # if OUT is in use, failure.txt is the other run's
            failure.write_first(error, rank, began, out)
            sys.stderr.write(f"{PREFIX}the first failure of the run is in {out / failure.FAILURE}\n")
        raise SystemExit(2) from error


def _refuse_old_keys() -> None:
    """Refuse torchrun's restarts with a store that outlives the ranks.

    The new ranks would read addresses and heartbeats of the old ones from it, and wait for processes that are gone.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"--max-restarts={restarts} of torchrun: restarted ranks would read the keys of the previous ones "
            "from the store, which torchrun keeps; pass --rdzv-backend=c10d and set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or leave --max-restarts out"
        )


def _with_lost_rank(error: Exception) -> Exception:
    """Return the error, or the RankError that names the lost rank if a collective failed because of one.

    `names_lost_ranks` works on errors that pass through it, so the error is raised again inside. It also publishes the
    error to the other ranks, so that they can quote it.
    """
    try:
        with names_lost_ranks():
            raise error
    except Exception as explained:  # noqa: BLE001 - it was caught before
        return explained


def leave_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies: a killed launcher cannot end its ranks. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the prctl
        os._exit(1)


def _one_log() -> None:
    """Write stdout line by line, and what our logger says to stderr: warnings with a prefix.

    Both streams go to the same file; a buffered stdout would appear in it too late, out of order.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # it is the stream that Python opened
    handler = logging.StreamHandler()
    handler.setFormatter(_Prefixed())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _Prefixed(logging.Formatter):
    """Prefix every line of a warning, so that the launcher shows a message of several lines as a whole. What is less
    than a warning stays in the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else "\n".join(PREFIX + line for line in text.splitlines())


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LAUNCHER_SIGNALS = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_SAME_SIGNAL_S = 2.0  # a repetition within this time is the same request: SLURM and our launcher both send it


class Stop:
    """A request to end the run, by the first signal. A second request ends the process at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at = 0.0

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal."""
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
        elif number != self.signal or time.monotonic() - self._at > _SAME_SIGNAL_S:
            os._exit(128 + number)


@contextmanager
def handle_signals() -> Iterator[Stop]:
    """Handle `SIGNALS` by a `Stop`. Python runs handlers in the main thread only; in another one nothing is handled."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with _handled(SIGNALS, stop.ask):
        yield stop


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Yield a list that grows by each signal this process receives, in order, without acting on any.

    The launcher passes them on to the ranks. Ignored signals (nohup) stay ignored.
    """
    received: list[int] = []
    numbers = [number for number in _LAUNCHER_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    with _handled(numbers, lambda number, _: received.append(number)):
        yield received


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for some signals, and the previous handlers again at the end."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
