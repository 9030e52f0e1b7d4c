"""Pack the documents of a step into batches of one length, the same number for every data rank.

Every rank packs all documents and takes its own bins, so the assignment needs no communication. It depends on the
lengths of documents only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..data import IGNORE, PLACEHOLDERS, Batch, OverTokens, Picture, cut, pack
from ..errors import DataError, counted
from ..mesh import Mesh
from ..watch import names_lost_ranks
from .agreement import Data, checksum, compare

BATCHES = "batches"


@names_lost_ranks()
def batches(
    documents: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    length: int,
    labels: Sequence[Sequence[int]] | OverTokens | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    images: Sequence[Sequence[Picture]] | None = None,
    placeholders: Sequence[int] = PLACEHOLDERS,
    fields: Mapping[str, Sequence[Any] | OverTokens] | None = None,
) -> list[Batch]:
    """Return this data rank's batches of `length` tokens. All ranks must give the same documents.

    Each document goes whole to one batch of one data rank. Every data rank gets the same number of batches; where
    documents run out, a batch has no targets. The order of documents changes: the longest are placed first. The other
    arguments are those of `pack`.

    >>> engine.step(mw.batches(documents, mesh, length=8192, trained=masks))      # doctest: +SKIP
    """

    def prepare() -> tuple[tuple[Batch, list[list[int]]], Mapping[str, object], Data]:
        _check_length(length, mesh.axes.cp * mesh.axes.tp)
        # Every rank packs all documents: so all ranks refuse a bad document, by its index in the caller's list.
        whole = pack(documents, labels=labels, trained=trained, images=images, placeholders=placeholders, fields=fields)
        bins = _bins([b - a for a, b in pairwise(whole.bounds)], length)
        return (whole, bins), _settings_to_compare(whole, length), Data()

    (whole, bins), _ = compare(mesh, BATCHES, prepare)
    local = [cut(whole, numbers, int(length)) for numbers in bins[mesh.data_rank :: mesh.num_data_ranks]]
    num = -(-len(bins) // mesh.num_data_ranks)  # per data rank, rounded up
    return local + [_empty_batch(whole, length)] * (num - len(local))


def _check_length(length: object, share: int) -> None:
    """Refuse a length that cp x tp ranks cannot share evenly."""
    if not isinstance(length, Integral) or isinstance(length, bool):
        raise DataError(f"length={length!r} must be a whole number")
    if int(length) % share:
        raise DataError(
            f"length={length} does not divide into cp*tp={share}; choose {-(-int(length) // share) * share}"
        )


def _settings_to_compare(whole: Batch, length: int) -> dict[str, object]:
    """Return the arguments that ranks compare. A rank that gave only its own documents would drop most of them: its
    bins would be cut up among all data ranks."""
    num, bounds = len(whole.bounds) - 1, torch.tensor(whole.bounds, device=whole.tokens.device)
    documents = f"{counted(num, 'document')} (checksum {checksum([whole.tokens, bounds])})"
    return {
        "length of batches()": length,
        "the documents of batches() (all ranks give the documents of all ranks; or pack your own: mw.pack)": documents,
        "the checksum of labels or trained": checksum([whole.labels]),
        "the checksum of images": checksum([] if whole.images is None else [whole.images.patches_PC, _frames(whole)]),
        **{f"the checksum of the field {name!r}": checksum([whole.fields[name]]) for name in sorted(whole.fields)},
    }


def _frames(whole: Batch) -> Tensor:
    return torch.tensor([(frame.height, frame.width, frame.start) for frame in whole.frames])


def _bins(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Assign documents to batches, first fit decreasing: the longest first, each to the first batch with room.

    This packs tightly: first fit decreasing never needs more than 11/9 of the smallest number of bins, plus one.
    """
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[longest] > length:
        raise DataError(
            f"document {longest} of {counted(sizes[longest], 'token')} does not fit into length={length}; split it, "
            "leave it out, or choose a larger length"
        )
    bins: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((i for i, free in enumerate(room) if free >= sizes[number]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(length)
        bins[at].append(number)
        room[at] -= sizes[number]
    return bins


def _empty_batch(whole: Batch, length: int) -> Batch:
    """Return a batch without targets. A data rank without documents runs it, because the other ranks wait for its
    collectives."""
    zeros = {name: [torch.zeros_like(values[:1])] for name, values in whole.fields.items()}
    return pack([[0]], labels=[[IGNORE]], length=length, fields=zeros)
