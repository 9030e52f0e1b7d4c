"""The packing plan: a pure function from stream number to documents, the same on every mesh.

An epoch is a permutation of all documents, cut into windows of at least 256 streams' worth of tokens; each window is
packed by best-fit decreasing (padding under 1% for usual lengths; truncation-free packing as in arXiv:2404.10830).
Streams are numbered through all windows and epochs. Step s, data rank r of N, micro-batch m of R take stream `s*N*R +
m*N + r`. So one number is the whole position of a run, which can resume on any number of ranks without repeating or
skipping a document, unlike per-rank dataloader state, which cannot be resharded (torchtitan#811).

Example: 2 data ranks with 2 micro-batches take 4 streams per step. Step 10 begins with stream 40; rank 1 gets streams
41 and 43. Resumed on 4 ranks with 1 micro-batch, step 10 has the same four streams, one per rank.
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

WINDOW = 256  # streams of a window: longer windows need less padding, but take longer to pack
_VERSION = 2  # of the rules below: a run that began under other rules cannot be resumed
_CACHE_FORMAT = 2  # of the files that store where windows begin
_DIGEST_BYTES = 16  # of XXH3-128
_SHORTEST = 2  # a document of one token has no target
MOST_DOCUMENTS = 10**9  # per run, over all epochs: more would take hours to pack, and 8 GB


@dataclass(frozen=True)
class DataSource:
    """A source of documents. `weight`: passes over it in an epoch. `share`: its share of tokens, instead of a weight.

    `cut`: documents longer than a stream are cut into pieces. `content`: a checksum of the documents.

    Shares are of tokens, weights are of passes: `share = 0.5` takes half of the tokens whatever the size of the source,
    `weight = 2` reads its documents twice per epoch.
    """

    name: str
    lengths: Indices
    weight: float = 1.0
    share: float | None = None
    cut: bool = False
    content: str = ""


@dataclass(frozen=True)
class Piece:
    """Tokens `start..stop` of a document, which become a document of a stream."""

    source: int
    document: int
    start: int
    stop: int
    epoch: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class _Window:
    """A range of an epoch's documents that are packed together. `first`: its first stream."""

    epoch: int
    start: int  # places of the epoch
    stop: int
    first: int  # stream


class Plan:
    """All streams of a run, of given `epochs` or number of `streams`.

    It keeps 16 bytes per document, and packs a window when one of its streams is first requested. `cache`: a folder for
    the bounds of windows, which take 9 s for a million documents and are the same in every process.
    """

    def __init__(
        self, sources: Sequence[DataSource], *, length: int, seed: int = 0, epochs: float | None = None,
        streams: int | None = None, cache: Path | None = None,
    ) -> None:  # fmt: skip
        if (epochs is None) == (streams is None):
            raise DataError("a plan has either epochs or streams; give one of them")
        self.sources, self.length, self.seed = tuple(sources), length, seed
        self._usable = [np.flatnonzero(source.lengths >= _SHORTEST) for source in sources]
        self._check()
        self.weights = self._weights()
        self._epochs, self._streams = epochs, streams
        self._check_amounts()
        self._windows, self.num_streams = self._load_or_build(cache)
        # Cache four windows: a step may straddle two, and a thread prepares the next step at the same time.
        self._packed = lru_cache(4)(self._pack)

    def _check(self) -> None:
        """Check the sources: usable documents, lengths, weights, shares."""
        if not self.sources or not any(map(len, self._usable)):
            raise DataError("there is no document of two or more tokens to train on; check the paths of the data")
        for source, usable in zip(self.sources, self._usable, strict=True):
            lengths = source.lengths[usable]
            if not len(usable):
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
        """Refuse a run too large to plan, and a source that would contribute nothing.

        A typo in a weight (1000 for 1.0) would otherwise look like a hang at start.
        """
        sizes = [weight * len(usable) for weight, usable in zip(self.weights, self._usable, strict=True)]
        if sum(sizes) > MOST_DOCUMENTS:
            at = sizes.index(max(sizes))
            raise DataError(
                f"a weight of {self.weights[at]:g} takes {sizes[at]:.3g} documents of {self.sources[at].name} in an "
                f"epoch; at most {MOST_DOCUMENTS:,} can be planned: give a smaller weight"
            )
        self._check_small(sizes)
        if not max(self.num_epochs, self.num_epochs * sum(sizes)) <= MOST_DOCUMENTS:
            amount, fix = f"{self._epochs or 0:g} epochs", "fewer epochs"
            if self._streams is not None:
                amount, fix = f"{self._streams:,} streams of {self.length:,} tokens", "fewer steps or tokens"
            raise DataError(
                f"{amount} are {self.num_epochs:.3g} passes over {counted(round(sum(sizes)), 'document')}; at most "
                f"{MOST_DOCUMENTS:,} documents can be planned, counted in each pass: give {fix}"
            )

    def _check_small(self, sizes: Sequence[float]) -> None:
        """Refuse a weight or share that rounds to nothing."""
        for source, usable, size in zip(self.sources, self._usable, sizes, strict=True):
            if source.share is None and round(size * max(1.0, min(self.num_epochs, MOST_DOCUMENTS))) == 0:
                raise DataError(
                    f"a weight of {source.weight:g} takes none of the {counted(len(usable), 'document')} of "
                    f"{source.name}; give {1 / len(usable):.2g} or more, or leave the source out"
                )
            if source.share is not None and self._streams and source.share * self._streams * self.length < 1:
                raise DataError(
                    f"a share of {source.share:g} of {self._streams * self.length:,} tokens is not one token of "
                    f"{source.name}; give a larger share, or leave the source out"
                )

    @cached_property
    def num_epochs(self) -> float:
        """Return the passes over the documents in the run; approximate if the run has a number of streams."""
        if self._epochs is not None:
            return self._epochs
        sizes = zip(self.weights, self.sources, self._usable, strict=True)
        tokens = sum(weight * int(source.lengths[usable].sum()) for weight, source, usable in sizes)
        return (self._streams or 0) * self.length / tokens if tokens > 0 else math.inf

    def _weights(self) -> tuple[float, ...]:
        """Return the passes over each source in an epoch. With shares, an epoch ends where the first source is
        used up."""
        if self.sources[0].share is None:
            return tuple(source.weight for source in self.sources)
        passes = [(source.share or 0) / int(source.lengths.sum()) for source in self.sources]
        return tuple(each / max(passes) for each in passes)

    def _load_or_build(self, cache: Path | None) -> tuple[list[_Window], int]:
        """Return windows and number of streams, from the cache if it has them.

        The cache key has the fingerprint of data and settings, and the length of the run; the file has a checksum.
        """
        if cache is None:
            return self._build_windows()
        key = f"{_CACHE_FORMAT} {self.fingerprint} {self._epochs} {self._streams}"
        file = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.plan"
        if file.exists():
            try:
                return _read_windows(file)
            except (DataError, OSError) as error:
                logger.warning("rebuilding a cached plan that is damaged: %s", error)
        windows, num = self._build_windows()
        cache.mkdir(parents=True, exist_ok=True)
        rows = [(window.epoch, window.start, window.stop, window.first) for window in windows]
        temporary = file.with_suffix(f".{secrets.token_hex(4)}")
        data = np.array([*rows, (num, 0, 0, 0)], dtype="<i8").tobytes()
        temporary.write_bytes(xxhash.xxh3_128_digest(data) + data)
        temporary.replace(file)  # atomic, if several processes build it
        return windows, num

    def _build_windows(self) -> tuple[list[_Window], int]:
        """Return all windows and the number of streams. Each window is packed once to count its streams, then
        dropped."""
        first_stream, max_streams, windows = 0, self._streams, list[_Window]()
        for epoch in itertools.count():
            share = 1.0 if self._epochs is None else min(1.0, self._epochs - epoch)
            if share <= 0 or (max_streams is not None and first_stream >= max_streams):
                return windows, first_stream if max_streams is None else max_streams
            for start, stop in self._cuts(epoch, share) if self._num_places(epoch) else ():
                window = _Window(epoch, start, stop, first_stream)
                windows.append(window)
                first_stream += len(self._pack(window))
                if max_streams is not None and first_stream >= max_streams:
                    break
        raise AssertionError

    def _ranges_of_sources(self, epoch: int) -> list[tuple[int, int]]:
        """Return the range of each source that an epoch takes, in an endless sequence of passes over it.

        With weight 1.5, epoch 0 takes positions 0 to 1.5 n, epoch 1 the next 1.5 n: every document is seen equally
        often.
        """
        sizes = zip(self.weights, self._usable, strict=True)
        return [(round(epoch * w * len(usable)), round((epoch + 1) * w * len(usable))) for w, usable in sizes]

    def _documents(self, epoch: int, places: Indices) -> tuple[Indices, Indices]:
        """Return source and document at positions of an epoch: one permutation mixes the sources, another orders each
        pass."""
        counts = self._ranges_of_sources(epoch)
        ends = np.cumsum([stop - start for start, stop in counts])
        # Position in the epoch -> position in the concatenation of all sources -> source and row of it.
        shuffled = permuted(places, int(ends[-1]), self.seed, "epoch", epoch)
        source = np.searchsorted(ends, shuffled, side="right")
        document = np.empty_like(shuffled)
        for s, ((start, stop), usable) in enumerate(zip(counts, self._usable, strict=True)):
            of_source = np.flatnonzero(source == s)
            pass_position = shuffled[of_source] - (ends[s] - (stop - start)) + start
            # With a weight above 1, an epoch covers several passes over a source, each in a different order.
            for pass_number in np.unique(pass_position // len(usable)):
                indices = of_source[pass_position // len(usable) == pass_number]
                position_in_pass = pass_position[pass_position // len(usable) == pass_number] % len(usable)
                document[indices] = usable[
                    permuted(position_in_pass, len(usable), self.seed, "source", s, int(pass_number))
                ]
        return source, document

    def _lengths(self, source: Indices, document: Indices) -> Indices:
        """Return the lengths of documents."""
        lengths = np.empty_like(document)
        for s, each in enumerate(self.sources):
            of_source = source == s
            lengths[of_source] = each.lengths[document[of_source]]
        return lengths

    def _cuts(self, epoch: int, share: float) -> Iterator[tuple[int, int]]:
        """Return the bounds of the windows of an epoch. A last window under half of the size joins the one before."""
        num = max(1, round(self._num_places(epoch) * share))
        ends = np.cumsum(self._lengths(*self._documents(epoch, np.arange(num))))
        min_tokens, bounds = WINDOW * self.length, [0]
        while bounds[-1] < num:
            tokens_before = int(ends[bounds[-1] - 1]) if bounds[-1] else 0
            # Find the first position at which the window has at least `min_tokens`, by bisection in cumulative lengths.
            bounds.append(min(num, int(np.searchsorted(ends, tokens_before + min_tokens)) + 1))
        last_tokens = int(ends[-1] - (ends[bounds[-2] - 1] if bounds[-2] else 0))
        # A short window packs badly: with few documents, the last streams are mostly padding.
        if len(bounds) > 2 and last_tokens < min_tokens // 2:
            del bounds[-2]
        return itertools.pairwise(bounds)

    def _pack(self, window: _Window) -> list[list[Piece]]:
        """Pack a window, and shuffle its streams: best fit puts the longest documents first."""
        source, document = self._documents(window.epoch, np.arange(window.start, window.stop))
        documents = zip(source.tolist(), document.tolist(), self._lengths(source, document).tolist(), strict=True)
        pieces = [piece for s, d, size in documents for piece in self._pieces(s, d, size, window.epoch)]
        streams = best_fit([len(piece) for piece in pieces], self.length)
        order = permuted(np.arange(len(streams)), len(streams), self.seed, "window", window.epoch, window.start)
        return [[pieces[number] for number in streams[at]] for at in order.tolist()]

    def _pieces(self, source: int, document: int, size: int, epoch: int) -> list[Piece]:
        """Split a document. A last piece of one token would have no target, so it gets one more token from the previous
        piece."""
        starts = [*range(0, size, self.length)]
        if size - starts[-1] < _SHORTEST:
            starts[-1] -= 1
        return [Piece(source, document, a, b, epoch) for a, b in itertools.pairwise([*starts, size])]

    def stream(self, number: int) -> list[Piece]:
        """Return the documents of a stream; an empty list past the end of the run.

        Windows are packed when first needed and four are cached, so reading streams in order packs each window once
        (some milliseconds for 256 streams).
        """
        if number < 0:
            raise DataError(f"there is no stream {number}")
        if number >= self.num_streams:
            return []
        window = self._windows[bisect_right(self._firsts, number) - 1]
        return self._packed(window)[number - window.first]

    @cached_property
    def _firsts(self) -> list[int]:
        """Return the first stream of each window, for bisection."""
        return [window.first for window in self._windows]

    def epochs_before(self, number: int) -> float:
        """Return how many epochs precede a stream, up to the order within a window.

        Progress and schedules in epochs use it; it need not be exact to a document.
        """
        window = self._windows[bisect_right(self._firsts, min(number, self.num_streams - 1)) - 1]
        share_done = min(1.0, (number - window.first) / len(self._packed(window)))
        place = window.start + share_done * (window.stop - window.start)
        return window.epoch + place / self._num_places(window.epoch)

    def _num_places(self, epoch: int) -> int:
        """Return the number of documents of an epoch."""
        return sum(stop - start for start, stop in self._ranges_of_sources(epoch))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything that the streams depend on.

        Saved with every checkpoint. A resume with other data, another length or another seed would continue at the same
        stream number in a different sequence, repeating some documents and skipping others.
        """
        digest = hashlib.sha256()
        digest.update(repr((_VERSION, WINDOW, self.length, self.seed)).encode())
        for source, weight in zip(self.sources, self.weights, strict=True):
            digest.update(repr((source.content, weight, source.cut)).encode())
            digest.update(np.ascontiguousarray(source.lengths, dtype="<i8").tobytes())
        return digest.hexdigest()


def _read_windows(file: Path) -> tuple[list[_Window], int]:
    """Read windows and number of streams from a cache file, after its checksum."""
    content = file.read_bytes()
    digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(data):
        raise DataError(f"{file} fails its checksum")
    *windows, last = np.frombuffer(data, dtype="<i8").reshape(-1, 4).tolist()
    return [_Window(*window) for window in windows], last[0]


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Pack by best-fit decreasing: longest first, each into the stream with the least room that it fits into. O(n log
    n) lookups.

    Unlike first-come packing with cuts, best fit truncates no documents: these would teach a model to start and stop in
    the middle (arXiv:2404.10830).
    """
    streams: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room that is left, stream
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        # `free` is sorted by room, so the first entry with enough room is the tightest fit.
        at = bisect_left(free, (length, -1))
        if at == len(free):
            room_left, stream = room, len(streams)
            streams.append([])
        else:
            room_left, stream = free.pop(at)
        streams[stream].append(number)
        insort(free, (room_left - length, stream))
    return streams
