"""Read rows of JSON lines, JSON lists, Parquet, Arrow and text files, each with the place that it came from.

No table library reads JSON lines here: these libraries drop empty lines, fill missing fields with null, and do not
report the line of an error.
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
_OF_DIRECTORIES = (".jsonl", ".parquet", ".txt", ".md")  # not .json: in a directory it often describes the other files
ARROW = ".arrow"  # files of data sets, which list their own files
_RANGE_BYTES = part_size(__name__, "_RANGE_BYTES", 8 << 20, small=101)
_SAMPLE_BYTES = part_size(__name__, "_SAMPLE_BYTES", 1 << 20, small=101)
_ARRAY_BYTES = 1 << 30  # size limit of a file that is one JSON list: it is parsed at once

_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Shard:
    """A part of a file: a byte range, or row groups of a table. Shards do not depend on the number of processes."""

    file: Path
    start: int
    stop: int
    split: Split = "file"

    @property
    def num_bytes(self) -> int:
        """Return the size, for progress."""
        return self.file.stat().st_size if self.split == "file" and is_text(self.file) else self.stop - self.start


@dataclass(frozen=True)
class Row:
    """A row. `at`: the byte where its line starts, or its number in a table. `wrong`: why it could not be read."""

    at: int
    values: Mapping[str, Any]
    wrong: str = ""


def is_text(file: Path) -> bool:
    """Return whether a file is plain text."""
    return file.suffix in (".txt", ".md")


def files_of(path: str | Path) -> list[Path]:
    """Return a file, or all readable files of a directory sorted by name."""
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is not a {', '.join(SUFFIXES)}; a file with one JSON object a line is a .jsonl")
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a directory; check the path of the data")
    files = sorted(each for each in path.rglob("*") if each.suffix in _OF_DIRECTORIES and each.is_file())
    if not files:
        arrays = sorted(str(each) for each in path.rglob("*.json"))
        hint = f"name its .json yourself: path = {arrays[:3]}" if arrays else "check the path of the data"
        raise DataError(f"{path} holds no {', '.join(_OF_DIRECTORIES)}; {hint}")
    return files


def shards_of(files: Sequence[Path], split: Split = "file") -> list[Shard]:
    """Split files into shards, the same for any number of processes.

    Processes tokenise shards in parallel. Their order is fixed, so the cache does not depend on the number of
    processes.
    """
    shards: list[Shard] = []
    for file in files:
        size = file.stat().st_size
        if file.suffix == ".parquet":
            with _table(file) as table:
                shards += [Shard(file, group, group + 1) for group in range(table.num_row_groups)]
        elif file.suffix == ARROW:
            shards += [Shard(file, start, stop) for start, stop in groups_of(file, _RANGE_BYTES)]
        elif is_text(file) and split != "line":
            shards.append(Shard(file, 0, size, split))
        elif file.suffix == ".json" and _is_array(file):
            shards.append(Shard(file, 0, size, "array"))
        else:
            # Byte ranges, not line numbers: splitting a file must not require reading it.
            starts = range(0, size, _RANGE_BYTES)
            shards += [Shard(file, start, min(start + _RANGE_BYTES, size), "line") for start in starts]
    return shards


def rows_of(shard: Shard) -> Iterator[Row]:
    """Yield the rows of a shard.

    A row that cannot be read is yielded with `wrong` set, not raised: the caller decides whether bad rows stop the run,
    and can name all of them at once.
    """
    if shard.file.suffix == ".parquet":
        yield from _rows_of_table(shard)
    elif shard.file.suffix == ARROW:
        yield from (Row(at, values) for at, values in numbered_rows(shard.file, shard.start, shard.stop))
    elif shard.split == "array":
        yield from _rows_of_array(shard.file)
    elif not is_text(shard.file):
        yield from (_row_of_json(at, line) for at, line in _lines(shard) if line.strip())
    elif shard.split == "line":
        yield from (_row_of_text(at, line.rstrip(b"\r\n")) for at, line in _lines(shard) if line.strip())
    else:
        content = shard.file.read_bytes()
        parts = [(0, content)] if shard.split == "file" else _paragraphs(content)
        yield from (_row_of_text(at, part) for at, part in parts if part.strip())


def _lines(shard: Shard) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that start in the range. A line across its start belongs to the range before.

    Example: with ranges of 10 bytes and lines that start at 0, 8 and 15, range 0 yields the first two lines (the second
    reaches beyond it), and range 10 yields the third.
    """
    with shard.file.open("rb") as file:
        if shard.start:
            # Begin one byte earlier: if it is a newline, the line that starts exactly at `start` is kept; else the rest
            # of the earlier line is skipped.
            file.seek(shard.start - 1)
            file.readline()
        at = file.tell()
        while at < shard.stop and (line := file.readline()):
            yield at, line
            at += len(line)


def _paragraphs(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the paragraphs between empty lines."""
    start, lines, at = 0, list[bytes](), 0
    for line in whole.splitlines(keepends=True):
        if line.strip():
            start = start if lines else at
            lines.append(line)
        elif lines:
            yield start, b"".join(lines).rstrip(b"\r\n")
            lines = []
        at += len(line)
    if lines:
        yield start, b"".join(lines).rstrip(b"\r\n")


def _row_of_json(at: int, line: bytes) -> Row:
    """Parse a JSON line."""
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        return Row(at, {}, f"it is not UTF-8: {error.reason} at its byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Row(at, {}, f"it is not valid JSON: {error}")
    return _row_of_value(at, values)


def _row_of_value(at: int, values: Any) -> Row:
    """Return the row of a parsed value, which must be an object."""
    if not isinstance(values, dict):
        return Row(at, {}, f"it is {kind_of(values)}, not an object")
    return Row(at, values)


def _is_array(file: Path) -> bool:
    """Return whether a file starts with a JSON list."""
    with file.open("rb") as opened:
        return opened.read(_SAMPLE_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _rows_of_array(file: Path) -> Iterator[Row]:
    """Yield the rows of a JSON list. A syntax error ends the file: where the next row starts is unknown."""
    if (size := file.stat().st_size) > _ARRAY_BYTES:
        raise DataError(
            f"{file} is a JSON list of {size / 2**30:.1f} GiB, above the limit of {_ARRAY_BYTES / 2**30:.0f}; write "
            "one row a line: jq -c '.[]' FILE.json > FILE.jsonl"
        )
    try:
        text = file.read_bytes().decode()
        at, previous_char = 0, 0  # the byte and the character of the previous row
        for char, values in _elements(text):
            # JSON is decoded as text, but places are bytes; only the text since the last row is encoded again.
            at, previous_char = at + len(text[previous_char:char].encode()), char
            yield _row_of_value(at, values)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not a JSON list of rows: {error}; repair it, or write one row a line") from error


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON list, each with the character where it starts."""
    decoder, char = json.JSONDecoder(), _skip_space(text, text.index("[") + 1)
    is_last = text[char : char + 1] == "]"
    while not is_last:
        values, stop = decoder.raw_decode(text, char)
        yield char, values
        stop = _skip_space(text, stop)
        is_last = text[stop : stop + 1] == "]"
        if not is_last and text[stop : stop + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, stop)
        char = stop if is_last else _skip_space(text, stop + 1)
    if (char := _skip_space(text, char + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, char)


def _skip_space(text: str, char: int) -> int:
    """Return the position of the next character that is not white space."""
    match = _SPACE.match(text, char)
    assert match is not None, "it matches nothing too"
    return match.end()


def _row_of_text(at: int, part: bytes) -> Row:
    """Decode UTF-8."""
    try:
        return Row(at, {"text": part.decode()})
    except UnicodeDecodeError as error:
        return Row(at, {}, f"it is not UTF-8: {error.reason} at its byte {error.start}")


def _rows_of_table(shard: Shard) -> Iterator[Row]:
    """Yield the rows of Parquet row groups."""
    with _table(shard.file) as table:
        at = sum(table.metadata.row_group(group).num_rows for group in range(shard.start))
        for batch in table.iter_batches(row_groups=[*range(shard.start, shard.stop)]):
            for values in batch.to_pylist():
                yield Row(at, values)
                at += 1


@contextmanager
def _table(file: Path) -> Iterator[Any]:
    """Open a Parquet file, with its errors as DataErrors."""
    try:
        with pq.ParquetFile(file) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a complete Parquet file: {error}; write or copy it again") from error


def places_of(file: Path, ats: Iterable[int]) -> dict[int, str]:
    """Return places for people: line numbers from 1, or table rows from 0."""
    if file.suffix in (".parquet", ARROW):
        return {at: f"{file}, row {at}" for at in ats}
    by_offset, line, previous_offset = dict[int, str](), 1, 0
    with file.open("rb") as opened:
        for at in sorted({*ats}):
            line += sum(chunk.count(b"\n") for chunk in _chunks(opened, at - previous_offset))
            by_offset[at], previous_offset = f"{file}:{line}", at
    return by_offset


def place_of(file: Path, at: int) -> str:
    """Return one place."""
    return places_of(file, [at])[at]


def _chunks(opened: Any, num_bytes: int) -> Iterator[bytes]:
    """Yield chunks of a given number of bytes."""
    while num_bytes > 0 and (chunk := opened.read(min(num_bytes, _SAMPLE_BYTES))):
        yield chunk
        num_bytes -= len(chunk)


def stamp(file: Path) -> tuple[str, int, int, bytes]:
    """Return a stamp that changes with a file: path, size, mtime, and both ends (an overwritten file may keep size and
    time).

    The whole file is not hashed: a terabyte of text would take an hour at every start. Both ends catch appended and
    rewritten files that kept their size.
    """
    stat_result = file.stat()
    with file.open("rb") as opened:
        head = opened.read(_SAMPLE_BYTES)
        opened.seek(max(0, stat_result.st_size - _SAMPLE_BYTES))
        return str(file.absolute()), stat_result.st_size, stat_result.st_mtime_ns, head + opened.read()
