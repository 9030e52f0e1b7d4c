"""Checkpoints of `torch.distributed.checkpoint` (DCP), read without running anything that lies in them.

Their list of contents is a pickle, and a pickle may call any function of any package. So it is read by an unpickler
that knows the few classes which such a list is made of, and refuses every other name. The tensors are read by torch,
which refuses code there by itself (`weights_only`).
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - to refuse what a pickle could run
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import BrokenFile
from ..weights import DTYPES, short

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
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of contents needs")
        return super().find_class(module, name)


class TorchFiles(FileSystemReader):
    """A directory that `torch.distributed.checkpoint.save` wrote: its tensors one by one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory, self.contents = directory, _contents(directory)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.contents

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = self.contents.state_dict_metadata
        return {name: tuple(value.size) for name, value in found.items() if isinstance(value, TensorStorageMetadata)}

    def tensor(self, name: str) -> Tensor:
        about = self.contents.state_dict_metadata[name]
        assert isinstance(about, TensorStorageMetadata)
        into = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load({name: into}, storage_reader=self, planner=planner, no_dist=True)
        return into


def _contents(directory: Path) -> Metadata:
    path = directory / TORCH_LIST
    try:
        found = _Known(io.BytesIO(path.read_bytes())).load()
    except Exception as error:
        raise BrokenFile(f"{path} is not the list of contents of a checkpoint of torch: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, Mapping):
        raise BrokenFile(f"{path} holds {short(found)}, and no list of contents; give a checkpoint of torch")
    for place in found.storage_data.values():
        name = place.relative_path if isinstance(place, _StorageInfo) else None
        if not isinstance(name, str) or PurePath(name).name != name or not (directory / name).is_file():
            raise BrokenFile(f"{path} names the file {short(name)}, which is not in {directory}")
    return found


def write_torch_files(directory: Path, state: Mapping[str, Any]) -> None:
    """By this process alone. `state` may map files: torch writes one tensor after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=FileSystemWriter(directory), no_dist=True)
