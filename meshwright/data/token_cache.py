"""Documents of a source, tokenised once and kept in Arrow files, which all ranks of a machine map into memory."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
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
from .row_files import Row, Shard, Split, place_of, places_of, rows_of, shards_of, stamp
from .template_sandbox import Unbounded
from .tokens import Tokens
from .vision_files import View

Make = Callable[[Mapping[str, Any]], list[Tokens]]
Unused = Callable[[Mapping[str, Any]], set[str]]

_VERSION = 4  # of what is written: an older cache is made anew
_INFO = "info.json"
RUN_BEGAN = "MESHWRIGHT_RUN_BEGAN"  # in the environment of ranks, from their launcher
BEGAN = float(os.environ.get(RUN_BEGAN, time.time()))
_READERS = 4
_PART_BYTES = part_size(__name__, "_PART_BYTES", 16 << 20, small=101)
_BATCH_TOKENS = part_size(__name__, "_BATCH_TOKENS", 4 << 20, small=11)
_NAMED = 20  # kinds of bad rows in one message
_VARIES = re.compile(r"""'[^']*'|"[^"]*"|\S*/\S*|\d[\d.,]*""")  # in the reasons of one kind: names, paths, numbers
_SCHEMA = pa.schema([
    ("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.int32())), ("file", pa.int32()), ("at", pa.int64()),
    ("views", pa.list_(pa.string())),
])  # fmt: skip


@dataclass(frozen=True)
class TokenizeSpec:
    """How rows of files become documents. `told`: all that changes what `make` does, such as the template. `unused`:
    which fields of a row change nothing."""

    name: str
    files: tuple[Path, ...]
    make: Make
    told: str
    split: Split = "file"
    on_bad: Literal["stop", "skip"] = "stop"
    unused: Unused | None = None

    @property
    def fingerprint(self) -> str:
        found = hashlib.sha256(repr((_VERSION, self.told, self.split, self.on_bad)).encode())
        for file in self.files:
            *about, ends = stamp(file)
            found.update(repr(about).encode())
            found.update(ends)
        return found.hexdigest()[:32]


LeftOut = tuple[int, int, str]  # a row: its file, where it is, and why


@dataclass(frozen=True)
class _Part:
    """The result of tokenising a shard.

    `content`: a checksum of its documents; `sum`: of the file that they were written to.
    """

    rows: int
    content: str
    sum: str
    bad: list[LeftOut]
    empty: list[LeftOut]  # without targets
    unused: set[str]


def prepare(recipe: TokenizeSpec, cache: Path, *, processes: int = 1) -> Documents:
    """The documents of a source, from the cache if nothing has changed. Only one process makes them; others wait.

    The first process of a run that asks compares the cache with its checksums, and makes it anew where it is damaged.
    """
    final = cache / recipe.fingerprint
    cache.mkdir(parents=True, exist_ok=True)
    checked = cache / f".{final.name}.checked"
    with FileLock(cache / f".{final.name}.lock"):
        if final.exists() and not _is_of_this_run(checked):
            _remove_damaged(recipe.name, final)
        if not final.exists():
            _make(recipe, final, processes)
        checked.write_text(str(time.time()))
    return Documents(recipe.name, final)


def _is_of_this_run(checked: Path) -> bool:
    """Whether a process has compared the files since this run began."""
    try:
        at = float(checked.read_text())
    except (OSError, ValueError):
        return False
    return BEGAN < at <= time.time()


def _remove_damaged(name: str, final: Path) -> None:
    try:
        info = _info_of(final)
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(_check, [final / file for file in info["sums"]], info["sums"].values()))
    except _Damaged as error:
        logger.warning("the cached tokens of %s are damaged and are made anew: %s", name, error)
        shutil.rmtree(final)


class _Damaged(DataError):
    """A file of the cache is not as it was written."""


def _info_of(final: Path) -> dict[str, Any]:
    file = final / _INFO
    try:
        digest, text = file.read_text().split("\n", 1)
    except (OSError, ValueError) as error:
        raise _Damaged(f"{file}: {error}") from error
    if digest != xxhash.xxh3_128_hexdigest(text.encode()):
        raise _Damaged(f"{file} fails its checksum")
    found: dict[str, Any] = json.loads(text)
    return found


def _check(file: Path, digest: str) -> None:
    if not file.is_file() or _sum_of(file) != digest:
        raise _Damaged(f"{file} fails its checksum")


def _sum_of(file: Path) -> str:
    found = xxhash.xxh3_128()
    with file.open("rb") as data:
        while part := data.read(_PART_BYTES):
            found.update(part)
    return found.hexdigest()


def _make(recipe: TokenizeSpec, final: Path, processes: int) -> None:
    for left in final.parent.glob(f".{final.name}.making-*"):
        shutil.rmtree(left)  # of a process that was killed: its lock is ours now
    making = final.parent / f".{final.name}.making-{secrets.token_hex(4)}"
    making.mkdir()
    try:
        parts = _write_all(recipe, making, processes)
        sums = {file.name: part.sum for file, part in zip(sorted(making.glob("*.arrow")), parts, strict=True)}
        info = {
            **_settled(recipe, parts, final.parent / f"{final.name}.rows.txt"),
            "files": [str(file) for file in recipe.files],
            "sums": sums,
        }
        text = json.dumps(info, indent=1) + "\n"
        (making / _INFO).write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
        making.rename(final)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _write_all(recipe: TokenizeSpec, making: Path, processes: int) -> list[_Part]:
    shards = shards_of(recipe.files, recipe.split)
    numbers = {file: number for number, file in enumerate(recipe.files)}
    light = replace(recipe, files=())  # which each process gets anew for each shard
    work = [(light, shard, numbers[shard.file], making / f"{at:06d}.arrow") for at, shard in enumerate(shards)]
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


def _write(recipe: TokenizeSpec, shard: Shard, number: int, target: Path) -> _Part:
    part, content = _Part(0, "", "", [], [], set()), xxhash.xxh3_128()
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
            try:
                found += [(each, row.at) for each in _documents(recipe, row, number, part)]
            except Unbounded as error:
                raise DataError(f"{place_of(shard.file, row.at)}: {error}") from error
            if sum(len(each) for each, _ in found) > _BATCH_TOKENS:
                add_batch()
        add_batch()
    return replace(part, rows=num_rows, content=content.hexdigest(), sum=_sum_of(target))


def _documents(recipe: TokenizeSpec, row: Row, number: int, part: _Part) -> list[Tokens]:
    if row.wrong:
        part.bad.append((number, row.at, _one_line(row.wrong)))
        return []
    try:
        made = recipe.make(row.values)
        part.unused.update(recipe.unused(row.values) if recipe.unused else ())
    except Unbounded:
        raise
    except DataError as error:
        part.bad.append((number, row.at, _one_line(str(error))))
        return []
    learnt = [each for each in made if each.num_targets]
    if not learnt:
        part.empty.append((number, row.at, "nothing of it is to be learnt"))
    return learnt


def _one_line(why: str) -> str:
    """As any terminal and file takes it: a row may hold halves of characters."""
    return " ".join(why.encode(errors="backslashreplace").decode().split())


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


def _settled(recipe: TokenizeSpec, parts: Sequence[_Part], listing: Path) -> dict[str, Any]:
    """What was read. Bad rows stop it, or are counted; nothing is dropped in silence. `listing`: where all rows that
    are left out are named."""
    bad = [each for part in parts for each in part.bad]
    empty = [each for part in parts for each in part.empty]
    _list_rows(recipe, [*bad, *empty], listing)
    if bad and recipe.on_bad == "stop":
        raise DataError(
            f"{counted(len(bad), 'row')} of {recipe.name} cannot be used:\n{_kinds(recipe, bad)}\nMend them, or set "
            f'on_bad = "skip" to leave them out. Each is named in {listing}'
        )
    for some, why in ((bad, "cannot be used"), (empty, "with nothing to learn")):
        if some:
            logger.warning(
                "%s of %s %s, left out, each named in %s:\n%s",
                counted(len(some), "row"), recipe.name, why, listing, _kinds(recipe, some),
            )  # fmt: skip
    unused = sorted(set[str]().union(*(part.unused for part in parts)))
    if unused:
        logger.warning("fields of %s that are not used: %s", recipe.name, ", ".join(unused))
    num_rows = sum(part.rows for part in parts)
    if num_rows == len(bad) + len(empty):
        raise DataError(f"no row of {recipe.name} can be trained on: {num_rows} were read; look at its first rows")
    content = xxhash.xxh3_128_hexdigest("".join(part.content for part in parts).encode())
    return {"rows": num_rows, "content": content, "bad": bad, "empty": empty, "unused": unused}


def _list_rows(recipe: TokenizeSpec, rows: Sequence[LeftOut], listing: Path) -> None:
    """Write a line for each row, in the order of the files."""
    listing.unlink(missing_ok=True)
    if rows:
        places = _places(recipe, rows)
        lines = [f"{places[file, at]}: {why}\n" for file, at, why in sorted(rows)]
        listing.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def _places(recipe: TokenizeSpec, rows: Sequence[LeftOut]) -> dict[tuple[int, int], str]:
    ats: dict[int, list[int]] = {}
    for file, at, _ in rows:
        ats.setdefault(file, []).append(at)
    return {
        (file, at): place for file, some in ats.items() for at, place in places_of(recipe.files[file], some).items()
    }


def _kinds(recipe: TokenizeSpec, rows: Sequence[LeftOut]) -> str:
    """A line for each kind of reason, the most frequent first, with its first row."""
    kinds: dict[str, list[LeftOut]] = {}
    for row in rows:
        kinds.setdefault(_VARIES.sub("", row[2]), []).append(row)
    often = sorted(kinds.values(), key=len, reverse=True)
    places = _places(recipe, [some[0] for some in often[:_NAMED]])
    lines = [f"  {counted(len(some), 'row')}, the first {places[some[0][:2]]}: {some[0][2]}" for some in often[:_NAMED]]
    return "\n".join([*lines, *([f"  and {len(often) - _NAMED} more kinds"] if len(often) > _NAMED else [])])


@dataclass(frozen=True)
class Statistics:
    rows: int
    skipped: int
    without_targets: int
    documents: int
    tokens: int
    targets: int
    longest: int
    too_long: int = 0


class Documents:
    """The documents of a source. Their tokens stay in files until somebody asks for them."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._info = name, _info_of(directory)
        batches = [batch for file in self._info["sums"] for batch in _mapped(directory / file) if len(batch)]
        self._ids, self._spans = ([_flat(batch.column(at)) for batch in batches] for at in (0, 1))
        self._from = np.concatenate([_numbers(batch.column(2)) for batch in batches])
        self._at = np.concatenate([_numbers(batch.column(3)) for batch in batches])
        self._views = [batch.column(4) for batch in batches]
        self._first = [0, *accumulate(len(batch) for batch in batches)]
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _ in self._ids]).astype(np.int64)

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
    def unused(self) -> list[str]:
        """Fields of its rows that change nothing of the documents."""
        return [*self._info["unused"]]

    @property
    def statistics(self) -> Statistics:
        return self.statistics_of(np.ones(len(self), dtype=bool))

    def statistics_of(self, kept: NDArray[np.bool_]) -> Statistics:
        """Return the statistics of the documents that are kept; the others are too long."""
        info, lengths = self._info, self.lengths[kept]
        return Statistics(
            info["rows"], len(info["bad"]), len(info["empty"]), len(lengths), int(lengths.sum()),
            int(self._num_targets[kept].sum()), int(lengths.max(initial=0)), int((~kept).sum()),
        )  # fmt: skip

    @cached_property
    def _num_targets(self) -> Indices:
        """Return the number of trained tokens of each document."""
        return np.concatenate([_num_targets(offsets, spans) for offsets, spans in self._spans])

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


def _num_targets(offsets: NDArray[np.int64], spans: NDArray[np.int32]) -> Indices:
    """Return the number of trained tokens of each document of a batch. A document's first token is never trained on."""
    pairs = spans.reshape(-1, 2).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(pairs[:, 1] - np.maximum(pairs[:, 0], 1))])
    found: Indices = np.diff(ends[offsets // 2])
    return found
