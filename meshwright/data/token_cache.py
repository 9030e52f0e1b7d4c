"""Tokenise the documents of a source once, into Arrow files that all ranks of a machine memory-map.

The cache key is a hash of the files and of everything that determines tokens. One process builds it under a lock.
Mapped files cost no memory per rank and no start-up time; tokenising on the fly would slow down the ranks that drew
long texts, and so all ranks.

Columns of the Arrow files, a row for each document:

  ids     list of int32     tokens
  spans   list of int32     starts and stops of trained ranges, flattened
  file    int32             number of the file that the row came from
  at      int64             byte or row number in it
  views   list of string    images and videos, as JSON
  parts   list of int32     lengths of the documents of a group; empty for a single document
  classes list of int32     the label of the last token of each document
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
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
from .cached_documents import INFO, TRAINED_ON, DamagedCache, Documents, flat_column, info_of
from .row_files import Row, Shard, Split, place_of, places_of, rows_of, shards_of, stamp
from .template_sandbox import Unbounded
from .tokens import Tokens

Make = Callable[[Mapping[str, Any]], list[Tokens]]
Unused = Callable[[Mapping[str, Any]], set[str]]

_VERSION = 5  # of the files: an older cache is rebuilt
RUN_BEGAN = "MESHWRIGHT_RUN_BEGAN"  # environment variable that the launcher sets for its ranks
BEGAN = float(os.environ.get(RUN_BEGAN, time.time()))
_READERS = 4
_PART_BYTES = part_size(__name__, "_PART_BYTES", 16 << 20, small=101)
_BATCH_TOKENS = part_size(__name__, "_BATCH_TOKENS", 4 << 20, small=11)
_NAMED = 20  # number of kinds of bad rows that one message names
# Parts that vary between reasons of one kind: names, paths, numbers.
_VARIABLE_PARTS = re.compile(r"""'[^']*'|"[^"]*"|\S*/\S*|\d[\d.,]*""")
_SCHEMA = pa.schema([
    ("ids", pa.list_(pa.int32())), ("spans", pa.list_(pa.int32())), ("file", pa.int32()), ("at", pa.int64()),
    ("views", pa.list_(pa.string())), ("parts", pa.list_(pa.int32())), ("classes", pa.list_(pa.int32())),
])  # fmt: skip


@dataclass(frozen=True)
class TokenizeSpec:
    """The recipe for making documents from rows.

    `settings_key`: everything that changes the result of `make`, such as the chat template. `unused`: returns the
    unused fields of a row.
    """

    name: str
    files: tuple[Path, ...]
    make: Make
    settings_key: str
    split: Split = "file"
    on_bad: Literal["stop", "skip"] = "stop"
    unused: Unused | None = None

    @property
    def fingerprint(self) -> str:
        """Return the cache key."""
        digest = hashlib.sha256(repr((_VERSION, self.settings_key, self.split, self.on_bad)).encode())
        for file in self.files:
            *about, file_ends = stamp(file)
            digest.update(repr(about).encode())
            digest.update(file_ends)
        return digest.hexdigest()[:32]


LeftOut = tuple[int, int, str]  # a row: its file, where it is, and why


@dataclass(frozen=True)
class _ShardResult:
    """The result of tokenising a shard. `content`: a checksum of its documents. `sum`: the checksum of the file that
    they were written to."""

    rows: int
    content: str
    sum: str
    bad: list[LeftOut]
    empty: list[LeftOut]  # without targets
    unused: set[str]


def prepare(spec: TokenizeSpec, cache: Path, *, processes: int = 1) -> Documents:
    """Return the documents of a source, from the cache if it is valid. One process builds it, all others wait.

    The first process of a run verifies the checksums of the cache and the ends of all images, and rebuilds it if
    needed.

    The order: lock; verify an existing cache; build it if there is none; write a note that this run has verified it.
    Later ranks read the note and only map the files.
    """
    final = cache / spec.fingerprint
    cache.mkdir(parents=True, exist_ok=True)
    checked = cache / f".{final.name}.checked"
    # A file lock, not a barrier: processes of several runs, and of several nodes on a shared file system, use one
    # cache.
    with FileLock(cache / f".{final.name}.lock"):
        if final.exists() and not _is_of_this_run(checked):
            _remove_stale(spec.name, final)
        if not final.exists():
            _build(spec, final, processes)
        checked.write_text(str(time.time()))
    return Documents(spec.name, final)


def _is_of_this_run(checked: Path) -> bool:
    """Return whether the files have been verified since this run began."""
    try:
        at = float(checked.read_text())
    except (OSError, ValueError):
        return False
    # A note from the future (clock changes, copied files) does not count.
    return BEGAN < at <= time.time()


def _remove_stale(name: str, final: Path) -> None:
    """Remove a cache that fails its checksums, or one of whose images has changed or is gone.

    It is derived data, so it will be rebuilt, with a warning. Then `on_bad` decides about a row whose image is gone.
    """
    try:
        info = info_of(final)
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(_check, [final / file for file in info["sums"]], info["sums"].values()))
        if change := Documents(name, final).changed_image():
            raise DamagedCache(change)
    except DamagedCache as error:
        logger.warning("rebuilding the token cache of %s, which is out of date: %s", name, error)
        shutil.rmtree(final)


def _check(file: Path, digest: str) -> None:
    """Verify a file."""
    if not file.is_file() or _checksum_of(file) != digest:
        raise DamagedCache(f"{file} fails its checksum")


def _checksum_of(file: Path) -> str:
    """Return the checksum of a file."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as data:
        while part := data.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _build(spec: TokenizeSpec, final: Path, processes: int) -> None:
    """Build the cache in a temporary directory, and rename it."""
    for leftover in final.parent.glob(f".{final.name}.making-*"):
        shutil.rmtree(leftover)  # left by a killed process: this process holds the lock now
    temporary = final.parent / f".{final.name}.making-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        results = _write_all(spec, temporary, processes)
        sums = {file.name: result.sum for file, result in zip(sorted(temporary.glob("*.arrow")), results, strict=True)}
        info = {
            **_check_and_summarise(spec, results, final.parent / f"{final.name}.rows.txt"),
            "files": [str(file) for file in spec.files],
            "sums": sums,
        }
        text = json.dumps(info, indent=1) + "\n"
        (temporary / INFO).write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
        # Atomic: a cache directory with its final name is complete.
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_all(spec: TokenizeSpec, temporary: Path, processes: int) -> list[_ShardResult]:
    """Tokenise all shards."""
    shards = shards_of(spec.files, spec.split)
    numbers = {file: number for number, file in enumerate(spec.files)}
    spec_without_files = replace(spec, files=())  # pickled for every shard
    work = [
        (spec_without_files, shard, numbers[shard.file], temporary / f"{at:06d}.arrow")
        for at, shard in enumerate(shards)
    ]
    with progress(f"read {spec.name}", sum(s.num_bytes for s in shards), "bytes", enabled=True) as advance:
        results = []
        for shard, result in zip(shards, _in_order(work, processes), strict=True):
            results.append(result)
            advance(shard.num_bytes)
    return results


def _in_order(work: Sequence[tuple[Any, ...]], processes: int) -> Iterator[_ShardResult]:
    """Tokenise shards in processes; yield results in order."""
    if min(processes, len(work)) <= 1:
        yield from (_write(*each) for each in work)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # inherited: n processes with n threads each would thrash
    # spawn, not fork: the tokenizer's Rust threads do not survive a fork.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_write, *zip(*work, strict=True))


def _write(spec: TokenizeSpec, shard: Shard, number: int, target: Path) -> _ShardResult:
    """Tokenise a shard into an Arrow file."""
    result, content = _ShardResult(0, "", "", [], [], set()), xxhash.xxh3_128()
    num_rows, pending = 0, list[tuple[Tokens, int]]()

    def add_batch() -> None:
        batch = _batch(pending, number)
        out.write_batch(batch)
        # The content hash covers training data, not paths, so moving the files does not invalidate a run's plan.
        for column in map(flat_column, map(batch.column, TRAINED_ON)):
            for array in column if len(column[1]) else ():
                content.update(array.data)
        for each, _ in pending:
            content.update("".join(view.content for view in each.views).encode())
        pending.clear()

    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as out:
        for row in rows_of(shard):
            num_rows += 1
            try:
                pending += [(each, row.at) for each in _documents(spec, row, number, result)]
            except Unbounded as error:
                raise DataError(f"{place_of(shard.file, row.at)}: {error}") from error
            if sum(len(each) for each, _ in pending) > _BATCH_TOKENS:
                add_batch()
        add_batch()
    return replace(result, rows=num_rows, content=content.hexdigest(), sum=_checksum_of(target))


def _documents(spec: TokenizeSpec, row: Row, number: int, result: _ShardResult) -> list[Tokens]:
    """Return the documents of a row, and note it if it is bad or has nothing to train on."""
    if row.wrong:
        result.bad.append((number, row.at, _one_line(row.wrong)))
        return []
    try:
        documents = spec.make(row.values)
        result.unused.update(spec.unused(row.values) if spec.unused else ())
    # A template that does not end would not end in the next row either, so it ends the run whatever on_bad says.
    except Unbounded:
        raise
    except DataError as error:
        result.bad.append((number, row.at, _one_line(str(error))))
        return []
    trained = [each for each in documents if each.num_targets]
    if not trained:
        result.empty.append((number, row.at, "no token of it is trained on"))
    return trained


def _one_line(why: str) -> str:
    """Return a reason on one line, with lone surrogates of the row escaped so that it can be printed."""
    return " ".join(why.encode(errors="backslashreplace").decode().split())


def _batch(documents: Sequence[tuple[Tokens, int]], number: int) -> pa.RecordBatch:
    """Build an Arrow record batch."""
    flat = lambda values: np.asarray(values, dtype=np.int32).ravel()  # noqa: E731 - short
    ids, spans, parts, classes = (_lists([flat(values(each)) for each, _ in documents]) for values in _COLUMNS)
    places = pa.array([number] * len(documents), pa.int32()), pa.array([at for _, at in documents], pa.int64())
    views = pa.array([[str(view) for view in each.views] for each, _ in documents], pa.list_(pa.string()))
    return pa.record_batch([ids, spans, *places, views, parts, classes], schema=_SCHEMA)


_COLUMNS = (attrgetter("ids"), attrgetter("spans"), attrgetter("parts"), attrgetter("classes"))


def _lists(arrays: Sequence[NDArray[np.int32]]) -> pa.ListArray:
    """Build an Arrow column of lists without copying each list."""
    offsets = np.fromiter(accumulate(map(len, arrays), initial=0), dtype=np.int32, count=len(arrays) + 1)
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))


def _check_and_summarise(spec: TokenizeSpec, results: Sequence[_ShardResult], listing: Path) -> dict[str, Any]:
    """Stop at bad rows, or report what is left out; nothing is dropped silently. `listing`: the file that lists these
    rows.

    All bad rows are reported at once, grouped by reason, with one example each and a file that lists every one.
    Stopping at the first makes fixing a data set with forty bad rows forty runs.
    """
    bad = [each for result in results for each in result.bad]
    empty = [each for result in results for each in result.empty]
    _list_rows(spec, [*bad, *empty], listing)
    if bad and spec.on_bad == "stop":
        raise DataError(
            f"{counted(len(bad), 'row')} of {spec.name} cannot be used:\n{_group_by_reason(spec, bad)}\nFix them, or "
            f'set on_bad = "skip" to leave them out. All of them are listed in {listing}'
        )
    for left_out, why in ((bad, "cannot be used"), (empty, "without trained tokens")):
        if left_out:
            logger.warning(
                "%s of %s %s, left out; all of them are listed in %s:\n%s",
                counted(len(left_out), "row"), spec.name, why, listing, _group_by_reason(spec, left_out),
            )  # fmt: skip
    unused = sorted(set[str]().union(*(result.unused for result in results)))
    if unused:
        logger.warning("fields of %s that are not used: %s", spec.name, ", ".join(unused))
    num_rows = sum(result.rows for result in results)
    if num_rows == len(bad) + len(empty):
        raise DataError(f"no row of {spec.name} can be trained on: {num_rows} were read; check its first rows")
    content = xxhash.xxh3_128_hexdigest("".join(result.content for result in results).encode())
    return {"rows": num_rows, "content": content, "bad": bad, "empty": empty, "unused": unused}


def _list_rows(spec: TokenizeSpec, rows: Sequence[LeftOut], listing: Path) -> None:
    """List each row that is left out, in the order of the files."""
    listing.unlink(missing_ok=True)
    if rows:
        places = _places(spec, rows)
        lines = [f"{places[file, at]}: {why}\n" for file, at, why in sorted(rows)]
        listing.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def _places(spec: TokenizeSpec, rows: Sequence[LeftOut]) -> dict[tuple[int, int], str]:
    """Return the places of rows."""
    offsets_by_file: dict[int, list[int]] = {}
    for file, at, _ in rows:
        offsets_by_file.setdefault(file, []).append(at)
    return {
        (file, at): place
        for file, offsets in offsets_by_file.items()
        for at, place in places_of(spec.files[file], offsets).items()
    }


def _group_by_reason(spec: TokenizeSpec, rows: Sequence[LeftOut]) -> str:
    """Return a line for each kind of reason, the most frequent first, with its first row."""
    kinds: dict[str, list[LeftOut]] = {}
    for row in rows:
        # "message 3 of 'a.json' ..." and "message 7 of 'b.json' ..." are one kind.
        kinds.setdefault(_VARIABLE_PARTS.sub("", row[2]), []).append(row)
    by_frequency = sorted(kinds.values(), key=len, reverse=True)
    places = _places(spec, [rows_of_kind[0] for rows_of_kind in by_frequency[:_NAMED]])
    lines = [
        f"  {counted(len(rows_of_kind), 'row')}, the first {places[rows_of_kind[0][:2]]}: {rows_of_kind[0][2]}"
        for rows_of_kind in by_frequency[:_NAMED]
    ]
    return "\n".join(
        [*lines, *([f"  and {len(by_frequency) - _NAMED} more kinds"] if len(by_frequency) > _NAMED else [])]
    )
