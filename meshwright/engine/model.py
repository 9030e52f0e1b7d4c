"""A model on a mesh: built from a directory, placed, and filled."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import parallel
from ..errors import ConfigError, LayoutError, StateError
from ..layout import Charge, Piece, Rules, Table, Unit, owns, pieces, units_of
from ..mesh import REPLICA, Mesh
from ..models import Decoder, arm_layers, describe, prefix_of, text_config
from ..weights import (
    Holding,
    Spelling,
    carried_keys,
    check_keys,
    choose,
    deliveries,
    fill,
    fill_fresh,
    load_bill,
    local_directory,
    of_source,
    of_table,
    open_source,
    read_config,
)
from .fit import Need, refuse_too_large, widths_of
from .savings import Savings

READ = ("rank", "node")
COMPUTE = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(eq=False)
class Model:
    """A model, this rank's part of it. Made by `load` or `init`."""

    mesh: Mesh
    rules: Rules
    table: Table
    parts: tuple[Decoder, ...]
    units: tuple[Unit, ...]
    dtype: torch.dtype
    config: Mapping[str, Any]
    directory: Path  # of config.json and the tokenizer
    spelling: Spelling
    savings: Savings
    bytes_read: int = 0
    load_bill: tuple[Charge, ...] = ()  # what loading sent and received
    seed: int | None = None  # of `init`
    checksum: int | None = None  # of the files
    number: int = 0  # of the models that all ranks have used together, the first being 1; 0 before
    waiting: object | None = None  # what an engine left for its update, which is to use the gradients that are there
    torn: str = ""  # why no call may go on with these parameters

    @cached_property
    def pieces(self) -> Mapping[str, Piece]:
        return pieces(self.table, self.rules, self.mesh.axes, self.mesh.coords)

    @cached_property
    def owned(self) -> set[str]:
        """Parameters whose elements here are counted and exported by this rank."""
        axes, coords = self.mesh.axes, self.mesh.coords
        return {name for name in self.pieces if owns(self.table, name, self.rules, axes, coords)}

    @cached_property
    def _places(self) -> list[tuple[str, nn.Module, str]]:
        """The module that holds each parameter. It stays the same; FSDP exchanges the parameter, and back."""
        split = {name: name.rpartition(".") for name in self.pieces}
        return [(name, self.parts[0].get_submodule(owner), last) for name, (owner, _, last) in split.items()]

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: holder.get_parameter(last) for name, holder, last in self._places}

    @property
    def trainable(self) -> list[str]:
        return [name for name, parameter in self._parameters().items() if parameter.requires_grad]

    def stored(self) -> dict[str, Tensor]:
        """What this rank stores of every parameter: live memory, not copies."""
        return {name: parallel.local(parameter).detach() for name, parameter in self._parameters().items()}

    def grads(self) -> dict[str, Tensor]:
        """This rank's part of every gradient that is there."""
        found = {name: parallel.local_grad(p) for name, p in self._parameters().items() if p.requires_grad}
        return {name: grad for name, grad in found.items() if grad is not None}

    def need(self, state_dtype: torch.dtype | None = None) -> Need:
        """What decides about the bytes that training takes here."""
        widths, trained = widths_of(self.dtype, state_dtype), frozenset(self.trainable)
        return Need(self.units, self.table, self.rules, self.mesh.axes, widths, trained, self.savings.offload)

    def holding(self, stored: Mapping[str, Tensor]) -> Holding:
        return Holding(self.table, self.rules, self.mesh, stored)

    def refuse_torn(self) -> None:
        if self.torn:
            raise StateError(f"{self.torn}; load the model again")

    def _refuse_copies(self, *_: object) -> NoReturn:
        raise StateError("a model is a part of a run and cannot be copied; load it once more, or use mw.gather(model)")

    __deepcopy__ = __reduce__ = _refuse_copies

    def __repr__(self) -> str:
        num = sum(p.numel for p in self.table)
        return f"Model({self.config.get('model_type')}, {num:,} parameters, {self.dtype}, {self.mesh.axes})"


def load(
    source: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    head: str = "lm",
    dtype: torch.dtype | None = None,
    train: str | Sequence[str] = "**",
    read: str = "rank",
    savings: Savings = Savings(),
) -> Model:
    """A model from a Hugging Face directory or hub id, each rank reading just the bytes that it stores.

    `dtype` is the compute dtype (bfloat16 by default); parameters are kept in float32. `head`: "lm", "value" (`[T]`, or
    `[T, labels]` where `id2label` or `num_labels` of config.json say more than one: sequence and token classifiers; a
    language model gets a new one) or "none". `train`: patterns of the parameters that are trained.
    `read`: "rank", each its own bytes and nothing is sent; or "node", for slow shared file systems: one rank of each
    node reads what its node stores and sends it on (`model.load_bill`). `savings`: of memory and time.
    """
    if read not in READ:
        raise ConfigError(f"read={read!r} is unknown; choose from {', '.join(READ)}")
    _check_arguments(mesh, dtype, train, savings)
    directory = local_directory(source, mesh)
    config, found = read_config(directory), open_source(directory)
    module, table = describe(config, prefix_of(config, found.entries), head, found.entries)
    fresh = [p.name for p in table if p.optional and not any(k in found.entries for k in p.layouts[0].keys)]
    choice = choose(table, found)
    check_keys(table, found, choice, fresh, torch.promote_types(dtype or torch.bfloat16, torch.float32))
    spelling = of_source(table, found, choice, carried_keys(table, found, choice), fresh)
    model = _place(module, table, mesh or Mesh(), config, directory, spelling, dtype, train, savings)
    node = _node(model.mesh, read)
    plan = list(deliveries(table, model.rules, model.mesh.axes, node, found, choice, fresh))
    model.load_bill = tuple(load_bill(plan, model.mesh.rank, node))
    model.bytes_read = fill(model.holding(model.stored()), plan, node, found)
    _fill_fresh(model, fresh, seed=0)
    model.checksum = found.checksum()
    return model


def init(
    source: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    head: str = "lm",
    dtype: torch.dtype | None = None,
    train: str | Sequence[str] = "**",
    seed: int = 0,
    savings: Savings = Savings(),
) -> Model:
    """The same from `config.json` alone, with random weights that do not depend on the mesh."""
    _check_arguments(mesh, dtype, train, savings)
    _check_seed(seed)
    directory = local_directory(source, mesh, weights=False)
    config = read_config(directory)
    if "quantization_config" in config:
        raise ConfigError(
            "config.json has a quantization_config, but new weights are not quantised, and whoever loads their export "
            "would take them for it; remove it from config.json"
        )
    module, table = describe(config, prefix_of(config, None), head)
    spelling = of_table(table, _file_dtype(config))
    model = _place(module, table, mesh or Mesh(), config, directory, spelling, dtype, train, savings)
    _fill_fresh(model, list(model.pieces), seed)
    model.seed = seed
    return model


def _file_dtype(config: Mapping[str, Any]) -> torch.dtype:
    text = text_config(config)
    name = next((c[n] for c in (config, text) for n in ("dtype", "torch_dtype") if c.get(n)), "float32")
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"config.json: dtype={name!r:.200} is unknown; choose from {', '.join(kinds)}")
    return kinds[name]


def _place(
    module: Decoder,
    table: Table,
    mesh: Mesh,
    config: Mapping[str, Any],
    directory: Path,
    spelling: Spelling,
    dtype: torch.dtype | None,
    train: str | Sequence[str],
    savings: Savings,
) -> Model:
    compute = dtype or torch.bfloat16
    _freeze(module, table, [train] if isinstance(train, str) else list(train))
    rules = Rules()
    units = units_of(module, module.units(), reshard=savings.reshard)
    refuse_too_large(Need(units, table, rules, mesh.axes, widths_of(compute), frozenset(), savings.offload), mesh.room)
    module.compute_in(compute)
    mesh.process_group(REPLICA)  # all ranks must make it; later, replicas may look at what they like
    arm_layers(module, savings.recompute, savings.compiled)
    parallel.distribute(module, units, table, rules, mesh, compute, offload=savings.offload)
    for each in module.modules():
        each.register_state_dict_pre_hook(_refuse_state_dict)
        each.register_load_state_dict_pre_hook(_refuse_state_dict)
    model = Model(mesh, rules, table, (module,), tuple(units), compute, config, directory, spelling, savings)
    for name, stored in model.stored().items():
        if tuple(stored.shape) != model.pieces[name].shape:  # FSDP and the table must cut alike
            raise LayoutError(
                f"{name}: rank {mesh.rank} stores {tuple(stored.shape)}, the table says {model.pieces[name].shape}"
            )
    return model


def refuse_other_than_a_model(model: object) -> None:
    if not isinstance(model, Model):
        raise ConfigError(
            f"{type(model).__name__} is no model; give what mw.load returned (of an engine: engine.model)"
        )


def refuse_inference_mode() -> None:
    if torch.is_inference_mode_enabled():
        raise StateError(
            "torch.inference_mode() is on: no later step could use the tensors that are made under it. Leave it out; "
            "logprobs, logits and evaluate take no gradients anyway"
        )


def _check_seed(seed: object) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed={seed!r} must be a whole number")


def _check_arguments(mesh: object, dtype: object, train: object, savings: object) -> None:
    refuse_inference_mode()
    if not isinstance(mesh, Mesh | None):
        raise ConfigError(f"mesh={mesh!r} is no mesh; give mw.Mesh(fsdp=4), or nothing for one process")
    if dtype not in (None, *COMPUTE):
        raise ConfigError(f"dtype={dtype!r} cannot be computed in; choose from {', '.join(map(str, COMPUTE))}")
    patterns = [train] if isinstance(train, str) else train
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"train={train!r} must be a pattern of names, or a list of them, such as 'layers.*'")
    if not isinstance(savings, Savings):
        raise ConfigError(f"savings={savings!r} are no savings; give mw.Savings(recompute='full'), say")


def _freeze(module: Decoder, table: Table, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(p.name, pattern) for p in table):
            first = next(iter(table)).name
            raise ConfigError(
                f"train={pattern!r} matches no parameter; names are like {first}, and model.trainable lists them of a "
                "model that is loaded without train="
            )
    for param in table:
        trained = any(fnmatch.fnmatchcase(param.name, pattern) for pattern in patterns)
        module.get_parameter(param.name).requires_grad_(trained)


def _refuse_state_dict(*_: object) -> None:
    """Our tensors are pieces under our own names: a state dict of them would look whole and be wrong."""
    raise StateError(
        "a state dict of a part holds pieces; use mw.gather(model), mw.stream(model), mw.export or mw.load"
    )


def _node(mesh: Mesh, read: str) -> range:
    """The ranks of which the first reads for all."""
    return mesh.node if read == "node" else range(mesh.rank, mesh.rank + 1)


def _fill_fresh(model: Model, names: Sequence[str], seed: int) -> None:
    stored = model.stored()
    for name in names:
        fill_fresh(model.table[name], model.pieces[name], stored[name], seed)
