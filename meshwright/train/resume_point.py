"""Where a run stands, and where it goes on: from its newest checkpoint, if it is still the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import CHECKPOINTS, RUN, checkpoints, opened_at
from ..engine import Engine, resume
from ..errors import CheckpointError, ConfigError
from ..log import logger
from ..weights import path_of
from .config import Config
from .config_docs import ChangedField, changed_fields
from .config_file import read
from .data_sources import TrainingData
from .lr_schedule import jump_of


@dataclass
class Position:
    """All that a checkpoint holds beside the engine. `stream`: which the next step begins with. `lowest`: the held-out
    loss that was lowest, and `since` the evaluations after it. `num_steps`: of the run, by which its rate falls; None
    in checkpoints of earlier versions."""

    plan: str
    stream: int = 0
    skipped: int = 0
    lowest: float | None = None
    since: int = 0
    num_steps: int | None = None


def position_of(config: Config, engine: Engine, data: TrainingData) -> Position:
    """Resume the run: its newest checkpoint that is not damaged, or the one that `resume` names, or the beginning."""
    mesh, out = engine.model.mesh, path_of(config.out)
    found, told = mesh.broadcast_object(_found(config, out) if mesh.rank == 0 else None)
    if told:
        raise ConfigError(told)
    if mesh.rank == 0 and found is not None:
        _tell_changes(config, out / RUN)
    if found is None:
        return Position(data.plan.fingerprint, num_steps=data.num_steps)
    resumed = resume(engine, found)
    position = _taken(config, data, resumed.directory, resumed.state, engine.steps)
    logger.warning("going on from %s", resumed.directory)
    return position


def check_position(config: Config, data: TrainingData) -> None:
    """Refuse, before any rank starts, what `position_of` would refuse on all of them."""
    found, told = _found(config, path_of(config.out))
    if told:
        raise ConfigError(told)
    if found is None:
        return
    try:
        checkpoint = opened_at(found)
    except CheckpointError:  # the ranks decide what follows from a broken one
        return
    _taken(config, data, checkpoint.directory, checkpoint.trainer["state"], checkpoint.trainer["step"])


def _taken(config: Config, data: TrainingData, found: Path, state: object, step: int) -> Position:
    """Return the position that a checkpoint of `step` holds, if the run may go on from it."""
    if not isinstance(state, dict) or state.get("plan") != data.plan.fingerprint:
        raise CheckpointError(
            f"{found} was trained on other data: files, tokenizer, weights, length or seed have changed; "
            "choose another out (model may be this checkpoint)"
        )
    position = Position(**state)
    if position.num_steps and (jump := jump_of(config.optim, position.num_steps, data.num_steps, step)):
        raise ConfigError(
            f"{found}: {jump}. Begin from a checkpoint before it fell (another out, and resume = its path), or begin a "
            "new run, with a schedule of its own, whose model is this checkpoint"
        )
    return replace(position, num_steps=data.num_steps)


def _found(config: Config, out: Path) -> tuple[Path | None, str]:
    """Return what to resume, and why it cannot be resumed. Rank 0 decides for all. For the run's own
    checkpoints return their folder, so that an older one is taken where the newest is damaged."""
    newest = next((each.path for each in checkpoints(out / CHECKPOINTS)), None)
    if newest is None:
        return (None if config.resume in ("auto", "never") else path_of(config.resume)), ""
    if config.resume == "never":
        return None, f'{newest} is there, and resume = "never"; choose another out, or remove it'
    refused = [f"  {each}" for each in _changes(config, out / RUN)[0] if not each.may]
    told = "\n".join([f"this is not the run that {out / RUN} tells of:", *refused]) if refused else ""
    return out / CHECKPOINTS, told


def _tell_changes(config: Config, file: Path) -> None:
    """Log what differs from the config that the run began with, and may."""
    changes, unknown = _changes(config, file)
    for each in changes:
        logger.warning("%s", each)
    if unknown:
        logger.warning("what has changed since the run began is not known: %s", unknown)


def _changes(config: Config, file: Path) -> tuple[list[ChangedField], str]:
    """Return what differs, and why that is not known where the file of an earlier version cannot be read."""
    try:
        return (changed_fields(read(file), config) if file.is_file() else []), ""
    except ConfigError as error:
        return [], str(error)
