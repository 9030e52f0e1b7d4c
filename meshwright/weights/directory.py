"""A Hugging Face directory out of pieces: same files, keys, layouts and dtypes as the source; all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import ExportError
from ..log import progress
from .header import DTYPES
from .source import Source
from .spelling import Key, Spelling
from .streaming import Holding, whole_tensors

_SMALL = (".json", ".jinja", ".txt", ".model", ".md", "LICENSE")  # what a tokenizer, a processor or a reader needs
_COPY_BYTES = 16 << 20


def write_directory(
    holding: Holding, spelling: Spelling, config: Mapping[str, Any], beside: Path, directory: Path
) -> None:
    """Write the model to `directory`, which must not exist yet or be empty. Every rank calls it; rank 0 writes.

    Everything goes into a temporary directory beside it, which is renamed when it is whole. `beside`: where the
    tokenizer's and other small files are copied from.
    """
    rank = holding.mesh.rank
    failure: Exception | None = None
    whole = directory.with_name(f".{directory.name}.unfinished-{os.getpid()}")
    trained = [k for k in spelling.keys.values() if k.name not in spelling.carried]
    tensors = whole_tensors(holding, spelling, trained, exact=True)
    if rank == 0:
        try:
            _check_target(directory)
            whole.mkdir(parents=True)
            _write_all(tensors, spelling, config, beside, whole, f"export to {directory}")
            if directory.exists():
                directory.rmdir()
            whole.rename(directory)
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it and raise
            failure = error
            shutil.rmtree(whole, ignore_errors=True)
    for _ in tensors:  # other ranks send here; after a failure rank 0 takes what they still send
        pass
    _agree(holding, failure, directory)


def _check_target(directory: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty; choose another or remove it")


def _agree(holding: Holding, failure: Exception | None, directory: Path) -> None:
    """All ranks end alike."""
    failed = torch.tensor(0 if failure is None else 1, device=holding.mesh.device)
    holding.mesh.sum_(failed, ("pp", "replicate", "fsdp", "cp", "tp"), "the end of an export")
    if failed.item():
        reason = failure or "see the message of rank 0"
        raise ExportError(f"nothing was exported to {directory}: {reason}") from failure


def _write_all(
    tensors: Iterator[tuple[Key, Tensor]],
    spelling: Spelling,
    config: Mapping[str, Any],
    beside: Path,
    whole: Path,
    label: str,
) -> None:
    total = sum(k.num_bytes for k in spelling.keys.values())
    with progress(label, total, "bytes", enabled=True) as advance:
        for file in spelling.files:
            keys = [k for k in spelling.keys.values() if k.file == file]
            with (whole / file).open("wb") as out:
                out.write(header(keys, spelling.metadata.get(file, {})))
                for key in keys:
                    _write_key(out, key, tensors, spelling)
                    advance(key.num_bytes)
                out.flush()
                os.fsync(out.fileno())
    _write_small(spelling, config, beside, whole, total)


def _write_key(out: BinaryIO, key: Key, tensors: Iterator[tuple[Key, Tensor]], spelling: Spelling) -> None:
    if key.name in spelling.carried:
        assert spelling.source is not None
        out.writelines(raw_bytes(spelling.source, key.name))
        return
    made, tensor = next(tensors)
    assert made.name == key.name, (made.name, key.name)
    out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def header(keys: Iterable[Key], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header whose tensors lie in the order of `keys`."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key in keys:
        fields[key.name] = {"dtype": key.dtype, "shape": list(key.shape), "data_offsets": [at, at + key.num_bytes]}
        at += key.num_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def raw_bytes(source: Source, key: str) -> Iterator[bytes]:
    """The bytes of a carried tensor, as they are."""
    entry = source.entries[key]
    source.check_unchanged(entry.file)
    with (source.directory / entry.file).open("rb") as f:
        f.seek(entry.start)
        left = entry.stop - entry.start
        while left:
            part = f.read(min(left, _COPY_BYTES))
            if not part:
                raise OSError(f"{entry.file} ended inside {key}; it was there when the model was loaded")
            yield part
            left -= len(part)


def raw_tensor(source: Source, key: str) -> Tensor:
    """A tensor of the source, exactly as stored: a dtype that torch does not know as its bytes."""
    entry = source.entries[key]
    flat = torch.frombuffer(bytearray(b"".join(raw_bytes(source, key))) or bytearray(1), dtype=torch.uint8)
    flat = flat[: entry.stop - entry.start]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape) if entry.dtype in DTYPES else flat


def _write_small(spelling: Spelling, config: Mapping[str, Any], beside: Path, whole: Path, total: int) -> None:
    """Config, index, and copies of whatever small files lie beside the source (tokenizer, templates)."""
    ours = {"config.json", *spelling.files}
    for path in sorted(beside.iterdir()) if beside.is_dir() else []:
        small = path.name.endswith(_SMALL) and not path.name.endswith(".index.json")
        if small and path.is_file() and path.name not in ours:
            shutil.copyfile(path, whole / path.name)
    (whole / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # to the byte as transformers does
    if len(spelling.files) > 1 or (spelling.source is not None and spelling.source.index is not None):
        index = dict(spelling.source.index or {}) if spelling.source else {}
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        index["weight_map"] = {k.name: k.file for k in sorted(spelling.keys.values(), key=lambda k: k.name)}
        (whole / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def exported_config(config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The source's config; a stated dtype where the export was asked to change it."""
    if dtype is None:
        return dict(config)
    name = str(dtype).removeprefix("torch.")
    out = {k: v for k, v in config.items() if k != "torch_dtype"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {**out["text_config"], "dtype": name}
    return {**out, "dtype": name}
