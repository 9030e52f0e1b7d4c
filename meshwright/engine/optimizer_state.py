"""How both moments of what is trained are kept, in memory and in a checkpoint: wide, in bfloat16, or as codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint as disk
from ..checkpoint import FIRST, SECOND, WEIGHTS, Checkpoint, Sharded
from ..errors import CheckpointError, ConfigError
from ..mesh import Mesh
from ..ops import int8_state
from ..optim.adamw import AdamW, Moments, Place, zero_codes
from ..sharding import Piece, ShardingSpec, check_coded, coded_of, pieces, with_scales
from ..weights import Values
from .model import Model

_CODES = ".codes"


@dataclass(frozen=True)
class Kept:
    """`coded`: the parameters whose moments are codes. `spec` and `pieces`: of all parameters, and of their scales."""

    coded: tuple[str, ...]
    spec: ShardingSpec
    pieces: Mapping[str, Piece]

    def places(self) -> dict[str, Place]:
        """Of the pieces here."""
        held = {name: self.pieces[name] for name in self.coded if name in self.pieces}
        return {name: Place(piece.row_numbers, piece.first_col) for name, piece in held.items()}


def kept_by(model: Model, state: torch.dtype | None) -> Kept:
    if state != torch.uint8:
        return Kept((), model.blueprint.spec, model.pieces)
    coded = coded_of(model.table, model.trained)
    spec = spec_with(model.blueprint.spec, model.mesh, coded, "state_dtype=torch.bfloat16")
    return Kept(coded, spec, pieces(spec, model.mesh.axes, model.mesh.rank))


def spec_with(spec: ShardingSpec, mesh: Mesh, coded: Sequence[str], instead: str) -> ShardingSpec:
    """With scales. A mesh that cuts a block is refused; `instead` says what else would do."""
    check_coded(spec, mesh.axes, coded, instead)
    return spec.with_table(with_scales(spec.table, coded), mesh.axes.pp)


def scales_of(coded: Iterable[str]) -> list[str]:
    return [name + int8_state.SCALES for name in coded]


def named(key: str, dtype: torch.dtype) -> str:
    """A key of the files in a state dict: codes are called so, since torch would load them as wide moments."""
    return key + _CODES if dtype == torch.uint8 else key


def key_of(name: str) -> str:
    return name.removesuffix(_CODES)


def dtypes_of(model: Model, optimizer: AdamW, kept: Kept) -> dict[str, torch.dtype]:
    """Of all moments, on whatever rank, and of their scales."""
    state = optimizer.settings.state
    wide = None if state == torch.uint8 else state
    found = {name: torch.uint8 if name in kept.coded else wide or model.kept[name] for name in model.trained}
    return found | dict.fromkeys(scales_of(kept.coded), torch.float32)


def coded_in(checkpoint: Checkpoint, trained: Iterable[str]) -> list[str]:
    """Those whose moments a checkpoint has as codes: it then has scales of them."""
    return [name for name in trained if name + int8_state.SCALES in checkpoint.planes[FIRST].entries]


def to_be_read(optimizer: AdamW, stored: Mapping[str, Tensor], coded: Iterable[str]) -> Moments:
    """Memory for the moments of a checkpoint that has those of `coded` as codes. What is codes here and not there is
    read as wide as the parameter."""
    there = set(coded)
    new, made = optimizer.new_moments({n: t for n, t in stored.items() if n not in optimizer.coded}), Moments()
    for name, tensor in ((name, tensor) for name, tensor in stored.items() if tensor.numel()):
        if name in there:
            made |= zero_codes(name, tensor)
        else:
            made[name] = new[name] if name in new else (torch.zeros_like(tensor), torch.zeros_like(tensor))
    return made


def take_moments(optimizer: AdamW, read: Moments, stored: Mapping[str, Tensor], coded: Iterable[str]) -> None:
    """Keep what was read as this engine does. Of what changes its form, one parameter is there in both at a time."""
    there, state = set(coded), optimizer.settings.state
    optimizer.moments = read
    for name in [name for name in stored if name in read and (name in there) != (name in optimizer.coded)]:
        both = read.pop(name)
        if name in optimizer.coded:
            read |= zero_codes(name, stored[name])
            optimizer.encode(name, both)
        else:
            three = zip(both, read.pop(name + int8_state.SCALES), int8_state.CODES, strict=True)
            first, second = (int8_state.decode(*each).to(state or stored[name].dtype).contiguous() for each in three)
            read[name] = (first, second)


StateDict = dict[str, dict[str, Any]]
COUNTERS = "counters"


def planes_in_memory(model: Model, optimizer: AdamW, kept: Kept) -> dict[str, dict[str, Sharded]]:
    """By plane and key: what this rank holds, live, in the dtype in which it is held. Moments that no step has made yet
    are made: they are zero, and may be about to be filled."""
    live, _ = model.values().apart  # what stays in 8 bits is of the source, and takes nothing
    stored, out, owned = Values(live), dict[str, dict[str, Sharded]](), model.owned.union(scales_of(model.owned))
    trained = {name: live[name] for name in model.trained if name in live}
    optimizer.make_moments(trained)
    both = {**optimizer.moments, **optimizer.new_moments(trained, empty=True)}
    first, second = (Values({name: pair[at] for name, pair in both.items()}) for at in (0, 1))
    values = {WEIGHTS: stored, FIRST: first, SECOND: second}
    moments = {name: pair[0].dtype for name, pair in both.items()}
    for plane in disk.planes_of(kept.spec.table, model.keymap, {}, moments):
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
