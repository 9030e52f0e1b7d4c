"""A model on a mesh: its blueprint, placed and filled."""

from __future__ import annotations

import gc
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn, Unpack

import torch
from torch import Tensor, nn

from .. import parallel
from ..blueprint import Blueprint
from ..checkpoint import extents_of_model
from ..errors import ConfigError, LoadError, StateError
from ..memory.budget import Need, held_while_training, refuse_too_large, with_hold
from ..mesh import Mesh
from ..models import Decoder, Quantisable
from ..ops.garbage import collector_paused
from ..optim import AdamW, Optimizer
from ..recipe import Pipeline, Recipe, RecipeFields
from ..sharding import (
    Charge,
    Line,
    Piece,
    Placement,
    Stage,
    Table,
    cut,
    gathered_in_fp8,
    owned,
    pieces,
    place,
    trained_from,
    ways,
)
from ..weights import (
    BYTES,
    CONFIG,
    KeyMap,
    Reader,
    SmallFiles,
    Source,
    StoredModel,
    Values,
    chosen,
    fill,
    fill_fresh,
    grid_of,
    load_bill,
    local_directory,
    open_source,
    plan_reads,
    read_config,
    read_small,
    read_stamped_config,
    rows_of,
)
from .gradient_start import begun_backward
from .validation import check_loading, check_unquantised, spelled_out


@dataclass
class Calls:
    """What calls on a model leave behind for the next ones."""

    shared_id: int = 0  # of the models that all ranks have used together, the first being 1; 0 before
    pending: object | None = None  # the step whose gradients lie on the parameters
    half_updated: str = ""  # which update was cut off: the parameters are then worth nothing
    in_loss: bool = False  # its loss is being computed, which must not run it
    loaded: dict[str, tuple[Tensor, int]] = field(
        default_factory=dict
    )  # 8-bit numbers, and how often they were written


@dataclass(eq=False)
class Model:
    """This rank's part of a model. Made by `load` or `init`."""

    mesh: Mesh
    blueprint: Blueprint
    stages: tuple[Stage, ...]  # the pipeline stages of this rank
    low: parallel.Fp8Gather  # the parameters that come to them in 8 bits
    trained: tuple[str, ...]  # the names of all parameters that are trained, on whatever rank
    small: SmallFiles  # beside its weights, kept by rank 0, which writes them
    begun: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # as `sharding.Work.begins`
    bytes_read: int = 0
    load_bill: tuple[Charge, ...] = ()  # what loading sent and received
    calls: Calls = field(default_factory=Calls)

    @property
    def parts(self) -> tuple[Decoder, ...]:
        return tuple(stage.module for stage in self.stages)

    @property
    def line(self) -> Line:
        """Which stages there are, and who has them."""
        return self.blueprint.spec.line(self.mesh.axes.pp)

    @property
    def recipe(self) -> Recipe:
        """How the model is run, with open options decided."""
        return self.blueprint.recipe

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.blueprint.compute

    @property
    def pipeline(self) -> Pipeline:
        return self.recipe.pipeline

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once a step, and not for each micro-batch."""
        return self.blueprint.spec.gathers_once(self.mesh.axes.pp)

    @property
    def sums_once(self) -> bool:
        """Whether gradients are summed once a step, after the last micro-batch."""
        return self.blueprint.spec.sums_once(self.mesh.axes.pp)

    @cached_property
    def trained_from(self) -> int:
        """The first stage that has something to train."""
        return trained_from(self.table, self.line, self.trained)

    @property
    def config(self) -> Mapping[str, object]:
        """Of `config.json`."""
        return self.blueprint.config

    @property
    def directory(self) -> Path | None:
        """Of `config.json` and the tokenizer."""
        return self.blueprint.directory

    @property
    def table(self) -> Table:
        return self.blueprint.table

    @property
    def keymap(self) -> KeyMap:
        return self.blueprint.keymap

    @cached_property
    def kept(self) -> Mapping[str, torch.dtype]:
        """The dtype of the values that are stored of each parameter, on whatever rank."""
        return self.blueprint.stored_dtypes(self.dtype, {*self.trained})

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Parameters that are stored as 8-bit numbers, on whatever rank."""
        return self.blueprint.stays_quantised({*self.trained})

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        return pieces(self.blueprint.spec, self.mesh.axes, self.mesh.rank)

    @cached_property
    def owned(self) -> set[str]:
        """Parameters whose elements here are counted and handed out by this rank."""
        return set(owned(self.blueprint.spec, self.mesh.axes, self.mesh.rank))

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        """The module that holds each parameter. It stays the same, while FSDP exchanges the parameter."""
        names = {name: part for part in self.parts for name, _ in part.named_parameters()}
        split = [(name, *name.rpartition(".")[::2]) for name in self.pieces]
        return [(name, names[name].get_submodule(owner), last) for name, owner, last in split]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Straight from where a module keeps them: each step walks over all of them several times."""
        return {name: p for name, holder, last in self._places if (p := holder._parameters[last]) is not None}

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's piece of a parameter, as the module holds it."""
        return self._parameters()[name]

    def placement(self, name: str) -> Placement:
        return place(self.table[name], self.blueprint.spec.rules, self.mesh.axes)

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters of this rank that are trained."""
        return [name for name, parameter in self._parameters().items() if parameter.requires_grad]

    def stored(self) -> dict[str, Tensor]:
        """What this rank stores of every parameter: live memory, not copies. Of a frozen matrix that stays in 8 bits
        these are its numbers, as uint8, without their scales."""
        return {name: piece.detach() for name, piece in self.to_update().items()}

    def to_update(self) -> dict[str, Tensor]:
        """The same, for a caller that writes under no_grad: detaching all of them takes longer than updating them."""
        return {name: parallel.local(parameter) for name, parameter in self._parameters().items()}

    def values(self) -> Values:
        """The same; but values of what is in 8 bits, which are made when they are asked for."""
        stored = self.stored()
        grids = {name: holder.grids[last] for name, holder, last in self._in_numbers()}
        here = {n: rows_of(self.pieces[n], grid).to(stored[n].device) for n, grid in grids.items()}
        return Values(stored, here)

    def _in_numbers(self) -> Iterator[tuple[str, Quantisable, str]]:
        for name, holder, last in self._places if self.numbers else []:
            if name in self.numbers:
                assert isinstance(holder, Quantisable), "only such a module knows of scales"
                yield name, holder, last

    def grads(self) -> dict[str, Tensor]:
        """This rank's part of every gradient that is there."""
        found = {name: p.grad for name, p in self._parameters().items() if p.requires_grad}
        return {name: parallel.local(grad) for name, grad in found.items() if grad is not None}

    def forget_grads(self) -> None:
        """Also those that FSDP has not summed yet, of a step that failed."""
        parallel.reset_after_forward(self.parts)
        for parameter in self._parameters().values():
            parameter.grad = None
        self.calls.pending = None

    def need(self, optimizer: Optimizer = AdamW()) -> Need:
        """Return the memory that training takes on this mesh."""
        held = held_while_training(
            self.dtype, frozenset(self.trained), optimizer, offload=self.recipe.memory.offload,
            narrow=_narrow(self.kept), numbers=self.numbers, low=self.low.names,
        )  # fmt: skip
        return Need(self.blueprint.spec, self.mesh.axes, held)

    def stored_model(self, stored: Mapping[str, Tensor]) -> StoredModel:
        return StoredModel(self.blueprint.spec, self.mesh, stored)

    def check_whole(self) -> None:
        if self.calls.half_updated:
            raise StateError(f"{self.calls.half_updated}; load the model again")
        for name, (numbers, times) in self.calls.loaded.items():
            if numbers._version != times:
                raise StateError(
                    f"{name} is frozen and stays in 8 bits: what model.stored() has of it are numbers without their "
                    "scales, and something has written into them. Load the model again, with train= that takes it in"
                )

    def _refuse_copies(self, *_: object) -> NoReturn:
        raise StateError("a model is part of a run and cannot be copied; load it once more, or use mw.gather(model)")

    __deepcopy__ = __reduce__ = _refuse_copies

    def __repr__(self) -> str:
        num = sum(p.numel for p in self.table)
        found = ways(self.blueprint.spec, self.mesh.axes)
        of_cp = f" ({found})" if found else ""
        return f"Model({self.config.get('model_type')}, {num:,} parameters, {self.dtype}, {self.mesh.axes}{of_cp})"


@spelled_out(Recipe)
def load(
    source: str | os.PathLike[str], mesh: Mesh | None = None, *, read: str = "rank", **fields: Unpack[RecipeFields]
) -> Model:
    """Return a model from a Hugging Face directory or hub id, of which each rank reads just the bytes that it stores.

    `fields`: how it is run (`meshwright/recipe.py`, docs/reference.md). Parameters that are trained are kept in
    float32, frozen ones in the dtype of the files. `read`: "rank", each its own bytes and nothing is sent; or "node",
    for slow shared file systems: one rank of each node reads what its node stores and sends it on (`model.load_bill`).
    """
    check_loading(mesh, fields.get("dtype"), read)
    recipe, directory = Recipe(**fields), local_directory(source, mesh)
    extents = extents_of_model(directory)
    config, stamp = read_stamped_config(directory)
    gc.collect()  # else a model that was dropped would keep its memory beside the new one
    with collector_paused():
        files = replace(open_source(directory, {CONFIG: stamp}), extents=extents)
        blueprint = Blueprint.of(
            config, files, recipe, directory=directory, origin=f"files with checksum {files.checksum()}",
            stored=torch.promote_types(recipe.dtype or torch.bfloat16, torch.float32),
        )  # fmt: skip
        model = put_on_mesh(blueprint, mesh or Mesh())
        node = model.mesh.node if read == "node" else range(model.mesh.rank, model.mesh.rank + 1)
        plan = list(plan_reads(model.blueprint.spec, model.mesh.axes, node, model.keymap, numbers=model.numbers))
    model.load_bill = tuple(load_bill(plan, model.mesh.rank, node))
    scaled = model.keymap.source
    assert scaled is not None
    num_bytes = _give_grids(model, scaled, len(node) > 1)
    model.bytes_read = num_bytes + fill(model.stored(), model.mesh, plan, node, scaled)
    _fill_fresh(model, model.keymap.fresh, seed=0)
    held = model.stored()
    model.calls.loaded = {name: (held[name], held[name]._version) for name in held.keys() & model.numbers}
    return model


@spelled_out(Recipe)
def init(
    source: str | os.PathLike[str], mesh: Mesh | None = None, *, seed: int = 0, **fields: Unpack[RecipeFields]
) -> Model:
    """Return a model made from `config.json` alone, with random weights that do not depend on the mesh."""
    check_loading(mesh, fields.get("dtype"))
    recipe, directory = Recipe(**fields), local_directory(source, mesh, weights=False)
    extents_of_model(directory)  # names a damaged config or tokenizer of a checkpoint before anything is read with it
    config = read_config(directory)
    check_unquantised(config)
    gc.collect()  # else a model that was dropped would keep its memory beside the new one
    with collector_paused():
        blueprint = Blueprint.of(config, None, recipe, directory=directory, origin=f"seed {seed}")
        model = put_on_mesh(blueprint, mesh or Mesh())
    _fill_fresh(model, model.pieces, seed)
    return model


def put_on_mesh(blueprint: Blueprint, mesh: Mesh) -> Model:
    """Place a model: its parameters have memory then, and no values."""
    compute, memory = blueprint.compute, blueprint.recipe.memory
    trained = {*blueprint.trained()}
    for name in blueprint.table.params:
        blueprint.module.get_parameter(name).requires_grad_(name in trained)
    _refuse_only_read(blueprint, trained)
    blueprint = with_hold(blueprint, mesh.axes, compute, mesh.least_bytes)
    values, numbers = blueprint.stored_dtypes(compute, trained), blueprint.stays_quantised(trained)
    low = gathered_in_fp8(blueprint.spec, trained, wide=memory.gathers_wide)
    weights_alone = held_while_training(
        compute, frozenset(), offload=memory.offload, narrow=_narrow(values), numbers=numbers, low=low
    )
    refuse_too_large(Need(blueprint.spec, mesh.axes, weights_alone), mesh.memory)
    blueprint.module.compute_in(compute)
    stored = {**values, **dict.fromkeys(numbers, BYTES)}
    begun = begun_backward(blueprint.spec, mesh.axes, mesh.rank, compute, trained)
    stages, gathers = parallel.distribute(blueprint.spec, mesh, compute, stored)
    for each in (module for stage in stages for module in stage.module.modules()):
        each.register_state_dict_pre_hook(_refuse_state_dict)
        each.register_load_state_dict_pre_hook(_refuse_state_dict)
    assert blueprint.directory is not None, "a model on a mesh has a config.json somewhere"
    small = SmallFiles(blueprint.directory) if mesh.rank else read_small(blueprint.directory)
    names = tuple(name for name in blueprint.table.params if name in trained)
    return Model(mesh, blueprint, stages, gathers, names, small, begun)


def _narrow(values: Mapping[str, torch.dtype]) -> dict[str, int]:
    return {name: dtype.itemsize for name, dtype in values.items()}


def _refuse_only_read(blueprint: Blueprint, trained: Container[str]) -> None:
    """An export would have to write what was trained, and nothing here writes such a format."""
    for param in blueprint.table:
        found = blueprint.keymap.only_read(param)
        if found is not None and param.name in trained:
            key, form = found
            raise ConfigError(
                f"{key} is {form}, in which weights are read and not trained, but train= takes in {param.name}; give "
                "patterns of what is to be trained of the rest, such as train=['*norm*'], or train=[] for nothing, or "
                "fetch the model in bfloat16 or FP8"
            )


def _refuse_state_dict(*_: object) -> None:
    """Our tensors are pieces under our own names: a state dict of them would look whole and be wrong."""
    raise StateError(
        "a state dict of a part holds pieces; use mw.gather(model), mw.stream(model), mw.export or mw.load"
    )


def _give_grids(model: Model, source: Source, together: bool) -> int:
    """Read the scales of what stays in 8 bits, of all that FSDP gathers here. How many bytes they are. `together`:
    other ranks will wait for what this one reads, so all hear of a failure."""
    spec, mesh, keymap = model.blueprint.spec, model.mesh, model.keymap
    with Reader(source) as reader:

        def read() -> None:
            for name, holder, last in model._in_numbers():
                param = model.table[name]
                box = cut(param, place(param, spec.rules, mesh.axes), mesh.axes, mesh.coords)
                holder.grids[last] = grid_of(param, box, chosen(param, keymap.choice), reader).to(mesh.device)

        if together and model.numbers:
            mesh.together(read, "the reading of scales", LoadError, "nothing was loaded")
        else:
            read()
        return reader.num_bytes


def _fill_fresh(model: Model, names: Iterable[str], seed: int) -> None:
    stored = model.stored()
    for name in (name for name in names if name in stored):
        fill_fresh(model.table[name], model.pieces[name], stored[name], seed)
