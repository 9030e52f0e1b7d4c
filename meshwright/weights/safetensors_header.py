"""Parse safetensors headers strictly: a file becomes a list of named byte ranges; nothing in it is trusted or executed.

Every byte after the header must belong to exactly one tensor. With overlaps or gaps, one file could mean different
things to different readers.
"""

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

# Every dtype of the format: the bits of an element, and torch's name. Dtypes that torch lacks, or has only packed, can
# be carried through an export but not trained.
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
_LFS_POINTER = b"version "  # the first bytes of a git-lfs pointer: the usual result of a clone without git-lfs
_MAX_JSON_BYTES = 100_000_000  # the limit of the safetensors format for a header
_MAX_DIMS = 64  # torch's limit
_MAX_SIZE = 2**63 - 1
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 200
_FIELDS = {"dtype", "shape", "data_offsets"}
_INT_ONLY = {int}  # compared with exact types: bool is a subclass of int


class Entry(NamedTuple):
    """One tensor of a file: `start` and `stop` are byte offsets in it. A tuple, because a model may have 37,000."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def short(value: object) -> str:
    """Return a repr of bounded length, for quoting a file's contents in an error."""
    return _REPR.repr(value)


@functools.lru_cache(1 << 12)  # the layers of a model repeat the same shapes
def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in a file. Dtypes of less than a byte are packed, and must fill whole bytes."""
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {shape} takes {bits} bits, which is not a whole number of bytes")
    return bits // 8


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    return read_stamped_json(path)[0]


def read_stamped_json(path: Path) -> tuple[dict[str, Any], Stamp]:
    """Read a JSON file that holds an object, and the version of the file."""
    with opened(path) as file:
        return _object(path, _bytes_of(file, 0, file.stamp.num_bytes, "a JSON file")), file.stamp


def read_header(path: Path) -> tuple[list[Entry], Mapping[str, str], Stamp]:
    """Read the tensors of a file in the order of their bytes, its metadata, and the version of the file.

    Entries are sorted by offset, and an export writes them in this order, which byte-equal files need.
    """
    with opened(path) as file:
        size, length = file.stamp.num_bytes, _length_of(file)
        header = _object(path, _bytes_of(file, 8, length, "a header"))
    try:
        metadata = _metadata(header.pop("__metadata__", {}))
        name = path.name  # `path.name` is a new string at each access; sharing one saves memory
        entries = [_entry(name, key, spec, 8 + length) for key, spec in header.items()]
    except ValueError as error:
        raise BrokenFile(f"{path}: malformed header: {error}; fetch or write the file again") from error
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_extent(path, entries, 8 + length, size)
    return entries, metadata, file.stamp


def _length_of(file: Opened) -> int:
    """Return the length of the header."""
    path, size = file.path, file.stamp.num_bytes
    raw = _bytes_of(file, 0, min(8, size), "a safetensors file")
    length: int = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
    if raw == _LFS_POINTER:
        raise BrokenFile(f"{path} is a git-lfs pointer, not the file; fetch it with `git lfs pull`")
    if not 2 <= length <= min(_MAX_JSON_BYTES, size - 8):
        raise BrokenFile(
            f"{path}: {size} bytes with a header of {length}: truncated, or not a safetensors file; fetch it again"
        )
    return length


def _bytes_of(file: Opened, start: int, length: int, what: str) -> bytes:
    """Read bytes, up to the limit of the format."""
    if length > _MAX_JSON_BYTES:
        raise BrokenFile(f"{file.path}: {length} bytes are too many for {what}; at most {_MAX_JSON_BYTES} are read")
    return file.bytes_at(start, length)


def _object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN, an object at the top."""
    try:
        value = json.loads(text.decode(), object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_nan)
    except ValueError as error:
        raise BrokenFile(f"{path}: malformed header or JSON: {error}; fetch or write the file again") from error
    except RecursionError as error:
        raise BrokenFile(f"{path}: malformed header or JSON: nested too deep; fetch or write the file again") from error
    if not isinstance(value, dict):
        raise BrokenFile(f"{path} holds a {type(value).__name__}, not an object of fields; fetch or write it again")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict, and refuse equal keys: json would silently keep the last one."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {short(key)} occurs twice")
        fields[key] = value
    return fields


def _refuse_nan(name: str) -> float:
    """Refuse NaN and Infinity, which Python's json accepts."""
    raise ValueError(f"{name} is not a JSON number")


def _metadata(metadata: Any) -> dict[str, str]:
    """Check `__metadata__`: names to strings."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"__metadata__ is {short(metadata)}; it must map names to strings")
    for text in (*metadata, *metadata.values()):
        text.encode()  # raises for a lone surrogate, which JSON can spell but UTF-8 cannot: it could never be written
    return metadata


def _entry(file: str, key: str, spec: Any, data_start: int) -> Entry:
    """Check one tensor: dtype, shape, and offsets that match both."""
    key.encode()
    if not isinstance(spec, dict) or spec.keys() != _FIELDS:
        raise ValueError(f"{short(key)} has {short(spec)}; it must have dtype, shape and data_offsets, and no more")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{short(key)} has the unknown dtype {short(dtype)}; known are {', '.join(BITS)}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMS:
        raise ValueError(
            f"{short(key)} has shape {short(shape)} and offsets {short(offsets)}; these must be lists of non-negative "
            f"integers, of at most {_MAX_DIMS} and exactly 2"
        )
    (start, stop), expected = offsets, num_bytes(dtype, tuple(shape))
    if stop - start != expected:
        raise ValueError(f"{short(key)} {dtype} {shape} takes {expected} bytes, but its offsets give it {stop - start}")
    return Entry(key, file, dtype, tuple(shape), data_start + start, data_start + stop)


def _sizes(value: Any) -> bool:
    """Return whether a value is a list of non-negative 63-bit integers."""
    if not isinstance(value, list) or not {*map(type, value)} <= _INT_ONLY:
        return False
    return not value or (min(value) >= 0 and max(value) <= _MAX_SIZE)


def _check_extent(path: Path, entries: list[Entry], data_start: int, size: int) -> None:
    """Check that tensors tile the file after its header.

    The format allows neither gaps nor overlaps. A reader that only looks up offsets notices neither, so a file could
    hide a tensor or alias two of them.
    """
    expected = data_start
    for entry in entries:
        if entry.start != expected:
            raise BrokenFile(
                f"{path}: {short(entry.key)} begins at byte {entry.start}, expected {expected}: a gap or an overlap; "
                "fetch or write the file again"
            )
        expected = entry.stop
    if expected != size:
        raise BrokenFile(
            f"{path}: its header describes {expected} bytes, but it has {size}: truncated or grown; "
            "fetch the file again"
        )
