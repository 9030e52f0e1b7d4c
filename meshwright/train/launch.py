"""The launcher of `meshwright train`: start the ranks of one machine, watch them, and restart them after a failure.

Under torchrun, SLURM or Ray, `WORLD_SIZE` is set: then this process is one rank and only trains. Otherwise it is the
launcher. It trains nothing and never creates a process group or touches a device, so it survives whatever happens to
the ranks, and can say which one failed first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..checkpoint import CHECKPOINTS, newest_whole
from ..errors import ConfigError, RankError
from ..log import logger
from ..weights import path_of
from . import failure, processes
from .config import Config
from .config_checks import contradictions
from .data_sources import TrainingData, all_of, held_out_of, model_directory, training_data
from .display import Display, RunState
from .lock import hold
from .rank import LAUNCHER, as_rank, record_signals
from .resume_point import check_position
from .run import run
from .samples import prompts_of

LOGS = "logs"
_MAX_STARTS_WITHOUT_STEP = 2  # in a row; a further start would fail before its first step too


def start(config: Config, arguments: Sequence[str]) -> str:
    """Train, and return why the run ended early, "" if it did not.

    `arguments`: the command-line arguments that ranks are started with.
    """
    if "WORLD_SIZE" in os.environ:
        return as_rank(config, run)
    out, world = path_of(config.out), config.mesh.world
    with hold(out):
        data = prepared(config).data  # before any rank runs: ranks that wait for one that tokenises would time out
        check_position(config, data)
        if world > 1:
            # By default each rank would use all cores, and the ranks would take them from each other.
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
        state, log = RunState(f"meshwright train {config.out}", describe_mesh(config), data.num_steps), config.log
        with (
            record_signals() as signals,
            Display(state, out, plain=log.plain, every=log.every, signals=signals) as display,
        ):
            return _launch(config, arguments, out, display, signals)


def ends_at_the_terminal() -> bool:
    """Return whether a person reads this process's output: our launcher, or rank 0 under torchrun and others."""
    return "WORLD_SIZE" not in os.environ or (os.environ["RANK"] == "0" and LAUNCHER not in os.environ)


@dataclass(frozen=True)
class Prepared:
    """All data of a run: the training data, and the held-out sets by name."""

    data: TrainingData
    held_out: Mapping[str, TrainingData]


def prepared(config: Config) -> Prepared:
    """Tokenise all data, with a process per core (8 at most).

    It may take hours, so the prompts of samples are checked first.
    """
    directory, processes = model_directory(config.model), min(8, os.cpu_count() or 1)
    prompts_of(config.sample, config.data[0], directory)
    results: list[Any] = all_of(
        partial(make, config, directory, path_of(config.cache), processes=processes)
        for make in (training_data, held_out_of)
    )
    return Prepared(*results)


def what_next(config: Config) -> str:
    """Tell the user what the same command does after a run that ended early."""
    if newest_whole(path_of(config.out) / CHECKPOINTS) is None:
        return "nothing was saved yet: the same command starts anew"
    return f"the same command resumes from {config.out}"


def _launch(config: Config, arguments: Sequence[str], out: Path, display: Display, signals: Sequence[int]) -> str:
    """Run attempts until one ends without a failure. Return why it ended early, "" at the end of the data.

    An attempt is one start of all ranks; each resumes from the newest checkpoint. `signals`: those that this process
    has received; the list grows meanwhile. No restart follows a signal, a failure that would repeat itself, or
    `max_restarts` restarts.

    A rank that fails twice is taken for bad hardware: the next attempt runs on a smaller mesh.
    """
    failed, restarts, without_step, rank_arguments = Counter[int](), 0, 0, list(arguments)
    while True:
        logs = next_attempt(out / LOGS)
        display.starts(logs / "0.log", again=restarts > 0)
        outcome = processes.run_ranks(config.mesh.world, rank_arguments, logs, config.launch.shutdown_timeout, signals)
        if outcome.failure is None:
            return f"signal {outcome.signal}" if outcome.signal else ""
        display.follow()  # count the steps of this attempt, up to its last line
        without_step = 0 if display.attempt_steps else without_step + 1
        failure.write(out, str(outcome.failure))
        stops = outcome.signal or outcome.failure.final or without_step == _MAX_STARTS_WITHOUT_STEP
        if stops or restarts == config.launch.max_restarts:
            raise RankError(str(outcome.failure))
        restarts += 1
        failed[outcome.failure.rank] += 1
        shrink = config.launch.fewer or failed[outcome.failure.rank] > 1
        if shrink and (smaller := smaller_mesh(config)):  # else the same ranks try again
            config, failed, mesh = smaller, Counter(), smaller.mesh
            rank_arguments = [*arguments, "--set", f"mesh.replicate={mesh.replicate}", f"mesh.fsdp={mesh.fsdp}"]
            display.state.mesh = describe_mesh(config)
        where = newest_whole(out / CHECKPOINTS) or "the start"
        logger.warning(
            "%s; restarting from %s on %s (%d of %d)",
            outcome.failure.short, where, describe_mesh(config), restarts, config.launch.max_restarts,
        )  # fmt: skip


def next_attempt(folder: Path) -> Path:
    """Return the log folder of the next attempt. Attempts are numbered across commands, so no log is overwritten."""
    numbers = [int(each.name) for each in folder.iterdir() if each.name.isdecimal()] if folder.is_dir() else []
    return folder / str(max(numbers, default=-1) + 1)


def smaller_mesh(config: Config) -> Config | None:
    """Return the config on the largest valid mesh with fewer ranks, None if no such mesh exists.

    Only the data-parallel axes shrink, fsdp first: they change nothing but the number of micro-batches per rank. The
    other axes are constrained by the model.
    """
    mesh, candidates = config.mesh, []
    for replicate, fsdp in product(range(1, mesh.replicate + 1), range(1, mesh.fsdp + 1)):
        smaller = mesh.model_copy(update={"replicate": replicate, "fsdp": fsdp})
        other = config.model_copy(update={"mesh": smaller})
        if smaller.world < mesh.world and not any(contradictions(other)):
            candidates.append(((smaller.world, replicate), other))
    return max(candidates, key=lambda each: each[0])[1] if candidates else None


def describe_mesh(config: Config) -> str:
    """Format the mesh: `4 ranks: fsdp=2 tp=2`."""
    sizes = [f"{axis}={size}" for axis, size in config.mesh.model_dump().items() if size > 1]
    world = config.mesh.world
    return " ".join([f"{world} ranks:", *sizes]) if world > 1 else "1 rank"


def refuse_other_world(config: Config, nproc: int | None) -> None:
    """Refuse a `--nproc` that contradicts the mesh."""
    world = config.mesh.world
    if nproc is not None and nproc != world:
        raise ConfigError(
            f"--nproc {nproc}, but the mesh of the run has {world} ranks; leave --nproc out, or change the mesh"
        )
