"""Yield this rank's shards under Hugging Face names, in the coordinates of the files, without communication.

A piece is a box of a parameter. The tensor of a file may have its rows in another order (gate and up interleaved by
expert, q, k and v one after the other), so one piece can be several boxes of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sharding import Box, storage_order
from .keymap import Key, KeyMap
from .streaming import DtypeOf, Overlap, StoredModel, buckets, dtypes_of


@dataclass(frozen=True)
class ShardSpec:
    """The box of a whole tensor that a shard fills: `whole[offset[0] : offset[0] + size[0], ...]`."""

    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index of the whole tensor."""
        return tuple(slice(at, at + num) for at, num in zip(self.offset, self.size, strict=True))


def shards(
    stored_model: StoredModel, keymap: KeyMap, keys: Iterable[Key], *, dtypes: DtypeOf | None = None
) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """Yield copies of the boxes that this rank owns, in the order of `keys`. Over all ranks they tile every tensor."""
    rank, keys = stored_model.mesh.rank, list(keys)
    dtype_of_key = dtypes_of(stored_model.spec.table, keymap, keys, dtypes)
    for bucket in buckets(stored_model, keymap, keys, dtype_of_key, [rank]):
        for part in bucket.parts[rank]:
            values = part.values(stored_model)
            for box, spec in file_boxes(part, part.overlap):
                own, order = values[box.within(part.overlap).slices], storage_order(_on_meta(part, box))
                out = torch.empty(spec.size, dtype=dtype_of_key[part.key.name], device=values.device)
                yield part.key.name, out.copy_(own.permute(order).reshape(spec.size)), spec


def file_boxes(part: Overlap, box: Box) -> Iterator[tuple[Box, ShardSpec]]:
    """Divide a box of a parameter into boxes that are also boxes of the file's tensor; yield each with its box in the
    file.

    Indices of the file grow with each index of the parameter. So the first and the last element span the smallest box
    of the file around all of them, and it is the same box if it has as many elements.
    """
    view, shape = _on_meta(part, box), part.key.shape
    first = int(view.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start, stop = _position(first, shape), _position(last, shape)
    spec = ShardSpec(shape, start, tuple(b - a + 1 for a, b in zip(start, stop, strict=True)))
    if Box.whole(spec.size).size == box.size:
        yield box, spec
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    for index in range(box.start[dim], box.stop[dim]):
        one = tuple(index if d == dim else at for d, at in enumerate(box.start))
        end = tuple(index + 1 if d == dim else at for d, at in enumerate(box.stop))
        yield from file_boxes(part, Box(one, end))


def _on_meta(part: Overlap, box: Box) -> Tensor:
    """View a box of an overlap in the whole tensor of the key, without memory."""
    whole = part.block.view(torch.empty(part.key.shape, device="meta"))
    return whole[box.within(part.block.ours).slices]


def _position(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element from its number in row-major order."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return tuple(index)
