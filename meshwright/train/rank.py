"""A run on a rank that somebody else has started: its output goes to its log, its end is told, and it leaves with its
launcher."""

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

LAUNCHER, ATTEMPT = "MESHWRIGHT_LAUNCHER", "MESHWRIGHT_ATTEMPT"  # its process; which start of the run this is
OURS = "meshwright: "  # how a line of a log begins that the person at the terminal is to see
_PR_SET_PDEATHSIG = 1


def as_rank(config: Config, run: Callable[[Config], str]) -> str:
    """Under our launcher or torchrun."""
    began = time.time()
    launched = LAUNCHER in os.environ
    if launched:
        leave_with(int(os.environ[LAUNCHER]))
        _one_log()
    try:
        _refuse_old_keys()
        return run(config)
    except Exception as unnamed:  # noqa: BLE001 - whatever it is, the launcher is told
        error = _named(unnamed)
        rank, out = int(os.environ["RANK"]), path_of(config.out)
        words = failure.record(error, rank)
        if launched or not isinstance(error, MeshwrightError):
            traceback.print_exception(error)
        if not launched:
            sys.stderr.write(f"{OURS}{words}\n")
        if not (launched or isinstance(error, OutInUse)):  # then that file is of another run
            failure.write_first(error, rank, began, out)
            sys.stderr.write(f"{OURS}the first failure of the run is told in {out / failure.FAILURE}\n")
        raise SystemExit(2) from error


def _refuse_old_keys() -> None:
    """Ranks of a restart would meet the addresses and heartbeats of those before them, and wait for them."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"--max-restarts={restarts} of torchrun: ranks that it starts again would find what the ones before them "
            "left in the store, which torchrun keeps; give --rdzv-backend=c10d and set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or leave --max-restarts out"
        )


def _named(error: Exception) -> Exception:
    """The others learn of it, or it is theirs: a collective of the loop that fails names the rank that is lost."""
    try:
        with names_lost_ranks():
            raise error
    except Exception as named:  # noqa: BLE001 - it was caught before
        return named


def leave_with(parent: int) -> None:
    """A launcher that is killed cannot end its ranks. Linux alone does it for it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def _one_log() -> None:
    """Both streams go to the same file: lines come in the order in which they are written."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # it is the stream that Python opened
    handler = logging.StreamHandler()
    handler.setFormatter(_Marked())
    logger.addHandler(handler)


class _Marked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(OURS + line for line in super().format(record).splitlines())


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_OF_LAUNCHERS = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_MOMENT_S = 2.0


class Stop:
    """Whether somebody asked this process to end, and how."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._at = 0.0

    def ask(self, number: int, _: FrameType | None = None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
        elif number != self.signal or time.monotonic() - self._at > _MOMENT_S:
            os._exit(128 + number)


@contextmanager
def listening() -> Iterator[Stop]:
    """Signals reach the main thread alone."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with _handled(SIGNALS, stop.ask):
        yield stop


@contextmanager
def noted() -> Iterator[list[int]]:
    """Note the signals that this process gets, in their order, and heed none. One that it ignores (nohup) stays so."""
    got: list[int] = []
    numbers = [number for number in _OF_LAUNCHERS if signal.getsignal(number) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    with _handled(numbers, lambda number, _: got.append(number)):
        yield got


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
