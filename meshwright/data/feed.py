"""Turn the streams of a packing plan into batches, one step ahead of training, in a thread.

The stream number alone determines the documents of a data rank, so a run can resume on another number of ranks and
still use every sample exactly once. State kept per rank (a dataloader's position) cannot be resharded (torchtitan#811).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ..errors import DataError, counted
from .batch import IGNORE, Batch
from .images import Images, images_of
from .packing_plan import DataSource, Piece, Plan
from .processor import Processor
from .token_cache import Documents
from .tokens import Tokens
from .vision_files import View

TooLong = Literal["stop", "drop", "cut"]
SOURCE = "source"  # the field with the source of each token, where there are several sources
_NAMED = 20  # number of documents that one error names
_IMAGE_THREADS = 4  # threads that decode images: Pillow and FFmpeg release the GIL


def source_of(
    documents: Documents, length: int, *, weight: float = 1.0, share: float | None = None, too_long: TooLong = "stop"
) -> DataSource:
    """Make a `DataSource` for streams of `length`. Documents that are too long stop the run, are dropped, or are cut.

    Cutting is right for plain text, where any part of a document is a document. A cut chat loses its system message and
    question; "drop" reports it in the statistics instead.
    """
    too_long_docs = np.flatnonzero(documents.lengths > length)
    lengths = documents.lengths
    if too_long == "cut" and documents.num_parts.max(initial=1) > 1:
        raise DataError(f'rows of {documents.name} make several documents each; take too_long = "stop" or "drop"')
    if len(too_long_docs) and too_long == "stop":
        lines = [f"  {documents.place(n)}: {lengths[n]} tokens" for n in too_long_docs[:_NAMED].tolist()]
        more = [f"  and {len(too_long_docs) - _NAMED} more"] if len(too_long_docs) > _NAMED else []
        raise DataError(
            f"{counted(len(too_long_docs), 'document')} of {documents.name} have more than the {length} tokens of a "
            "stream:\n" + "\n".join([*lines, *more]) + '\nTake a longer stream, or set too_long = "drop" or "cut"'
        )
    with_images = too_long_docs[documents.num_views[too_long_docs] > 0]
    if len(with_images) and too_long == "cut":
        raise DataError(
            f"{counted(len(with_images), 'document')} of {documents.name} with images have more than {length} "
            f"tokens, the first is {documents.place(with_images[0])}; a cut could go through an image, so take a "
            'longer stream, set images.max_pixels, or too_long = "drop"'
        )
    if too_long == "drop":
        lengths = np.where(lengths > length, 0, lengths)  # the plan leaves out documents without targets
    return DataSource(documents.name, lengths, weight, share, cut=too_long == "cut", content=documents.content)


def batch_of(
    documents: Sequence[Tokens], length: int, sources: Sequence[int] | None = None, images: Images | None = None,
    values: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> Batch:  # fmt: skip
    """Pack documents, or groups of them, into a batch of `length`, as `mw.pack(..., trained=, length=)` does, without
    Python ints per token.

    Without documents it is all padding. `sources`: the source index of each. `images`: those of the documents.
    `values`: fields with one number for each document of a group, repeated for all tokens of that document.

    Labels are made from spans by slices of numpy arrays: for a span [start, stop) the labels at start-1 .. stop-2 are
    the tokens start .. stop-1. No Python object is made per token.
    """
    starts = [*accumulate(map(len, documents), initial=0)]
    tokens, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORE, dtype=np.int64)
    for begin, document in zip(starts, documents, strict=False):
        tokens[begin : begin + len(document)] = document.ids
        for start, stop in document.spans:
            first = max(start, 1)  # token t is predicted at t-1, so the first token of a document is never a target
            labels[begin + first - 1 : begin + stop - 1] = document.ids[first:stop]
        for end, label in zip(accumulate(document.sizes), document.classes, strict=False):
            labels[begin + end - 1] = label
    sizes = [size for document in documents for size in document.sizes]
    bounds, num_filler = [*accumulate(sizes, initial=0)], length - starts[-1]
    groups = [number for number, document in enumerate(documents) for _ in document.sizes]
    fields = {} if sources is None else {SOURCE: _by_token(sources, [*map(len, documents)], length)}
    for name, of_groups in (values or {}).items():
        fields[name] = _by_token([value for group in of_groups for value in group], sizes, length, np.float64)
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(labels), tuple(bounds if num_filler == 0 else [*bounds, length]),
        fields, num_filler, images, groups=tuple(groups),
    )  # fmt: skip


def _by_token(values: Sequence[float], sizes: Sequence[int], length: int, dtype: Any = np.int64) -> torch.Tensor:
    """Repeat a value for each token of its document; 0 for padding."""
    per_token = np.repeat(np.asarray(values, dtype=dtype), sizes)
    return torch.from_numpy(np.pad(per_token, (0, length - len(per_token))))


class Streams(NamedTuple):
    """The batches of a data rank in a step. `next`: the stream that the next step begins with."""

    batches: list[Batch]
    next: int


class Feed:
    """Batches of one data rank. Each step takes `micro_batches` streams for each of `num_ranks` data ranks.

    `processor`: decodes the images of a vision-language model, several at a time. Numbers of documents
    (`Documents.values`) become fields.

    Work overlaps with the GPU: one thread packs and decodes the next step, and FFmpeg and Pillow decode several
    images in parallel. If `time/data_wait_share` in the metrics is high, that is not enough.
    """

    def __init__(
        self, documents: Sequence[Documents], plan: Plan, *, micro_batches: int, rank: int, num_ranks: int,
        processor: Processor | None = None,
    ) -> None:  # fmt: skip
        self.documents, self.plan, self.micro_batches = documents, plan, micro_batches
        self.processor, self._readers = processor, ThreadPoolExecutor(_IMAGE_THREADS, "images")
        self.rank, self.num_ranks = rank, num_ranks
        self._thread, self._ahead = ThreadPoolExecutor(1, "feed"), dict[int, Future[list[Batch]]]()

    @property
    def streams_per_step(self) -> int:
        """Return how many streams all data ranks take in a step."""
        return self.micro_batches * self.num_ranks

    def step(self, first: int) -> Streams:
        """Return the batches of the step that begins with stream `first`, and start making those of the next step.

        A future for the following step is always in flight. The step that needs it raises its exception, on all ranks
        of the data rank, since they read the same streams.
        """
        following = first + self.streams_per_step
        future = self._ahead.pop(first, None)
        # After a resume `first` differs from the expected one, and the prepared step is not used.
        batches = future.result() if future is not None else self._batches(first)
        self._ahead = {following: self._thread.submit(self._batches, following)}
        return Streams(batches, following)

    def _batches(self, first: int) -> list[Batch]:
        """Make the batches of a step: micro-batch m of this rank is stream `first + m * num_ranks + rank`."""
        # Interleaved over ranks, so that the streams of a step are consecutive in the plan on every mesh.
        numbers = [first + m * self.num_ranks + self.rank for m in range(self.micro_batches)]
        return [self._batch(self.plan.stream(number)) for number in numbers]

    def _batch(self, pieces: Sequence[Piece]) -> Batch:
        """Make the batch of a stream."""
        sources = [piece.source for piece in pieces] if len(self.documents) > 1 else None
        parts = [self._part(piece) for piece in pieces]
        values = {name: [self._values(name, piece, part) for piece, part in zip(pieces, parts, strict=True)]
                  for name in self.documents[0].values}  # fmt: skip
        return batch_of(parts, self.plan.length, sources, self._images(parts, pieces), values)

    def _values(self, name: str, piece: Piece, part: Tokens) -> list[float]:
        """Return the values of the documents of a row."""
        values: list[float] = self.documents[piece.source].values[name][piece.document, : len(part.sizes)].tolist()
        return values

    def _images(self, parts: Sequence[Tokens], pieces: Sequence[Piece]) -> Images | None:
        """Decode the images of a stream."""
        views = [view for part in parts for view in part.views]
        if not views:
            return None
        assert self.processor is not None, "documents with images are made with a processor"
        shown_by = [piece for part, piece in zip(parts, pieces, strict=True) for _ in part.views]
        pixels_and_views = zip(self._readers.map(self._pixels, views, shown_by), views, strict=True)
        images = iter([(pixels, view.grid) for pixels, view in pixels_and_views])
        by_document = [[next(images) for _ in part.views] for part in parts]
        return images_of([part.ids.tolist() for part in parts], by_document, self.processor.placeholders.ids)

    def _pixels(self, view: View, shown_by: Piece) -> torch.Tensor:
        """Decode an image; an error says which row shows it."""
        assert self.processor is not None
        try:
            return self.processor.pixels(view)
        except DataError as error:
            raise DataError(f"{self.documents[shown_by.source].place(shown_by.document)}: {error}") from error

    def _part(self, piece: Piece) -> Tokens:
        """Return the tokens of a piece."""
        return piece_of(self.documents[piece.source].tokens(piece.document), piece.start, piece.stop)

    def place(self, number: int) -> str:
        """Return where the documents of a stream came from, for errors.

        When a loss is NaN, the error names the documents of the stream.
        """
        pieces = self.plan.stream(number)
        return f"stream {number}: " + ", ".join(self.documents[p.source].place(p.document) for p in pieces)

    def close(self) -> None:
        """Stop the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False, cancel_futures=True)


def piece_of(document: Tokens, start: int, stop: int) -> Tokens:
    """Return tokens `start..stop` of a document, with the trained spans inside."""
    if (start, stop) == (0, len(document)):
        return document
    # A span that is cut is trained on in both pieces, with its part in each.
    spans = [(max(a, start) - start, min(b, stop) - start) for a, b in document.spans]
    return Tokens(document.ids[start:stop], tuple((a, b) for a, b in spans if a < b))
