"""Start a run: ranks as processes of this machine, or this process as a rank that somebody else has started."""

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
from .rank import LAUNCHER, as_rank, noted
from .resume_point import check_position
from .run import run
from .samples import prompts_of

LOGS = "logs"
_IN_VAIN = 2  # starts in a row without a step, after which another would not help


def start(config: Config, arguments: Sequence[str]) -> str:
    """Train, and say why it ended early. `arguments`: those of the command that a rank is started with."""
    if "WORLD_SIZE" in os.environ:
        return as_rank(config, run)
    out, world = path_of(config.out), config.mesh.world
    with hold(out):
        data = prepared(config).data  # before any rank runs: ranks that wait for one that tokenises time out
        check_position(config, data)
        if world > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
        seen, log = RunState(f"meshwright train {config.out}", shape(config), data.num_steps), config.log
        with noted() as asked, Display(seen, out, plain=log.plain, every=log.every, asked=asked) as display:
            return _launch(config, arguments, out, display, asked)


def ends_at_the_terminal() -> bool:
    """Whether a person reads what this process prints: our launcher, or rank 0 of another one such as torchrun."""
    return "WORLD_SIZE" not in os.environ or (os.environ["RANK"] == "0" and LAUNCHER not in os.environ)


@dataclass(frozen=True)
class Prepared:
    """All data of a run: what is trained on, and the held-out sets by name."""

    data: TrainingData
    held_out: Mapping[str, TrainingData]


def prepared(config: Config) -> Prepared:
    """The data, tokenised by as many processes as there are cores. That may take long: prompts are looked at first."""
    directory, processes = model_directory(config.model), min(8, os.cpu_count() or 1)
    prompts_of(config.sample, config.data[0], directory)
    found: list[Any] = all_of(
        partial(make, config, directory, path_of(config.cache), processes=processes)
        for make in (training_data, held_out_of)
    )
    return Prepared(*found)


def what_next(config: Config) -> str:
    """Say what the same command does after a run that was ended early."""
    if newest_whole(path_of(config.out) / CHECKPOINTS) is None:
        return "nothing was saved yet: the same command begins anew"
    return f"the same command goes on from {config.out}"


def _launch(config: Config, arguments: Sequence[str], out: Path, display: Display, asked: Sequence[int]) -> str:
    """Start the ranks, and again from the newest checkpoint where one has failed. `asked`: signals that came so far."""
    failed, restarts, in_vain, given = Counter[int](), 0, 0, list(arguments)
    while True:
        logs = next_attempt(out / LOGS)
        display.starts(logs / "0.log", again=restarts > 0)
        how = processes.ended(config.mesh.world, given, logs, config.launch.shutdown_timeout, asked)
        if how.failure is None:
            return f"signal {how.signal}" if how.signal else ""
        display.follow()
        in_vain = 0 if display.num_steps_seen else in_vain + 1
        failure.write(out, str(how.failure))
        stops = how.signal or how.failure.final or in_vain == _IN_VAIN
        if stops or restarts == config.launch.max_restarts:
            raise RankError(str(how.failure))
        restarts += 1
        failed[how.failure.rank] += 1
        leaves_out = config.launch.fewer or failed[how.failure.rank] > 1
        if leaves_out and (smaller := fewer(config)):  # without one the same ranks try again
            config, failed, mesh = smaller, Counter(), smaller.mesh
            given = [*arguments, "--set", f"mesh.replicate={mesh.replicate}", f"mesh.fsdp={mesh.fsdp}"]
            display.seen.mesh = shape(config)
        where = newest_whole(out / CHECKPOINTS) or "the beginning"
        logger.warning(
            "%s; starting again from %s on %s (%d of %d)",
            how.failure.short, where, shape(config), restarts, config.launch.max_restarts,
        )  # fmt: skip


def next_attempt(folder: Path) -> Path:
    """Starts are counted through all commands of a run: none writes over the logs of another."""
    taken = [int(each.name) for each in folder.iterdir() if each.name.isdecimal()] if folder.is_dir() else []
    return folder / str(max(taken, default=-1) + 1)


def fewer(config: Config) -> Config | None:
    """On the largest mesh of fewer ranks that the run can have. fsdp gets smaller first; tp and ep stay."""
    mesh, found = config.mesh, []
    for replicate, fsdp in product(range(1, mesh.replicate + 1), range(1, mesh.fsdp + 1)):
        smaller = mesh.model_copy(update={"replicate": replicate, "fsdp": fsdp})
        other = config.model_copy(update={"mesh": smaller})
        if smaller.world < mesh.world and not any(contradictions(other)):
            found.append(((smaller.world, replicate), other))
    return max(found, key=lambda each: each[0])[1] if found else None


def shape(config: Config) -> str:
    """`4 ranks: fsdp=2 tp=2`."""
    sizes = [f"{axis}={size}" for axis, size in config.mesh.model_dump().items() if size > 1]
    world = config.mesh.world
    return " ".join([f"{world} ranks:", *sizes]) if world > 1 else "1 rank"


def refuse_other_world(config: Config, nproc: int | None) -> None:
    world = config.mesh.world
    if nproc is not None and nproc != world:
        raise ConfigError(
            f"--nproc {nproc}, and the mesh of the run has {world} ranks; leave --nproc out, or set the mesh"
        )
