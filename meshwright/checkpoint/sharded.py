"""Tensors of the files, of which each rank holds some boxes, for `torch.distributed.checkpoint`.

A DTensor cuts a dim into parts in the order of ranks. Our pieces are rows of a matrix that tp or ep cut before, so a
fused key may hold several ranges of it on one rank: no DTensor can say that, and one that says something near it loses
rows. So these tensors answer the questions that torch's planner asks DTensors too (`__create_write_items__` and the
like): which boxes of the whole tensor are here. Its planner then writes and reads them on any mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import CheckpointError, StateError
from ..layout import Block, Box, Piece, as_it_lies
from ..weights import KeyMap, chosen

_new_empty = torch.ops.aten.new_empty.default


@dataclass(frozen=True)
class Part:
    """A box of a key, and the memory that holds it. Of copies on several ranks one is written."""

    start: tuple[int, ...]
    values: Tensor
    written: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.start), self.values.size())


class Sharded(Tensor):
    """Has the shape of a whole tensor and holds `parts` of it: live memory. It knows no operation of tensors."""

    parts: list[tuple[tuple[int, ...], Tensor, bool]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> Sharded:
        made: Sharded = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made.parts = [(part.start, part.values, part.written) for part in parts]
        return made

    def held(self) -> list[Part]:
        return [Part(*part) for part in self.parts]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # the stub is of another torch
        if func is _new_empty:  # an asynchronous save copies it: torch then copies `parts`
            return Sharded(args[1], args[0].dtype, [])
        raise StateError(
            f"{func} of a tensor of a state dict: this rank holds parts of it, for torch.distributed.checkpoint alone; "
            "mw.gather(model) gives whole tensors"
        )

    def __repr__(self) -> str:  # type: ignore[override] # the stub takes contents
        return f"Sharded({tuple(self.shape)}, {self.dtype}, {len(self.parts)} parts here)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Asked by the planner of a save."""
        return [self._item(fqn, part) for part in self.held() if part.written]

    def _item(self, fqn: str, part: Part) -> WriteItem:
        data = TensorWriteData(part.chunk, TensorProperties(self.dtype), self.size())
        return WriteItem(MetadataIndex(fqn, torch.Size(part.start)), WriteItemType.SHARD, tensor_data=data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Asked by the planner of a load."""
        return [part.chunk for part in self.held()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Asked by both: the memory."""
        return next(part.values for part in self.held() if part.start == tuple(index.offset or ()))


def sharded(
    values: Mapping[str, Tensor], pieces: Mapping[str, Piece], owned: set[str], keymap: KeyMap
) -> dict[str, Sharded]:
    """The pieces of a rank as parts of keys."""
    parts: dict[str, list[Part]] = {name: [] for name in keymap.keys if name not in keymap.carried}
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in values.items():
        for block in chosen(pieces[name].param, keymap.choice).blocks:
            dtypes[block.key] = tensor.dtype
            for box, view in pieces[name].views(tensor):
                common = block.ours.meet(box)
                if common is not None:
                    held = view[common.within(box).slices]
                    parts[block.key] += [Part(at, part, name in owned) for at, part in _parts(block, common, held)]
    return {key: Sharded(keymap.keys[key].shape, dtype, parts[key]) for key, dtype in dtypes.items()}


def _parts(block: Block, common: Box, held: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """A box of ours as few boxes of the key, each with its memory in the shape of that box."""
    wanted = block.view(torch.empty(block.shape, device="meta"))[common.within(block.ours).slices]
    order = as_it_lies(wanted)
    yield from _boxes(block.shape, wanted.permute(order), held.permute(order))


def _boxes(shape: tuple[int, ...], wanted: Tensor, held: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """`wanted`: where the elements of `held` lie in the key, as a view of a tensor without memory."""
    first = int(wanted.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(wanted.shape, wanted.stride(), strict=True))
    start, end = _unravel(first, shape), _unravel(last, shape)
    size = tuple(b - a + 1 for a, b in zip(start, end, strict=True))
    try:
        if min(size, default=1) < 1 or torch.Size(size).numel() != wanted.numel():
            raise RuntimeError("no box")
        yield start, held.view(size)
    except RuntimeError:  # elements that no view can put side by side
        dim = next(dim for dim, num in enumerate(wanted.shape) if num > 1)
        for at in range(wanted.shape[dim]):
            yield from _boxes(shape, wanted.select(dim, at), held.select(dim, at))


def _unravel(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out: list[int] = []
    for size in reversed(shape):
        at, here = divmod(at, size)
        out.insert(0, here)
    return tuple(out)


def take(mine: Sharded, given: Tensor, key: str) -> None:
    """Copy what was given for a key into the memory that `mine` shows: nothing, where it is that memory."""
    if mine.shape != given.shape:
        raise CheckpointError(f"{key} is {tuple(given.shape)} in the state dict, and {tuple(mine.shape)} here")
    if not isinstance(given, Sharded):
        for part in mine.held():
            part.values.copy_(given[tuple(slice(a, a + n) for a, n in zip(part.start, part.values.shape, strict=True))])
        return
    theirs = {part.start: part.values for part in given.held()}
    for part in mine.held():
        if part.start not in theirs or theirs[part.start].shape != part.values.shape:
            raise CheckpointError(
                f"{key} of the state dict lacks this rank's part at {part.start}; give what engine.state_dict() of the "
                "same mesh returned, filled by torch.distributed.checkpoint.load"
            )
        if theirs[part.start].data_ptr() != part.values.data_ptr():
            part.values.copy_(theirs[part.start])
