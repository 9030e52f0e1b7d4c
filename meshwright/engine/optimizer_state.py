"""Optimizer state in memory, in checkpoints and in state dicts: wide, in bfloat16, or in 8 bits with scales.

A checkpoint may hold another form than the engine keeps. Then state is read in the form of the checkpoint and converted
one parameter at a time, so both forms never exist for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint as disk
from ..checkpoint import WEIGHTS, Checkpoint, Sharded
from ..errors import CheckpointError, ConfigError
from ..mesh import Mesh
from ..optim import (
    SCALES,
    LocalOptimizer,
    Optimizer,
    Place,
    State,
    check_blocks,
    names_of_scales,
    with_scales,
    zero_codes,
)
from ..optim.int8_state import decode
from ..recipe import Lora
from ..sharding import Piece, ShardingSpec, pieces
from ..weights import Values
from .model import Model

# Suffix of the key of 8-bit state in a state dict.
_CODES = ".codes"
COUNTERS = "counters"
_RESERVED = {*disk.PARAMETERS, disk.RANDOM, disk.PARTS, COUNTERS}  # other folders of a checkpoint or keys of a state


@dataclass(frozen=True)
class StateLayout:
    """The layout of optimizer state on the mesh.

    `quantised`: the parameters whose state is in 8 bits. `spec` and `pieces` cover all parameters, and the scales of
    these, which are declared like parameters.
    """

    quantised: tuple[str, ...]
    spec: ShardingSpec
    pieces: Mapping[str, Piece]

    def places(self) -> dict[str, Place]:
        """Return the positions of this rank's quantised pieces in whole matrices, which seed stochastic rounding."""
        local = {name: self.pieces[name] for name in self.quantised if name in self.pieces}
        return {name: Place(piece.row_numbers, piece.first_col) for name, piece in local.items()}


def state_layout(model: Model, optimizer: Optimizer) -> StateLayout:
    """Return the layout of an optimizer's state on the model's mesh. Refuse names that a checkpoint already uses."""
    names = optimizer.state_names
    wrong = [name for at, name in enumerate(names) if not name.isidentifier() or name in {*_RESERVED, *names[:at]}]
    if wrong:
        raise ConfigError(
            f"state_names of {type(optimizer).__name__} has {wrong[0]!r}; give each tensor a unique name, such as "
            f"'momentum', and none of {', '.join(sorted(_RESERVED))}"
        )
    # Without 8-bit state the layout is that of the weights themselves, and nothing need be computed.
    quantised = optimizer.quantised(model.table, model.trained)
    if not quantised:
        return StateLayout((), model.blueprint.spec, model.pieces)
    spec = spec_with(model.blueprint.spec, model.mesh, quantised, "state_dtype=torch.bfloat16")
    return StateLayout(quantised, spec, pieces(spec, model.mesh.axes, model.mesh.rank))


def spec_with(spec: ShardingSpec, mesh: Mesh, quantised: Sequence[str], instead: str) -> ShardingSpec:
    """Return the spec with scales added. Refuse a mesh that cuts a block. `instead`: another fix, for the message."""
    check_blocks(spec, mesh.axes, quantised, instead)
    return spec.with_table(with_scales(spec.table, quantised), mesh.axes.pp)


def state_key(key: str, dtype: torch.dtype) -> str:
    """Return the key of a tensor in a state dict. Codes get a suffix: without one torch would load codes into wide
    state, or the reverse, and only cast the dtype."""
    return key + _CODES if dtype == torch.uint8 else key


def file_key(name: str) -> str:
    """Return the key of the files for a key of a state dict."""
    return name.removesuffix(_CODES)


def dtypes_of(model: Model, optimizer: LocalOptimizer, layout: StateLayout) -> dict[str, dict[str, torch.dtype]]:
    """Return the dtypes of all state on any rank, of parameters and of scales, by state name."""
    # By arithmetic, not from tensors: all ranks need the dtypes of all parameters to create the files.
    wide = optimizer.options.wide_dtype
    dtypes = {name: torch.uint8 if name in layout.quantised else wide(model.kept[name]) for name in model.trained}
    dtypes |= dict.fromkeys(names_of_scales(layout.quantised), torch.float32)
    has = optimizer.state_names
    return {
        state: {name: dtype for name, dtype in dtypes.items() if state in has[name]}
        for state in optimizer.options.state_names
    }


def state_of(source: Checkpoint, optimizer: LocalOptimizer, trained: Iterable[str]) -> list[str]:
    """Return the state sets of the optimizer in a checkpoint. Refuse those of another optimizer."""
    saved = [name for name in source.planes if name not in disk.PARAMETERS]
    needed = {state for name in trained for state in optimizer.state_names[name]}
    known = {*optimizer.options.state_names}
    if not needed <= {*saved} <= known and (saved or source.trainer["step"]):  # none is saved at step 0
        has, needs = (", ".join(names) or "nothing" for names in (saved, sorted(needed)))
        kind = type(optimizer.options).__name__
        raise CheckpointError(
            f"{source.directory} has the optimizer state {has}, but {kind} needs {needs}; give "
            f"mw.Engine the optimizer= that was saved, or start with new state: mw.load({str(source.directory)!r})"
        )
    return saved


def quantised_in(checkpoint: Checkpoint, planes: Sequence[str], trained: Iterable[str]) -> list[str]:
    """Return the trained parameters whose state is in 8 bits in a checkpoint: those with scales."""
    return [name for name in trained if planes and name + SCALES in checkpoint.planes[planes[0]].entries]


def to_be_read(optimizer: LocalOptimizer, stored: Mapping[str, Tensor], quantised: Iterable[str]) -> State:
    """Return memory for the state of a checkpoint, in the form in which the checkpoint has it.

    `quantised`: the parameters whose state the checkpoint has in 8 bits. State that only this engine quantises is read
    in the dtype of the parameter, and `take_state` quantises it.
    """
    in_8_bits = set(quantised)
    new, made = optimizer.new_state({n: t for n, t in stored.items() if n not in optimizer.quantised}), State()
    for name, tensor in ((name, tensor) for name, tensor in stored.items() if tensor.numel()):
        num = len(optimizer.state_names[name])
        if name in in_8_bits:
            made |= zero_codes(name, tensor, num)
        else:
            made[name] = new[name] if name in new else tuple(torch.zeros_like(tensor) for _ in range(num))
    return made


def take_state(optimizer: LocalOptimizer, read: State, stored: Mapping[str, Tensor], quantised: Iterable[str]) -> None:
    """Convert the state that was read to the form of this engine, and make it the engine's state. Only one parameter at
    a time exists in both forms."""
    in_8_bits, num = set(quantised), len(optimizer.options.state_names)
    optimizer.state = read
    for name in [name for name in stored if name in read and (name in in_8_bits) != (name in optimizer.quantised)]:
        tensors = read.pop(name)
        if name in optimizer.quantised:
            read |= zero_codes(name, stored[name], num)
            optimizer.encode(name, tensors)
        else:
            dtype = optimizer.options.wide_dtype(stored[name].dtype)
            quantised_tensors = zip(tensors, read.pop(name + SCALES), optimizer.options.codes, strict=True)
            read[name] = tuple(decode(*each).to(dtype).contiguous() for each in quantised_tensors)


StateDict = dict[str, dict[str, Any]]


def planes_in_memory(model: Model, optimizer: LocalOptimizer, layout: StateLayout) -> dict[str, dict[str, Sharded]]:
    """Return this rank's tensors by state set and key: live memory, in the dtype in which it is stored.

    Optimizer state that no step has created yet is created now, as zeros: a load may be about to fill it.
    """
    live, _ = model.values().apart  # without frozen FP8 weights, which always come from the model's own files
    stored, out = Values(live), dict[str, dict[str, Sharded]]()
    owned = model.owned.union(names_of_scales(model.owned))
    trained = {name: live[name] for name in model.trained if name in live}
    optimizer.make_state(trained)
    state = optimizer.by_name({**optimizer.state, **optimizer.new_state(trained, empty=True)})
    values = {WEIGHTS: stored} | {name: Values(tensors) for name, tensors in state.items()}
    dtypes = {name: {param: each.dtype for param, each in tensors.items()} for name, tensors in state.items()}
    # A file tensor may hold several parameters, of which only some are trained: zeros stand for the state of the rest.
    for plane in disk.planes_of(layout.spec.table, model.keymap, {}, dtypes):
        padded = disk.with_zeros(values[plane.name], plane, model.table, stored)
        whole = {name: padded[name] if name in values[plane.name] else padded[name].contiguous() for name in padded}
        by_key = disk.sharded(whole, layout.pieces, owned, plane.keymap)
        out[plane.name] = {state_key(key, tensor.dtype): tensor for key, tensor in by_key.items()}
    return out


def check_same_keys(own: Mapping[str, Mapping[str, object]], state: object) -> None:
    """Refuse a state dict with other keys than this engine's, before anything is copied."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"a state dict is a dict, not a {type(state).__name__}; give what engine.state_dict() returned"
        )
    for plane, keys in own.items():
        others = state.get(plane, {})
        odd = sorted({*keys} ^ {*others})
        if odd:
            only_in = "the state dict" if odd[0] in others else "this engine"
            raise CheckpointError(
                f"{plane}/{odd[0]} is in {only_in} alone ({len(odd)} such keys); give the engine.state_dict() of an "
                "engine with the same model and the same train="
            )


def check_same_scale(lora: Lora | None, counters: Mapping[str, Tensor]) -> None:
    """Refuse adapters of another scale: their keys and shapes agree, and the model would compute something else."""
    if lora is not None and float(counters["adapter_scale"]) != lora.scale:
        raise CheckpointError(
            f"the state dict has adapters of scale {float(counters['adapter_scale']):.6g}, this engine's have "
            f"{lora.scale:.6g} (lora.alpha, lora.rank, lora.rslora); load the model with the lora= that was saved"
        )


def take_planes(own: Mapping[str, Mapping[str, Sharded]], state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy a state dict into live memory. Tensors that a load has filled in place are not copied again."""
    with torch.no_grad():
        for plane, keys in own.items():
            for key, tensor in keys.items():
                disk.take(tensor, state[plane][key], f"{plane}/{key}")
