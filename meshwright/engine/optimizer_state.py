"""How optimizer state is kept, in memory and in a checkpoint: wide, in bfloat16, or in 8 bits with scales."""

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
from ..sharding import Piece, ShardingSpec, pieces
from ..weights import Values
from .model import Model

_CODES = ".codes"
COUNTERS = "counters"
_RESERVED = {*disk.PARAMETERS, disk.RANDOM, disk.PARTS, COUNTERS}  # other folders of a checkpoint or keys of a state


@dataclass(frozen=True)
class StateLayout:
    """`quantised`: the parameters whose state is in 8 bits. `spec` and `pieces`: of all parameters, and of scales."""

    quantised: tuple[str, ...]
    spec: ShardingSpec
    pieces: Mapping[str, Piece]

    def places(self) -> dict[str, Place]:
        """Return where the quantised pieces of this rank lie."""
        held = {name: self.pieces[name] for name in self.quantised if name in self.pieces}
        return {name: Place(piece.row_numbers, piece.first_col) for name, piece in held.items()}


def state_layout(model: Model, optimizer: Optimizer) -> StateLayout:
    """Return where the state of an optimizer lies. Refuse names that a checkpoint already uses."""
    names = optimizer.state_names
    wrong = [name for at, name in enumerate(names) if not name.isidentifier() or name in {*_RESERVED, *names[:at]}]
    if wrong:
        raise ConfigError(
            f"state_names of {type(optimizer).__name__} has {wrong[0]!r}; give each tensor a unique name, such as "
            f"'momentum', and none of {', '.join(sorted(_RESERVED))}"
        )
    quantised = optimizer.quantised(model.table, model.trained)
    if not quantised:
        return StateLayout((), model.blueprint.spec, model.pieces)
    spec = spec_with(model.blueprint.spec, model.mesh, quantised, "state_dtype=torch.bfloat16")
    return StateLayout(quantised, spec, pieces(spec, model.mesh.axes, model.mesh.rank))


def spec_with(spec: ShardingSpec, mesh: Mesh, quantised: Sequence[str], instead: str) -> ShardingSpec:
    """Return the spec with scales. Refuse a mesh that cuts a block; `instead` says what else to choose."""
    check_blocks(spec, mesh.axes, quantised, instead)
    return spec.with_table(with_scales(spec.table, quantised), mesh.axes.pp)


def named(key: str, dtype: torch.dtype) -> str:
    """Return the key of a tensor in a state dict. Codes get a suffix, since torch would load them as wide state."""
    return key + _CODES if dtype == torch.uint8 else key


def key_of(name: str) -> str:
    return name.removesuffix(_CODES)


def dtypes_of(model: Model, optimizer: LocalOptimizer, kept: StateLayout) -> dict[str, dict[str, torch.dtype]]:
    """Return the dtypes of all state on whatever rank, by state name: of parameters, and of scales."""
    wide = optimizer.options.wide_dtype
    dtypes = {name: torch.uint8 if name in kept.quantised else wide(model.kept[name]) for name in model.trained}
    dtypes |= dict.fromkeys(names_of_scales(kept.quantised), torch.float32)
    return dict.fromkeys(optimizer.options.state_names, dtypes)


def state_of(source: Checkpoint, optimizer: Optimizer) -> list[str]:
    """Return the planes of optimizer state in a checkpoint. Refuse those of another optimizer."""
    found = [name for name in source.planes if name not in disk.PARAMETERS]
    if {*found} != {*optimizer.state_names} and (found or source.trainer["step"]):  # step 0 has none yet
        saved, kept = (", ".join(names) or "nothing" for names in (found, optimizer.state_names))
        raise CheckpointError(
            f"{source.directory} has the optimizer state {saved}, but {type(optimizer).__name__} keeps {kept}; give "
            f"mw.Engine the optimizer= that was saved, or start with new state: mw.load({str(source.directory)!r})"
        )
    return found


def quantised_in(checkpoint: Checkpoint, planes: Sequence[str], trained: Iterable[str]) -> list[str]:
    """Return the parameters whose state a checkpoint has in 8 bits: it then has scales of them."""
    return [name for name in trained if planes and name + SCALES in checkpoint.planes[planes[0]].entries]


def to_be_read(optimizer: LocalOptimizer, stored: Mapping[str, Tensor], quantised: Iterable[str]) -> State:
    """Return memory for the state of a checkpoint that has that of `quantised` in 8 bits. State that this engine alone
    quantises is read as wide as the parameter."""
    in_8_bits, num = set(quantised), len(optimizer.options.state_names)
    new, made = optimizer.new_state({n: t for n, t in stored.items() if n not in optimizer.quantised}), State()
    for name, tensor in ((name, tensor) for name, tensor in stored.items() if tensor.numel()):
        if name in in_8_bits:
            made |= zero_codes(name, tensor, num)
        else:
            made[name] = new[name] if name in new else tuple(torch.zeros_like(tensor) for _ in range(num))
    return made


def take_state(optimizer: LocalOptimizer, read: State, stored: Mapping[str, Tensor], quantised: Iterable[str]) -> None:
    """Keep what was read in the form of this engine. Only one parameter at a time exists in both forms."""
    in_8_bits, num = set(quantised), len(optimizer.options.state_names)
    optimizer.state = read
    for name in [name for name in stored if name in read and (name in in_8_bits) != (name in optimizer.quantised)]:
        kept = read.pop(name)
        if name in optimizer.quantised:
            read |= zero_codes(name, stored[name], num)
            optimizer.encode(name, kept)
        else:
            dtype = optimizer.options.wide_dtype(stored[name].dtype)
            three = zip(kept, read.pop(name + SCALES), optimizer.options.codes, strict=True)
            read[name] = tuple(decode(*each).to(dtype).contiguous() for each in three)


StateDict = dict[str, dict[str, Any]]


def planes_in_memory(model: Model, optimizer: LocalOptimizer, kept: StateLayout) -> dict[str, dict[str, Sharded]]:
    """Return what this rank holds, live, by plane and key, in the dtype in which it is held. State that no step has
    made yet is made: it is zero, and may be about to be filled."""
    live, _ = model.values().apart  # what stays in 8 bits is of the source, and takes nothing
    stored, out = Values(live), dict[str, dict[str, Sharded]]()
    owned = model.owned.union(names_of_scales(model.owned))
    trained = {name: live[name] for name in model.trained if name in live}
    optimizer.make_state(trained)
    state = optimizer.by_name({**optimizer.state, **optimizer.new_state(trained, empty=True)})
    values = {WEIGHTS: stored} | {name: Values(tensors) for name, tensors in state.items()}
    dtypes = {name: {param: each.dtype for param, each in tensors.items()} for name, tensors in state.items()}
    for plane in disk.planes_of(kept.spec.table, model.keymap, {}, dtypes):
        held = disk.with_zeros(values[plane.name], plane, model.table, stored)
        whole = {name: held[name] if name in values[plane.name] else held[name].contiguous() for name in held}
        found = disk.sharded(whole, kept.pieces, owned, plane.keymap)
        out[plane.name] = {named(key, tensor.dtype): tensor for key, tensor in found.items()}
    return out


def check_same_keys(mine: Mapping[str, Mapping[str, object]], given: object) -> None:
    """Before anything is taken."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"a state dict is a dict, not a {type(given).__name__}; give what engine.state_dict() returned"
        )
    for plane, keys in mine.items():
        theirs = given.get(plane, {})
        odd = sorted({*keys} ^ {*theirs})
        if odd:
            whose = "the state dict" if odd[0] in theirs else "this engine"
            raise CheckpointError(
                f"{plane}/{odd[0]} is in {whose} alone ({len(odd)} such keys); give what engine.state_dict() of an "
                "engine of the same model with the same train= returned"
            )


def take_planes(mine: Mapping[str, Mapping[str, Sharded]], given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Into live memory. What a load has put there already stays."""
    with torch.no_grad():
        for plane, keys in mine.items():
            for key, tensor in keys.items():
                disk.take(tensor, given[plane][key], f"{plane}/{key}")
