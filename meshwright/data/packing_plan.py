"""What is trained on, as a pure function: stream j of a run holds these documents, whatever the mesh.

An epoch is a list of documents in a random order. It is cut into windows of at least 256 streams' worth of tokens, in
each of which documents are packed by best fit. Streams are numbered through all windows and epochs: step s, data rank
r of N and micro-batch m of R take stream `s*N*R + m*N + r`, so a run goes on from a number alone, on any mesh.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError, counted
from ..log import logger
from .permute import Indices, permuted

WINDOW = 256  # streams of a window, about: packing wastes less in longer ones, and each is packed as a whole
_VERSION = 2  # of the rules below: a run that began under others cannot go on
_CACHE_FORMAT = 2  # of the files that keep where windows begin: files of an earlier one are made anew
_DIGEST_BYTES = 16  # of XXH3-128
_SHORTEST = 2  # a document of one token has no target
MOST_DOCUMENTS = 10**9  # of a run, over all of its epochs: they would take hours to pack, and 8 GB


@dataclass(frozen=True)
class DataSource:
    """A source as the plan sees it. `weight`: passes over it in an epoch. `share`: of the tokens, instead of weights.

    `cut`: documents longer than a stream are cut into pieces. `content`: a checksum of the documents.
    """

    name: str
    lengths: Indices
    weight: float = 1.0
    share: float | None = None
    cut: bool = False
    content: str = ""


@dataclass(frozen=True)
class Piece:
    """Tokens `start..stop` of a document, as a document of a stream."""

    source: int
    document: int
    start: int
    stop: int
    epoch: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Window:
    epoch: int
    start: int  # places of the epoch
    stop: int
    first: int  # stream


class Plan:
    """All streams of a run of `epochs`, or of as many `streams`.

    It keeps 16 bytes a document, and packs a window when somebody asks for a stream of it. `cache`: a folder for where
    windows begin, which takes 9 s for a million documents and is the same for every process.
    """

    def __init__(
        self, sources: Sequence[DataSource], *, length: int, seed: int = 0, epochs: float | None = None,
        streams: int | None = None, cache: Path | None = None,
    ) -> None:  # fmt: skip
        if (epochs is None) == (streams is None):
            raise DataError("a plan is of epochs or of streams; give one of them")
        self.sources, self.length, self.seed = tuple(sources), length, seed
        self._kept = [np.flatnonzero(source.lengths >= _SHORTEST) for source in sources]
        self._check()
        self.weights = self._weights()
        self._epochs, self._streams = epochs, streams
        self._check_amounts()
        self._windows, self.num_streams = self._kept_in(cache)
        self._packed = lru_cache(4)(self._pack)

    def _check(self) -> None:
        if not self.sources or not any(map(len, self._kept)):
            raise DataError("there is no document of two or more tokens to train on; look at the paths of the data")
        for source, kept in zip(self.sources, self._kept, strict=True):
            lengths = source.lengths[kept]
            if not len(kept):
                raise DataError(f"{source.name} has no document of two or more tokens; leave it out")
            if not source.cut and (too_long := int((lengths > self.length).sum())):
                raise DataError(
                    f"{counted(too_long, 'document')} of {source.name} are longer than a stream of {self.length} "
                    f"tokens, the longest has {int(lengths.max())}; choose a longer stream, drop or cut them"
                )
            if source.weight <= 0 or (source.share is not None and source.share <= 0):
                raise DataError(f"the weight or share of {source.name} is not above 0; leave the source out")
        shares = [source.share is not None for source in self.sources]
        if any(shares) and not all(shares):
            raise DataError(f"{self.sources[shares.index(False)].name} has no share, others have; give all one or none")

    def _check_amounts(self) -> None:
        """Refuse a run that would be packed for ever, and a source of which the run takes nothing."""
        sizes = [weight * len(kept) for weight, kept in zip(self.weights, self._kept, strict=True)]
        if sum(sizes) > MOST_DOCUMENTS:
            at = sizes.index(max(sizes))
            raise DataError(
                f"a weight of {self.weights[at]:g} takes {sizes[at]:.3g} documents of {self.sources[at].name} in an "
                f"epoch; at most {MOST_DOCUMENTS:,} can be planned: give a smaller weight"
            )
        self._check_small(sizes)
        if not max(self.num_epochs, self.num_epochs * sum(sizes)) <= MOST_DOCUMENTS:
            what, less = f"{self._epochs or 0:g} epochs", "fewer epochs"
            if self._streams is not None:
                what, less = f"{self._streams:,} streams of {self.length:,} tokens", "fewer steps or tokens"
            raise DataError(
                f"{what} are {self.num_epochs:.3g} passes over {counted(round(sum(sizes)), 'document')}; at most "
                f"{MOST_DOCUMENTS:,} documents can be planned, counted in each pass: give {less}"
            )

    def _check_small(self, sizes: Sequence[float]) -> None:
        for source, kept, size in zip(self.sources, self._kept, sizes, strict=True):
            if source.share is None and round(size * max(1.0, min(self.num_epochs, MOST_DOCUMENTS))) == 0:
                raise DataError(
                    f"a weight of {source.weight:g} takes none of the {counted(len(kept), 'document')} of "
                    f"{source.name}; give {1 / len(kept):.2g} or more, or leave the source out"
                )
            if source.share is not None and self._streams and source.share * self._streams * self.length < 1:
                raise DataError(
                    f"a share of {source.share:g} of {self._streams * self.length:,} tokens is not one token of "
                    f"{source.name}; give a larger share, or leave the source out"
                )

    @cached_property
    def num_epochs(self) -> float:
        """Passes over the list of documents in the run; of a run of streams about, since no packing is perfect."""
        if self._epochs is not None:
            return self._epochs
        sizes = zip(self.weights, self.sources, self._kept, strict=True)
        tokens = sum(weight * int(source.lengths[kept].sum()) for weight, source, kept in sizes)
        return (self._streams or 0) * self.length / tokens if tokens > 0 else math.inf

    def _weights(self) -> tuple[float, ...]:
        """Passes over each source in an epoch. With shares, an epoch ends where the first source is used up."""
        if self.sources[0].share is None:
            return tuple(source.weight for source in self.sources)
        passes = [(source.share or 0) / int(source.lengths.sum()) for source in self.sources]
        return tuple(each / max(passes) for each in passes)

    def _kept_in(self, cache: Path | None) -> tuple[list[_Window], int]:
        if cache is None:
            return self._lay_out()
        told = f"{_CACHE_FORMAT} {self.fingerprint} {self._epochs} {self._streams}"
        file = cache / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.plan"
        if file.exists():
            try:
                return _read_windows(file)
            except (DataError, OSError) as error:
                logger.warning("a plan in the cache is damaged and is made anew: %s", error)
        windows, num = self._lay_out()
        cache.mkdir(parents=True, exist_ok=True)
        rows = [(window.epoch, window.start, window.stop, window.first) for window in windows]
        making = file.with_suffix(f".{secrets.token_hex(4)}")
        data = np.array([*rows, (num, 0, 0, 0)], dtype="<i8").tobytes()
        making.write_bytes(xxhash.xxh3_128_digest(data) + data)
        making.replace(file)  # whole or not there, whoever else makes it
        return windows, num

    def _lay_out(self) -> tuple[list[_Window], int]:
        """All windows, and how many streams they hold. Each is packed once for that, and forgotten."""
        first, wanted, windows = 0, self._streams, list[_Window]()
        for epoch in itertools.count():
            share = 1.0 if self._epochs is None else min(1.0, self._epochs - epoch)
            if share <= 0 or (wanted is not None and first >= wanted):
                return windows, first if wanted is None else wanted
            for start, stop in self._cuts(epoch, share) if self._num_places(epoch) else ():
                window = _Window(epoch, start, stop, first)
                windows.append(window)
                first += len(self._pack(window))
                if wanted is not None and first >= wanted:
                    break
        raise AssertionError

    def _counts(self, epoch: int) -> list[tuple[int, int]]:
        """Which places of its endless row of passes an epoch takes of each source."""
        sizes = zip(self.weights, self._kept, strict=True)
        return [(round(epoch * w * len(kept)), round((epoch + 1) * w * len(kept))) for w, kept in sizes]

    def _documents(self, epoch: int, places: Indices) -> tuple[Indices, Indices]:
        """Source and document at each place of an epoch."""
        counts = self._counts(epoch)
        ends = np.cumsum([stop - start for start, stop in counts])
        mixed = permuted(places, int(ends[-1]), self.seed, "epoch", epoch)
        source = np.searchsorted(ends, mixed, side="right")
        document = np.empty_like(mixed)
        for s, ((start, stop), kept) in enumerate(zip(counts, self._kept, strict=True)):
            mine = np.flatnonzero(source == s)
            row = mixed[mine] - (ends[s] - (stop - start)) + start
            for number in np.unique(row // len(kept)):
                of_pass = mine[row // len(kept) == number]
                at = row[row // len(kept) == number] % len(kept)
                document[of_pass] = kept[permuted(at, len(kept), self.seed, "source", s, int(number))]
        return source, document

    def _lengths(self, source: Indices, document: Indices) -> Indices:
        out = np.empty_like(document)
        for s, each in enumerate(self.sources):
            mine = source == s
            out[mine] = each.lengths[document[mine]]
        return out

    def _cuts(self, epoch: int, share: float) -> Iterator[tuple[int, int]]:
        """The places of each window of an epoch. A last one under a half joins the one before."""
        num = max(1, round(self._num_places(epoch) * share))
        ends = np.cumsum(self._lengths(*self._documents(epoch, np.arange(num))))
        least, bounds = WINDOW * self.length, [0]
        while bounds[-1] < num:
            done = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            bounds.append(min(num, int(np.searchsorted(ends, done + least)) + 1))
        last = int(ends[-1] - (ends[bounds[-2] - 1] if bounds[-2] else 0))
        if len(bounds) > 2 and last < least // 2:
            del bounds[-2]
        return itertools.pairwise(bounds)

    def _pack(self, window: _Window) -> list[list[Piece]]:
        source, document = self._documents(window.epoch, np.arange(window.start, window.stop))
        found = zip(source.tolist(), document.tolist(), self._lengths(source, document).tolist(), strict=True)
        pieces = [piece for s, d, size in found for piece in self._pieces(s, d, size, window.epoch)]
        streams = best_fit([len(piece) for piece in pieces], self.length)
        order = permuted(np.arange(len(streams)), len(streams), self.seed, "window", window.epoch, window.start)
        return [[pieces[number] for number in streams[at]] for at in order.tolist()]

    def _pieces(self, source: int, document: int, size: int, epoch: int) -> list[Piece]:
        """A piece of one token has no target, so the one before gives it another token."""
        starts = [*range(0, size, self.length)]
        if size - starts[-1] < _SHORTEST:
            starts[-1] -= 1
        return [Piece(source, document, a, b, epoch) for a, b in itertools.pairwise([*starts, size])]

    def stream(self, number: int) -> list[Piece]:
        """The documents of a stream; none beyond the end of the run."""
        if number < 0:
            raise DataError(f"there is no stream {number}")
        if number >= self.num_streams:
            return []
        window = self._windows[bisect_right(self._firsts, number) - 1]
        return self._packed(window)[number - window.first]

    @cached_property
    def _firsts(self) -> list[int]:
        return [window.first for window in self._windows]

    def epochs_before(self, number: int) -> float:
        """How many epochs the streams before this one are, but for the order within a window."""
        window = self._windows[bisect_right(self._firsts, min(number, self.num_streams - 1)) - 1]
        done = min(1.0, (number - window.first) / len(self._packed(window)))
        place = window.start + done * (window.stop - window.start)
        return window.epoch + place / self._num_places(window.epoch)

    def _num_places(self, epoch: int) -> int:
        return sum(stop - start for start, stop in self._counts(epoch))

    @cached_property
    def fingerprint(self) -> str:
        """Of all that any stream depends on."""
        told = hashlib.sha256()
        told.update(repr((_VERSION, WINDOW, self.length, self.seed)).encode())
        for source, weight in zip(self.sources, self.weights, strict=True):
            told.update(repr((source.content, weight, source.cut)).encode())
            told.update(np.ascontiguousarray(source.lengths, dtype="<i8").tobytes())
        return told.hexdigest()


def _read_windows(file: Path) -> tuple[list[_Window], int]:
    """Return the windows and the number of streams that a file of the cache holds, behind the checksum of its bytes."""
    found = file.read_bytes()
    digest, data = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(data):
        raise DataError(f"{file} fails its checksum")
    *windows, last = np.frombuffer(data, dtype="<i8").reshape(-1, 4).tolist()
    return [_Window(*window) for window in windows], last[0]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of documents by stream: the longest first, each where the least room is left that it fits into."""
    streams: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left, stream
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        size = lengths[number]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            left, stream = room, len(streams)
            streams.append([])
        else:
            left, stream = free.pop(at)
        streams[stream].append(number)
        insort(free, (left - size, stream))
    return streams
