"""Rows of files: chats, texts or tokens, each with the place that it came from.

We read JSON lines ourselves. Libraries for tables drop empty lines, fill missing fields with null and do not say in
which line something is wrong.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from ..ops.part_sizes import part_size
from .hf_datasets import groups_of, numbered_rows
from .json_values import kind_of

Split = Literal["file", "paragraph", "line", "array"]

SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".md")
_OF_DIRECTORIES = (".jsonl", ".parquet", ".txt", ".md")  # a .json in one is often about the others
ARROW = ".arrow"  # of data sets, which say themselves which files are theirs
_RANGE_BYTES = part_size(__name__, "_RANGE_BYTES", 8 << 20, small=101)
_SAMPLE_BYTES = part_size(__name__, "_SAMPLE_BYTES", 1 << 20, small=101)
_ARRAY_BYTES = 1 << 30  # of a file that is one JSON value, which is read as a whole

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Shard:
    """A part of a file: of its bytes, or of the row groups or batches of a table."""

    file: Path
    start: int
    stop: int
    split: Split = "file"

    @property
    def num_bytes(self) -> int:
        return self.file.stat().st_size if self.split == "file" and is_text(self.file) else self.stop - self.start


@dataclass(frozen=True)
class Row:
    """`at`: the byte where a line begins, or the number of a row. `wrong`: why it could not be read."""

    at: int
    values: Mapping[str, Any]
    wrong: str = ""


def is_text(file: Path) -> bool:
    return file.suffix in (".txt", ".md")


def files_of(path: str | Path) -> list[Path]:
    """A file, or all of a directory that can be read, in the order of their names."""
    found = Path(path).expanduser()
    if found.is_file():
        if found.suffix not in SUFFIXES:
            raise DataError(f"{found} is no {', '.join(SUFFIXES)}; a file of one JSON object a line is a .jsonl")
        return [found]
    if not found.is_dir():
        raise DataError(f"{found} is neither a file nor a directory; look at the path of the data")
    files = sorted(each for each in found.rglob("*") if each.suffix in _OF_DIRECTORIES and each.is_file())
    if not files:
        arrays = sorted(str(each) for each in found.rglob("*.json"))
        hint = f"name its .json yourself: path = {arrays[:3]}" if arrays else "look at the path of the data"
        raise DataError(f"{found} holds no {', '.join(_OF_DIRECTORIES)}; {hint}")
    return files


def shards_of(files: Sequence[Path], split: Split = "file") -> list[Shard]:
    """The same whatever the number of processes that read them."""
    out: list[Shard] = []
    for file in files:
        size = file.stat().st_size
        if file.suffix == ".parquet":
            with _table(file) as table:
                out += [Shard(file, group, group + 1) for group in range(table.num_row_groups)]
        elif file.suffix == ARROW:
            out += [Shard(file, start, stop) for start, stop in groups_of(file, _RANGE_BYTES)]
        elif is_text(file) and split != "line":
            out.append(Shard(file, 0, size, split))
        elif file.suffix == ".json" and _is_array(file):
            out.append(Shard(file, 0, size, "array"))
        else:
            starts = range(0, size, _RANGE_BYTES)
            out += [Shard(file, start, min(start + _RANGE_BYTES, size), "line") for start in starts]
    return out


def rows_of(shard: Shard) -> Iterator[Row]:
    if shard.file.suffix == ".parquet":
        yield from _rows_of_table(shard)
    elif shard.file.suffix == ARROW:
        yield from (Row(at, values) for at, values in numbered_rows(shard.file, shard.start, shard.stop))
    elif shard.split == "array":
        yield from _rows_of_array(shard.file)
    elif not is_text(shard.file):
        yield from (_of_json(at, line) for at, line in _lines(shard) if line.strip())
    elif shard.split == "line":
        yield from (_of_text(at, line.rstrip(b"\r\n")) for at, line in _lines(shard) if line.strip())
    else:
        whole = shard.file.read_bytes()
        parts = [(0, whole)] if shard.split == "file" else _paragraphs(whole)
        yield from (_of_text(at, part) for at, part in parts if part.strip())


def _lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Those that begin in the range: the one across its start is the range's before."""
    with shard.file.open("rb") as file:
        if shard.start:
            file.seek(shard.start - 1)
            file.readline()
        at = file.tell()
        while at < shard.stop and (line := file.readline()):
            yield at, line
            at += len(line)


def _paragraphs(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """Between empty lines."""
    begun, held, at = 0, list[bytes](), 0
    for line in whole.splitlines(keepends=True):
        if line.strip():
            begun = begun if held else at
            held.append(line)
        elif held:
            yield begun, b"".join(held).rstrip(b"\r\n")
            held = []
        at += len(line)
    if held:
        yield begun, b"".join(held).rstrip(b"\r\n")


def _of_json(at: int, line: bytes) -> Row:
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        return Row(at, {}, f"it is not UTF-8: {error.reason} at its byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Row(at, {}, f"it is no JSON: {error}")
    return _of_value(at, values)


def _of_value(at: int, values: Any) -> Row:
    if not isinstance(values, dict):
        return Row(at, {}, f"it is {kind_of(values)}, not an object")
    return Row(at, values)


def _is_array(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(_SAMPLE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _rows_of_array(file: Path) -> Iterator[Row]:
    """Rows of a file that is a list of them. What is no JSON ends it: nobody knows where the next row begins."""
    if (size := file.stat().st_size) > _ARRAY_BYTES:
        raise DataError(
            f"{file} is a list of {size / 2**30:.1f} GiB, and at most {_ARRAY_BYTES / 2**30:.0f} are read at once; "
            "write a row a line: jq -c '.[]' FILE.json > FILE.jsonl"
        )
    try:
        text = file.read_bytes().decode()
        at, before = 0, 0  # the byte and the character of the row before
        for char, values in _elements(text):
            at, before = at + len(text[before:char].encode()), char
            yield _of_value(at, values)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON list of rows: {error}; write it again, or write a row a line") from error


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """Elements of a list, each with the character where it begins."""
    decoder, char = json.JSONDecoder(), _after(text, text.index("[") + 1)
    is_last = text[char : char + 1] == "]"
    while not is_last:
        values, stop = decoder.raw_decode(text, char)
        yield char, values
        stop = _after(text, stop)
        is_last = text[stop : stop + 1] == "]"
        if not is_last and text[stop : stop + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, stop)
        char = stop if is_last else _after(text, stop + 1)
    if (char := _after(text, char + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, char)


def _after(text: str, char: int) -> int:
    """Where something stands at or after `char`."""
    found = _SPACE.match(text, char)
    assert found is not None, "it matches nothing too"
    return found.end()


def _of_text(at: int, part: bytes) -> Row:
    try:
        return Row(at, {"text": part.decode()})
    except UnicodeDecodeError as error:
        return Row(at, {}, f"it is not UTF-8: {error.reason} at its byte {error.start}")


def _rows_of_table(shard: Shard) -> Iterator[Row]:
    with _table(shard.file) as table:
        at = sum(table.metadata.row_group(group).num_rows for group in range(shard.start))
        for batch in table.iter_batches(row_groups=[*range(shard.start, shard.stop)]):
            for values in batch.to_pylist():
                yield Row(at, values)
                at += 1


@contextmanager
def _table(file: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(file) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is no whole Parquet file: {error}; write or copy it again") from error


def places_of(file: Path, ats: Iterable[int]) -> dict[int, str]:
    """As people look for them: lines of a file, counted from 1, or rows of a table, counted from 0."""
    if file.suffix in (".parquet", ARROW):
        return {at: f"{file}, row {at}" for at in ats}
    found, line, before = dict[int, str](), 1, 0
    with file.open("rb") as opened:
        for at in sorted({*ats}):
            line += sum(chunk.count(b"\n") for chunk in _chunks(opened, at - before))
            found[at], before = f"{file}:{line}", at
    return found


def place_of(file: Path, at: int) -> str:
    return places_of(file, [at])[at]


def _chunks(opened: Any, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (chunk := opened.read(min(num_bytes, _SAMPLE_BYTES))):
        yield chunk
        num_bytes -= len(chunk)


def stamp(file: Path) -> tuple[str, int, int, bytes]:
    """What changes when a file does: a new one may have the size, and the time, of the old one."""
    found = file.stat()
    with file.open("rb") as opened:
        head = opened.read(_SAMPLE_BYTES)
        opened.seek(max(0, found.st_size - _SAMPLE_BYTES))
        return str(file.absolute()), found.st_size, found.st_mtime_ns, head + opened.read()
