"""Find the checkpoint that a run resumes from, and refuse to resume a run that has changed.

Config fields marked `Fixed` and the fingerprint of the packing plan must not change. Otherwise a resumed run would skip
documents or read some twice, and its loss curve would not show it. The mesh may change: the order of documents does not
depend on it (docs/resume.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import CHECKPOINTS, RUN, checkpoints, opened_at
from ..engine import Engine, resume
from ..errors import CheckpointError, ConfigError
from ..log import logger
from ..mesh import Mesh
from ..weights import path_of
from .config import Config
from .config_docs import ChangedField, changed_fields
from .config_file import read
from .data_sources import TrainingData
from .lr_schedule import rate_jump, rate_rise


@dataclass
class Position:
    """The trainer's part of a checkpoint, in addition to the engine's.

    `plan`: the fingerprint of the packing plan. `stream`: the first stream of the next step. `skipped`: steps without
    update, for a non-finite loss. `lowest`: the lowest held-out loss, and `since` the number of evaluations after
    it. `num_steps`: the length of the run, which the learning rate depends on; None in checkpoints of earlier versions.
    `reference`: the key of the reference model, if the objective has one. `held_out`: the key of the held-out data
    that `lowest` is of; "" in checkpoints of earlier versions.
    """

    plan: str
    stream: int = 0
    skipped: int = 0
    lowest: float | None = None
    since: int = 0
    num_steps: int | None = None
    reference: str = ""
    held_out: str = ""


def with_held_out(position: Position, fingerprints: Mapping[str, str], rank: int) -> Position:
    """Return the position of a run with these held-out sets, given by name and fingerprint.

    If other data were held out before, the lowest loss is forgotten: it would be compared with losses of other
    documents, for the best checkpoint and for early stopping.
    """
    now = hashlib.sha256(json.dumps(dict(fingerprints), sort_keys=True).encode()).hexdigest() if fingerprints else ""
    if position.held_out in ("", now):
        return replace(position, held_out=now)
    if rank == 0 and position.lowest is not None:
        logger.warning(
            "the held-out data changed: their lowest loss so far, %.4g, no longer counts for the best checkpoint or "
            "early stopping", position.lowest,
        )  # fmt: skip
    return replace(position, held_out=now, lowest=None, since=0)


def position_of(config: Config, engine: Engine, data: TrainingData, reference: str = "") -> Position:
    """Resume the engine and return the position: of the newest checkpoint, of the one `resume` names, or the start.

    Rank 0 alone looks at the directory. On a shared file system ranks may see a new file at different times, and ranks
    that resume from different checkpoints would train different models.
    """
    mesh, out = engine.model.mesh, path_of(config.out)
    source, refusal = mesh.broadcast_object(_resume_source(config, out) if mesh.rank == 0 else None)
    if refusal:
        raise ConfigError(refusal)
    if mesh.rank == 0 and source is not None:
        _log_changes(config, out / RUN)
    if source is None:
        return Position(data.plan.fingerprint, num_steps=data.num_steps, reference=reference)
    resumed = resume(engine, source)
    position = _position_in(config, data, resumed.directory, resumed.state, engine.steps)
    _check_reference(resumed.directory, position.reference, reference)
    logger.warning("resuming from %s", resumed.directory)
    before = resumed.state.get("num_steps") or data.num_steps  # None in checkpoints of earlier versions
    if rise := rate_rise(config.optim, before, data.num_steps, engine.steps):
        logger.warning(
            "the learning rate rises %s at step %d: the curve of %s depends on the number of steps, %d before and %d "
            "now",
            rise, engine.steps + 1, config.optim.schedule, before, data.num_steps,
        )  # fmt: skip
    return position


def check_reference(config: Config, mesh: Mesh, reference: str) -> None:
    """Refuse a resume with another reference model or teacher, before anything is loaded. Collective.

    Rank 0 alone looks, as in `position_of`, which looks at the checkpoint that is then loaded.
    """
    refusal = ""
    if mesh.rank == 0 and reference:
        source, _ = _resume_source(config, path_of(config.out))
        try:
            checkpoint = None if source is None else opened_at(source)
            if checkpoint is not None and isinstance(state := checkpoint.trainer["state"], dict):
                _check_reference(checkpoint.directory, state.get("reference", ""), reference)
        except CheckpointError as error:  # a broken checkpoint is for `resume` to report
            refusal = str(error) if "reference" in str(error) else ""
    if refusal := mesh.broadcast_object(refusal):
        raise CheckpointError(refusal)


def _check_reference(checkpoint: Path, before: str, now: str) -> None:
    if before != now:
        raise CheckpointError(
            f"{checkpoint} was trained with a reference model with other weights, or another teacher, than the run "
            "file names now (dpo.reference, distill.teacher, distill.scores, or model itself), or with another dtype "
            "of it; put these weights back, or choose another out"
        )


def check_position(config: Config, data: TrainingData) -> None:
    """Refuse in the launcher what `position_of` would refuse on every rank after minutes of loading."""
    source, refusal = _resume_source(config, path_of(config.out))
    if refusal:
        raise ConfigError(refusal)
    if source is None:
        return
    try:
        checkpoint = opened_at(source)
    except CheckpointError:  # a broken checkpoint is for `resume` to report, or to replace by an older one
        return
    _position_in(config, data, checkpoint.directory, checkpoint.trainer["state"], checkpoint.trainer["step"])


def _position_in(config: Config, data: TrainingData, checkpoint: Path, state: object, step: int) -> Position:
    """Return the position that a checkpoint of `step` holds, or refuse to resume from it."""
    if not isinstance(state, dict) or state.get("plan") != data.plan.fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained on other data: files, images, tokenizer, weights, length or seed have "
            "changed; choose another out (model may be this checkpoint)"
        )
    position = Position(**state)
    if position.num_steps and (jump := rate_jump(config.optim, position.num_steps, data.num_steps, step)):
        raise ConfigError(
            f"{checkpoint}: {jump}. Start from a checkpoint before the decay (another out, and resume = its path), or "
            "start a new run, with its own schedule, whose model is this checkpoint"
        )
    return replace(position, num_steps=data.num_steps)


def _resume_source(config: Config, out: Path) -> tuple[Path | None, str]:
    """Return what to resume from (None: start anew) and, if that is refused, the message.

    For the run's own checkpoints this is their folder: `resume` takes an older checkpoint if the newest is damaged.
    """
    newest = next((each.path for each in checkpoints(out / CHECKPOINTS)), None)
    if newest is None:
        return (None if config.resume in ("auto", "never") else path_of(config.resume)), ""
    if config.resume == "never":
        return None, f'{newest} exists, and resume = "never"; choose another out, or remove it'
    refused = [f"  {each}" for each in _changes(config, out / RUN)[0] if not each.may]
    message = "\n".join([f"the config differs from that of the run, {out / RUN}:", *refused]) if refused else ""
    return out / CHECKPOINTS, message


def _log_changes(config: Config, file: Path) -> None:
    """Log the allowed changes since the run began."""
    changes, unknown = _changes(config, file)
    for each in changes:
        logger.warning("%s", each)
    if unknown:
        logger.warning("changes of the config since the run began are unknown: %s", unknown)


def _changes(config: Config, file: Path) -> tuple[list[ChangedField], str]:
    """Return the changed fields, and an error message if config.toml, of an earlier version perhaps, cannot be read."""
    try:
        return (changed_fields(read(file), config) if file.is_file() else []), ""
    except ConfigError as error:
        return [], str(error)
