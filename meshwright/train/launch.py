"""Start a run: on this process alone, on processes of this machine, or as a rank that torchrun started."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..checkpoint import newest_whole
from ..errors import ConfigError, RankError
from ..log import logger
from ..weights import path_of
from .config import Config
from .layout import layout_of
from .position import CHECKPOINTS
from .run import model_directory, run
from .sinks import check_sinks
from .sources import Data, data_of
from .stop import SIGNALS

_SHUTDOWN_S = 600  # after a signal: a save of a large model takes minutes


def start(config: Config, arguments: Sequence[str]) -> str:
    """Train, and say why it ended early. `arguments`: those of the command that a rank is started with."""
    if "WORLD_SIZE" in os.environ:
        return run(config)
    check_sinks(config)
    layout_of(config)
    prepared(config)  # before any rank runs: ranks that wait for one that tokenises time out
    if config.mesh.world == 1:
        return run(config)
    return _launch(config, arguments)


def prepared(config: Config) -> Data:
    """The data, tokenised by as many processes as there are cores."""
    processes = min(8, os.cpu_count() or 1)
    return data_of(config, model_directory(config), path_of(config.cache), processes=processes)


def _launch(config: Config, arguments: Sequence[str]) -> str:
    """Start the ranks, and once more from the newest checkpoint where one has died."""
    world, folder = config.mesh.world, path_of(config.out) / CHECKPOINTS
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    for attempt in range(config.launch.max_restarts + 1):
        before = newest_whole(folder)
        ended = _ended(world, arguments)
        if not ended.failure:
            return f"signal {ended.signal}" if ended.signal else ""
        now = newest_whole(folder)
        if attempt == config.launch.max_restarts or now is None or (attempt and now == before):
            raise RankError(f"{ended.failure}; what it said stands above")
        logger.warning("%s; starting again from %s (%d)", ended.failure, now, attempt + 1)
    raise AssertionError("the last attempt has ended, or failed")


class Ended(NamedTuple):
    """How the ranks of an attempt ended: by themselves, because one failed, or because somebody asked them to."""

    failure: str = ""
    signal: int = 0


def _ended(world: int, arguments: Sequence[str]) -> Ended:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # sixty lines of its own would bury what a rank says
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=0, shutdown_timeout=_SHUTDOWN_S, run_id="meshwright",
    )  # fmt: skip
    try:
        elastic_launch(settings, sys.executable)("-m", "meshwright", *arguments)
    except SignalException as error:  # this process got it and passed it on
        return Ended(signal=int(error.sigval))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode - 128 in SIGNALS:  # the ranks got it themselves
            return Ended(signal=failure.exitcode - 128)
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else f"signal {failure.signal_name()}"
        return Ended(failure=f"rank {rank} of {world} ended with {how}")
    return Ended()


def refuse_other_world(config: Config, nproc: int | None) -> None:
    world = config.mesh.world
    if nproc is not None and nproc != world:
        raise ConfigError(
            f"--nproc {nproc}, and the mesh of the run has {world} ranks; leave --nproc out, or set the mesh"
        )
