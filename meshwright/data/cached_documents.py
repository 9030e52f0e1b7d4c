"""Read the documents of a source from the mapped Arrow files of the token cache."""

from __future__ import annotations

import copy
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ..errors import DataError
from .permute import Indices
from .row_files import place_of
from .tokens import Tokens
from .vision_files import View

INFO = "info.json"
_READERS = 4  # threads that look at images
TRAINED_ON = ("ids", "spans", "parts", "classes")  # the columns that decide what a model is trained on


class DamagedCache(DataError):
    """Raised for a cache file that differs from what was written."""


def info_of(final: Path) -> dict[str, Any]:
    """Read the description of a cache, after its checksum."""
    file = final / INFO
    try:
        digest, text = file.read_text().split("\n", 1)
    except (OSError, ValueError) as error:
        raise DamagedCache(f"{file}: {error}") from error
    if digest != xxhash.xxh3_128_hexdigest(text.encode()):
        raise DamagedCache(f"{file} fails its checksum")
    info: dict[str, Any] = json.loads(text)
    return info


@dataclass(frozen=True)
class Statistics:
    """Counts of a source."""

    rows: int
    skipped: int
    without_targets: int
    documents: int
    tokens: int
    targets: int
    longest: int
    too_long: int = 0


class Documents:
    """The documents of a source. Their tokens stay in mapped files until they are used.

    `lengths` of all documents are in memory (8 bytes each), and the packing plan needs nothing else.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._info = name, info_of(directory)
        batches = [batch for file in self._info["sums"] for batch in _mapped(directory / file) if len(batch)]
        lists = {name: [flat_column(batch.column(name)) for batch in batches] for name in TRAINED_ON}
        self._ids, self._spans, self._parts, self._classes = lists.values()
        self._file_numbers = np.concatenate([_numbers(batch.column("file")) for batch in batches])
        self._offsets = np.concatenate([_numbers(batch.column("at")) for batch in batches])
        self._views = [batch.column("views") for batch in batches]
        self._first = [0, *accumulate(len(batch) for batch in batches)]
        self.values: Mapping[str, NDArray[np.float64]] = {}  # by name, `[rows, documents of a row]`
        self.lengths = np.concatenate([np.diff(offsets) for offsets, _ in self._ids]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def with_values(self, values: Mapping[str, NDArray[np.float64]]) -> Documents:
        """Return the documents with more numbers, one per document, such as reference scores: batches get them as
        fields."""
        documents = copy.copy(self)
        documents.values = values
        return documents

    def tokens(self, number: int) -> Tokens:
        """Return a document as a view of the mapped file."""
        # `_first[i]` is the number of the first document of batch i.
        batch = bisect_right(self._first, number) - 1
        row = number - self._first[batch]
        ids, spans, parts, classes = (
            values[starts[row] : starts[row + 1]]
            for starts, values in (self._ids[batch], self._spans[batch], self._parts[batch], self._classes[batch])
        )
        views = tuple(map(View.of, self._views[batch][row].as_py()))
        pairs = tuple((int(a), int(b)) for a, b in spans.reshape(-1, 2))
        return Tokens(ids, pairs, views, tuple(parts.tolist()), tuple(classes.tolist()))

    @cached_property
    def num_parts(self) -> Indices:
        """Return the number of documents of each group, 1 for a single document."""
        return np.concatenate([np.maximum(np.diff(starts), 1) for starts, _ in self._parts]).astype(np.int64)

    @cached_property
    def num_views(self) -> Indices:
        """Return the number of images and videos of each document."""
        return np.concatenate([np.diff(column.offsets.to_numpy()) for column in self._views]).astype(np.int64)

    def changed_image(self) -> str:
        """Return how the first changed image differs from the one that was read; "" if none has changed."""
        with ThreadPoolExecutor(_READERS) as readers:
            for column in self._views:
                views = map(View.of, column.flatten().unique().to_pylist())
                if change := next(filter(None, readers.map(View.change, views)), ""):
                    return change
        return ""

    def place(self, number: int) -> str:
        """Return the file and line of a document."""
        return place_of(Path(self._info["files"][self._file_numbers[number]]), int(self._offsets[number]))

    def row_numbers(self) -> NDArray[np.float64]:
        """Return the number of the row that each document came from. -> `[rows, documents of a row]`"""
        pairs = np.stack([self._file_numbers.astype(np.int64), self._offsets], 1)
        number = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1, 1).astype(np.float64)
        return np.repeat(number, int(self.num_parts.max(initial=1)), 1)

    @property
    def content(self) -> str:
        """Return a checksum of all tokens and of the trained spans, independent of where the files are."""
        return str(self._info["content"])

    @property
    def unused(self) -> list[str]:
        """Return the fields of rows that are not used."""
        return [*self._info["unused"]]

    @property
    def statistics(self) -> Statistics:
        """Return the statistics of all documents."""
        return self.statistics_of(np.ones(len(self), dtype=bool))

    def statistics_of(self, kept: NDArray[np.bool_]) -> Statistics:
        """Return the statistics of the kept documents; all other documents count as too long."""
        info, lengths = self._info, self.lengths[kept]
        return Statistics(
            info["rows"], len(info["bad"]), len(info["empty"]), len(lengths), int(lengths.sum()),
            int(self._num_targets[kept].sum()), int(lengths.max(initial=0)), int((~kept).sum()),
        )  # fmt: skip

    @cached_property
    def _num_targets(self) -> Indices:
        """Return the number of trained tokens of each document."""
        of_spans = np.concatenate([_num_targets(offsets, spans) for offsets, spans in self._spans])
        return of_spans + np.concatenate([np.diff(starts) for starts, _ in self._classes])

    def __repr__(self) -> str:
        return f"Documents({self.name}, {', '.join(f'{k} {v}' for k, v in asdict(self.statistics).items())})"


def _mapped(file: Path) -> Iterator[pa.RecordBatch]:
    """Memory-map the record batches of a file."""
    return iter(pa.ipc.open_stream(pa.memory_map(str(file))))


def _numbers(column: Any) -> NDArray[np.int64]:
    """Return a column without copying it."""
    values: NDArray[np.int64] = column.to_numpy(zero_copy_only=True)
    return values


def flat_column(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return offsets and values of a column of lists."""
    return column.offsets.to_numpy(), column.values.to_numpy()


def _num_targets(offsets: NDArray[np.int64], spans: NDArray[np.int32]) -> Indices:
    """Return the number of trained tokens of each document of a batch. A document's first token is never trained on."""
    pairs = spans.reshape(-1, 2).astype(np.int64)
    # Prefix sums over all spans, taken at the document bounds: no Python loop over millions of documents.
    ends = np.concatenate([[0], np.cumsum(pairs[:, 1] - np.maximum(pairs[:, 0], 1))])
    num_targets: Indices = np.diff(ends[offsets // 2])
    return num_targets
