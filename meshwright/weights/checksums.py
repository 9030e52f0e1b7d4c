"""Checksums of written byte ranges (extents): the extents of a file tile it, and a reader verifies what it reads.

A checksum covers the bytes that one rank wrote at once, not a fixed block of the file: neither rank could check a block
at the seam between two ranks. xxh3 runs at some 30 GB/s, far above any disk, so checking costs next to nothing.

Example: ranks 0 and 1 write one tensor. Rank 0 adds the extent (0, 1048576), rank 1 (1048576, 2097152). A reader on
another mesh that needs bytes 1000000 to 1100000 reads both, verifies both, and keeps its part.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import BrokenFile

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A byte range of a file that one rank wrote at once, with its checksum. A reader that reads all of it can verify
    it."""

    start: int
    stop: int
    checksum: int  # xxh3, 64 bits

    def matches(self, data: Bytes) -> bool:
        """Return whether the bytes are those that were written."""
        return checksum(data) == self.checksum


@dataclass
class Extents:
    """The extents of each file, in the order in which they were written."""

    of_file: dict[str, list[Extent]] = field(default_factory=dict)

    def add(self, file: str, start: int, data: Bytes) -> None:
        """Record bytes that were written to a file from `start` on."""
        self.of_file.setdefault(file, []).append(Extent(start, start + len(data), checksum(data)))

    def update(self, other: Extents) -> None:
        for file, extents in other.of_file.items():
            self.of_file.setdefault(file, []).extend(extents)

    @property
    def num_bytes(self) -> int:
        return sum(extent.stop - extent.start for extent in self)

    def __iter__(self) -> Iterator[Extent]:
        return (extent for extents in self.of_file.values() for extent in extents)

    def sorted(self) -> dict[str, list[Extent]]:
        return {file: sorted(extents) for file, extents in self.of_file.items()}

    def find_gap(self, file: str, num_bytes: int) -> str:
        """Describe an error in the extents of a file of `num_bytes`; "" if each byte lies in exactly one."""
        at = 0
        for extent in sorted(self.of_file.get(file, [])):
            if extent.start != at:
                return f"byte {min(at, extent.start)} lies in {'no extent' if extent.start > at else 'two extents'}"
            at = extent.stop
        return "" if at == num_bytes else f"its extents end at byte {at} of {num_bytes}"

    def as_json(self) -> str:
        """Return `{file: [[start, stop, xxh3 in hex], ...]}` as a line of JSON."""
        extents = {
            file: [[r.start, r.stop, f"{r.checksum:016x}"] for r in extents] for file, extents in self.of_file.items()
        }
        return json.dumps(extents, separators=(",", ":")) + "\n"


def extents_of_json(text: bytes) -> Extents:
    """Parse what `as_json` wrote. Raise ValueError for anything else."""
    try:
        by_file = json.loads(text)
        return Extents(
            {file: [Extent(a, b, int(digest, 16)) for a, b, digest in extents] for file, extents in by_file.items()}
        )
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"not a list of extents: {error}") from error


def checksum(data: Bytes) -> int:
    """Return the xxh3 checksum, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def overlapping(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Yield the extents, of a sorted list, that have bytes of `start..stop`."""
    at = bisect_right(extents, start, key=lambda extent: extent.stop)
    while at < len(extents) and extents[at].start < stop:
        yield extents[at]
        at += 1


class Checks:
    """Verifies bytes as they are read. `checked` collects the extents of each file that passed.

    Bytes are compared while they are in the CPU's cache, right after the read, so a restore needs no second pass over
    the data.
    """

    def __init__(self, directory: Path, extents: Mapping[str, Sequence[Extent]]) -> None:
        self.directory, self.extents = directory, extents  # those of a file sorted
        self.checked: dict[str, set[Extent]] = {}

    def split(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, Extent]]:
        """Split `start..stop` of a file at the bounds of extents; each part comes with its extent."""
        for extent in overlapping(self.extents[file], start, stop):
            yield max(start, extent.start), min(stop, extent.stop), extent

    def check(self, file: str, extent: Extent, data: Bytes, key: str = "") -> None:
        """Raise BrokenFile if `data`, the bytes of an extent, fail their checksum. `key`: the tensor that is read, for
        the error."""
        if not extent.matches(data):
            raise BrokenFile(
                f"bytes {extent.start} to {extent.stop} of {self.directory / file}{key and f' ({key})'} fail their "
                "checksum, so they are not what was written; copy the checkpoint again, or use another one"
            )
        self.checked.setdefault(file, set()).add(extent)

    def is_checked(self, file: str, extent: Extent) -> bool:
        return extent in self.checked.get(file, ())
