"""Whole tensors under their Hugging Face names, one after the other, on global rank 0, in bounded memory.

Every rank knows from the table which boxes of a key each owner holds; owners send just those, rank 0 puts them in
their places. No rank plans for the others, no parameter is gathered whole on a rank that does not want it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Block, Box, Param, Piece, Rules, Table, owns, pieces
from ..mesh import Mesh, standing
from .header import DTYPES
from .spelling import Key, Spelling, blocks_by_key

_BATCH_BYTES = 64 << 20  # of keys in flight; a larger tensor goes alone


@dataclass(frozen=True)
class Holding:
    """What a rank stores, by parameter: of all ranks the pieces are known, of this one the tensors too."""

    table: Table
    rules: Rules
    mesh: Mesh
    stored: Mapping[str, Tensor]


def whole_tensors(
    holding: Holding, spelling: Spelling, keys: Iterable[Key], *, exact: bool
) -> Iterator[tuple[Key, Tensor]]:
    """On rank 0 yields every key's whole tensor; elsewhere yields nothing but must be run through all the same.

    `exact`: in the dtype of the key (weights); otherwise in the dtype in which it is stored (gradients).
    """
    made_of = blocks_by_key(holding.table, spelling.choice)
    axes = holding.mesh.axes
    owned = {
        rank: _owned(holding.table, holding.rules, holding.mesh, rank)
        for rank in (range(axes.world) if holding.mesh.rank == 0 else [holding.mesh.rank])
    }
    for batch in _batches(keys):
        plan = {rank: list(_parts(batch, made_of, owned[rank])) for rank in owned}
        mine = _packed(plan[holding.mesh.rank], holding, exact)
        if holding.mesh.rank != 0:
            for buffer in mine.values():
                with standing("a handing out of weights"):
                    dist.send(buffer, 0)
                    holding.mesh.settle()
            continue
        whole = {k.name: _empty(k, made_of[k.name], holding, exact) for k in batch}
        for rank in range(axes.world):
            _place(whole, plan[rank], mine if rank == 0 else _received(plan[rank], holding, exact, rank))
        yield from ((key, whole[key.name]) for key in batch)


@dataclass(frozen=True)
class _Part:
    """The box `ours` of a parameter, which stands in `block` of the key."""

    key: Key
    block: Block
    piece: Piece
    ours: Box


def _owned(table: Table, rules: Rules, mesh: Mesh, rank: int) -> dict[str, Piece]:
    coords = mesh.axes.coords(rank)
    held = pieces(table, rules, mesh.axes, coords)
    return {name: piece for name, piece in held.items() if owns(table, name, rules, mesh.axes, coords)}


def _batches(keys: Iterable[Key]) -> Iterator[list[Key]]:
    batch: list[Key] = []
    for key in keys:
        if batch and sum(k.num_bytes for k in batch) + key.num_bytes > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _parts(
    batch: list[Key], made_of: Mapping[str, list[tuple[Param, Block]]], held: Mapping[str, Piece]
) -> Iterator[_Part]:
    for key in batch:
        for param, block in made_of[key.name]:
            for box in held[param.name].boxes if param.name in held else ():
                common = block.ours.meet(box)
                if common is not None:
                    yield _Part(key, block, held[param.name], common)


def _dtype(part_key: Key, stored: torch.dtype, exact: bool) -> torch.dtype:
    return DTYPES[part_key.dtype] if exact else stored


def _packed(parts: list[_Part], holding: Holding, exact: bool) -> dict[torch.dtype, Tensor]:
    """The elements of the parts one after the other, a buffer for each dtype."""
    flat: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        stored = holding.stored[part.piece.param.name]
        for box, view in part.piece.views(stored):
            if box.meet(part.ours) == part.ours:
                values = view[part.ours.within(box).slices].detach().flatten()
                dtype = _dtype(part.key, stored.dtype, exact)
                flat.setdefault(dtype, []).append(values.to(holding.mesh.device, dtype))
    return {dtype: torch.cat(flat[dtype]) for dtype in sorted(flat, key=str)}


def _received(parts: list[_Part], holding: Holding, exact: bool, rank: int) -> dict[torch.dtype, Tensor]:
    sizes: dict[torch.dtype, int] = {}
    for part in parts:
        dtype = _dtype(part.key, holding.stored[part.piece.param.name].dtype, exact)
        sizes[dtype] = sizes.get(dtype, 0) + part.ours.size
    out = {}
    for dtype in sorted(sizes, key=str):
        out[dtype] = torch.empty(sizes[dtype], dtype=dtype, device=holding.mesh.device)
        with standing("a handing out of weights"):
            dist.recv(out[dtype], rank)
    return out


def _empty(key: Key, made_of: list[tuple[Param, Block]], holding: Holding, exact: bool) -> Tensor:
    stored = holding.stored[made_of[0][0].name]
    return torch.empty(key.shape, dtype=_dtype(key, stored.dtype, exact), device="cpu")


def _place(whole: Mapping[str, Tensor], parts: list[_Part], buffers: Mapping[torch.dtype, Tensor]) -> None:
    at = dict.fromkeys(buffers, 0)
    for part in parts:
        into = part.block.view(whole[part.key.name])[part.ours.within(part.block.ours).slices]
        start = at[into.dtype]
        into.copy_(buffers[into.dtype][start : start + part.ours.size].view(part.ours.shape))
        at[into.dtype] = start + part.ours.size
