"""Stream whole tensors under their Hugging Face names, one after the other, in bounded memory (weight sync, gather).

The declaration gives the boxes of a key that each owner holds. Owners send only those bytes, to rank 0 or to all ranks,
which insert them. Nothing is padded, unlike in an all-gather of uneven pieces. Each receiving rank plans for all ranks,
which takes long with a thousand ranks.

For reinforcement learning this is the weight sync to an inference engine, which expects the keys of the hub: one key
per expert if the source has such keys (verl#6896).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..axes import DENSE
from ..mesh import Mesh
from ..mesh.collectives import broadcast_each_
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Piece, ShardingSpec, Table, owned
from .frozen_scales import QuantisedView, Values
from .keymap import Key, KeyMap, blocks_by_key, widest
from .safetensors_header import DTYPES

DtypeOf = Mapping[str, torch.dtype]  # of keys, or of parameters
# Bytes in flight at a time; a larger tensor is sent alone.
_BATCH_BYTES = part_size(__name__, "_BATCH_BYTES", 64 << 20, small=150_011)


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


@dataclass(frozen=True)
class Overlap:
    """The box `overlap` of a parameter that is a part of `block` of the key."""

    key: Key
    block: Block
    piece: Piece
    overlap: Box

    def view(self, tensor: Tensor) -> Tensor:
        """View the elements of the overlap in the whole tensor of the key."""
        return self.block.view(tensor)[self.overlap.within(self.block.ours).slices]

    def values(self, stored_model: StoredModel) -> Tensor:
        """Return the elements that this rank stores."""
        views = stored_model.views(self.piece)
        box, view = next((box, view) for box, view in views if box.meet(self.overlap) == self.overlap)
        return view[self.overlap.within(box).slices].detach()


@dataclass(frozen=True)
class Bucket:
    """Keys that travel together, their dtypes, and by rank the overlaps that it owns, in an order that ranks share."""

    keys: list[Key]
    dtypes: DtypeOf
    parts: Mapping[int, list[Overlap]]

    def sizes(self, rank: int) -> dict[torch.dtype, int]:
        """Return how many elements of each dtype a rank sends."""
        sizes: dict[torch.dtype, int] = {}
        for part in self.parts[rank]:
            dtype = self.dtypes[part.key.name]
            sizes[dtype] = sizes.get(dtype, 0) + part.overlap.size
        return sizes


def buckets(
    stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], dtypes: DtypeOf, ranks: Iterable[int]
) -> Iterator[Bucket]:
    """Divide keys into buckets of bounded bytes, with the parts of some ranks. `dtypes`: by key.

    All ranks derive the same buckets from the declaration, so no sizes are exchanged.
    """
    made_of, owners = blocks_by_key(stored_model.spec.table, keymap.choice), dict[str, list[tuple[int, Piece]]]()
    ranks = list(ranks)
    for rank in ranks:
        for name, piece in owned(stored_model.spec, stored_model.mesh.axes, rank).items():
            owners.setdefault(name, []).append((rank, piece))
    for batch in _batches(keys, dtypes):
        parts: dict[int, list[Overlap]] = {rank: [] for rank in ranks}
        for key in batch:
            for param, block in made_of[key.name]:
                for rank, piece in owners.get(param.name, ()):
                    common = (block.ours.meet(box) for box in piece.boxes)
                    parts[rank] += [Overlap(key, block, piece, box) for box in common if box is not None]
        yield Bucket(batch, dtypes, parts)


def whole_tensors(
    stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], *, dtypes: DtypeOf | None = None,
    to_all: bool = False,
) -> Iterator[tuple[Key, Tensor]]:  # fmt: skip
    """Yield each key with its whole tensor on rank 0. Other ranks get nothing, but must iterate to the end, because
    they send.

    `to_all`: every rank gets every tensor, on its device; rank 0 alone gets them on the CPU. Tensors have the dtype of
    their key, or with `dtypes` (by parameter) the widest dtype of their parts. Each owns its memory.

    They are yielded in buckets of at most 64 MB, in the order of `keys`. Memory is bounded by the largest tensor or one
    bucket, whichever is larger, and as much again for received buffers.
    """
    mesh, keys = stored_model.mesh, list(keys)
    dtype_of_key = dtypes_of(stored_model.spec.table, keymap, keys, dtypes)
    ranks = range(mesh.axes.world) if to_all or mesh.rank == 0 else [mesh.rank]
    for bucket in buckets(stored_model, keymap, keys, dtype_of_key, ranks):
        tensors = _sent(bucket, stored_model, to_all)
        # Keep no reference while the caller has them, so that each is freed when the caller drops it.
        yield from ((key, tensors.pop(key.name)) for key in bucket.keys if tensors)


def _sent(bucket: Bucket, stored_model: StoredModel, to_all: bool) -> dict[str, Tensor]:
    """Send a bucket, and return its whole tensors where they arrive."""
    mesh, tensors = stored_model.mesh, dict[str, Tensor]()
    if to_all or mesh.rank == 0:
        device = mesh.device if to_all else mesh.host
        tensors = {k.name: torch.empty(k.shape, dtype=bucket.dtypes[k.name], device=device) for k in bucket.keys}
    sizes = {rank: bucket.sizes(rank) for rank in bucket.parts}
    for rank, buffers in exchanged(mesh, _packed(bucket, stored_model), sizes, to_all):
        _insert(tensors, bucket.parts[rank], buffers)
    return tensors


def dtypes_of(table: Table, keymap: KeyMap, keys: Iterable[Key], dtypes: DtypeOf | None) -> dict[str, torch.dtype]:
    """Return the dtype in which each key travels: its own, or the widest of its parts in `dtypes` (by parameter)."""
    if dtypes is None:
        return {key.name: DTYPES[key.dtype] for key in keys}
    made_of = blocks_by_key(table, keymap.choice)
    return {key.name: widest(dtypes[param.name] for param, _ in made_of[key.name]) for key in keys}


Buffers = dict[torch.dtype, Tensor]


def exchanged(
    mesh: Mesh, own: Buffers, sizes: Mapping[int, Mapping[torch.dtype, int]], to_all: bool
) -> Iterator[tuple[int, Buffers]]:
    """Send this rank's buffers to rank 0, or to all ranks. Yield the buffers of every rank where they arrive.

    `sizes`: elements by rank and dtype. There is one buffer per dtype, so each rank sends one or two messages per
    bucket.
    """
    if to_all:
        every = {rank: own if rank == mesh.rank else _empty(each, mesh) for rank, each in sizes.items()}
        sent = [(buffer, rank) for rank, each in every.items() for buffer in each.values()]
        if mesh.axes.world > 1:
            broadcast_each_(sent, mesh.process_group(DENSE), "the sending of weights to all ranks")
        yield from every.items()
        return
    # Sends block, so a rank is at most one bucket ahead of rank 0, which bounds memory on both sides.
    if mesh.rank != 0:
        for buffer in own.values():
            mesh.send(buffer, 0, "the sending of weights to rank 0")
        return
    yield 0, own
    for rank in (rank for rank in sizes if rank != 0):
        buffers = _empty(sizes[rank], mesh)
        for buffer in buffers.values():
            mesh.receive(buffer, rank, "the receiving of weights on rank 0")
        yield rank, buffers


def _empty(sizes: Mapping[torch.dtype, int], mesh: Mesh) -> Buffers:
    """Allocate buffers for the messages of a rank, in the order in which it sends them."""
    return {dtype: torch.empty(sizes[dtype], dtype=dtype, device=mesh.device) for dtype in sorted(sizes, key=str)}


def _batches(keys: Iterable[Key], dtypes: DtypeOf) -> Iterator[list[Key]]:
    """Yield keys in batches of bounded size."""
    batch: list[Key] = []
    num_bytes = 0
    for key in keys:
        key_bytes = prod(key.shape) * dtypes[key.name].itemsize
        if batch and num_bytes + key_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(key)
        num_bytes += key_bytes
    if batch:
        yield batch


def _packed(bucket: Bucket, stored_model: StoredModel) -> Buffers:
    """Copy this rank's parts of a bucket into one buffer per dtype, on the device."""
    buffers = _empty(bucket.sizes(stored_model.mesh.rank), stored_model.mesh)
    positions = dict.fromkeys(buffers, 0)
    for part in bucket.parts[stored_model.mesh.rank]:
        dtype = bucket.dtypes[part.key.name]
        start, positions[dtype] = positions[dtype], positions[dtype] + part.overlap.size
        buffers[dtype][start : positions[dtype]].view(part.overlap.shape).copy_(part.values(stored_model))
    return buffers


def _insert(tensors: Mapping[str, Tensor], parts: list[Overlap], buffers: Buffers) -> None:
    """Copy the elements of buffers to their places in whole tensors.

    Sender and receiver visit overlaps in the same order, so positions in a buffer need not be sent.
    """
    positions = dict.fromkeys(buffers, 0)
    for part in parts:
        destination = part.view(tensors[part.key.name])
        start = positions[destination.dtype]
        destination.copy_(buffers[destination.dtype][start : start + part.overlap.size].view(part.overlap.shape))
        positions[destination.dtype] = start + part.overlap.size
