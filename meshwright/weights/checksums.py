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
class Run:
    """Bytes of a file that one rank wrote at once. A reader that reads all of them can check them."""

    start: int
    stop: int
    checksum: int  # xxh3, 64 bits

    def is_of(self, data: Bytes) -> bool:
        return checksum(data) == self.checksum


@dataclass
class Runs:
    """By file, in the order in which they were written."""

    of_file: dict[str, list[Run]] = field(default_factory=dict)

    def add(self, file: str, start: int, data: Bytes) -> None:
        self.of_file.setdefault(file, []).append(Run(start, start + len(data), checksum(data)))

    def update(self, other: Runs) -> None:
        for file, runs in other.of_file.items():
            self.of_file.setdefault(file, []).extend(runs)

    @property
    def num_bytes(self) -> int:
        return sum(run.stop - run.start for run in self)

    def __iter__(self) -> Iterator[Run]:
        return (run for runs in self.of_file.values() for run in runs)

    def sorted(self) -> dict[str, list[Run]]:
        return {file: sorted(runs) for file, runs in self.of_file.items()}

    def gap(self, file: str, num_bytes: int) -> str:
        """What is wrong with the runs of a file of `num_bytes`: nothing, if each byte of it lies in one run."""
        at = 0
        for run in sorted(self.of_file.get(file, [])):
            if run.start != at:
                return f"byte {min(at, run.start)} lies in {'no run' if run.start > at else 'two runs'}"
            at = run.stop
        return "" if at == num_bytes else f"its runs end at byte {at} of {num_bytes}"

    def as_json(self) -> str:
        runs = {file: [[r.start, r.stop, f"{r.checksum:016x}"] for r in runs] for file, runs in self.of_file.items()}
        return json.dumps(runs, separators=(",", ":")) + "\n"


def runs_of_json(text: bytes) -> Runs:
    """What `as_json` wrote. ValueError where it is anything else."""
    try:
        found = json.loads(text)
        return Runs({file: [Run(a, b, int(digest, 16)) for a, b, digest in runs] for file, runs in found.items()})
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"these are no runs: {error}") from error


def checksum(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def overlapping(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Those of sorted runs that have bytes of `start..stop`."""
    at = bisect_right(runs, start, key=lambda run: run.stop)
    while at < len(runs) and runs[at].start < stop:
        yield runs[at]
        at += 1


class Checks:
    """Compares what is read with the checksums of what was written. `checked`: by file, the runs that were right."""

    def __init__(self, directory: Path, runs: Mapping[str, Sequence[Run]]) -> None:
        self.directory, self.runs = directory, runs  # those of a file sorted
        self.checked: dict[str, set[Run]] = {}

    def parts(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, Run]]:
        """`start..stop` as parts of runs, each with its run."""
        for run in overlapping(self.runs[file], start, stop):
            yield max(start, run.start), min(stop, run.stop), run

    def check(self, file: str, run: Run, data: Bytes, key: str = "") -> None:
        """`data`: the bytes of the run, which is a part of `key`."""
        if not run.is_of(data):
            raise BrokenFile(
                f"bytes {run.start} to {run.stop} of {self.directory / file} are not those that were written"
                f"{key and f' for {key}'}: they fail their checksum; copy the checkpoint again, or take another one"
            )
        self.checked.setdefault(file, set()).add(run)

    def is_checked(self, file: str, run: Run) -> bool:
        return run in self.checked.get(file, ())
