"""Convert checkpoints between three kinds: Hugging Face, torch.distributed.checkpoint (DCP), and Meshwright's own.

One process reads a tensor at a time and writes it before the next one, so a model may be larger than the memory. The
exception is writing DCP: its writer takes the whole state dict, whose tensors are memory-mapped where possible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint as disk
from .. import weights
from ..blueprint import Blueprint
from ..checkpoint import MASTER, PARAMETERS, WEIGHTS, StateSet
from ..errors import CheckpointError, ConfigError
from ..log import progress
from ..models import PREFIX, VISUAL
from ..optim import names_of_scales, with_scales
from ..optim.int8_state import is_quantised
from ..recipe import Recipe
from ..sharding import MTP, Param, Table
from ..weights import DTYPES, Extents, Files, KeyMap
from ..weights.peft_files import check_has_base
from .checkpoint import about_model
from .export import config_of
from .optimizer_state import COUNTERS, file_key, state_key

HF, TORCH, MESHWRIGHT = "hf", "dcp", "meshwright"
LOADS = ("router_load", "mtp_router_load")  # the second one for a trained MTP head
LazyTensors = Mapping[str, Callable[[], Tensor]]  # by key of the files; a call reads the tensor


@dataclass(frozen=True)
class State:
    """The state that a source holds. `blueprint`: the model, with the key names of the source's files (of `like`, for a
    source that has none)."""

    kind: str
    blueprint: Blueprint
    planes: Mapping[str, LazyTensors]  # by state set: weights, and each tensor of optimizer state
    step: int = 0
    tokens: int = 0
    router_load: tuple[tuple[float, ...], ...] = ()
    mtp_router_load: tuple[tuple[float, ...], ...] = ()

    @property
    def keymap(self) -> KeyMap:
        return self.blueprint.keymap

    @property
    def of_optimizer(self) -> list[str]:
        """Return the state sets of the optimizer, whichever optimizer it is."""
        return sorted(name for name in self.planes if name not in PARAMETERS)


def convert(
    source: Path, target: Path, to: str, *, like: Path | None = None, dtype: torch.dtype | None = None
) -> Path:  # fmt: skip
    """Convert `source`, and return the path that was written.

    `to`: the kind to write. `dtype`: the dtype of the weights. `like`: a Hugging Face directory with config and key
    names, for a DCP source, which has neither.
    """
    try:
        return _convert(_read_state(source, like), source, target, to, dtype)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error}") from error


def _convert(state: State, source: Path, target: Path, to: str, dtype: torch.dtype | None) -> Path:
    """Write a state in another kind, with a progress bar."""
    if state.kind == to:
        raise CheckpointError(f"{source} is already of the kind {to}; copy it")
    if to == TORCH and dtype is not None:
        raise ConfigError("torch's checkpoints hold tensors in the dtypes of the engine; leave --dtype out")
    if to == MESHWRIGHT and not state.of_optimizer:
        raise CheckpointError(
            f"{source} has no optimizer state to convert; mw.resume(engine, directory) reads its weights as they are"
        )
    # A Hugging Face directory takes the weights only.
    total = sum(len(keys) for plane, keys in state.planes.items() if to != HF or plane == WEIGHTS)
    with progress(f"convert {source} to {target}", total, "tensors", enabled=True) as advance:
        if to == TORCH:
            return _write_torch(state, target, advance)
        return (_write_hf if to == HF else _write_meshwright)(state, target, dtype, advance)


def _read_state(source: Path, like: Path | None) -> State:
    """Open a source; its files show its kind. A Meshwright checkpoint also has a config.json."""
    check_has_base(source)
    if (source / disk.TORCH_LIST).is_file():
        return _read_torch(source, like)
    if (source / weights.CONFIG).is_file() and not disk.is_checkpoint(source):
        files = weights.open_source(source)
        blueprint = Blueprint.of(weights.read_config(source), files, directory=source)
        return State(HF, blueprint, {WEIGHTS: _lazy_tensors(files.scaled_by(blueprint.config), blueprint)})
    return _read_meshwright(source)


def _read_meshwright(source: Path) -> State:
    """Open a Meshwright checkpoint. All checksums are verified first, since tensors are then read in any order."""
    checkpoint = disk.opened_at(source)
    check_has_base(checkpoint.directory)
    errors = disk.check_bytes(checkpoint)
    if errors:
        raise CheckpointError(f"{checkpoint.directory} is broken: {errors[0]} ({len(errors)} such runs)")
    trainer = checkpoint.trainer
    mtp = "head" if any(name.startswith(MTP) for name in trainer["trained"]) else "carried"
    recipe = Recipe(head=trainer["head"], tower=trainer.get("tower", False), mtp=mtp)
    config = weights.read_config(checkpoint.directory)
    blueprint = Blueprint.of(config, checkpoint.planes[WEIGHTS], recipe, directory=checkpoint.directory)
    # `parameters` are the float32 masters, if any: the weights next to them are rounded.
    planes = {WEIGHTS: _lazy_tensors(checkpoint.parameters, blueprint)}
    planes |= {
        name: _lazy_tensors(plane, blueprint) for name, plane in checkpoint.planes.items() if name not in PARAMETERS
    }
    loads = [tuple(map(tuple, trainer.get(name, ()))) for name in LOADS]
    return State(MESHWRIGHT, blueprint, planes, trainer["step"], trainer["tokens"], *loads)


def _read_torch(source: Path, like: Path | None) -> State:
    """Open a DCP checkpoint of `engine.state_dict()`.

    It has names and shapes, but no config: head and vision tower are inferred from the keys, all else comes from
    `like`.
    """
    if like is None:
        raise CheckpointError(
            f"{source} has no config.json, which gives the model and its key names; give --like, a Hugging Face "
            "directory"
        )
    dcp, files = disk.TorchFiles(source), weights.open_source(like)
    names = {name.split(".", 1)[0] for name in dcp.shapes}
    planes: dict[str, LazyTensors] = {}
    shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}
    # DCP flattens nested dicts to dotted names: `weights.model.norm.weight`, `exp_avg.model.norm.weight`.
    for plane in sorted(names - {COUNTERS}):
        keys = {file_key(name.split(".", 1)[1]): name for name in dcp.shapes if name.startswith(f"{plane}.")}
        shapes[plane] = {key: dcp.shapes[name] for key, name in keys.items()}
        planes[plane] = {key: lambda name=name: dcp.tensor(name) for key, name in keys.items()}  # type: ignore[misc] # mypy misses the default
    # `score.weight` exists only with a value head, and keys of vision tower and MTP head only if they were trained.
    keys_of_weights = {*planes.get(WEIGHTS, {})}
    tower, mtp = (any(key.startswith(prefix) for key in keys_of_weights) for prefix in (VISUAL, PREFIX))
    recipe = Recipe(
        head="value" if "score.weight" in keys_of_weights else "lm", tower=tower, mtp="head" if mtp else "carried"
    )
    blueprint = Blueprint.of(weights.read_config(like), files, recipe, directory=like)
    _drop_foreign(planes, shapes, blueprint)
    _add_frozen(planes, shapes, blueprint)
    _check_state(source, dcp.shapes, shapes, blueprint)
    step, tokens = (int(dcp.tensor(f"{COUNTERS}.{name}")) for name in ("step", "tokens"))
    there = [name if f"{COUNTERS}.{name}" in dcp.shapes else "" for name in LOADS]
    loads = [tuple(map(tuple, dcp.tensor(f"{COUNTERS}.{name}").tolist())) if name else () for name in there]
    return State(TORCH, blueprint, planes, step, tokens, *loads)


def _drop_foreign(
    planes: dict[str, LazyTensors], shapes: dict[str, Mapping[str, tuple[int, ...]]], blueprint: Blueprint
) -> None:
    """Drop what a user saved next to the engine's state dict: without keys of the model it is no optimizer state."""
    # A user's own dict may stand next to the engine's in one DCP checkpoint: `{**engine.state_dict(), "rng": ...}`.
    keys = {*blueprint.keymap.keys, *_shapes_of_scales(blueprint)}
    for plane in [name for name, tensors in planes.items() if name != WEIGHTS and not keys & {*tensors}]:
        del planes[plane], shapes[plane]


def _add_frozen(
    planes: dict[str, LazyTensors], shapes: dict[str, Mapping[str, tuple[int, ...]]], blueprint: Blueprint
) -> None:
    """Add frozen FP8 matrices from the files of `like`: `engine.state_dict()` leaves them out, since nothing changes
    them."""
    files, in_state = blueprint.keymap.source, planes.get(WEIGHTS, {})
    missing = [key for key in _param_keys(blueprint) if key not in in_state]
    frozen = [key for key in missing if files is not None and key in files.scales]
    if files is not None and frozen and WEIGHTS in planes:
        planes[WEIGHTS] = {**in_state, **{key: functools.partial(weights.whole_values, files, key) for key in frozen}}
        shapes[WEIGHTS] = {**shapes[WEIGHTS], **{key: files.entries[key].shape for key in frozen}}


def _check_state(
    source: Path, names: Iterable[str], planes: Mapping[str, Mapping[str, Any]], blueprint: Blueprint
) -> None:
    """Refuse a state with missing keys, or of another model than the blueprint's. `planes`: the shapes."""
    # Counters too: without them a resume would start at step 0 with the optimizer state of a later step.
    missing = {*_param_keys(blueprint)} - {*planes.get(WEIGHTS, {})}
    if missing or not {f"{COUNTERS}.{name}" for name in ("step", "tokens", "router_load")} <= {*names}:
        raise CheckpointError(
            f"{source} lacks {f'weights.{min(missing)}' if missing else COUNTERS}; give a directory that "
            "torch.distributed.checkpoint.save wrote from engine.state_dict(), and --like of the same model"
        )
    expected = {name: key.shape for name, key in blueprint.keymap.keys.items()} | _shapes_of_scales(blueprint)
    for plane, shapes in planes.items():
        for key, shape in shapes.items():
            if shape != expected.get(key):
                raise CheckpointError(
                    f"{plane}.{key} is {shape} in {source}, and {expected.get(key, 'missing')} in "
                    f"{blueprint.directory}; give --like of the same model"
                )


def _param_keys(blueprint: Blueprint) -> Iterator[str]:
    """Yield the keys that hold parameters; other keys of the files are carried unchanged."""
    for param in blueprint.table:
        yield from _keys(blueprint, param)


def _shapes_of_scales(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all scales that optimizer state may have."""
    quantised = [param.name for param in blueprint.table if is_quantised(param)]
    table = with_scales(blueprint.table, quantised)
    return {name: table[name].matrix for name in names_of_scales(quantised)}


def _keys(blueprint: Blueprint, param: Param) -> list[str]:
    """Return the keys that hold one parameter: several, where files keep gate and up, or experts, apart."""
    return [block.key for block in weights.chosen(param, blueprint.keymap.choice).blocks]


def _lazy_tensors(source: weights.Source, blueprint: Blueprint) -> LazyTensors:
    """Return the tensors of parameters in the files, and scales of optimizer state. Files are memory-mapped, so a
    tensor takes memory only while it is in use."""
    wanted = {*_param_keys(blueprint), *_shapes_of_scales(blueprint)}
    keys = [key for key in source.entries if key in wanted]
    return {key: lambda key=key: _read_tensor(source, key) for key in keys}  # type: ignore[misc] # mypy misses the default


def _read_tensor(source: weights.Source, key: str) -> Tensor:
    """Return a tensor of the files, as stored; FP8 and 4-bit weights are dequantised."""
    if key in source.scales:
        return weights.whole_values(source, key)
    entry = source.entries[key]
    path, dtype = source.directory / entry.file, DTYPES[entry.dtype]
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    flat = whole[entry.start : entry.stop]
    # `view(dtype)` needs an aligned start, which safetensors does not promise.
    return (flat if entry.start % dtype.itemsize == 0 else flat.clone()).view(dtype).view(entry.shape)


def _write_torch(state: State, target: Path, advance: Callable[[int], None]) -> Path:
    """Write the state dict that `engine.state_dict()` would return, as DCP files."""
    counters = {"step": torch.tensor(state.step), "tokens": torch.tensor(state.tokens)}
    for name in LOADS[: 1 + (state.blueprint.module.mtp is not None)]:
        loads = torch.tensor([list(row) for row in vars(state)[name]], dtype=torch.float64)
        counters[name] = loads if len(loads) else loads.view(0, 0)  # a model without experts
    opened = {plane: {key: read() for key, read in keys.items()} for plane, keys in state.planes.items()}
    tensors = {
        plane: {state_key(key, each.dtype): each for key, each in keys.items()} for plane, keys in opened.items()
    }
    with weights.atomic_directory(weights.Target(target.absolute(), 0, frozenset(), target)) as folder:
        disk.write_torch_files(folder, {**tensors, COUNTERS: counters})
    advance(sum(map(len, state.planes.values())))
    return target


def _export(state: State, target: Path, dtype: torch.dtype | None) -> weights.Export:
    """Plan the Hugging Face files to write. Float32 parameters (`A_log`) are never rounded."""
    assert state.blueprint.directory is not None, "every kind of source has a directory with config.json"
    # Without `dtype` each key keeps the dtype that the source's files (or those of `like`) have.
    keymap, config = state.keymap, config_of(state.blueprint, dtype, state.keymap)
    if dtype is not None:
        exact = {key for param in state.blueprint.table if param.float32 for key in _keys(state.blueprint, param)}
        keymap = keymap.recast(dtype, exact)
    return weights.Export(keymap, config, weights.read_small(state.blueprint.directory), target.absolute())


def _write_hf(state: State, target: Path, dtype: torch.dtype | None, advance: Callable[[int], None]) -> Path:
    """Write a Hugging Face directory. It appears under its name only when it is complete."""
    export = _export(state, target, dtype)
    with weights.atomic_directory(export.target()) as folder:
        weights.write_small(export, folder)
        weights.make_files(folder, export.keymap)
        with Files(folder, export.keymap) as files:
            _write_tensors(state, StateSet(WEIGHTS, export.keymap), files, advance)
            weights.copy_carried(files)
    return target


def _write_tensors(state: State, plane: StateSet, files: Files, advance: Callable[[int], None]) -> None:
    """Write every key of a state set that holds a parameter, and copies of one (a tied head). Others are carried."""
    values = state.planes[WEIGHTS if plane.name == MASTER else plane.name]
    copies = _sources_of_copies(state.blueprint)
    for key in plane.keymap.keys.values():
        if key.name not in plane.keymap.carried:
            tensor = values[copies.get(key.name, key.name)]().to(DTYPES[key.dtype]).contiguous()
            files.put(key.name, tensor.view(-1).view(torch.uint8).numpy().data, 0)
            advance(int(plane.name != MASTER and key.name in values))


def _sources_of_copies(blueprint: Blueprint) -> dict[str, str]:
    """Map each key that repeats a parameter (a tied head) to the key that it repeats."""
    layouts = [weights.chosen(param, blueprint.keymap.choice) for param in blueprint.table]
    return {copy.key: layout.blocks[0].key for layout in layouts for copy in layout.copies}


def _state_dtypes(state: State, trained: Sequence[str]) -> tuple[Table, dict[str, torch.dtype]]:
    """Return the table with the scales of 8-bit state, and the dtypes of state and scales.

    State that is not quantised has one dtype for all parameters, so one tensor shows it.
    """
    blueprint, tensors = state.blueprint, state.planes[state.of_optimizer[0]]
    quantised = [name for name in trained if names_of_scales([name])[0] in tensors]
    keys_of_wide = (_keys(blueprint, blueprint.table[name])[0] for name in trained if name not in quantised)
    wide = next((tensors[key]().dtype for key in keys_of_wide), torch.float32)
    dtypes = {name: torch.uint8 if name in quantised else wide for name in trained}
    return with_scales(blueprint.table, quantised), dtypes | dict.fromkeys(names_of_scales(quantised), torch.float32)


def _write_meshwright(state: State, target: Path, dtype: torch.dtype | None, advance: Callable[[int], None]) -> Path:
    """Write a Meshwright checkpoint, as `step-NNNNNN` in the folder `target`.

    A parameter counts as trained if a set of optimizer state has all of its keys: with Muon, a matrix has one such set.
    """
    blueprint, extents = state.blueprint, Extents()
    with_state = {
        name: [param.name for param in blueprint.table if {*_keys(blueprint, param)} <= {*state.planes[name]}]
        for name in state.of_optimizer
    }
    any_state = {param for names in with_state.values() for param in names}
    trained = [param.name for param in blueprint.table if param.name in any_state]
    # Trained weights are float32 in training: where files are narrower, the checkpoint gets masters.
    stored = blueprint.stored_dtypes(torch.float32, {*trained})
    table, dtypes = _state_dtypes(state, trained)
    export = _export(state, target, dtype)
    of_state = {
        name: {param: dtypes[param] for param in (*params, *names_of_scales(params)) if param in dtypes}
        for name, params in with_state.items()
    }
    planes = disk.planes_of(table, export.keymap, stored, of_state)
    about = about_model(blueprint) | {"mesh": "none: it was converted", "compute": "none"}
    trainer: dict[str, Any] = {
        "step": state.step, "tokens": state.tokens, "head": blueprint.head, "tower": blueprint.tower,
        "trained": trained, "settings": {}, "router_load": state.router_load, "state": None,
        **({} if blueprint.module.mtp is None else {"mtp_router_load": state.mtp_router_load}),
    }  # fmt: skip
    with disk.Draft(target.absolute(), state.step) as draft:
        disk.write_beside(export, draft.path, trainer, extents)
        # No random generators: they belong to ranks, and no rank wrote this.
        for plane in (*planes, disk.random_plane({"host": 1}, 0)):
            weights.make_files(draft.path, plane.keymap, extents, plane.folder)
        for plane in planes:
            with Files(draft.path, plane.keymap, extents, plane.folder) as files:
                _write_tensors(state, plane, files, advance)
                weights.copy_carried(files)
                files.fsync()
        # The manifest comes last: without it the directory counts as incomplete.
        disk.commit(draft, planes, [disk.write_part(draft.path, 0, extents)], about)
    return draft.final
