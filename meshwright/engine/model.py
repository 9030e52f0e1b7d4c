"""A model on a mesh: a blueprint whose parameters are placed on ranks and filled from files.

The blueprint knows every parameter of every rank before a byte is read. So memory is checked first, each rank reads
just the bytes that it stores, and no rank needs room for the whole model.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator, Mapping
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
from ..log import logger
from ..memory.budget import Need, held_while_training, refuse_too_large, with_hold
from ..mesh import Mesh
from ..models import Decoder, Quantisable
from ..ops.codings import Coding
from ..ops.garbage import collector_paused
from ..optim import AdamW, Optimizer
from ..recipe import Pipeline, Recipe, RecipeFields
from ..sharding import (
    MTP,
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
    CONFIG,
    KeyMap,
    Reader,
    SmallFiles,
    Source,
    StoredModel,
    Values,
    check_constants,
    chosen,
    fill,
    fill_fresh,
    grid_of,
    load_bill,
    local_directory,
    open_source,
    peft_files,
    plan_reads,
    read_config,
    read_small,
    read_stamped_config,
    rows_of,
)
from .asleep import WEIGHTS, Asleep
from .gradient_start import begun_backward
from .loading_checks import log_left_wide, log_mtp, refuse_training_read_only
from .validation import check_loading, check_unquantised, show_fields_in_help


@dataclass
class CallState:
    """The state that calls on a model leave for later calls."""

    shared_id: int = 0  # models are numbered from 1, in the order in which all ranks first used them; 0: not yet
    pending: object | None = None  # the step whose gradients are on the parameters
    half_updated: str = ""  # the update that was interrupted: the parameters are then a mixture of two steps
    in_loss: bool = False  # true while the user's loss runs, which must not call its own model
    in_base: bool = False  # true within `Model.base`, where adapters are off
    # Codes as loaded, each with the version counter of its tensor, which torch raises with every in-place write.
    loaded: dict[str, tuple[Tensor, int]] = field(default_factory=dict)
    asleep: Asleep = field(default_factory=Asleep)


@dataclass(eq=False)
class Model:
    """This rank's part of a model. `load` and `init` make it."""

    mesh: Mesh
    blueprint: Blueprint
    stages: tuple[Stage, ...]  # the pipeline stages of this rank
    low: parallel.Fp8Gather  # the parameters that FSDP all-gathers as FP8 codes
    trained: tuple[str, ...]  # the names of all trained parameters, on any rank
    small: SmallFiles  # tokenizer and other small files; rank 0 holds them, because it writes exports
    begun: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # as `sharding.Work.begins`
    bytes_read: int = 0
    load_bill: tuple[Charge, ...] = ()  # the collectives of loading
    calls: CallState = field(default_factory=CallState)

    @property
    def parts(self) -> tuple[Decoder, ...]:
        """Return the modules of this rank, one per pipeline stage."""
        return tuple(stage.module for stage in self.stages)

    @property
    def line(self) -> Line:
        """Return the map from pipeline stages to ranks."""
        return self.blueprint.spec.line(self.mesh.axes.pp)

    @property
    def recipe(self) -> Recipe:
        """Return how the model is run, with all open options decided."""
        return self.blueprint.recipe

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype."""
        return self.blueprint.compute

    @property
    def pipeline(self) -> Pipeline:
        """Return the pipeline options, with `hold` decided."""
        return self.recipe.pipeline

    @property
    def gathers_once(self) -> bool:
        """Return whether parameters are all-gathered once a step instead of once a micro-batch."""
        return self.blueprint.spec.gathers_once(self.mesh.axes.pp)

    @property
    def sums_once(self) -> bool:
        """Return whether gradients are reduced once a step, after the last micro-batch."""
        return self.blueprint.spec.sums_once(self.mesh.axes.pp)

    @cached_property
    def trained_from(self) -> int:
        """Return the first pipeline stage with a trained parameter. Backward ends in it."""
        return trained_from(self.table, self.line, self.trained)

    @property
    def config(self) -> Mapping[str, object]:
        """Return the content of `config.json`."""
        return self.blueprint.config

    @property
    def directory(self) -> Path | None:
        """Return the directory of `config.json` and the tokenizer."""
        return self.blueprint.directory

    @property
    def table(self) -> Table:
        """Return the declarations of all parameters, by name."""
        return self.blueprint.table

    @property
    def keymap(self) -> KeyMap:
        """Return the mapping from parameters to the keys of the files."""
        return self.blueprint.keymap

    @cached_property
    def kept(self) -> Mapping[str, torch.dtype]:
        """Return the storage dtype of each parameter, on any rank. Codes count as the dtype of their values."""
        return self.blueprint.stored_dtypes(self.dtype, {*self.trained})

    @cached_property
    def codings(self) -> Mapping[str, Coding]:
        """Return the frozen parameters that are stored as codes in 8 or 4 bits, on any rank, and how."""
        return self.blueprint.codings({*self.trained}, self.mesh.axes)

    @property
    def numbers(self) -> frozenset[str]:
        """Return the names of the parameters that are stored as codes, on any rank."""
        return frozenset(self.codings)

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        """Return the pieces that this rank stores, by parameter."""
        return pieces(self.blueprint.spec, self.mesh.axes, self.mesh.rank)

    @cached_property
    def owned(self) -> set[str]:
        """Return the parameters whose local elements this rank owns: of the ranks that hold the same elements, just one
        counts them in the gradient norm and writes them to files."""
        return set(owned(self.blueprint.spec, self.mesh.axes, self.mesh.rank))

    @cached_property
    def _holders(self) -> list[tuple[str, nn.Module, str]]:
        """Return the module that holds each parameter, and the attribute's name. Modules stay, while FSDP replaces
        their parameters."""
        names = {name: part for part in self.parts for name, _ in part.named_parameters()}
        split = [(name, *name.rpartition(".")[::2]) for name in self.pieces]
        return [(name, names[name].get_submodule(owner), last) for name, owner, last in split]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank. They are read from the modules' dicts: each step walks over all of them
        several times, and `named_parameters` would walk over all modules each time."""
        return {name: p for name, holder, last in self._holders if (p := holder._parameters[last]) is not None}

    def parameter(self, name: str) -> nn.Parameter:
        """Return this rank's piece of a parameter, as its module holds it."""
        return self._parameters()[name]

    @property
    def trains_mtp(self) -> bool:
        """Return whether a step runs the MTP head."""
        return any(name.startswith(MTP) for name in self.trained)

    def placement(self, name: str) -> Placement:
        """Return the mesh axes that shard, split and replicate a parameter."""
        return place(self.table[name], self.blueprint.spec.rules, self.mesh.axes)

    @property
    def trainable(self) -> list[str]:
        """Return the names of the trained parameters of this rank."""
        return [name for name, parameter in self._parameters().items() if parameter.requires_grad]

    def stored(self) -> dict[str, Tensor]:
        """Return the local tensor of every parameter: live memory, not copies.

        A frozen matrix in 8 bits is its codes, as uint8, without scales; one in 4 bits is rows of codes and scales
        (ops/codings.py). `values` dequantises them.
        """
        return {name: piece.detach() for name, piece in self.to_update().items()}

    def to_update(self) -> dict[str, Tensor]:
        """Return the tensors of `stored` without detaching them, for a caller that writes under no_grad: detaching
        thousands of tensors takes the host longer than updating them."""
        self.calls.asleep.check_weights()
        return {name: parallel.local(parameter) for name, parameter in self._parameters().items()}

    def values(self) -> Values:
        """Return the local values of every parameter. Codes are dequantised on each access, one at a time."""
        stored = self.stored()
        # A module holds the scales of the whole matrix that FSDP gathers; this rank stores only some of its rows.
        grids = {name: holder.grids[last] for name, holder, last in self._quantised_holders()}
        local = {n: rows_of(self.pieces[n], grid).to(stored[n].device) for n, grid in grids.items()}
        return Values(stored, local)

    def _quantised_holders(self) -> Iterator[tuple[str, Quantisable, str]]:
        """Yield the parameters of this rank that are stored as codes, each with its module and attribute."""
        for name, holder, last in self._holders if self.codings else []:
            if name in self.codings:
                assert isinstance(holder, Quantisable), "codes belong to a module with scales"
                yield name, holder, last

    def grads(self) -> dict[str, Tensor]:
        """Return the local tensor of every gradient that exists."""
        self.calls.asleep.check_gradients()
        grads = {name: p.grad for name, p in self._parameters().items() if p.requires_grad}
        return {name: parallel.local(grad) for name, grad in grads.items() if grad is not None}

    def forget_grads(self) -> None:
        """Drop all gradients, also unsharded ones that FSDP has not reduced because the step failed."""
        parallel.reset_after_forward(self.parts)
        for parameter in self._parameters().values():
            parameter.grad = None
        self.calls.pending = None

    def sleep(self) -> int:
        """Move the weights to host memory, as `Engine.sleep` does. Return how many bytes of the device were freed."""
        from .sleep import put_to_sleep  # which imports this module

        return put_to_sleep(self, {WEIGHTS: True})

    def wake(self) -> int:
        """Move the weights back to the device. Return how many bytes they take there."""
        from .sleep import wake_up

        return wake_up(self, {WEIGHTS: True})

    def need(self, optimizer: Optimizer = AdamW()) -> Need:
        """Return the memory that training takes on this mesh, by rank."""
        held = held_while_training(
            self.dtype, frozenset(self.trained), optimizer, offload=self.recipe.memory.offload,
            narrow=_itemsizes(self.kept), numbers=self.codings, low=self.low.names,
        )  # fmt: skip
        return Need(self.blueprint.spec, self.mesh.axes, held)

    def base(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without adapters: `with model.base(): mw.logprobs(model, batch)` is the reference policy.

        It takes no memory, since the base's weights are the model's own. Not for steps. It raises if `train` names
        weights of the base: without adapters the model would still not be its base.
        """
        new = (name for name in self.trained if not self.table[name].adapter and name not in self.keymap.fresh)
        changed = [name for name in new if not name.startswith(MTP)]  # which scores no token of the model
        if changed:
            raise ConfigError(
                f"{changed[0]} is trained next to the adapters ({len(changed)} such parameters), so model.base() would "
                "not be the base; load the base as a second model, or train adapters alone"
            )
        from .adapters import adapters_off

        return adapters_off(self)

    def stored_model(self, stored: Mapping[str, Tensor]) -> StoredModel:
        """Return local tensors with their layout, from which `weights/` gathers and writes whole tensors."""
        return StoredModel(self.blueprint.spec, self.mesh, stored)

    def check_whole(self) -> None:
        """Refuse a model whose last update was interrupted, or whose FP8 codes were overwritten."""
        if self.calls.half_updated:
            raise StateError(f"{self.calls.half_updated}; load the model again")
        for name, (codes, version) in self.calls.loaded.items():
            if codes._version != version:
                bits = 8 if self.codings[name].scale is None else 4
                raise StateError(
                    f"{name} is frozen and stays in {bits} bits: model.stored() has its codes, not its values, and "
                    "something has overwritten them. Load the model again, with a train= that includes it"
                )

    def _refuse_copies(self, *_: object) -> NoReturn:
        """Refuse `copy.deepcopy` and `pickle`: a copy would be no part of the mesh."""
        raise StateError("a model is part of a run and cannot be copied; load it once more, or use mw.gather(model)")

    __deepcopy__ = __reduce__ = _refuse_copies

    def __repr__(self) -> str:
        num = sum(p.numel for p in self.table)
        cp_split = ways(self.blueprint.spec, self.mesh.axes)
        suffix = f" ({cp_split})" if cp_split else ""
        return f"Model({self.config.get('model_type')}, {num:,} parameters, {self.dtype}, {self.mesh.axes}{suffix})"


@show_fields_in_help(Recipe)
def load(
    source: str | os.PathLike[str], mesh: Mesh | None = None, *, read: str = "rank", **fields: Unpack[RecipeFields]
) -> Model:
    """Load a model from a Hugging Face directory or hub id. Each rank reads just the bytes that it stores.

    `fields`: how it is run (`meshwright/recipe.py`, docs/reference.md). Trained parameters are stored in float32,
    frozen ones in the dtype of the files. `read`: "rank", each rank reads its own bytes and no collective runs; or
    "node", for slow shared file systems: one rank of each node reads what its node stores and sends it to the others
    (`model.load_bill`).
    """
    check_loading(mesh, fields.get("dtype"), read)
    recipe, directory = _with_adapter_files(Recipe(**fields)), local_directory(source, mesh)
    peft_files.check_has_base(directory)
    # A checkpoint has checksums of its files. They are verified as the bytes are read.
    extents = extents_of_model(directory)
    config, stamp = read_stamped_config(directory)
    # Models have reference cycles, so only the collector frees a dropped one, whose memory the new one may need. While
    # modules are built it is paused: it would look at every object again and again, and nothing is garbage yet.
    gc.collect()
    with collector_paused():
        files = replace(open_source(directory, {CONFIG: stamp}), extents=extents)
        blueprint = Blueprint.of(
            config, files, recipe, directory=directory, origin=_origin(files, recipe),
            stored=torch.promote_types(recipe.dtype or torch.bfloat16, torch.float32),
        )  # fmt: skip
        check_constants(blueprint.table, files)
        model = put_on_mesh(blueprint, mesh or Mesh())
        # The ranks for which one rank reads: with read="rank" a range of one.
        node = model.mesh.node if read == "node" else range(model.mesh.rank, model.mesh.rank + 1)
        plan = list(plan_reads(model.blueprint.spec, model.mesh.axes, node, model.keymap, numbers=model.codings))
    model.load_bill = tuple(load_bill(plan, model.mesh.rank, node))
    scaled = model.keymap.source
    assert scaled is not None
    num_bytes = _read_frozen_scales(model, scaled, len(node) > 1)
    model.bytes_read = num_bytes + fill(model.stored(), model.mesh, plan, node, scaled)
    log_mtp(model.blueprint, model.trained, model.mesh)
    # Parameters that the files lack, such as a new value head: seed 0, so that every run starts from the same ones.
    _fill_fresh(model, model.keymap.fresh, seed=0)
    if recipe.lora is not None and recipe.lora.path:
        peft_files.fill_factors(recipe.lora.path, model.table, model.pieces, model.stored())
    local = model.stored()
    model.calls.loaded = {name: (local[name], local[name]._version) for name in local.keys() & model.numbers}
    return model


def _with_adapter_files(recipe: Recipe) -> Recipe:
    """Return the recipe with rank, scale and targets of the PEFT files that its adapters begin from, if any."""
    return recipe if recipe.lora is None else replace(recipe, lora=peft_files.recipe_of(recipe.lora))


def _origin(files: Source, recipe: Recipe) -> str:
    """Name the weights, for the comparison between ranks."""
    adapters = "" if recipe.lora is None else f" and {recipe.lora}{peft_files.checksum(recipe.lora)}"
    frozen = "" if recipe.frozen is None else f", frozen in {recipe.frozen}"
    return f"files with checksum {files.checksum()}{adapters}{frozen}"


@show_fields_in_help(Recipe)
def init(
    source: str | os.PathLike[str], mesh: Mesh | None = None, *, seed: int = 0, **fields: Unpack[RecipeFields]
) -> Model:
    """Build a model from `config.json` alone, with random weights that do not depend on the mesh."""
    check_loading(mesh, fields.get("dtype"))
    recipe, directory = Recipe(**fields), local_directory(source, mesh, weights=False)
    if recipe.lora is not None and recipe.lora.path:
        raise ConfigError(f"lora.path={recipe.lora.path!r} goes on from trained adapters, and mw.init draws a new base")
    if recipe.frozen is not None:
        raise ConfigError(
            f"frozen={recipe.frozen!r} quantises weights of files, and mw.init draws new ones; leave it out"
        )
    extents_of_model(directory)  # refuses a damaged config or tokenizer of a checkpoint
    config = read_config(directory)
    check_unquantised(config)
    gc.collect()  # frees a dropped model, as in `load`
    with collector_paused():
        blueprint = Blueprint.of(config, None, recipe, directory=directory, origin=f"seed {seed}")
        model = put_on_mesh(blueprint, mesh or Mesh())
    _fill_fresh(model, model.pieces, seed)
    return model


def put_on_mesh(blueprint: Blueprint, mesh: Mesh) -> Model:
    """Place a model on a mesh: allocate its parameters, without values yet.

    Everything that can be refused is refused before the first allocation.
    """
    compute = blueprint.compute
    trained = {*blueprint.trained()}
    blueprint.mark(trained)
    refuse_training_read_only(blueprint, trained)
    memory = parallel.with_compiled(blueprint.recipe, blueprint.module, mesh.device).memory
    blueprint = with_hold(blueprint.with_options(memory=memory), mesh.axes, compute, mesh.least_bytes)
    # Compare with the memory of the devices before any is allocated. The optimizer is not known yet, so only weights
    # count now; `Engine` compares again.
    values, codings = blueprint.stored_dtypes(compute, trained), blueprint.codings(trained, mesh.axes)
    log_left_wide(blueprint.left_wide(trained, mesh.axes), mesh)
    if mesh.rank == 0 and (left := blueprint.left_out(trained)):
        logger.info("%s", left)
    low = gathered_in_fp8(blueprint.spec, trained, wide=memory.gathers_wide)
    weights_alone = held_while_training(
        compute, frozenset(), offload=memory.offload, narrow=_itemsizes(values), numbers=codings, low=low
    )
    refuse_too_large(Need(blueprint.spec, mesh.axes, weights_alone), mesh.memory)
    blueprint.module.compute_in(compute)
    stored: dict[str, torch.dtype | Coding] = {**values, **codings}
    # Counted on the meta device, so before `distribute` places the same modules.
    begun = begun_backward(blueprint.spec, mesh.axes, mesh.rank, compute, trained)
    stages, fp8_gather = parallel.distribute(blueprint.spec, mesh, compute, stored)
    # Modules are public (`model.parts`), so a user may well call `torch.save(part.state_dict())`.
    for each in (module for stage in stages for module in stage.module.modules()):
        each.register_state_dict_pre_hook(_refuse_state_dict)
        each.register_load_state_dict_pre_hook(_refuse_state_dict)
    assert blueprint.directory is not None, "a model on a mesh has a config.json somewhere"
    # Rank 0 reads small files now: they may change or vanish before an export writes them.
    small = SmallFiles(blueprint.directory) if mesh.rank else read_small(blueprint.directory)
    names = tuple(name for name in blueprint.table.params if name in trained)
    return Model(mesh, blueprint, stages, fp8_gather, names, small, begun)


def _itemsizes(values: Mapping[str, torch.dtype]) -> dict[str, int]:
    """Return the bytes per element of each parameter."""
    return {name: dtype.itemsize for name, dtype in values.items()}


def _refuse_state_dict(*_: object) -> None:
    """Refuse `state_dict` and `load_state_dict` of a module: its tensors are pieces under Meshwright's names, so a file
    of them would look whole and be wrong."""
    raise StateError(
        "a state dict of a module would hold pieces; use mw.gather(model), mw.stream(model), mw.export or mw.load"
    )


def _read_frozen_scales(model: Model, source: Source, together: bool) -> int:
    """Read the scales of frozen parameters in 8 bits, and the divisors of those in 4 bits. Return how many bytes were
    read.

    A rank reads the scales of the whole matrix that FSDP gathers on it, not only of its rows. `together`: other ranks
    wait for what this one reads, so all raise if one fails.
    """
    spec, mesh, keymap = model.blueprint.spec, model.mesh, model.keymap
    with Reader(source) as reader:

        def read() -> None:
            for name, holder, last in model._quantised_holders():
                param = model.table[name]
                box = cut(param, place(param, spec.rules, mesh.axes), mesh.axes, mesh.coords)
                grid = grid_of(param, box, chosen(param, keymap.choice), reader, model.codings[name])
                holder.grids[last] = grid.to(mesh.device)

        if together and model.numbers:
            mesh.together(read, "the reading of scales", LoadError, "nothing was loaded")
        else:
            read()
        return reader.num_bytes


def _fill_fresh(model: Model, names: Iterable[str], seed: int) -> None:
    """Draw new weights. Values depend on the seed, the name and the position in the whole parameter, not on the
    mesh."""
    stored = model.stored()
    for name in (name for name in names if name in stored):
        fill_fresh(model.table[name], model.pieces[name], stored[name], seed)
