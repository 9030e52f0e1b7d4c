"""What was written: runs of bytes, each with its checksum. Together the runs of a file are the file."""

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
    """Bytes of a file that one rank wrote at once. A reader that reads all of them can check them."""

    start: int
    stop: int
    checksum: int  # xxh3, 64 bits

    def is_of(self, data: Bytes) -> bool:
        return checksum(data) == self.checksum


@dataclass
class Extents:
    """By file, in the order in which they were written."""

    of_file: dict[str, list[Extent]] = field(default_factory=dict)

    def add(self, file: str, start: int, data: Bytes) -> None:
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

    def gap(self, file: str, num_bytes: int) -> str:
        """What is wrong with the runs of a file of `num_bytes`: nothing, if each byte of it lies in one run."""
        at = 0
        for extent in sorted(self.of_file.get(file, [])):
            if extent.start != at:
                return f"byte {min(at, extent.start)} lies in {'no extent' if extent.start > at else 'two extents'}"
            at = extent.stop
        return "" if at == num_bytes else f"its runs end at byte {at} of {num_bytes}"

    def as_json(self) -> str:
        extents = {
            file: [[r.start, r.stop, f"{r.checksum:016x}"] for r in extents] for file, extents in self.of_file.items()
        }
        return json.dumps(extents, separators=(",", ":")) + "\n"


def extents_of_json(text: bytes) -> Extents:
    """What `as_json` wrote. ValueError where it is anything else."""
    try:
        found = json.loads(text)
        return Extents(
            {file: [Extent(a, b, int(digest, 16)) for a, b, digest in extents] for file, extents in found.items()}
        )
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"these are no runs: {error}") from error


def checksum(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def overlapping(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """Those of sorted runs that have bytes of `start..stop`."""
    at = bisect_right(extents, start, key=lambda extent: extent.stop)
    while at < len(extents) and extents[at].start < stop:
        yield extents[at]
        at += 1


class Checks:
    """Compares what is read with the checksums of what was written. `checked`: by file, the runs that were right."""

    def __init__(self, directory: Path, extents: Mapping[str, Sequence[Extent]]) -> None:
        self.directory, self.extents = directory, extents  # those of a file sorted
        self.checked: dict[str, set[Extent]] = {}

    def parts(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, Extent]]:
        """`start..stop` as parts of runs, each with its run."""
        for extent in overlapping(self.extents[file], start, stop):
            yield max(start, extent.start), min(stop, extent.stop), extent

    def check(self, file: str, extent: Extent, data: Bytes, key: str = "") -> None:
        """`data`: the bytes of the extent, which is a part of `key`."""
        if not extent.is_of(data):
            raise BrokenFile(
                f"bytes {extent.start} to {extent.stop} of {self.directory / file} are not those that were written"
                f"{key and f' for {key}'}: they fail their checksum; copy the checkpoint again, or take another one"
            )
        self.checked.setdefault(file, set()).add(extent)

    def is_checked(self, file: str, extent: Extent) -> bool:
        return extent in self.checked.get(file, ())
