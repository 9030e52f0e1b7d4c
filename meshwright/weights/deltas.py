"""Find and send the elements of whole tensors that changed since a snapshot (weight sync of sparse updates).

After a small step most weights round to the same bfloat16, so few elements differ in the dtype that is sent. Each rank
compares the pieces that it owns with its snapshot, bit by bit, and sends indices and values of those that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..axes import DENSE
from .keymap import Key, KeyMap
from .streaming import Bucket, Buffers, DtypeOf, Overlap, StoredModel, buckets, exchanged

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that compare bits, by bytes


@dataclass(frozen=True)
class Change:
    """The elements of an owned part that changed: their indices in the part and in the whole tensor, and their
    values."""

    key: str
    size: int  # of the part
    places: Tensor  # in the row-major order of the part
    indices: Tensor  # in that of the whole tensor
    values: Tensor

    def on(self, device: torch.device) -> Change:
        """Return what a snapshot on that device needs."""
        places = self.places.to(device, index_dtype(self.size))
        return Change(self.key, self.size, places, self.indices[:0], self.values.to(device))


def snapshot_of(stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], dtypes: DtypeOf) -> list[Tensor]:
    """Copy the parts that this rank owns to the host, as flat tensors in the order in which parts are sent."""
    rank, host = stored_model.mesh.rank, stored_model.mesh.host
    every = (bucket.parts[rank] for bucket in buckets(stored_model, keymap, keys, dtypes, [rank]))
    # A copy even where device and dtype are equal: the live weights will change.
    return [part.values(stored_model).flatten().to(host, dtypes[part.key.name], copy=True) for p in every for part in p]


def send_changes(
    stored_model: StoredModel,
    planned: Iterable[Bucket],
    snapshot: Sequence[Tensor],
    changed: list[Change],
    to_all: bool,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (key, indices, values) of each tensor with changes, on rank 0 or `to_all`; every rank must exhaust it.

    `planned`: the buckets with this rank's parts. Indices are sorted, so they do not depend on the mesh. `changed`
    collects this rank's changes; `move` writes them into the snapshot.
    """
    mesh = stored_model.mesh
    for bucket in planned:
        own: list[Change] = []
        for part in bucket.parts[mesh.rank]:
            own.append(_change(part, stored_model, snapshot[len(changed)], bucket.dtypes[part.key.name]))
            changed.append(own[-1].on(mesh.host))
        counts = mesh.all_gather_on_hosts(_counts(bucket, own), DENSE, "the numbers of changed weights")
        yield from _received(bucket, own, counts.long(), stored_model, to_all)


def _received(
    bucket: Bucket, own: Sequence[Change], counts: Tensor, stored_model: StoredModel, to_all: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Exchange the changes of a bucket and yield them by tensor. `counts`: by rank and key."""
    mesh = stored_model.mesh
    sizes = {rank: _sizes(bucket, of_rank) for rank, of_rank in enumerate(counts.tolist())}
    indices: dict[str, list[Tensor]] = {}
    values: dict[str, list[Tensor]] = {}
    for rank, buffers in exchanged(mesh, _packed(own, mesh.device), sizes, to_all):
        at = dict.fromkeys(buffers, 0)
        for key, num in zip(bucket.keys, counts[rank].tolist(), strict=True):
            for dtype, into in (
                ((index_dtype(prod(key.shape)), indices), (bucket.dtypes[key.name], values)) if num else ()
            ):
                into.setdefault(key.name, []).append(buffers[dtype][at[dtype] : at[dtype] + num])
                at[dtype] += num
    for name in (key.name for key in bucket.keys if key.name in indices):
        ordered, order = torch.cat(indices.pop(name)).sort()
        changed = torch.cat(values.pop(name))[order]
        yield (name, ordered, changed) if to_all else (name, ordered.to(mesh.host), changed.to(mesh.host))


def move(snapshot: Sequence[Tensor], changed: Sequence[Change]) -> None:
    """Write the changes that were sent into the snapshot."""
    for part, change in zip(snapshot, changed, strict=True):
        part[change.places.long()] = change.values


def index_dtype(num: int) -> torch.dtype:
    """Return the dtype for indices of `num` elements: int32 if it is wide enough."""
    return torch.int32 if num <= torch.iinfo(torch.int32).max else torch.int64


def _change(part: Overlap, stored_model: StoredModel, before: Tensor, dtype: torch.dtype) -> Change:
    """Compare the bits of a part with its snapshot: so -0 differs from 0, and a NaN equals itself."""
    now, bits = part.values(stored_model).flatten().to(dtype), _BITS[dtype.itemsize]
    places = (now.view(bits) != before.to(now.device).view(bits)).nonzero().view(-1)
    view = part.view(torch.empty(part.key.shape, device="meta"))
    indices, rest = torch.full_like(places, int(view.storage_offset())), places
    for size, stride in reversed([*zip(view.shape, view.stride(), strict=True)]):
        indices += rest % size * stride
        rest = rest // size
    dtype_of_indices = index_dtype(prod(part.key.shape))
    return Change(part.key.name, len(now), places, indices.to(dtype_of_indices), now[places])


def _counts(bucket: Bucket, own: Sequence[Change]) -> list[int]:
    """Return how many elements of each key of a bucket changed on this rank."""
    counts = dict.fromkeys((key.name for key in bucket.keys), 0)
    for change in own:
        counts[change.key] += len(change.places)
    return [*counts.values()]


def _sizes(bucket: Bucket, counts: Sequence[int]) -> dict[torch.dtype, int]:
    """Return the elements of each buffer that a rank with these counts sends."""
    sizes: dict[torch.dtype, int] = {}
    for key, num in zip(bucket.keys, counts, strict=True):
        for dtype in (index_dtype(prod(key.shape)), bucket.dtypes[key.name]) if num else ():
            sizes[dtype] = sizes.get(dtype, 0) + num
    return sizes


def _packed(own: Sequence[Change], device: torch.device) -> Buffers:
    """Concatenate the indices and values of this rank's changes, key by key, in one buffer per dtype."""
    flat: dict[torch.dtype, list[Tensor]] = {}
    for change in own:
        for x in (change.indices, change.values) if len(change.places) else ():
            flat.setdefault(x.dtype, []).append(x.to(device))
    return {dtype: torch.cat(flat[dtype]) for dtype in sorted(flat, key=str)}
