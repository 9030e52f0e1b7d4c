"""How both moments of what is trained are kept, in memory and in a checkpoint: wide, in bfloat16, or as codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint import FIRST, Checkpoint
from ..layout import Piece, ShardingSpec, check_coded, coded_of, pieces, with_scales
from ..mesh import Mesh
from ..ops import codes
from ..optim import AdamW, Moments, Place, zero_codes
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
    return spec.beside(with_scales(spec.table, coded), mesh.axes.pp)


def scales_of(coded: Iterable[str]) -> list[str]:
    return [name + codes.SCALES for name in coded]


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
    return [name for name in trained if name + codes.SCALES in checkpoint.planes[FIRST].entries]


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
            three = zip(both, read.pop(name + codes.SCALES), codes.CODES, strict=True)
            first, second = (codes.decode(*each).to(state or stored[name].dtype).contiguous() for each in three)
            read[name] = (first, second)
