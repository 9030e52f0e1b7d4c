"""Rows of Arrow files, as the package `datasets` writes them: streams of record batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import DataError

Decode = Callable[[Any], Any]


def groups_of(file: Path, num_bytes: int) -> list[tuple[int, int]]:
    """Ranges of its batches, each of about so many bytes. Only their headers are read."""
    found, start, held, at = list[tuple[int, int]](), 0, 0, -1
    for at, batch in enumerate(_batches(file)):
        held += batch.nbytes
        if held >= num_bytes:
            found.append((start, at + 1))
            start, held = at + 1, 0
    return [*found, (start, at + 1)] if start <= at else found


def num_rows_of(file: Path) -> int:
    return sum(len(batch) for batch in _batches(file))


def numbered_rows(file: Path, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Of a range of batches, each with its number in the file."""
    at = 0
    for number, batch in enumerate(_batches(file)):
        if number >= stop:
            return
        if number >= start:
            decoders = {name: _decoder(batch.schema.field(name).type) for name in batch.schema.names}
            for row, values in enumerate(batch.to_pylist(), at):
                yield row, {name: _decoded(value, decoders[name]) for name, value in values.items()}
        at += len(batch)


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    try:
        yield from pa.ipc.open_stream(pa.memory_map(str(file)))
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no whole Arrow stream, as datasets writes it: {error}; make it anew") from error


def _decoder(kind: Any) -> Decode | None:
    """What makes values of JSON texts: such a column holds objects that differ from row to row. None: nothing to do."""
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads if kind.extension_name == "arrow.json" else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        return inner and (lambda values: [_decoded(each, inner) for each in values])
    if pa.types.is_struct(kind):
        inners = {kind.field(at).name: _decoder(kind.field(at).type) for at in range(kind.num_fields)}
        if any(inners.values()):
            return lambda values: {name: _decoded(each, inners[name]) for name, each in values.items()}
    return None


def _decoded(value: Any, decode: Decode | None) -> Any:
    return value if value is None or decode is None else decode(value)
