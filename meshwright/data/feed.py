"""Streams of a plan as batches, made a step ahead of the training."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import torch

from ..errors import DataError, counted
from .batch import IGNORE, Batch
from .images import Images, images_of
from .packing_plan import DataSource, Piece, Plan
from .permute import Indices
from .processor import Processor
from .token_cache import Documents
from .tokens import Tokens

TooLong = Literal["stop", "drop", "cut"]
SOURCE = "source"  # the field that says of which source a token is, where there are several
_NAMED = 20  # documents in one message
_READERS = 4  # threads that read pictures: Pillow and FFmpeg let others run meanwhile


def source_of(
    documents: Documents, length: int, *, weight: float = 1.0, share: float | None = None, too_long: TooLong = "stop"
) -> DataSource:
    """A source of a plan for streams of `length`. What is too long stops it, is left out, or is cut into pieces."""
    beyond = np.flatnonzero(documents.lengths > length)
    lengths = documents.lengths
    if len(beyond) and too_long == "stop":
        places = [f"  {documents.place(n)}: {lengths[n]} tokens" for n in beyond[:_NAMED].tolist()]
        more = [f"  and {len(beyond) - _NAMED} more"] if len(beyond) > _NAMED else []
        raise DataError(
            f"{counted(len(beyond), 'document')} of {documents.name} have more than the {length} tokens of a stream:\n"
            + "\n".join([*places, *more])
            + '\nTake a longer stream, or set too_long = "drop" or "cut"'
        )
    seeing = beyond[documents.num_views[beyond] > 0]
    if len(seeing) and too_long == "cut":
        raise DataError(
            f"{counted(len(seeing), 'document')} of {documents.name} with pictures have more than {length} tokens, "
            f"the first is {documents.place(seeing[0])}; a cut may go through a picture, so take a longer stream, set "
            'pictures.max_pixels, or too_long = "drop"'
        )
    if too_long == "drop":
        lengths = np.where(lengths > length, 0, lengths)  # a plan leaves out what has no target
    return DataSource(documents.name, lengths, weight, share, cut=too_long == "cut", content=documents.content)


def batch_of(
    parts: Sequence[Tokens], length: int, sources: Sequence[int] | None = None, images: Images | None = None
) -> Batch:
    """As `mw.pack(..., trained=, length=)`, without a Python number for each token. Without parts it is all filler.

    `sources`: of which each part is, where there are several. `images`: what they show.
    """
    bounds = [*accumulate(map(len, parts), initial=0)]
    tokens, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORE, dtype=np.int64)
    for begin, end, part in zip(bounds, bounds[1:], parts, strict=False):
        tokens[begin:end] = part.ids
        for start, stop in part.spans:
            first = max(start, 1)  # the term of a token is that of the one before, which the first has not
            labels[begin + first - 1 : begin + stop - 1] = part.ids[first:stop]
    num_filler = length - bounds[-1]
    ends = bounds if num_filler == 0 else [*bounds, length]
    fields = {SOURCE: torch.from_numpy(_by_token(sources, parts, length))} if sources is not None else {}
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), tuple(ends), fields, num_filler, images)


def _by_token(values: Sequence[int], parts: Sequence[Tokens], length: int) -> Indices:
    found = np.repeat(np.asarray(values, dtype=np.int64), [*map(len, parts)])
    return np.pad(found, (0, length - len(found)))


class Streams(NamedTuple):
    """What a data rank gets for a step. `next`: the stream that the step after it begins with."""

    batches: list[Batch]
    next: int


class Feed:
    """Batches of one data rank. Step after step takes `micro_batches` streams for each of `num_ranks` data ranks.
    `processor`: reads the pictures of a model that sees, several at a time."""

    def __init__(
        self, documents: Sequence[Documents], plan: Plan, *, micro_batches: int, rank: int, num_ranks: int,
        processor: Processor | None = None,
    ) -> None:  # fmt: skip
        self.documents, self.plan, self.micro_batches = documents, plan, micro_batches
        self.processor, self._readers = processor, ThreadPoolExecutor(_READERS, "pictures")
        self.rank, self.num_ranks = rank, num_ranks
        self._thread, self._ahead = ThreadPoolExecutor(1, "feed"), dict[int, Future[list[Batch]]]()

    @property
    def streams_per_step(self) -> int:
        return self.micro_batches * self.num_ranks

    def step(self, first: int) -> Streams:
        """That begins with stream `first`. The next one is made meanwhile."""
        following = first + self.streams_per_step
        made = self._ahead.pop(first, None)
        batches = made.result() if made is not None else self._batches(first)
        self._ahead = {following: self._thread.submit(self._batches, following)}
        return Streams(batches, following)

    def _batches(self, first: int) -> list[Batch]:
        numbers = [first + m * self.num_ranks + self.rank for m in range(self.micro_batches)]
        return [self._batch(self.plan.stream(number)) for number in numbers]

    def _batch(self, pieces: Sequence[Piece]) -> Batch:
        sources = [piece.source for piece in pieces] if len(self.documents) > 1 else None
        parts = [self._part(piece) for piece in pieces]
        return batch_of(parts, self.plan.length, sources, self._images(parts))

    def _images(self, parts: Sequence[Tokens]) -> Images | None:
        """The pictures of a stream, in the places of their documents."""
        views = [view for part in parts for view in part.views]
        if not views:
            return None
        assert self.processor is not None, "documents with pictures are made with a processor"
        read = zip(self._readers.map(self.processor.pixels, views), views, strict=True)
        pictures = iter([(pixels, view.grid) for pixels, view in read])
        shown = [[next(pictures) for _ in part.views] for part in parts]
        return images_of([part.ids.tolist() for part in parts], shown, self.processor.marks.ids)

    def _part(self, piece: Piece) -> Tokens:
        return piece_of(self.documents[piece.source].tokens(piece.document), piece.start, piece.stop)

    def place(self, number: int) -> str:
        """Where the documents of a stream came from."""
        pieces = self.plan.stream(number)
        return f"stream {number}: " + ", ".join(self.documents[p.source].place(p.document) for p in pieces)

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False, cancel_futures=True)


def piece_of(document: Tokens, start: int, stop: int) -> Tokens:
    if (start, stop) == (0, len(document)):
        return document
    spans = [(max(a, start) - start, min(b, stop) - start) for a, b in document.spans]
    return Tokens(document.ids[start:stop], tuple((a, b) for a, b in spans if a < b))
