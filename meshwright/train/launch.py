"""Start a run: on this process alone, on processes of this machine, or as a rank that torchrun started."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from ..checkpoint import newest_whole
from ..errors import ConfigError, RankError
from ..log import logger
from ..weights import path_of
from .config import Config
from .run import CHECKPOINTS, model_directory, run
from .sources import Data, data_of

_SHUTDOWN_S = 600  # after a signal: a save of a large model takes minutes


def start(config: Config, arguments: Sequence[str]) -> str:
    """Train, and say why it ended early. `arguments`: those of the command that a rank is started with."""
    if "WORLD_SIZE" in os.environ:
        return run(config)
    prepared(config)  # before any rank runs: ranks that wait for one that tokenises time out
    if config.mesh.world == 1:
        return run(config)
    _launch(config, arguments)
    return ""


def prepared(config: Config) -> Data:
    """The data, tokenised by as many processes as there are cores."""
    processes = min(8, os.cpu_count() or 1)
    return data_of(config, model_directory(config), path_of(config.cache), processes=processes)


def _launch(config: Config, arguments: Sequence[str]) -> None:
    """Start the ranks, and once more from the newest checkpoint where one has died."""
    world, folder = config.mesh.world, path_of(config.out) / CHECKPOINTS
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    for attempt in range(config.launch.max_restarts + 1):
        before = newest_whole(folder)
        if (failure := _failure(world, arguments)) is None:
            return
        now = newest_whole(folder)
        if attempt == config.launch.max_restarts or now is None or (attempt and now == before):
            raise RankError(f"{failure}; what it said stands above")
        logger.warning("%s; starting again from %s (%d of %d)", failure, now, attempt + 1, config.launch.max_restarts)


def _failure(world: int, arguments: Sequence[str]) -> str | None:
    """Which rank ended the run, and how."""
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
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else f"signal {failure.signal_name()}"
        return f"rank {rank} of {world} ended with {how}"
    return None


def refuse_other_world(config: Config, nproc: int | None) -> None:
    world = config.mesh.world
    if nproc is not None and nproc != world:
        raise ConfigError(
            f"--nproc {nproc}, and the mesh of the run has {world} ranks; leave --nproc out, or set the mesh"
        )
