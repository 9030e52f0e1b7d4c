"""Whole tensors under their Hugging Face names, one after the other, on global rank 0, in bounded memory.

The table says which boxes of a key each owner holds. Owners send just those, and rank 0 puts them in their places. So
no other rank ever holds a whole parameter. Rank 0 plans for all ranks, which takes long on a thousand of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mesh import Mesh
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Param, Piece, ShardingSpec, owned
from .frozen_scales import QuantisedView, Values
from .keymap import Key, KeyMap, blocks_by_key, widest
from .safetensors_header import DTYPES

_Dtypes = Mapping[str, torch.dtype]  # of keys, or of parameters
# of keys in flight; a larger tensor goes alone
_BATCH_BYTES = part_size(__name__, "_BATCH_BYTES", 64 << 20, small=20_011)


@dataclass(frozen=True)
class StoredModel:
    """Every rank's pieces, and this rank's tensors."""

    spec: ShardingSpec
    mesh: Mesh
    stored: Mapping[str, Tensor]

    def views(self, piece: Piece) -> Iterator[tuple[Box, Tensor | QuantisedView]]:
        """Of what this rank stores of a parameter, each box."""
        stored = self.stored
        yield from stored.views(piece) if isinstance(stored, Values) else piece.views(stored[piece.param.name])


def whole_tensors(
    stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], *, dtypes: _Dtypes | None = None
) -> Iterator[tuple[Key, Tensor]]:
    """Every key's whole tensor, on rank 0. The other ranks get nothing, but must run through it all the same.

    Tensors are in the dtype of the key; with `dtypes` (of parameters) as wide as their widest part.
    """
    made_of = blocks_by_key(stored_model.spec.table, keymap.choice)
    mesh = stored_model.mesh
    ranks = range(mesh.axes.world) if mesh.rank == 0 else [mesh.rank]
    held = {rank: owned(stored_model.spec, mesh.axes, rank) for rank in ranks}
    for batch in _batches(keys):
        plan = {rank: list(_parts(batch, made_of, held[rank])) for rank in ranks}
        kinds = {k.name: DTYPES[k.dtype] if dtypes is None else _widest(made_of[k.name], dtypes) for k in batch}
        mine = _packed(plan[mesh.rank], stored_model, kinds)
        if mesh.rank != 0:
            for buffer in mine.values():
                mesh.send(buffer, 0, "the sending of weights to rank 0")
            continue
        whole = {k.name: torch.empty(k.shape, dtype=kinds[k.name], device="cpu") for k in batch}
        for rank in ranks:
            _insert(whole, plan[rank], mine if rank == 0 else _received(plan[rank], mesh, kinds, rank))
        yield from ((key, whole[key.name]) for key in batch)


@dataclass(frozen=True)
class _Overlap:
    """The box `ours` of a parameter, which is a part of `block` of the key."""

    key: Key
    block: Block
    piece: Piece
    ours: Box


def _batches(keys: Iterable[Key]) -> Iterator[list[Key]]:
    batch: list[Key] = []
    num_bytes = 0
    for key in keys:
        if batch and num_bytes + key.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(key)
        num_bytes += key.num_bytes
    if batch:
        yield batch


def _parts(
    batch: list[Key], made_of: Mapping[str, list[tuple[Param, Block]]], held: Mapping[str, Piece]
) -> Iterator[_Overlap]:
    for key in batch:
        for param, block in made_of[key.name]:
            for box in held[param.name].boxes if param.name in held else ():
                common = block.ours.meet(box)
                if common is not None:
                    yield _Overlap(key, block, held[param.name], common)


def _widest(made_of: list[tuple[Param, Block]], dtypes: _Dtypes) -> torch.dtype:
    return widest(dtypes[param.name] for param, _ in made_of)


def _packed(parts: list[_Overlap], stored_model: StoredModel, dtypes: _Dtypes) -> dict[torch.dtype, Tensor]:
    """The elements of the parts one after the other, a buffer for each dtype."""
    flat: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        for box, view in stored_model.views(part.piece):
            if box.meet(part.ours) == part.ours:
                values = view[part.ours.within(box).slices].detach().flatten()
                dtype = dtypes[part.key.name]
                flat.setdefault(dtype, []).append(values.to(stored_model.mesh.device, dtype))
    return {dtype: torch.cat(flat[dtype]) for dtype in sorted(flat, key=str)}


def _received(parts: list[_Overlap], mesh: Mesh, dtypes: _Dtypes, rank: int) -> dict[torch.dtype, Tensor]:
    sizes: dict[torch.dtype, int] = {}
    for part in parts:
        dtype = dtypes[part.key.name]
        sizes[dtype] = sizes.get(dtype, 0) + part.ours.size
    out = {}
    for dtype in sorted(sizes, key=str):
        empty = torch.empty(sizes[dtype], dtype=dtype, device=mesh.device)
        out[dtype] = mesh.receive(empty, rank, "the receiving of weights on rank 0")
    return out


def _insert(whole: Mapping[str, Tensor], parts: list[_Overlap], buffers: Mapping[torch.dtype, Tensor]) -> None:
    at = dict.fromkeys(buffers, 0)
    for part in parts:
        into = part.block.view(whole[part.key.name])[part.ours.within(part.block.ours).slices]
        start = at[into.dtype]
        into.copy_(buffers[into.dtype][start : start + part.ours.size].view(part.ours.shape))
        at[into.dtype] = start + part.ours.size
