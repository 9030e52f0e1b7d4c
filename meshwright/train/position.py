"""Where a run stands, and where it goes on: from its newest checkpoint, if it is still the same run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import checkpoints
from ..data import Plan
from ..engine import Engine, resume
from ..errors import CheckpointError, ConfigError
from ..log import logger
from ..weights import path_of
from .about import differences
from .config import Config
from .toml import read

CHECKPOINTS, CONFIG = "checkpoints", "config.toml"


@dataclass
class Position:
    """All that a checkpoint holds beside the engine. `stream`: which the next step begins with. `lowest`: the held-out
    loss that was lowest, and `since` the evaluations after it."""

    plan: str
    stream: int = 0
    skipped: int = 0
    lowest: float | None = None
    since: int = 0


def position_of(config: Config, engine: Engine, plan: Plan) -> Position:
    """Of the newest checkpoint of the run that is as it was saved, of the one that `resume` names, or the beginning."""
    mesh, out = engine.model.mesh, path_of(config.out)
    found, told = mesh.of_rank_0(_found(config, out) if mesh.rank == 0 else None)
    if told:
        raise ConfigError(told)
    if found is None:
        return Position(plan.fingerprint)
    resumed = resume(engine, found)
    state = resumed.state
    if not isinstance(state, dict) or state.get("plan") != plan.fingerprint:
        raise CheckpointError(
            f"{resumed.directory} was trained on other data: files, tokenizer, weights, length or seed have changed; "
            "choose another out (model may be this checkpoint)"
        )
    logger.warning("going on from %s", resumed.directory)
    return Position(**state)


def _found(config: Config, out: Path) -> tuple[Path | None, str]:
    """What to resume, and why it cannot be: what rank 0 finds holds for all. Of the run's own checkpoints it is their
    folder, so that an older one is taken where the newest is damaged."""
    newest = next((each.path for each in checkpoints(out / CHECKPOINTS)), None)
    if newest is None:
        return (None if config.resume in ("auto", "never") else path_of(config.resume)), ""
    if config.resume == "never":
        return None, f'{newest} is there, and resume = "never"; choose another out, or remove it'
    return out / CHECKPOINTS, _changed(config, out / CONFIG)


def _changed(config: Config, file: Path) -> str:
    """What the run began with and may not change now. The rest is told and taken."""
    if not file.is_file():
        return ""
    try:
        found = differences(read(file), config)
    except ConfigError as error:
        logger.warning("what has changed since the run began is not known: %s", error)
        return ""
    for each in found:
        if each.may:
            logger.warning("%s", each)
    refused = [f"  {each}" for each in found if not each.may]
    return "\n".join([f"this is not the run that {file} tells of:", *refused]) if refused else ""
