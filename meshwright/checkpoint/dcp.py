"""Interoperate with torch.distributed.checkpoint (DCP): a tensor subclass that tells DCP's planner which boxes this
rank holds.

A DTensor cuts a dim into equal parts in rank order. Our shards are rows of a matrix that tp or ep has already cut, so a
fused key may hold several ranges of it on one rank. No DTensor placement can express that, and the closest one loses
rows: uneven `_StridedShard` over 3 or more shards (pytorch#168134). DCP asks any tensor for its chunks through
`__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__`; these names are private, so a test pins
the torch versions.

Wrappers that copy the placement of a 2-D weight to a 3-D stack of expert weights save the wrong dim as sharded
(TransformerEngine#2713); boxes avoid placements.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - to refuse what a pickle could run
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import BrokenFile, CheckpointError, StateError
from ..sharding import Block, Box, Piece, storage_order
from ..weights import DTYPES, KeyMap, chosen, short

_new_empty = torch.ops.aten.new_empty.default


@dataclass(frozen=True)
class Part:
    """A box of a key and the memory that holds it. If several ranks hold copies, one of them is written."""

    start: tuple[int, ...]
    values: Tensor
    written: bool

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Return the box as DCP's metadata."""
        return ChunkStorageMetadata(torch.Size(self.start), self.values.size())


class Sharded(Tensor):
    """A tensor with the whole shape that holds only `parts` of it, in live memory. It supports no tensor operation.

    To DCP's planner it behaves like a DTensor, but with any set of boxes. It is a wrapper subclass without storage, so
    operations on it raise.
    """

    parts: list[tuple[tuple[int, ...], Tensor, bool]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[Part]) -> Sharded:
        made: Sharded = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        made.parts = [(part.start, part.values, part.written) for part in parts]
        return made

    def held(self) -> list[Part]:
        """Return the parts of this rank."""
        return [Part(*part) for part in self.parts]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # the stub is of another torch
        if func is _new_empty:  # async_save deep-copies it: torch creates an empty tensor, then copies `parts`
            return Sharded(args[1], args[0].dtype, [])
        raise StateError(
            f"{func} on a tensor of engine.state_dict(): this rank holds parts of it, which only "
            "torch.distributed.checkpoint can read; use mw.gather(model) for whole tensors"
        )

    def __repr__(self) -> str:  # type: ignore[override] # the stub takes contents
        return f"Sharded({tuple(self.shape)}, {self.dtype}, {len(self.parts)} parts on this rank)"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the write items of this rank, for the planner of a save."""
        return [self._item(fqn, part) for part in self.held() if part.written]

    def _item(self, fqn: str, part: Part) -> WriteItem:
        """Return the write item of a part."""
        data = TensorWriteData(part.chunk, TensorProperties(self.dtype), self.size())
        return WriteItem(MetadataIndex(fqn, torch.Size(part.start)), WriteItemType.SHARD, tensor_data=data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank reads, for the planner of a load."""
        return [part.chunk for part in self.held()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a box, for both planners."""
        return next(part.values for part in self.held() if part.start == tuple(index.offset or ()))


def sharded(
    values: Mapping[str, Tensor], pieces: Mapping[str, Piece], owned: set[str], keymap: KeyMap
) -> dict[str, Sharded]:
    """Return the shards of a rank as sharded tensors by key."""
    parts: dict[str, list[Part]] = {name: [] for name in keymap.keys if name not in keymap.carried}
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in values.items():
        for block in chosen(pieces[name].param, keymap.choice).blocks:
            dtypes[block.key] = tensor.dtype
            for box, view in pieces[name].views(tensor):
                common = block.ours.meet(box)
                if common is not None:
                    # Views of live memory: DCP reads from them and writes into them, without a copy of the model.
                    held = view[common.within(box).slices]
                    parts[block.key] += [Part(at, part, name in owned) for at, part in _parts(block, common, held)]
    return {key: Sharded(keymap.keys[key].shape, dtype, parts[key]) for key, dtype in dtypes.items()}


def _parts(block: Block, common: Box, held: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Split a box of a parameter into few boxes of the key, each with its memory in the shape of that box."""
    wanted = block.view(torch.empty(block.shape, device="meta"))[common.within(block.ours).slices]
    order = storage_order(wanted)
    yield from _boxes(block.shape, wanted.permute(order), held.permute(order))


def _boxes(shape: tuple[int, ...], wanted: Tensor, held: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield boxes. `wanted` says where the elements of `held` lie in the key (a view of a meta tensor)."""
    first = int(wanted.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(wanted.shape, wanted.stride(), strict=True))
    start, end = _unravel(first, shape), _unravel(last, shape)
    # First and last element span a box of the key. If it has as many elements as the view, the view fills it.
    size = tuple(b - a + 1 for a, b in zip(start, end, strict=True))
    try:
        if min(size, default=1) < 1 or torch.Size(size).numel() != wanted.numel():
            raise RuntimeError("no box")
        yield start, held.view(size)
    except RuntimeError:  # not a box, or not viewable as one: split along a dim
        dim = next(dim for dim, num in enumerate(wanted.shape) if num > 1)
        for at in range(wanted.shape[dim]):
            yield from _boxes(shape, wanted.select(dim, at), held.select(dim, at))


def _unravel(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of a flat position (numpy's unravel_index)."""
    out: list[int] = []
    for size in reversed(shape):
        at, index = divmod(at, size)
        out.insert(0, index)
    return tuple(out)


def take(local: Sharded, loaded: Tensor, key: str) -> None:
    """Copy a loaded tensor into this rank's memory; do nothing where both are the same memory.

    Boxes must match exactly: a state dict of another mesh must be loaded through DCP, whose planner reshards, not
    copied.
    """
    if local.shape != loaded.shape:
        raise CheckpointError(
            f"{key} is {tuple(loaded.shape)} in the state dict, but {tuple(local.shape)} in the model"
        )
    if not isinstance(loaded, Sharded):
        for part in local.held():
            part.values.copy_(
                loaded[tuple(slice(a, a + n) for a, n in zip(part.start, part.values.shape, strict=True))]
            )
        return
    loaded_parts = {part.start: part.values for part in loaded.held()}
    for part in local.held():
        if part.start not in loaded_parts or loaded_parts[part.start].shape != part.values.shape:
            raise CheckpointError(
                f"{key} of the state dict lacks this rank's part at {part.start}; give what engine.state_dict() of the "
                "same mesh returned, filled by torch.distributed.checkpoint.load"
            )
        if loaded_parts[part.start].data_ptr() != part.values.data_ptr():
            part.values.copy_(loaded_parts[part.start])


TORCH_LIST = ".metadata"
_OF_DCP = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_OF_DCP, "Metadata"), (_OF_DCP, "MetadataIndex"), (_OF_DCP, "StorageMeta"), (_OF_DCP, "TensorProperties"),
    (_OF_DCP, "TensorStorageMetadata"), (_OF_DCP, "BytesStorageMetadata"), (_OF_DCP, "ChunkStorageMetadata"),
    (_OF_DCP, "_MEM_FORMAT_ENCODING"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES.values()),
}  # fmt: skip


class _Known(pickle.Unpickler):
    """An unpickler for DCP's metadata that allows its classes only. A pickle can run any code on loading."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of DCP's metadata, and refuse any other."""
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of contents needs")
        return super().find_class(module, name)


class TorchFiles(FileSystemReader):
    """A directory that `torch.distributed.checkpoint.save` wrote, read tensor by tensor.

    DCP's metadata is a pickle. It is loaded by an unpickler that allows only the dozen classes that DCP writes.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory, self.contents = directory, _contents(directory)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.contents

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        entries = self.contents.state_dict_metadata
        return {name: tuple(value.size) for name, value in entries.items() if isinstance(value, TensorStorageMetadata)}

    def tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        about = self.contents.state_dict_metadata[name]
        assert isinstance(about, TensorStorageMetadata)
        into = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DCP warns that no process group exists
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load({name: into}, storage_reader=self, planner=planner, no_dist=True)
        return into


def _contents(directory: Path) -> Metadata:
    """Read and check the metadata: its classes, and that files lie inside the directory."""
    path = directory / TORCH_LIST
    try:
        metadata = _Known(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise BrokenFile(f"{path} is not the list of contents of a checkpoint of torch: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise BrokenFile(
            f"{path} holds {short(metadata)}, not a list of contents; give a directory that "
            "torch.distributed.checkpoint wrote"
        )
    for place in metadata.storage_data.values():
        name = place.relative_path if isinstance(place, _StorageInfo) else None
        if not isinstance(name, str) or PurePath(name).name != name or not (directory / name).is_file():
            raise BrokenFile(f"{path} names the file {short(name)}, which is not in {directory}")
    return metadata


def write_torch_files(directory: Path, state: Mapping[str, Any]) -> None:
    """Write a DCP checkpoint in this process alone. `state` may map files, so that tensors are read one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=FileSystemWriter(directory), no_dist=True)
