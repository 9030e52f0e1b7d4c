"""A directory of safetensors files as a map from key to bytes: headers are parsed strictly, nothing is executed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import BrokenFile, LoadError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TRAINABLE = ("BF16", "F16", "F32", "F64")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `start` and `stop` are byte offsets in it."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    """What a directory holds, in the order in which its files hold it."""

    directory: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by file
    index: Mapping[str, Any] | None = None  # of the index file, where there is one

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(e.file for e in self.entries.values()))


def open_source(directory: str | os.PathLike[str]) -> Source:
    """Read the headers of a Hugging Face directory."""
    root = Path(directory)
    files, index = _files(root)
    entries: dict[str, Entry] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        found, metadata[file] = read_header(root, file)
        for entry in found:
            if entry.key in entries:
                raise LoadError(f"{entry.key} stands in both {entries[entry.key].file} and {file}; remove one of them")
            entries[entry.key] = entry
    if index is not None:
        _check_index(index["weight_map"], entries)
    return Source(root, entries, metadata, index)


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise LoadError(f"{directory} has no config.json; give a Hugging Face model directory")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise BrokenFile(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise BrokenFile(f"{path} holds a {type(config).__name__}, not an object of fields")
    return config


def _files(root: Path) -> tuple[list[str], Mapping[str, Any] | None]:
    if not root.is_dir():
        raise LoadError(f"{root} is no directory; give a Hugging Face model directory")
    index_path = root / "model.safetensors.index.json"
    if index_path.is_file():
        index = _read_index(index_path)
        files = list(dict.fromkeys(index["weight_map"].values()))
        for file in files:
            if file != os.path.basename(file) or not (root / file).is_file():
                raise LoadError(f"{index_path.name} names the file {file!r}, which is not in {root}")
        return files, index
    files = sorted(p.name for p in root.glob("*.safetensors"))
    if "model.safetensors" in files:
        return ["model.safetensors"], None
    if not files:
        pickles = sorted(p.name for p in root.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
        hint = f"; {pickles[0]} is a pickle, which may run code: convert it to safetensors" if pickles else ""
        raise LoadError(f"{root} holds no safetensors file{hint}")
    return files, None


def _read_index(path: Path) -> Mapping[str, Any]:
    try:
        index = json.loads(path.read_text())
        well_formed = all(isinstance(k, str) and isinstance(v, str) for k, v in index["weight_map"].items())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenFile(f"{path} is no index of a checkpoint: {error!r}") from error
    if not well_formed:
        raise BrokenFile(f"{path}: weight_map must map key to file name")
    return index


def _check_index(weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for key, file in weight_map.items():
        if key not in entries or entries[key].file != file:
            where = entries[key].file if key in entries else "no file"
            raise LoadError(f"the index puts {key} into {file}, but {where} has it; mend the index")
    extra = [key for key in entries if key not in weight_map]
    if extra:
        raise LoadError(
            f"{entries[extra[0]].file} holds {extra[0]}, which the index does not list ({len(extra)} such keys)"
        )


def read_header(root: Path, file: str) -> tuple[list[Entry], Mapping[str, str]]:
    """The tensors of one file in the order of their bytes, and its metadata."""
    path = root / file
    size = path.stat().st_size
    with path.open("rb") as f:
        raw = f.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise BrokenFile(f"{path}: {size} bytes, header of {length}: truncated, or no safetensors file")
        text = f.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_doubles)
        metadata = header.pop("__metadata__", {})
        entries = [_entry(file, key, spec, 8 + length) for key, spec in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenFile(f"{path}: malformed header: {error}") from error
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_extent(path, entries, 8 + length, size)
    return entries, metadata


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands there twice")
    return out


def _entry(file: str, key: str, spec: Mapping[str, Any], base: int) -> Entry:
    dtype, shape, (start, stop) = spec["dtype"], spec["shape"], spec["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{key} has the unknown dtype {dtype!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"{key} has shape {shape} and offsets {[start, stop]}; they must be whole numbers")
    expected = prod(shape) * DTYPES[dtype].itemsize
    if stop - start != expected:
        raise ValueError(f"{key} {dtype} {shape} takes {expected} bytes, but its offsets give it {stop - start}")
    return Entry(key, file, dtype, tuple(shape), base + start, base + stop)


def _check_extent(path: Path, entries: list[Entry], base: int, size: int) -> None:
    at = base
    for entry in entries:
        if entry.start != at:
            raise BrokenFile(f"{path}: {entry.key} begins at byte {entry.start}, expected {at}: a gap or an overlap")
        at = entry.stop
    if at != size:
        raise BrokenFile(f"{path}: its header speaks of {at} bytes, it has {size}: truncated or grown")
