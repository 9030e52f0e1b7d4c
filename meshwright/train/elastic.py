"""Processes of this machine, started and ended by torch's elastic launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..data import BEGAN, RUN_BEGAN
from ..log import logger
from . import failure
from .rank import ATTEMPT, LAUNCHER
from .stop import SIGNALS

_HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")  # and passed on to the ranks

_NOISY = ("torch.distributed.elastic", "torch.distributed.launcher")  # each module sets the level of its own logger


@dataclass(frozen=True)
class Ended:
    """How the ranks of an attempt ended: by themselves, because one failed, or because somebody asked them to."""

    failure: failure.Failure | None = None
    signal: int = 0


class _Logs(LogsSpecs):
    """FOLDER/RANK.log for both streams, FOLDER/RANK.json for what a rank says of its failure."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.folder.mkdir(parents=True, exist_ok=True)
        logs = {rank: str(self.folder / f"{rank}.log") for rank in envs}
        errors = {rank: str(self.folder / f"{rank}.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[rank]
        return LogsDest(stdouts=logs, stderrs=logs, error_files=errors)

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)


def ended(world: int, arguments: Sequence[str], folder: Path, shutdown_timeout: int) -> Ended:
    """Start `python -m meshwright` on so many ranks, and wait for them. Their logs go to `folder`."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith(_NOISY)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # sixty lines of its own would bury what a rank says
    patience: dict[str, Any] = {"shutdown_timeout": shutdown_timeout}
    if not any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):
        logger.warning(
            "torch %s ends ranks 30 s after a signal, and knows no launch.shutdown_timeout", torch.__version__
        )
        patience = {}
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, run_id="meshwright", logs_specs=_Logs(folder), signals_to_handle=",".join(_HANDLED), **patience
    )  # fmt: skip
    os.environ |= {LAUNCHER: str(os.getpid()), ATTEMPT: folder.name, RUN_BEGAN: str(BEGAN)}
    with _handlers_kept():
        try:
            elastic_launch(settings, sys.executable)("-m", "meshwright", *arguments)
        except SignalException as error:  # this process got it and passed it on; a rank may have failed to save
            return Ended(failure.first({}, folder, world), int(error.sigval))
        except ChildFailedError as error:
            codes = {rank: (each.exitcode, float(each.timestamp)) for rank, each in error.failures.items()}
            asked = error.get_first_failure()[1].exitcode - 128
            found = failure.first(codes, folder, world)
            return Ended(signal=asked) if asked in SIGNALS else Ended(found)  # those got it themselves
    return Ended()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """It leaves handlers behind that raise exceptions of its own."""
    ours = _HANDLED if threading.current_thread() is threading.main_thread() else ()
    before = {name: signal.getsignal(signal.Signals[name]) for name in ours}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
