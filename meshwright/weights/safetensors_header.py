"""One safetensors file as a list of byte ranges: its header is parsed strictly, and nothing in it is trusted."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

import torch

from ..errors import BrokenFile
from .file_version import Opened, Stamp, opened

# Every dtype of the format: bits of an element, and what torch calls it. Those that torch does not know, or knows only
# packed, can be carried and not trained.
BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
TRAINABLE = ("BF16", "F16", "F32", "F64")
_LFS = b"version "  # how a pointer of git-lfs begins
_MAX_JSON_BYTES = 100_000_000  # the format's own limit for a header
_MAX_DIMS = 64  # of torch
_MAX_SIZE = 2**63 - 1
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_FIELDS = {"dtype", "shape", "data_offsets"}
_WHOLE = {int}  # True is one too, by class, and no size


class Entry(NamedTuple):  # a model has 37,000 of them
    """One tensor of a file: `start` and `stop` are byte offsets in it."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def short(value: object) -> str:
    """As `repr`, of bounded length: messages quote what a hostile file says."""
    return _SHORT.repr(value)


@functools.lru_cache(1 << 12)  # layers of a kind have the same
def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """What a tensor takes in a file. Elements smaller than a byte are packed; they must fill whole bytes."""
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {shape} takes {bits} bits, which are no whole bytes")
    return bits // 8


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    return read_stamped_json(path)[0]


def read_stamped_json(path: Path) -> tuple[dict[str, Any], Stamp]:
    with opened(path) as file:
        return _object(path, _bytes_of(file, 0, file.stamp.num_bytes, "a JSON file")), file.stamp


def read_header(path: Path) -> tuple[list[Entry], Mapping[str, str], Stamp]:
    """The tensors of one file in the order of their bytes, its metadata, and its stamp."""
    with opened(path) as file:
        size, length = file.stamp.num_bytes, _length_of(file)
        header = _object(path, _bytes_of(file, 8, length, "a header"))
    try:
        metadata = _metadata(header.pop("__metadata__", {}))
        name = path.name  # which is made anew at each call, and there may be tens of thousands
        entries = [_entry(name, key, spec, 8 + length) for key, spec in header.items()]
    except ValueError as error:
        raise BrokenFile(f"{path}: malformed header: {error}; fetch or write the file again") from error
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_extent(path, entries, 8 + length, size)
    return entries, metadata, file.stamp


def _length_of(file: Opened) -> int:
    """The length of the header."""
    path, size = file.path, file.stamp.num_bytes
    raw = _bytes_of(file, 0, min(8, size), "a safetensors file")
    length: int = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
    if raw == _LFS:
        raise BrokenFile(f"{path} is a pointer of git-lfs; fetch the file itself: git lfs pull")
    if not 2 <= length <= min(_MAX_JSON_BYTES, size - 8):
        raise BrokenFile(f"{path}: {size} bytes, header of {length}: truncated, or no safetensors file; fetch it again")
    return length


def _bytes_of(file: Opened, start: int, length: int, what: str) -> bytes:
    if length > _MAX_JSON_BYTES:
        raise BrokenFile(f"{file.path}: {length} bytes are too many for {what}; at most {_MAX_JSON_BYTES} are read")
    return file.bytes_at(start, length)


def _object(path: Path, text: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no doubled keys, no NaN, an object at the top."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except ValueError as error:
        raise BrokenFile(f"{path}: malformed header or JSON: {error}; fetch or write the file again") from error
    except RecursionError as error:
        raise BrokenFile(f"{path}: malformed header or JSON: nested too deep; fetch or write the file again") from error
    if not isinstance(found, dict):
        raise BrokenFile(f"{path} holds a {type(found).__name__}, not an object of fields; fetch or write it again")
    return found


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"the key {short(key)} stands there twice")
        out[key] = value
    return out


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError(f"__metadata__ is {short(found)}; it must map names to strings")
    for text in (*found, *found.values()):
        text.encode()  # half a surrogate pair could be read and never be written
    return found


def _entry(file: str, key: str, spec: Any, base: int) -> Entry:
    key.encode()
    if not isinstance(spec, dict) or spec.keys() != _FIELDS:
        raise ValueError(f"{short(key)} has {short(spec)}; it must have dtype, shape and data_offsets, and no more")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{short(key)} has the unknown dtype {short(dtype)}; known are {', '.join(BITS)}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise ValueError(
            f"{short(key)} has shape {short(shape)} and offsets {short(offsets)}; these must be lists of whole "
            f"numbers, at most {_MAX_DIMS} and exactly 2"
        )
    (start, stop), expected = offsets, num_bytes(dtype, tuple(shape))
    if stop - start != expected:
        raise ValueError(f"{short(key)} {dtype} {shape} takes {expected} bytes, but its offsets give it {stop - start}")
    return Entry(key, file, dtype, tuple(shape), base + start, base + stop)


def _sizes(found: Any) -> bool:
    if not isinstance(found, list) or not {*map(type, found)} <= _WHOLE:
        return False
    return not found or (min(found) >= 0 and max(found) <= _MAX_SIZE)


def _check_extent(path: Path, entries: list[Entry], base: int, size: int) -> None:
    at = base
    for entry in entries:
        if entry.start != at:
            raise BrokenFile(
                f"{path}: {short(entry.key)} begins at byte {entry.start}, expected {at}: a gap or an overlap; "
                "fetch or write the file again"
            )
        at = entry.stop
    if at != size:
        raise BrokenFile(
            f"{path}: its header speaks of {at} bytes, it has {size}: truncated or grown; fetch the file again"
        )
