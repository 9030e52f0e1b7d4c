"""Documents of a source, tokenised once and kept in Arrow files, which all ranks of a machine map into memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash
from filelock import FileLock
from numpy.typing import NDArray

from ..errors import DataError, counted
from ..log import logger, progress
from ..ops.part_sizes import part_size
from .permute import Indices
from .reading import Row, Shard, Split, place_of, rows_of, shards_of, stamp
from .tokens import Tokens
from .views import View

Make = Callable[[Mapping[str, Any]], list[Tokens]]

_VERSION = 3  # of what is written: an older cache is made anew
_INFO = "info.json"
_BATCH_TOKENS = part_size(__name__, "_BATCH_TOKENS", 4 << 20, small=11)
_NAMED = 20  # bad rows in one message
_SCHEMA = pa.schema([
    ("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.int32())), ("file", pa.int32()), ("at", pa.int64()),
    ("views", pa.list_(pa.string())),
])  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How rows of files become documents. `told`: all that changes what `make` does, such as the template."""

    name: str
    files: tuple[Path, ...]
    make: Make
    told: str
    split: Split = "file"
    on_bad: Literal["stop", "skip"] = "stop"

    @property
    def fingerprint(self) -> str:
        found = hashlib.sha256(repr((_VERSION, self.told, self.split, self.on_bad)).encode())
        for file in self.files:
            *about, ends = stamp(file)
            found.update(repr(about).encode())
            found.update(ends)
        return found.hexdigest()[:32]


@dataclass(frozen=True)
class _Part:
    """What became of a shard. Bad rows and rows without targets by where they are: (file, at, why).

    `content`: a checksum of its documents.
    """

    rows: int
    content: str
    bad: list[tuple[int, int, str]]
    empty: list[tuple[int, int, str]]


def prepare(recipe: Recipe, cache: Path, *, processes: int = 1) -> Documents:
    """The documents of a source, from the cache if nothing has changed. Only one process makes them; others wait."""
    final = cache / recipe.fingerprint
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{final.name}.lock"):
        if not (final / _INFO).is_file():
            _make(recipe, final, processes)
    return Documents(recipe.name, final)


def _make(recipe: Recipe, final: Path, processes: int) -> None:
    for left in final.parent.glob(f".{final.name}.making-*"):
        shutil.rmtree(left)  # of a process that was killed: its lock is ours now
    making = final.parent / f".{final.name}.making-{secrets.token_hex(4)}"
    making.mkdir()
    try:
        parts = _write_all(recipe, making, processes)
        info = _settled(recipe, parts)
        (making / _INFO).write_text(
            json.dumps({**info, "files": [str(file) for file in recipe.files]}, indent=1) + "\n"
        )
        making.rename(final)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _write_all(recipe: Recipe, making: Path, processes: int) -> list[_Part]:
    shards = shards_of(recipe.files, recipe.split)
    numbers = {file: number for number, file in enumerate(recipe.files)}
    work = [(recipe.make, shard, numbers[shard.file], making / f"{at:06d}.arrow") for at, shard in enumerate(shards)]
    with progress(f"read {recipe.name}", sum(s.num_bytes for s in shards), "bytes", enabled=True) as advance:
        parts = []
        for shard, part in zip(shards, _in_order(work, processes), strict=True):
            parts.append(part)
            advance(shard.num_bytes)
    return parts


def _in_order(work: Sequence[tuple[Any, ...]], processes: int) -> Iterator[_Part]:
    if min(processes, len(work)) <= 1:
        yield from (_write(*each) for each in work)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the children: processes and threads together are too many
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_write, *zip(*work, strict=True))


def _write(make: Make, shard: Shard, number: int, target: Path) -> _Part:
    part, content = _Part(0, "", [], []), xxhash.xxh3_128()
    num_rows, found = 0, list[tuple[Tokens, int]]()

    def add_batch() -> None:
        batch = _batch(found, number)
        out.write_batch(batch)
        for values in (*_flat(batch.column(0)), *_flat(batch.column(1))):
            content.update(values.data)
        for each, _ in found:
            content.update("".join(view.content for view in each.views).encode())
        found.clear()

    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as out:
        for row in rows_of(shard):
            num_rows += 1
            found += [(each, row.at) for each in _documents(make, row, number, part)]
            if sum(len(each) for each, _ in found) > _BATCH_TOKENS:
                add_batch()
        add_batch()
    return _Part(num_rows, content.hexdigest(), part.bad, part.empty)


def _documents(make: Make, row: Row, number: int, part: _Part) -> list[Tokens]:
    if row.wrong:
        part.bad.append((number, row.at, row.wrong))
        return []
    try:
        made = make(row.values)
    except DataError as error:
        part.bad.append((number, row.at, str(error)))
        return []
    learnt = [each for each in made if each.num_targets]
    if not learnt:
        part.empty.append((number, row.at, "nothing of it is to be learnt"))
    return learnt


def _batch(found: Sequence[tuple[Tokens, int]], number: int) -> pa.RecordBatch:
    ids = [each.ids for each, _ in found]
    spans = [np.asarray(each.spans, dtype=np.int32).ravel() for each, _ in found]
    columns = [_lists(ids), _lists(spans), pa.array([number] * len(found), pa.int32())]
    views = pa.array([[str(view) for view in each.views] for each, _ in found], pa.list_(pa.string()))
    return pa.record_batch([*columns, pa.array([at for _, at in found], pa.int64()), views], schema=_SCHEMA)


def _lists(of: Sequence[NDArray[np.int32]]) -> pa.ListArray:
    offsets = np.fromiter(accumulate(map(len, of), initial=0), dtype=np.int32, count=len(of) + 1)
    values = np.concatenate(of) if of else np.empty(0, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


def _settled(recipe: Recipe, parts: Sequence[_Part]) -> dict[str, Any]:
    """What was read. Bad rows stop it, or are counted; nothing is dropped in silence."""
    bad = [each for part in parts for each in part.bad]
    empty = [each for part in parts for each in part.empty]
    if bad and recipe.on_bad == "stop":
        raise DataError(
            f"{counted(len(bad), 'row')} of {recipe.name} cannot be used:\n{_told(recipe, bad)}\nMend them, or set "
            'on_bad = "skip" to leave them out'
        )
    for some, what in ((bad, "cannot be used and are left out"), (empty, "have nothing to learn and are left out")):
        if some:
            logger.warning("%s of %s %s:\n%s", counted(len(some), "row"), recipe.name, what, _told(recipe, some[:3]))
    num_rows = sum(part.rows for part in parts)
    if num_rows == len(bad) + len(empty):
        raise DataError(f"no row of {recipe.name} can be trained on: {num_rows} were read; look at its first rows")
    content = xxhash.xxh3_128_hexdigest("".join(part.content for part in parts).encode())
    return {"rows": num_rows, "content": content, "bad": bad, "empty": empty}


def _told(recipe: Recipe, rows: Sequence[tuple[int, int, str]]) -> str:
    lines = [f"  {place_of(recipe.files[file], at)}: {why}" for file, at, why in rows[:_NAMED]]
    return "\n".join([*lines, *([f"  and {len(rows) - _NAMED} more"] if len(rows) > _NAMED else [])])


@dataclass(frozen=True)
class Statistics:
    rows: int
    skipped: int
    without_targets: int
    documents: int
    tokens: int
    targets: int
    longest: int


class Documents:
    """The documents of a source. Their tokens stay in files until somebody asks for them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._info = name, json.loads((directory / _INFO).read_text())
        batches = [batch for file in sorted(directory.glob("*.arrow")) for batch in _mapped(file) if len(batch)]
        self._ids, self._spans = ([_flat(batch.column(at)) for batch in batches] for at in (0, 1))
        self._from = np.concatenate([_numbers(batch.column(2)) for batch in batches])
        self._at = np.concatenate([_numbers(batch.column(3)) for batch in batches])
        self._views = [batch.column(4) for batch in batches]
        self._first = [0, *accumulate(len(batch) for batch in batches)]
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _ in self._ids]).astype(np.int64)
        self._targets = sum(_num_targets(spans) for _, spans in self._spans)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, number: int) -> Tokens:
        """A view: nothing is copied."""
        batch = bisect_right(self._first, number) - 1
        at = number - self._first[batch]
        (of_ids, ids), (of_spans, spans) = self._ids[batch], self._spans[batch]
        pairs = spans[of_spans[at] : of_spans[at + 1]].reshape(-1, 2)
        views = tuple(map(View.of, self._views[batch][at].as_py()))
        return Tokens(ids[of_ids[at] : of_ids[at + 1]], tuple((int(a), int(b)) for a, b in pairs), views)

    @cached_property
    def num_views(self) -> Indices:
        """Pictures and videos of each document."""
        return np.concatenate([np.diff(column.offsets.to_numpy()) for column in self._views]).astype(np.int64)

    def place(self, number: int) -> str:
        """Where it came from."""
        return place_of(Path(self._info["files"][self._from[number]]), int(self._at[number]))

    @property
    def content(self) -> str:
        """A checksum of all tokens, and of what is learnt of them: the same wherever the files lie."""
        return str(self._info["content"])

    @property
    def statistics(self) -> Statistics:
        info, lengths = self._info, self.lengths
        return Statistics(
            info["rows"], len(info["bad"]), len(info["empty"]), len(self), int(lengths.sum()), self._targets,
            int(lengths.max()),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Documents({self.name}, {', '.join(f'{k} {v}' for k, v in asdict(self.statistics).items())})"


def _mapped(file: Path) -> Iterator[pa.RecordBatch]:
    return iter(pa.ipc.open_stream(pa.memory_map(str(file))))


def _numbers(column: Any) -> NDArray[np.int64]:
    found: NDArray[np.int64] = column.to_numpy(zero_copy_only=True)
    return found


def _flat(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Offsets and values of a column of lists."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _num_targets(spans: NDArray[np.int32]) -> int:
    """The first token of a document is never learnt."""
    pairs = spans.reshape(-1, 2)
    return int((pairs[:, 1] - np.maximum(pairs[:, 0], 1)).sum())
