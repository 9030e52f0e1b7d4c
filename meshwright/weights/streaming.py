"""Stream whole tensors under their Hugging Face names to rank 0, one after the other, in bounded memory (weight sync,
gather).

The declaration says which boxes of a key each owner holds. Owners send just those, and rank 0 inserts them. No other
rank ever holds a whole parameter, as an all-gather (`full_tensor()`) would make every rank do. Rank 0 plans for all
ranks, which takes long on a thousand of them.

For reinforcement learning this is the weight sync to an inference engine, which expects the keys of the hub: per expert
where the source has them so (verl#6896).
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

DtypeOf = Mapping[str, torch.dtype]  # of keys, or of parameters
# Bytes of keys that are in flight at a time; a larger tensor is sent alone.
_BATCH_BYTES = part_size(__name__, "_BATCH_BYTES", 64 << 20, small=20_011)


@dataclass(frozen=True)
class StoredModel:
    """The pieces of every rank, and the tensors of this rank."""

    spec: ShardingSpec
    mesh: Mesh
    stored: Mapping[str, Tensor]

    def views(self, piece: Piece) -> Iterator[tuple[Box, Tensor | QuantisedView]]:
        """Yield each box of a piece of this rank, with its stored values."""
        stored = self.stored
        yield from stored.views(piece) if isinstance(stored, Values) else piece.views(stored[piece.param.name])


def whole_tensors(
    stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], *, dtypes: DtypeOf | None = None
) -> Iterator[tuple[Key, Tensor]]:
    """Yield each key with its whole tensor on rank 0. Other ranks get nothing, but must iterate to the end: they send.

    Tensors have the dtype of their key, or with `dtypes` (by parameter) the widest dtype of their parts.

    Tensors are yielded on the CPU of rank 0 in batches of at most 64 MB, in the order of `keys`. Memory is bounded by
    the largest tensor or one batch, whichever is larger.
    """
    parts_of_key = blocks_by_key(stored_model.spec.table, keymap.choice)
    mesh = stored_model.mesh
    # Rank 0 derives what every rank sends from the declaration, so no sizes are exchanged. Both sides walk the same
    # keys in the same order.
    ranks = range(mesh.axes.world) if mesh.rank == 0 else [mesh.rank]
    owned_pieces = {rank: owned(stored_model.spec, mesh.axes, rank) for rank in ranks}
    for batch in _batches(keys):
        plan = {rank: list(_parts(batch, parts_of_key, owned_pieces[rank])) for rank in ranks}
        dtype_of_key = {
            k.name: DTYPES[k.dtype] if dtypes is None else _widest(parts_of_key[k.name], dtypes) for k in batch
        }
        packed = _packed(plan[mesh.rank], stored_model, dtype_of_key)
        # Blocking sends: a rank is at most one batch ahead of rank 0, which bounds memory on both sides.
        if mesh.rank != 0:
            for buffer in packed.values():
                mesh.send(buffer, 0, "the sending of weights to rank 0")
            continue
        tensors = {k.name: torch.empty(k.shape, dtype=dtype_of_key[k.name], device="cpu") for k in batch}
        for rank in ranks:
            _insert(tensors, plan[rank], packed if rank == 0 else _received(plan[rank], mesh, dtype_of_key, rank))
        yield from ((key, tensors[key.name]) for key in batch)


@dataclass(frozen=True)
class _Overlap:
    """The box `overlap` of a parameter that is a part of `block` of the key."""

    key: Key
    block: Block
    piece: Piece
    overlap: Box


def _batches(keys: Iterable[Key]) -> Iterator[list[Key]]:
    """Yield keys in batches of bounded size."""
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
    batch: list[Key], parts_of_key: Mapping[str, list[tuple[Param, Block]]], owned_pieces: Mapping[str, Piece]
) -> Iterator[_Overlap]:
    """Yield the overlaps of a batch with some owned pieces, in an order that sender and receiver share."""
    for key in batch:
        for param, block in parts_of_key[key.name]:
            for box in owned_pieces[param.name].boxes if param.name in owned_pieces else ():
                common = block.ours.meet(box)
                if common is not None:
                    yield _Overlap(key, block, owned_pieces[param.name], common)


def _widest(parts: list[tuple[Param, Block]], dtypes: DtypeOf) -> torch.dtype:
    """Return the widest dtype of the parts of a key."""
    return widest(dtypes[param.name] for param, _ in parts)


def _packed(parts: list[_Overlap], stored_model: StoredModel, dtypes: DtypeOf) -> dict[torch.dtype, Tensor]:
    """Concatenate the elements of the overlaps in one buffer per dtype, on the device.

    A dtype is a buffer, so that each rank sends one or two messages a batch instead of one a tensor.
    """
    flat: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        for box, view in stored_model.views(part.piece):
            if box.meet(part.overlap) == part.overlap:
                values = view[part.overlap.within(box).slices].detach().flatten()
                dtype = dtypes[part.key.name]
                flat.setdefault(dtype, []).append(values.to(stored_model.mesh.device, dtype))
    return {dtype: torch.cat(flat[dtype]) for dtype in sorted(flat, key=str)}


def _received(parts: list[_Overlap], mesh: Mesh, dtypes: DtypeOf, rank: int) -> dict[torch.dtype, Tensor]:
    """Receive the buffers of a rank."""
    sizes: dict[torch.dtype, int] = {}
    for part in parts:
        dtype = dtypes[part.key.name]
        sizes[dtype] = sizes.get(dtype, 0) + part.overlap.size
    buffers = {}
    for dtype in sorted(sizes, key=str):
        empty = torch.empty(sizes[dtype], dtype=dtype, device=mesh.device)
        buffers[dtype] = mesh.receive(empty, rank, "the receiving of weights on rank 0")
    return buffers


def _insert(tensors: Mapping[str, Tensor], parts: list[_Overlap], buffers: Mapping[torch.dtype, Tensor]) -> None:
    """Copy the elements of buffers to their places in whole tensors.

    Sender and receiver walk overlaps in one order, so positions in a buffer need not be sent.
    """
    positions = dict.fromkeys(buffers, 0)
    for part in parts:
        destination = part.block.view(tensors[part.key.name])[part.overlap.within(part.block.ours).slices]
        start = positions[destination.dtype]
        destination.copy_(buffers[destination.dtype][start : start + part.overlap.size].view(part.overlap.shape))
        positions[destination.dtype] = start + part.overlap.size
