"""Checkpoints of one kind out of those of another, by one process, tensor by tensor."""

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
from ..models import VISUAL
from ..optim import names_of_scales, with_scales
from ..optim.int8_state import is_quantised
from ..recipe import Recipe
from ..sharding import Param, Table
from ..weights import DTYPES, Extents, Files, KeyMap
from .checkpoint import about_model
from .optimizer_state import COUNTERS, key_of, named

HF, TORCH, OURS = "hf", "dcp", "meshwright"
Tensors = Mapping[str, Callable[[], Tensor]]  # by key of the files, each read when it is asked for


@dataclass(frozen=True)
class State:
    """What was found. `blueprint`: the model, as the directory spells it that `like` names."""

    kind: str
    blueprint: Blueprint
    planes: Mapping[str, Tensors]
    step: int = 0
    tokens: int = 0
    router_load: tuple[tuple[float, ...], ...] = ()

    @property
    def keymap(self) -> KeyMap:
        return self.blueprint.keymap

    @property
    def of_optimizer(self) -> list[str]:
        """The state sets of the optimizer, whichever it is."""
        return sorted(name for name in self.planes if name not in PARAMETERS)


def convert(
    source: Path, target: Path, to: str, *, like: Path | None = None, dtype: torch.dtype | None = None
) -> Path:  # fmt: skip
    """Write `target`, and return what was written. `dtype`: of the weights. `like`: a Hugging Face directory that says
    how files spell the model, for a source that does not say so."""
    try:
        return _convert(_read(source, like), source, target, to, dtype)
    except OSError as error:
        raise CheckpointError(f"{target} was not written: {error}") from error


def _convert(state: State, source: Path, target: Path, to: str, dtype: torch.dtype | None) -> Path:
    if state.kind == to:
        raise CheckpointError(f"{source} is of the kind {to} already; copy it")
    if to == TORCH and dtype is not None:
        raise ConfigError("the tensors of torch's checkpoints are those of the engine; leave --dtype out")
    if to == OURS and not state.of_optimizer:
        raise CheckpointError(
            f"{source} has no optimizer state; mw.resume(engine, directory) takes its weights as they are"
        )
    total = sum(len(keys) for plane, keys in state.planes.items() if to != HF or plane == WEIGHTS)
    with progress(f"convert {source} to {target}", total, "tensors", enabled=True) as advance:
        if to == TORCH:
            return _write_torch(state, target, advance)
        return (_write_hf if to == HF else _write_ours)(state, target, dtype, advance)


def _read(source: Path, like: Path | None) -> State:
    if (source / disk.TORCH_LIST).is_file():
        return _read_torch(source, like)
    if (source / weights.CONFIG).is_file() and not disk.is_checkpoint(source):
        found = weights.open_source(source)
        blueprint = Blueprint.of(weights.read_config(source), found, directory=source)
        return State(HF, blueprint, {WEIGHTS: _mapped(found.scaled_by(blueprint.config), blueprint)})
    return _read_ours(source)


def _read_ours(source: Path) -> State:
    found = disk.opened_at(source)
    wrong = disk.check_bytes(found)
    if wrong:
        raise CheckpointError(f"{found.directory} is broken: {wrong[0]} ({len(wrong)} such runs)")
    about = found.trainer
    recipe = Recipe(head=about["head"], tower=about.get("tower", False))
    config = weights.read_config(found.directory)
    blueprint = Blueprint.of(config, found.planes[WEIGHTS], recipe, directory=found.directory)
    planes = {WEIGHTS: _mapped(found.parameters, blueprint)}
    planes |= {name: _mapped(plane, blueprint) for name, plane in found.planes.items() if name not in PARAMETERS}
    load = tuple(tuple(row) for row in about["router_load"])
    return State(OURS, blueprint, planes, about["step"], about["tokens"], load)


def _read_torch(source: Path, like: Path | None) -> State:
    if like is None:
        raise CheckpointError(f"{source} does not say how files spell its model; give --like, a Hugging Face directory")
    found, files = disk.TorchFiles(source), weights.open_source(like)
    names = {name.split(".", 1)[0] for name in found.shapes}
    planes: dict[str, Tensors] = {}
    shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}
    for plane in sorted(names - {COUNTERS}):
        keys = {key_of(name.split(".", 1)[1]): name for name in found.shapes if name.startswith(f"{plane}.")}
        shapes[plane] = {key: found.shapes[name] for key, name in keys.items()}
        planes[plane] = {key: lambda name=name: found.tensor(name) for key, name in keys.items()}  # type: ignore[misc] # mypy misses the default
    head = "value" if "score.weight" in planes.get(WEIGHTS, {}) else "lm"
    tower = any(key.startswith(VISUAL) for key in planes.get(WEIGHTS, {}))
    blueprint = Blueprint.of(weights.read_config(like), files, Recipe(head=head, tower=tower), directory=like)
    _drop_foreign(planes, shapes, blueprint)
    _add_frozen(planes, shapes, blueprint)
    _check(source, found.shapes, shapes, blueprint)
    numbers = {name: found.tensor(f"{COUNTERS}.{name}") for name in ("step", "tokens", "router_load")}
    load = tuple(tuple(row) for row in numbers["router_load"].tolist())
    return State(TORCH, blueprint, planes, int(numbers["step"]), int(numbers["tokens"]), load)


def _drop_foreign(
    planes: dict[str, Tensors], shapes: dict[str, Mapping[str, tuple[int, ...]]], blueprint: Blueprint
) -> None:
    """Drop what a user saved next to the state dict: a state set of the optimizer has keys of the model."""
    keys = {*blueprint.keymap.keys, *_shapes_of_scales(blueprint)}
    for plane in [name for name, found in planes.items() if name != WEIGHTS and not keys & {*found}]:
        del planes[plane], shapes[plane]


def _add_frozen(
    planes: dict[str, Tensors], shapes: dict[str, Mapping[str, tuple[int, ...]]], blueprint: Blueprint
) -> None:
    """A state leaves out frozen matrices of files in 8 bits: they are those of the files."""
    files, there = blueprint.keymap.source, planes.get(WEIGHTS, {})
    lacking = [key for key in _trained_keys(blueprint) if key not in there]
    frozen = [key for key in lacking if files is not None and key in files.scales]
    if files is not None and frozen and WEIGHTS in planes:
        planes[WEIGHTS] = {**there, **{key: functools.partial(weights.whole_values, files, key) for key in frozen}}
        shapes[WEIGHTS] = {**shapes[WEIGHTS], **{key: files.entries[key].shape for key in frozen}}


def _check(source: Path, names: Iterable[str], planes: Mapping[str, Mapping[str, Any]], blueprint: Blueprint) -> None:
    """That it is a state of this model. `planes`: the shapes."""
    lacking = {*_trained_keys(blueprint)} - {*planes.get(WEIGHTS, {})}
    if lacking or not {f"{COUNTERS}.{name}" for name in ("step", "tokens", "router_load")} <= {*names}:
        raise CheckpointError(
            f"{source} lacks {f'weights.{min(lacking)}' if lacking else COUNTERS}; give what "
            "torch.distributed.checkpoint.save wrote of engine.state_dict(), and --like of the same model"
        )
    due = {name: key.shape for name, key in blueprint.keymap.keys.items()} | _shapes_of_scales(blueprint)
    for plane, shapes in planes.items():
        for key, shape in shapes.items():
            if shape != due.get(key):
                raise CheckpointError(
                    f"{plane}.{key} is {shape} in {source}, and {due.get(key, 'nothing')} in {blueprint.directory}; "
                    "give --like of the same model"
                )


def _trained_keys(blueprint: Blueprint) -> Iterator[str]:
    """Those of which parameters are made."""
    for param in blueprint.table:
        yield from _keys(blueprint, param)


def _shapes_of_scales(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all scales that optimizer state may have."""
    quantised = [param.name for param in blueprint.table if is_quantised(param)]
    table = with_scales(blueprint.table, quantised)
    return {name: table[name].matrix for name in names_of_scales(quantised)}


def _keys(blueprint: Blueprint, param: Param) -> list[str]:
    return [block.key for block in weights.chosen(param, blueprint.keymap.choice).blocks]


def _mapped(source: weights.Source, blueprint: Blueprint) -> Tensors:
    """Return the tensors of parameters in the files, and scales of optimizer state. They are mapped, so they take no
    memory until somebody reads them."""
    wanted = {*_trained_keys(blueprint), *_shapes_of_scales(blueprint)}
    keys = [key for key in source.entries if key in wanted]
    return {key: lambda key=key: _tensor(source, key) for key in keys}  # type: ignore[misc] # mypy misses the default


def _tensor(source: weights.Source, key: str) -> Tensor:
    if key in source.scales:
        return weights.whole_values(source, key)
    entry = source.entries[key]
    path, dtype = source.directory / entry.file, DTYPES[entry.dtype]
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    flat = whole[entry.start : entry.stop]
    return (flat if entry.start % dtype.itemsize == 0 else flat.clone()).view(dtype).view(entry.shape)


def _write_torch(state: State, target: Path, advance: Callable[[int], None]) -> Path:
    numbers = {"step": torch.tensor(state.step), "tokens": torch.tensor(state.tokens)}
    loads = torch.tensor([list(row) for row in state.router_load], dtype=torch.float64)
    numbers["router_load"] = loads if len(loads) else loads.view(0, 0)  # of a model without experts
    made = {plane: {key: make() for key, make in keys.items()} for plane, keys in state.planes.items()}
    tensors = {plane: {named(key, each.dtype): each for key, each in keys.items()} for plane, keys in made.items()}
    with weights.atomic_directory(weights.Target(target.absolute(), 0, frozenset(), target)) as whole:
        disk.write_torch_files(whole, {**tensors, COUNTERS: numbers})
    advance(sum(map(len, state.planes.values())))
    return target


def _export(state: State, target: Path, dtype: torch.dtype | None) -> weights.Export:
    assert state.blueprint.directory is not None, "it was read from one"
    keymap, config = state.keymap, weights.exported_config(state.blueprint.config, dtype, state.keymap)
    if dtype is not None:
        exact = {key for param in state.blueprint.table if param.float32 for key in _keys(state.blueprint, param)}
        keymap = keymap.recast(dtype, exact)
    return weights.Export(keymap, config, weights.read_small(state.blueprint.directory), target.absolute())


def _write_hf(state: State, target: Path, dtype: torch.dtype | None, advance: Callable[[int], None]) -> Path:
    export = _export(state, target, dtype)
    with weights.atomic_directory(export.target()) as whole:
        weights.write_small(export, whole)
        weights.make_files(whole, export.keymap)
        with Files(whole, export.keymap) as files:
            _put(state, StateSet(WEIGHTS, export.keymap), files, advance)
            weights.copy_carried(files)
    return target


def _put(state: State, plane: StateSet, files: Files, advance: Callable[[int], None]) -> None:
    """Every key of a plane that parameters are made of; also those that hold one once more."""
    values = state.planes[WEIGHTS if plane.name == MASTER else plane.name]
    copies = _copies(state.blueprint)
    for key in plane.keymap.keys.values():
        if key.name not in plane.keymap.carried:
            tensor = values[copies.get(key.name, key.name)]().to(DTYPES[key.dtype]).contiguous()
            files.put(key.name, tensor.view(-1).view(torch.uint8).numpy().data, 0)
            advance(int(plane.name != MASTER and key.name in values))


def _copies(blueprint: Blueprint) -> dict[str, str]:
    """The key that holds the same, of each that holds a parameter once more (a tied head)."""
    layouts = [weights.chosen(param, blueprint.keymap.choice) for param in blueprint.table]
    return {copy.key: layout.blocks[0].key for layout in layouts for copy in layout.copies}


def _state_dtypes(state: State, trained: Sequence[str]) -> tuple[Table, dict[str, torch.dtype]]:
    """Return a table with the scales that were found, and the dtypes of state and scales. All wide state has one."""
    blueprint, found = state.blueprint, state.planes[state.of_optimizer[0]]
    quantised = [name for name in trained if names_of_scales([name])[0] in found]
    keys_of_wide = (_keys(blueprint, blueprint.table[name])[0] for name in trained if name not in quantised)
    wide = next((found[key]().dtype for key in keys_of_wide), torch.float32)
    dtypes = {name: torch.uint8 if name in quantised else wide for name in trained}
    return with_scales(blueprint.table, quantised), dtypes | dict.fromkeys(names_of_scales(quantised), torch.float32)


def _write_ours(state: State, target: Path, dtype: torch.dtype | None, advance: Callable[[int], None]) -> Path:
    """A step in the folder `target`."""
    blueprint, extents = state.blueprint, Extents()
    keys_of_state = {*state.planes[state.of_optimizer[0]]}
    trained = [param.name for param in blueprint.table if {*_keys(blueprint, param)} <= keys_of_state]
    stored = blueprint.stored_dtypes(torch.float32, {*trained})
    table, dtypes = _state_dtypes(state, trained)
    export = _export(state, target, dtype)
    planes = disk.planes_of(table, export.keymap, stored, dict.fromkeys(state.of_optimizer, dtypes))
    about = about_model(blueprint) | {"mesh": "none: it was converted", "compute": "none"}
    trainer = {
        "step": state.step, "tokens": state.tokens, "head": blueprint.head, "tower": blueprint.tower,
        "trained": trained, "settings": {}, "router_load": state.router_load, "state": None,
    }  # fmt: skip
    with disk.Draft(target.absolute(), state.step) as draft:
        disk.write_beside(export, draft.path, trainer, extents)
        for plane in (*planes, disk.random_plane({"host": 1}, 0)):  # of no rank
            weights.make_files(draft.path, plane.keymap, extents, plane.folder)
        for plane in planes:
            with Files(draft.path, plane.keymap, extents, plane.folder) as files:
                _put(state, plane, files, advance)
                weights.copy_carried(files)
                files.fsync()
        disk.commit(draft, planes, [disk.write_part(draft.path, 0, extents)], about)
    return draft.final
