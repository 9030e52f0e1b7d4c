"""Save a checkpoint with everything that training needs, and resume from it on any mesh.

A checkpoint names tensors as Hugging Face files do and stores them whole, so it knows nothing of the mesh that wrote
it: each rank of another mesh reads its own pieces. All ranks agree on the content before a byte is written, and a
resume refuses whatever would make the same weights compute other values.
"""

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
from .adapters import adapter_record, check_same_adapters, saved_part
from .agreement import Data, Proposal, agree, check_ready, compare, identity
from .engine import Engine
from .export import ExportOptions, check_pieces, export_plan, refuse_overflow
from .model import Model
from .optimizer_state import dtypes_of, quantised_in, spec_with, state_of, take_state, to_be_read
from .resume_checks import (
    carried_before,
    check_adapter_keys,
    check_carried_mtp,
    check_mtp,
    check_same,
    check_same_config,
    check_same_table,
    check_state,
    check_tower,
    settings_of,
)


@dataclass(frozen=True)
class Resumed:
    """The position of a resumed run. `state`: the `state=` of the save. If the source has no optimizer state, `step` is
    0 and `state` None."""

    directory: Path
    step: int
    tokens: int
    state: Any = None


@names_lost_ranks()
def save(
    engine: Engine, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, keep: int | None = None,
    keep_every: int | None = None, state: Any = None, wait: bool = True,
) -> Path:  # fmt: skip
    """Write `directory/step-000200`: a Hugging Face directory that also holds all that `resume` needs. All ranks call
    it.

    Weights are in the dtypes of the source, with float32 masters in separate files; with `dtype=torch.float32` the
    weights are their own masters. `keep`: how many of the latest checkpoints stay; with `keep_every=N`, those of every
    Nth step stay too. `state`: yours, such as the position in your data; it must be JSON, and equal on all ranks.

    With `wait=False` it returns once weights and optimizer state are copied to host memory, and a thread writes the
    files. If that fails, the next call that trains, saves or resumes raises, and so does `engine.wait()`.
    """
    content = _content(engine, directory, ExportOptions(dtype), Keep(keep, keep_every), state)
    doing(f"saving step {engine.steps}")
    if wait:
        disk.save(content, engine.model.mesh)
    else:
        engine.saving = disk.SaveJob(content, engine.model.mesh)
    return disk.final_place(content.folder, content.step)


def _content(
    engine: Engine, directory: str | os.PathLike[str], choices: ExportOptions, keep: Keep, state: object
) -> Content:
    """Return what this rank contributes, after all ranks have agreed to write the same checkpoint.

    Whatever can be refused is refused in `propose`. So no rank raises while others already write, and a refused save
    leaves no files.
    """
    model = _checked_model(engine, "save")
    folder = _checked_path(directory)

    def propose() -> Proposal:
        engine.settle_saving(wait=True)  # two saves at once would write into the same folder
        # Gradients are not saved, so none may wait for an update: a resumed run would skip it.
        check_ready(model, engine.trained)
        _check_keep(keep)
        # Weights, masters and optimizer state must all have the shapes of this rank's pieces, scales included.
        for values in _values_to_save(engine).values():
            check_pieces(model, values.stored, engine.state_layout.pieces)
        refuse_overflow(model, choices)
        text = _checked_json(state)
        fields = {"directory": str(folder), "dtype": choices.dtype, **asdict(keep), "state": text, "step": engine.steps}
        return Proposal(settings={f"{name}=": value for name, value in fields.items()})

    agree(model, "save", propose)
    at = export_plan(model, folder, choices)
    spec = engine.state_layout.spec
    if model.recipe.lora is not None:
        table, keymap = saved_part(model, spec.table)
        at, spec = replace(at, keymap=keymap), spec.with_table(table, model.mesh.axes.pp)
    kept = {name: dtype for name, dtype in model.kept.items() if name in spec.table.params}
    # Before the first step the optimizer has no state, and none is written.
    state_dtypes = dtypes_of(model, engine.optimizer, engine.state_layout) if engine.optimizer.steps else {}
    return Content(
        step=engine.steps,
        spec=spec,
        planes=disk.planes_of(spec.table, at.keymap, kept, state_dtypes),
        values=_values_to_save(engine),
        export=at,
        trainer={**_trainer(engine), "state": state},
        random=_random_states(model),
        about=_provenance(model),
        keep=keep,
    )  # fmt: skip


def _checked_model(engine: Engine, call: str) -> Model:
    """Return the model of an engine. Refuse anything else, such as the model itself."""
    argument: object = engine
    if not isinstance(argument, Engine):
        raise ConfigError(
            f"mw.{call} takes an engine, not a {type(argument).__name__}; give what mw.Engine returned (weights only: "
            "mw.export(model, directory), mw.load)"
        )
    return engine.model


def _checked_path(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory. Refuse URLs of object stores (decision 0007)."""
    argument: object = directory
    if not isinstance(argument, str | os.PathLike):
        raise CheckpointError(f"{directory!r} is not a path; give the folder of the checkpoints")
    if disk.is_url(directory):
        raise CheckpointError(
            f"{directory} is not a directory: all ranks write parts of one file at once and read from its middle, "
            "which no object store allows; save to a directory, and use `meshwright copy` to move checkpoints to a "
            "store and back"
        )
    return weights.path_of(directory).absolute()


def _check_keep(keep: Keep) -> None:
    """Refuse counts below 1, and `keep_every` without `keep`."""
    arguments: dict[str, object] = {"keep": keep.last, "keep_every": keep.every}
    for name, number in arguments.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{name}={number!r} must be a number of checkpoints or steps above 0")
    if keep.every and keep.last is None:
        raise ConfigError(f"keep_every={keep.every} exempts checkpoints from the limit that keep= sets; give keep= too")


def _checked_json(state: object) -> str:
    """Return the caller's state as JSON text, which ranks compare. NaN is refused: JSON has none."""
    try:
        return json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"state= is not JSON: {error}; give numbers, strings, lists and dicts, and save tensors in your own file"
        ) from error


def _values_to_save(engine: Engine) -> Mapping[str, weights.Values]:
    """Return this rank's pieces by state set. An empty piece has no optimizer state in memory, so it is made now.

    Weights and masters are the same tensors: the writer rounds the former to the dtypes of the files.
    """
    model, optimizer = engine.model, engine.optimizer
    saved = saved_part(model, model.table)[0].params
    values = model.values() if model.recipe.lora is None else model.values().only(saved.__contains__)
    trained = {name: values[name] for name in engine.trained if name in values}
    state = optimizer.by_name({**optimizer.new_state(trained, empty=True), **optimizer.state})
    return {WEIGHTS: values, MASTER: values} | {name: weights.Values(tensors) for name, tensors in state.items()}


def _trainer(engine: Engine) -> dict[str, Any]:
    """Return the counters and settings of trainer.json.

    Head, tower and trained parameters define which tensors exist. A resume compares them before it reads any.
    """
    return {
        "step": engine.steps,
        "tokens": engine.tokens,
        "head": engine.model.blueprint.head,
        "tower": engine.model.blueprint.tower,
        "trained": engine.trained,
        "settings": settings_of(engine),
        "router_load": engine.router.trained_load.tolist(),
        **({} if engine.mtp is None else {"mtp_router_load": engine.mtp.router.trained_load.tolist()}),
        "lora": adapter_record(engine.model),
        "frozen": engine.model.recipe.frozen,
    }


def _random_states(model: Model) -> dict[str, bytes]:
    """Return the states of this rank's random generators. The engine draws no numbers, but a user's loss may."""
    states = {"host": torch.get_rng_state()}
    if model.mesh.device != model.mesh.host:
        states["device"] = torch.get_device_module(model.mesh.device).get_rng_state(model.mesh.device)
    return {name: bytes(state.cpu().numpy()) for name, state in states.items()}


def _provenance(model: Model) -> dict[str, Any]:
    """Return the `about` of the manifest."""
    return about_model(model.blueprint) | {"mesh": str(model.mesh.axes), "compute": str(model.dtype)}


def about_model(blueprint: Blueprint) -> dict[str, Any]:
    """Describe a checkpoint to a human reader: model, size, torch version, date. Nothing reads it back."""
    return {
        "model": str(blueprint.config.get("model_type")),
        "parameters": sum(param.numel for param in blueprint.table),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@names_lost_ranks()
def resume(engine: Engine, directory: str | os.PathLike[str], *, new_config: str | Sequence[str] = ()) -> Resumed:
    """Resume from a checkpoint, or from the newest whole one in a folder, on any mesh. All ranks call it.

    It replaces weights, optimizer state and counters of `engine`. Every byte is verified by its checksum. In a folder,
    a damaged checkpoint is skipped with a warning, and the next older one is used. From a Hugging Face directory only
    weights are read, with a warning. `new_config`: fields of `config.json` that may differ from the saved ones, such as
    "rope_theta".
    """
    model = _checked_model(engine, "resume")
    path, new_config = _checked_path(directory), [new_config] if isinstance(new_config, str) else list(new_config)
    doing(f"resuming from {path}")

    def prepare() -> tuple[None, Mapping[str, object], Data]:
        model.calls.asleep.check()
        engine.settle_saving(wait=True)
        return None, {**identity(model), "directory": str(path), "new_config": str(sorted(new_config))}, Data()

    compare(model.mesh, "resume", prepare)
    damaged: list[Path] = []  # known on rank 0, which chooses the checkpoint for all ranks
    while True:
        source = _open_on_rank_0(model, path, damaged)
        if isinstance(source, weights.Source):
            return _resume_weights_only(engine, source, new_config)
        try:
            return _resumed(engine, source, new_config)
        except BrokenCheckpointError as error:
            # A checkpoint that was named itself has no replacement: all ranks raise. In a folder rank 0 notes it as
            # damaged, and the next turn of the loop opens the one before.
            if disk.is_named(path, source.directory) or model.mesh.rank == 0:
                disk.pass_over(path, source.directory, error, damaged)


def _resumed(engine: Engine, source: Checkpoint, new_config: Sequence[str]) -> Resumed:
    """Restore everything from a checkpoint: first all checks, then the tensors, then the counters."""
    model, trainer = engine.model, source.trainer
    check_tower(model, source.directory, trainer.get("tower", False))
    check_same_adapters(model, trainer.get("lora"), source.directory)
    check_mtp(model, trainer["trained"], source.directory)
    check_carried_mtp(model, source.planes[WEIGHTS])
    # Raise for anything that differs before a tensor is overwritten, so that a refused resume leaves a usable model.
    blueprint = _blueprint_of(model, source.planes[WEIGHTS], trainer["head"])
    planes = state_of(source, engine.optimizer, engine.trained)
    check_same(engine, source, blueprint, trainer)
    check_same_config(model, blueprint, source.directory, new_config)
    # Optimizer state is read in the form of the checkpoint (8 bits or wide), which may differ from the engine's.
    trained = {*engine.trained} - {*carried_before(engine, trainer)}
    stored = {name: tensor for name, tensor in model.stored().items() if name in trained}
    quantised = quantised_in(source, planes, [name for name in engine.trained if name in trained])
    if planes:
        check_state(engine, source, blueprint, trained, quantised)
    state = to_be_read(engine.optimizer, stored, quantised) if planes else {}
    spec = model.blueprint.spec.with_table(blueprint.table, model.mesh.axes.pp)
    spec = spec_with(spec, model.mesh, quantised, f"resume {source.directory.name} on another mesh")
    # Frozen FP8 weights are compared with the checkpoint, not replaced: their codes come from the model's own files.
    live, frozen_fp8 = model.values().only(blueprint.table.params.__contains__).apart
    wanted = [RestoreTarget(source.parameters, live, frozenset(blueprint.table.params), frozen_fp8)]
    # One target per state set: weights (from float32 masters, if any), then each tensor of optimizer state.
    has = engine.optimizer.state_names
    for name, tensors in ((name, engine.optimizer.by_name(state)[name]) for name in planes):
        names = {param for param in trained if name in has[param]} | {*names_of_scales(quantised)}
        wanted.append(RestoreTarget(source.planes[name], tensors, frozenset(names)))
    if model.numbers and model.recipe.lora is None:  # on all ranks or none: it is collective
        disk.check_frozen(source, spec, blueprint.keymap.choice, wanted, model.mesh)
    with _marked_half_restored(engine, source.directory):
        disk.restore(source, spec, blueprint.keymap.choice, wanted, model.mesh)
    # The step counts into the stochastic rounding of 8-bit state, so counters come first.
    _restore_counters(engine, source)
    take_state(engine.optimizer, state, stored, quantised)
    return Resumed(source.directory, engine.steps, engine.tokens, trainer["state"])


def _open_on_rank_0(model: Model, path: Path, damaged: list[Path]) -> Checkpoint | weights.Source:
    """Open the checkpoint on rank 0, and broadcast its description. A thousand ranks that read every header would
    overload a shared file system."""

    def open_it() -> Checkpoint | weights.Source | None:
        if model.mesh.rank:
            return None
        plain = (path / weights.CONFIG).is_file() and not disk.is_checkpoint(path)
        return weights.open_source(path) if plain else disk.open_newest(path, damaged)

    on_rank_0 = disk.together(open_it, f"the opening of {path}", model.mesh, f"{path} cannot be resumed")
    opened: Checkpoint | weights.Source = model.mesh.broadcast_object(on_rank_0)
    return opened


def _blueprint_of(model: Model, source: weights.Source, head: str) -> Blueprint:
    """Return the blueprint of the checkpoint's own config and files: its key names may differ from the model's."""
    # A value head in place of the vocabulary is another model, even if all other shapes agree.
    if head != model.blueprint.head:
        raise CheckpointError(
            f"{source.directory} has head={head!r}, but the engine's model has head={model.blueprint.head!r}; load the "
            f"model with head={head!r}"
        )
    config, stored = weights.read_config(source.directory), torch.promote_types(model.dtype, torch.float32)
    if model.recipe.lora is None:
        return Blueprint.of(config, source, model.blueprint.recipe, stored=stored)
    table, keymap = saved_part(model, model.table)
    check_adapter_keys(source, keymap)
    spec = model.blueprint.spec.with_table(table, model.mesh.axes.pp)
    return replace(model.blueprint, config=config, spec=spec, keymap=keymap)


@contextlib.contextmanager
def _marked_half_restored(engine: Engine, directory: Path) -> Iterator[None]:
    """Mark the model as half updated while its tensors are replaced. If that fails, the mark stays until a resume
    succeeds; on success the checkpoint becomes the model's origin. A checkpoint of adapters replaces no base."""
    engine.discard()  # gradients of the replaced weights
    calls = engine.model.calls
    calls.half_updated = f"the resume from {directory} failed, and some parameters may be replaced"
    yield
    calls.half_updated = ""
    if engine.model.recipe.lora is None:
        engine.model.blueprint = replace(engine.model.blueprint, origin=f"the checkpoint {directory}")


def _restore_counters(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore counters, expert load, and the random generators.

    Generators belong to ranks. If another number of ranks saved, they are left as they are: no choice would continue
    the same random numbers.
    """
    trainer = checkpoint.trainer
    engine.steps = engine.optimizer.steps = trainer["step"]
    engine.tokens = trainer["tokens"]
    engine.router.resume(trainer["router_load"])
    if engine.mtp is not None:
        engine.mtp.router.resume(trainer.get("mtp_router_load"))
    rows = checkpoint.random_rows(engine.model.mesh)
    if rows:
        torch.set_rng_state(rows["host"])
        if "device" in rows and engine.model.mesh.device != engine.model.mesh.host:
            torch.get_device_module(engine.model.mesh.device).set_rng_state(rows["device"], engine.model.mesh.device)


def _resume_weights_only(engine: Engine, source: weights.Source, new_config: Sequence[str]) -> Resumed:
    """Take the weights of a Hugging Face directory, and start with new optimizer state.

    An export is such a directory, for example. Step 0 restarts the schedule of the learning rate too, so a warning says
    so.
    """
    model = engine.model
    if model.recipe.lora is not None:
        raise CheckpointError(
            f"{source.directory} holds the weights of a model, and the engine's has adapters (LoRA); resume a "
            "checkpoint of adapters, or load it as the base: mw.load(..., lora=)"
        )
    check_carried_mtp(model, source)
    blueprint = _blueprint_of(model, source, model.blueprint.head)
    check_same_table(model, blueprint, source.directory)
    check_same_config(model, blueprint, source.directory, new_config)
    spec = replace(model.blueprint.spec, table=blueprint.table)
    # Each rank reads its own bytes, as `mw.load(read="rank")` does.
    alone, files = range(model.mesh.rank, model.mesh.rank + 1), blueprint.keymap.source or source
    live, frozen_fp8 = model.values().apart
    keymap, axes, rank = blueprint.keymap, model.mesh.axes, model.mesh.rank

    # As in `_resumed`: frozen FP8 weights must be those of the files; all others are replaced.
    def check_frozen() -> None:
        weights.check_same(frozen_fp8, rank, list(weights.plan_reads(spec, axes, alone, keymap, frozen_fp8)), files)

    def read() -> None:
        weights.fill(live, model.mesh, list(weights.plan_reads(spec, axes, alone, keymap, live)), alone, files)

    at, what = f"the reading of {source.directory}", f"{source.directory} cannot be resumed"
    if model.numbers:
        model.mesh.together(check_frozen, at, CheckpointError, what)
    with _marked_half_restored(engine, source.directory):
        model.mesh.together(read, at, CheckpointError, what)
    # The bias correction of AdamW counts from its own first step.
    engine.steps = engine.optimizer.steps = engine.tokens = 0
    engine.optimizer.state = {}
    engine.router.resume()
    if engine.mtp is not None:
        engine.mtp.router.resume()
    if model.mesh.rank == 0:
        logger.warning("%s holds weights alone: optimizer state begins at zero, steps at 0", source.directory)
    return Resumed(source.directory, 0, 0)
