"""A tokenised document, or a group of documents that must stay together: ids, trained ranges, images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from .vision_files import View

Ids = NDArray[np.int32]
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)  # eq would ask arrays for one truth value
class Tokens:
    """A tokenised document. `spans`: half-open ranges of trained tokens, each predicted at the token before it. No
    token precedes the first token of a document, so it is never a target.

    `parts`: the lengths of several documents made from one row, such as both answers of a pair. They are packed as one,
    so a loss gets them together. `classes`: for each document the label of its last token, for heads that score whole
    documents.

    Ids are int32: half of the memory and cache of int64, and enough for any vocabulary. They become int64 in the batch.
    """

    ids: Ids
    spans: tuple[Span, ...]
    views: tuple[View, ...] = ()  # images and videos, in the order of their places
    parts: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the length of each document."""
        return self.parts or (len(self.ids),)

    @property
    def num_targets(self) -> int:
        """Return the number of loss terms."""
        return len(self.classes) + sum(stop - max(start, 1) for start, stop in self.spans if stop > 1)


def tokens(ids: Sequence[int], spans: Sequence[Span], views: Sequence[View] = ()) -> Tokens:
    """Build a document from lists."""
    return Tokens(np.asarray(ids, dtype=np.int32), tuple(spans), tuple(views))


def scored(document: Tokens, label: int = 0) -> Tokens:
    """Return a document with a label only at its last token, for a head that scores whole documents."""
    return Tokens(document.ids, (), document.views, classes=(label,))


def together(documents: Sequence[Tokens]) -> Tokens:
    """Return documents as one group, which packing keeps together.

    The first token of each document is cut off its first span, since nothing predicts it.
    """
    starts = [*accumulate(map(len, documents), initial=0)]
    at_start = zip(starts, documents, strict=False)
    return Tokens(
        np.concatenate([each.ids for each in documents]),
        tuple((at + max(a, 1), at + b) for at, each in at_start for a, b in each.spans if b > 1),
        tuple(view for each in documents for view in each.views),
        tuple(map(len, documents)),
        tuple(label for each in documents for label in each.classes),
    )
