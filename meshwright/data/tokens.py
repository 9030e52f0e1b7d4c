"""A tokenised document: its ids, which of them are trained on, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .vision_files import View

Ids = NDArray[np.int32]
Span = tuple[int, int]


@dataclass(frozen=True, eq=False)  # eq would ask arrays for one truth value
class Tokens:
    """A tokenised document. `spans`: half-open ranges of trained tokens, each predicted at the token before it. The
    first token of a document has none before it and is never a target.

    int32 ids: half of the memory and cache of int64, and no vocabulary needs more. They become int64 in the batch.
    """

    ids: Ids
    spans: tuple[Span, ...]
    views: tuple[View, ...] = ()  # pictures and videos, in the order of their places

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        """Return the number of loss terms."""
        return sum(stop - max(start, 1) for start, stop in self.spans if stop > 1)


def tokens(ids: Sequence[int], spans: Sequence[Span], views: Sequence[View] = ()) -> Tokens:
    """Build a document from lists."""
    return Tokens(np.asarray(ids, dtype=np.int32), tuple(spans), tuple(views))
