"""Save all that training needs, and go on from it on any mesh."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint as disk
from .. import weights
from ..blueprint import Blueprint
from ..checkpoint import MASTER, WEIGHTS, Checkpoint, Content, Keep, RestoreTarget
from ..errors import BrokenCheckpointError, CheckpointError, ConfigError
from ..log import logger
from ..optim import names_of_scales
from ..watch import doing, names_lost_ranks
from .agreement import Data, Proposal, agree, check_ready, compare, identity
from .engine import Engine
from .export import Choices, check_pieces, exported, refuse_overflow
from .model import Model
from .optimizer_state import dtypes_of, quantised_in, spec_with, state_of, take_state, to_be_read

# Of config.json: what changes no value that the model computes. A difference of anything else is refused.
_NO_MATTER = (
    "architectures", "dtype", "torch_dtype", "num_labels", "transformers_version", "id2label", "label2id",
    "quantization_config",
)  # fmt: skip
_SAID = (
    "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range",
    "router_aux_loss_coef", "output_router_logits",
)  # fmt: skip


@dataclass(frozen=True)
class Resumed:
    """Where training goes on. `state` is what was given to `save`; `step` 0 and no state for new optimizer state."""

    directory: Path
    step: int
    tokens: int
    state: Any = None


@names_lost_ranks()
def save(
    engine: Engine, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, keep: int | None = None,
    keep_every: int | None = None, state: Any = None, wait: bool = True,
) -> Path:  # fmt: skip
    """Write `directory/step-000200`, a Hugging Face directory and beside it all that `resume` needs. All ranks call it.

    The weights are in the dtypes of the source, with float32 masters beside them; with `dtype=torch.float32` they are
    their own masters. `keep`: how many checkpoints stay, the last ones; with `keep_every`, those of every so many steps
    stay too. `state`: yours, such as the position in your data; it must be JSON, and the same on all ranks.

    With `wait=False` it returns as soon as all is copied (into host memory, as much as weights and optimizer state
    take), and a thread writes it. The next call that trains, saves or resumes, or `engine.wait()`, raises if that
    failed.
    """
    content = _content(engine, directory, Choices(dtype), Keep(keep, keep_every), state)
    doing(f"the saving of step {engine.steps}")
    if wait:
        disk.save(content, engine.model.mesh)
    else:
        engine.saving = disk.SaveJob(content, engine.model.mesh)
    return disk.final_place(content.folder, content.step)


def _content(engine: Engine, directory: str | os.PathLike[str], choices: Choices, keep: Keep, state: object) -> Content:
    """What all ranks have agreed to write."""
    model = _model_of(engine, "save")
    folder = _path(directory)

    def propose() -> Proposal:
        engine.settle_saving(wait=True)
        check_ready(model, engine.trained)
        _check_keep(keep)
        for values in _values(engine).values():
            check_pieces(model, values.stored, engine.state_layout.pieces)
        refuse_overflow(model, choices)
        text = _json(state)
        given = {"directory": str(folder), "dtype": choices.dtype, **asdict(keep), "state": text, "step": engine.steps}
        return Proposal(settings={f"{name}=": value for name, value in given.items()})

    agree(model, "save", propose)
    at = exported(model, folder, choices)
    kept = dtypes_of(model, engine.optimizer, engine.state_layout) if engine.optimizer.steps else {}
    return Content(
        step=engine.steps,
        spec=engine.state_layout.spec,
        planes=disk.planes_of(engine.state_layout.spec.table, at.keymap, model.kept, kept),
        values=_values(engine),
        export=at,
        trainer={**_trainer(engine), "state": state},
        random=_generators(model),
        about=_about(model),
        keep=keep,
    )  # fmt: skip


def _model_of(engine: Engine, call: str) -> Model:
    given: object = engine
    if not isinstance(given, Engine):
        raise ConfigError(
            f"mw.{call} takes an engine, not a {type(given).__name__}; give what mw.Engine returned (weights alone: "
            "mw.export(model, directory), mw.load)"
        )
    return engine.model


def _path(directory: str | os.PathLike[str]) -> Path:
    given: object = directory
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(f"{directory!r} is no path; give the folder of the checkpoints")
    if disk.is_url(directory):
        raise CheckpointError(
            f"{directory} is no directory: all ranks write into one file at once, and read from its middle, which no "
            "object store can; give a directory, and `meshwright copy` carries checkpoints to a store and back"
        )
    return weights.path_of(directory).absolute()


def _check_keep(keep: Keep) -> None:
    given: dict[str, object] = {"keep": keep.last, "keep_every": keep.every}
    for name, number in given.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{name}={number!r} must be a number of checkpoints or steps above 0")
    if keep.every and keep.last is None:
        raise ConfigError(f"keep_every={keep.every} says which stay beside the last ones; give keep= too")


def _json(state: object) -> str:
    try:
        return json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"state= is no JSON: {error}; give numbers, strings, lists and dicts, and save tensors in a file of yours"
        ) from error


def _values(engine: Engine) -> Mapping[str, weights.Values]:
    """Return this rank's pieces. State of an empty piece was never made."""
    values, optimizer = engine.model.values(), engine.optimizer
    trained = {name: values[name] for name in engine.trained if name in values}
    state = optimizer.by_name({**optimizer.new_state(trained, empty=True), **optimizer.state})
    return {WEIGHTS: values, MASTER: values} | {name: weights.Values(tensors) for name, tensors in state.items()}


def _trainer(engine: Engine) -> dict[str, Any]:
    return {
        "step": engine.steps,
        "tokens": engine.tokens,
        "head": engine.model.blueprint.head,
        "tower": engine.model.blueprint.tower,
        "trained": engine.trained,
        "settings": _settings(engine),
        "router_load": engine.router.trained_load.tolist(),
    }


def _settings(engine: Engine) -> dict[str, Any]:
    """What shapes the training, and may be changed between two runs: who changes it is told."""
    options = engine.optimizer.options.settings()
    return {**options, "max_norm": engine.max_norm, "router_aux": engine.router.mode}


def _generators(model: Model) -> dict[str, bytes]:
    """Of this rank. The engine draws nothing; a loss of the user's may."""
    states = {"host": torch.get_rng_state()}
    if model.mesh.device != model.mesh.host:
        states["device"] = torch.get_device_module(model.mesh.device).get_rng_state(model.mesh.device)
    return {name: bytes(state.cpu().numpy()) for name, state in states.items()}


def _about(model: Model) -> dict[str, Any]:
    return about_model(model.blueprint) | {"mesh": str(model.mesh.axes), "compute": str(model.dtype)}


def about_model(blueprint: Blueprint) -> dict[str, Any]:
    """For people, wherever it was saved."""
    return {
        "model": str(blueprint.config.get("model_type")),
        "parameters": sum(param.numel for param in blueprint.table),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@names_lost_ranks()
def resume(engine: Engine, directory: str | os.PathLike[str], *, new_config: str | Sequence[str] = ()) -> Resumed:
    """Go on from a checkpoint, or from the newest whole one of a folder, on whatever mesh. All ranks call it.

    It replaces weights, optimizer state and counters of `engine`; every byte is checked against its checksum, and in a
    folder an older checkpoint takes the place of a damaged one, with a warning. A Hugging Face directory gives its
    weights alone, and says so. `new_config`: fields of `config.json` that are meant to differ from those that were
    saved, such as "rope_theta".
    """
    model = _model_of(engine, "resume")
    path, new_config = _path(directory), [new_config] if isinstance(new_config, str) else list(new_config)
    doing(f"the resuming of {path}")

    def prepare() -> tuple[None, Mapping[str, object], Data]:
        engine.settle_saving(wait=True)
        return None, {**identity(model), "directory": str(path), "new_config": str(sorted(new_config))}, Data()

    compare(model.mesh, "resume", prepare)
    damaged: list[Path] = []  # of rank 0
    while True:
        source = _opened(model, path, damaged)
        if isinstance(source, weights.Source):
            return _weights_alone(engine, source, new_config)
        try:
            return _resumed(engine, source, new_config)
        except BrokenCheckpointError as error:
            if source.directory.parent != path or model.mesh.rank == 0:  # which says it for all
                disk.pass_over(path, source.directory, error, damaged)


def _resumed(engine: Engine, source: Checkpoint, new_config: Sequence[str]) -> Resumed:
    model, trainer = engine.model, source.trainer
    _check_tower(model, source.directory, trainer.get("tower", False))
    blueprint = _drawn(model, source.planes[WEIGHTS], trainer["head"])
    planes = state_of(source, engine.optimizer.options)
    _check_same(engine, source, blueprint, trainer)
    _check_same_config(model, blueprint, source.directory, new_config)
    trained = {*engine.trained}
    stored = {name: tensor for name, tensor in model.stored().items() if name in trained}
    quantised = quantised_in(source, planes, engine.trained)
    state = to_be_read(engine.optimizer, stored, quantised) if planes else {}
    spec = replace(model.blueprint.spec, table=blueprint.table)
    spec = spec_with(spec, model.mesh, quantised, f"resume {source.directory.name} on another mesh")
    live, same = model.values().apart
    wanted = [RestoreTarget(source.parameters, live, frozenset(model.table.params), same)]
    names = frozenset(trained.union(names_of_scales(quantised)))
    for name, tensors in engine.optimizer.by_name(state).items() if planes else ():
        wanted.append(RestoreTarget(source.planes[name], tensors, names))
    if model.numbers:
        disk.check_frozen(source, spec, blueprint.keymap.choice, wanted, model.mesh)
    with _replacing(engine, source.directory):
        disk.restore(source, spec, blueprint.keymap.choice, wanted, model.mesh)
    _set(engine, source)
    take_state(engine.optimizer, state, stored, quantised)
    return Resumed(source.directory, engine.steps, engine.tokens, trainer["state"])


def _opened(model: Model, path: Path, damaged: list[Path]) -> Checkpoint | weights.Source:
    """As rank 0 finds it, for all ranks: a thousand of them need not read every header."""

    def look() -> Checkpoint | weights.Source | None:
        if model.mesh.rank:
            return None
        plain = (path / weights.CONFIG).is_file() and not disk.is_checkpoint(path)
        return weights.open_source(path) if plain else disk.open_newest(path, damaged)

    found = disk.together(look, f"the resuming of {path}", model.mesh, f"{path} cannot be resumed")
    opened: Checkpoint | weights.Source = model.mesh.broadcast_object(found)
    return opened


def _check_tower(model: Model, at: Path, tower: bool) -> None:
    """Refuse a tower that is trained on one side alone: one that was kept as it is has no optimizer state."""
    if tower != model.blueprint.tower:
        raise CheckpointError(
            f"{at} was saved with tower={tower}, and the engine's model has tower={model.blueprint.tower}; load that "
            f"with tower={tower}, or begin anew from the weights: mw.load({str(at)!r}, tower={model.blueprint.tower})"
        )


def _drawn(model: Model, source: weights.Source, head: str) -> Blueprint:
    """The model of the checkpoint, spelled as its files spell it."""
    if head != model.blueprint.head:
        raise CheckpointError(
            f"{source.directory} has head={head!r}, the engine's model head={model.blueprint.head!r}; load the model "
            f"with head={head!r}"
        )
    stored = torch.promote_types(model.dtype, torch.float32)
    return Blueprint.of(weights.read_config(source.directory), source, model.blueprint.recipe, stored=stored)


def _check_same(engine: Engine, checkpoint: Checkpoint, blueprint: Blueprint, trainer: Mapping[str, Any]) -> None:
    """The same parameters in the same shapes, and the same of them trained. What else differs is said."""
    model, at = engine.model, checkpoint.directory
    _check_same_table(model, blueprint, at)
    trained = set(trainer["trained"])
    if trained != set(engine.trained):
        odd = min(trained ^ set(engine.trained))
        whose = "the checkpoint" if odd in trained else "this engine"
        raise CheckpointError(
            f"{at} trained {len(trained)} parameters, this engine trains {len(engine.trained)}; {odd} is trained by "
            f"{whose} alone. Give mw.load the same train="
        )
    if model.mesh.rank == 0:
        then_set = trainer["settings"]  # nothing, in what was converted from another kind
        for name, now, then in _differences({n: v for n, v in _settings(engine).items() if n in then_set}, then_set):
            logger.warning("%s was %s in %s, and is %s now", name, then, at.name, now)
        mesh = checkpoint.manifest.about.get("mesh")
        if mesh != str(model.mesh.axes):
            logger.info("%s was saved on %s, and is resumed on %s", at.name, mesh, model.mesh.axes)


def _check_same_table(model: Model, blueprint: Blueprint, at: Path) -> None:
    mine, theirs = model.table.params, blueprint.table.params
    kinds = model.config.get("model_type"), blueprint.config.get("model_type")
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"{at} is a {kinds[1]}, the engine's model a {kinds[0]}; resume with the model it is of")
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs or mine[name].dims != theirs[name].dims:
            there, here = (p[name].dims if name in p else "nothing" for p in (theirs, mine))
            raise CheckpointError(f"{name} is {there} in {at}, and {here} here; resume with the model that was saved")
    if blueprint.keymap.fresh:
        raise CheckpointError(f"{at} lacks {min(blueprint.keymap.fresh)}; give a checkpoint that has it")


def _check_same_config(model: Model, blueprint: Blueprint, at: Path, new_config: Sequence[str]) -> None:
    """Refuse another `config.json` than the one that was saved: the same weights would compute other values."""
    for name, now, then in _differences(_flat(model.config), _flat(blueprint.config)):
        field = name.rpartition(".")[2]
        if {*name.split(".")} & {*_NO_MATTER}:
            continue
        if field not in _SAID and name not in new_config and field not in new_config:
            raise CheckpointError(
                f"{name} of config.json was {then} in {at}, and is {now} now, so the model would compute other values "
                f"than those that it was trained to; load the model with the config.json of {at}, or say that it is "
                f"meant: mw.resume(engine, directory, new_config=[{name!r}])"
            )
        if model.mesh.rank == 0:
            logger.warning("%s of config.json was %s in %s, and is %s now", name, then, at.name, now)


def _flat(config: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Fields of fields under one name: `text_config.rope_theta`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{inside}{name}.") if isinstance(value, Mapping) else {inside + name: value}
    return flat


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    names = [name for name in {**now, **then} if now.get(name) != then.get(name)]
    return [(name, now.get(name), then.get(name)) for name in names]


@contextlib.contextmanager
def _replacing(engine: Engine, directory: Path) -> Iterator[None]:
    """A model that is replaced in part is worth nothing, until a resume goes through."""
    engine.discard()
    calls = engine.model.calls
    calls.half_updated = f"the resuming of {directory} failed, and some parameters may be replaced"
    yield
    calls.half_updated = ""
    engine.model.blueprint = replace(engine.model.blueprint, origin=f"the checkpoint {directory}")


def _set(engine: Engine, checkpoint: Checkpoint) -> None:
    trainer = checkpoint.trainer
    engine.steps = engine.optimizer.steps = trainer["step"]
    engine.tokens = trainer["tokens"]
    engine.router.resume(trainer["router_load"])
    rows = checkpoint.random_rows(engine.model.mesh)
    if rows:
        torch.set_rng_state(rows["host"])
        if "device" in rows and engine.model.mesh.device != engine.model.mesh.host:
            torch.get_device_module(engine.model.mesh.device).set_rng_state(rows["device"], engine.model.mesh.device)


def _weights_alone(engine: Engine, source: weights.Source, new_config: Sequence[str]) -> Resumed:
    """Take the weights of a Hugging Face directory, and begin with new optimizer state."""
    model = engine.model
    blueprint = _drawn(model, source, model.blueprint.head)
    _check_same_table(model, blueprint, source.directory)
    _check_same_config(model, blueprint, source.directory, new_config)
    spec = replace(model.blueprint.spec, table=blueprint.table)
    alone, found = range(model.mesh.rank, model.mesh.rank + 1), blueprint.keymap.source or source
    live, same = model.values().apart
    keymap, axes, rank = blueprint.keymap, model.mesh.axes, model.mesh.rank

    def compare() -> None:
        weights.check_same(same, rank, list(weights.plan_reads(spec, axes, alone, keymap, same)), found)

    def read() -> None:
        weights.fill(live, model.mesh, list(weights.plan_reads(spec, axes, alone, keymap, live)), alone, found)

    at, what = f"the reading of {source.directory}", f"{source.directory} cannot be resumed"
    if model.numbers:
        model.mesh.together(compare, at, CheckpointError, what)
    with _replacing(engine, source.directory):
        model.mesh.together(read, at, CheckpointError, what)
    engine.steps = engine.optimizer.steps = engine.tokens = 0
    engine.optimizer.state = {}
    if model.mesh.rank == 0:
        logger.warning("%s holds weights alone: optimizer state begins at zero, and steps at 0", source.directory)
    return Resumed(source.directory, 0, 0)
