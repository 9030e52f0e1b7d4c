"""A run on one rank: model, engine and data of a config, trained from where the last checkpoint stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from ..checkpoint import newest_whole
from ..data import Batch, Feed, Plan, source_of
from ..engine import Engine, Savings, check_export, export, load, resume
from ..errors import CheckpointError, ConfigError
from ..log import logger
from ..mesh import Mesh
from ..weights import download, is_hub_id, path_of
from .config import Config
from .loop import Habits, Loop, Position
from .metrics import JsonLines, Lines, Sink
from .schedule import schedule
from .sources import Data, data_of, documents_of
from .stop import listening
from .toml import as_toml

CHECKPOINTS, EXPORT = "checkpoints", "export"
_SAVINGS = ("recompute", "reshard", "offload", "compiled")


def run(config: Config) -> str:
    """Train on this rank. All ranks of the mesh call it. Returns why it ended early, "" otherwise."""
    out = path_of(config.out)
    sizes = config.mesh.model_dump()
    mesh = Mesh(**sizes)
    torch.manual_seed(config.seed * mesh.axes.world + mesh.rank)  # the engine draws nothing; what is added to it may
    directory, cache = model_directory(config), path_of(config.cache)
    data = data_of(config, directory, cache)
    model = load(
        config.model, mesh, dtype=getattr(torch, config.train.dtype), train=config.train.train,
        savings=Savings(**config.train.model_dump(include={*_SAVINGS})),
    )  # fmt: skip
    if config.save.export:
        check_export(model, out / EXPORT, overwrite=True)
    engine = _engine(config, model, data.num_steps)
    position = _position(config, engine, data.plan, out / CHECKPOINTS)
    feed = Feed(
        data.documents, data.plan, micro_batches=config.train.streams_per_step // mesh.num_data_ranks,
        rank=mesh.data_rank, num_ranks=mesh.num_data_ranks,
    )  # fmt: skip
    with listening() as stop:
        loop = Loop(
            engine, feed, data.num_steps, position, out / CHECKPOINTS, _habits(config), stop,
            _sinks(config, out, data) if mesh.rank == 0 else (), _held_out(config, directory, cache, mesh),
        )  # fmt: skip
        why = loop.run()
    feed.close()
    if not why and config.save.export:
        export(model, out / EXPORT, overwrite=True)
    return why


def model_directory(config: Config) -> Path:
    """Where config, tokenizer and templates lie."""
    path = path_of(config.model)
    if path.is_dir():
        return path
    if not is_hub_id(config.model):
        raise ConfigError(f"model = {config.model!r} is no directory and no hub id (org/name)")
    return download(config.model, weights=False)


def _engine(config: Config, model: object, num_steps: int) -> Engine:
    optim = config.optim
    first, second = optim.betas
    return Engine(
        model, lr=schedule(optim, num_steps), betas=(first, second), eps=optim.eps, weight_decay=optim.weight_decay,  # type: ignore[arg-type] # load returned it
        max_norm=optim.max_norm or None, router_aux=config.train.router_aux,
        state_dtype=getattr(torch, optim.state_dtype) if optim.state_dtype else None,
    )  # fmt: skip


def _position(config: Config, engine: Engine, plan: Plan, folder: Path) -> Position:
    """Of the newest whole checkpoint of the run, or the beginning."""
    mesh = engine.model.mesh
    found = mesh.of_rank_0(newest_whole(folder) if mesh.rank == 0 else None)
    if found is None:
        return Position(plan.fingerprint)
    if config.resume == "never":
        raise ConfigError(f'{found} is there, and resume = "never"; choose another out, or remove it')
    state = resume(engine, found).state
    if not isinstance(state, dict) or state.get("plan") != plan.fingerprint:
        raise CheckpointError(
            f"{found} was trained on other data: files, tokenizer, weights, length or seed have changed; choose "
            "another out (model may be this checkpoint)"
        )
    logger.warning("going on from %s", found)
    return Position(**state)


def _habits(config: Config) -> Habits:
    hours, keep = config.train.time_limit, config.save.keep
    return Habits(
        config.save.every, None if keep == "all" else keep, config.save.keep_every,
        config.eval.every if config.eval.path else 0, config.train.on_nan, math.inf if hours is None else 3600 * hours,
    )  # fmt: skip


def _sinks(config: Config, out: Path, data: Data) -> list[Sink]:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.toml").write_text(as_toml(config))
    return [JsonLines(out / "metrics.jsonl"), Lines(data.num_steps)]


def _held_out(config: Config, directory: Path, cache: Path, mesh: Mesh) -> dict[str, Sequence[Batch]]:
    """The same number of batches on every data rank, the last ones of filler."""
    section, length = config.eval, config.train.length
    if not section.path:
        return {}
    documents = documents_of(section, directory, cache)
    too_long = section.too_long or ("cut" if section.kind == "text" else "stop")
    plan = Plan([source_of(documents, length, too_long=too_long)], length=length, epochs=1)
    feed = Feed([documents], plan, micro_batches=1, rank=mesh.data_rank, num_ranks=mesh.num_data_ranks)
    firsts = range(0, plan.num_streams, mesh.num_data_ranks)
    batches = [feed.step(first).batches[0] for first in firsts]
    feed.close()
    return {section.name or "held-out": batches}
