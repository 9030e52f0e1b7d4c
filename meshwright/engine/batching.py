"""Documents of a whole step -> batches of one length, as many on every data rank."""

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
    """This data rank's batches of `length` tokens, of documents that all ranks give alike.

    Each document goes whole to one batch of one data rank. Every data rank gets equally many batches; those that come
    short get one without targets. The order of documents changes: the longest are placed first. All else as in `pack`.

    >>> engine.step(mw.batches(documents, mesh, length=8192, trained=masks))      # doctest: +SKIP
    """

    def prepare() -> tuple[tuple[Batch, list[list[int]]], Mapping[str, object], Data]:
        _check_length(length, mesh.axes.cp * mesh.axes.tp)
        # all of it on every rank: what is wrong with it is refused everywhere, in the numbers of the caller
        whole = pack(documents, labels=labels, trained=trained, images=images, placeholders=placeholders, fields=fields)
        bins = _bins([b - a for a, b in pairwise(whole.bounds)], length)
        return (whole, bins), _settings(whole, length), Data()

    (whole, bins), _ = compare(mesh, BATCHES, prepare)
    made = [cut(whole, numbers, int(length)) for numbers in bins[mesh.data_rank :: mesh.num_data_ranks]]
    num = -(-len(bins) // mesh.num_data_ranks)  # on every data rank
    return made + [_empty(whole, length)] * (num - len(made))


def _check_length(length: object, share: int) -> None:
    if not isinstance(length, Integral) or isinstance(length, bool):
        raise DataError(f"length={length!r} must be a whole number")
    if int(length) % share:
        raise DataError(
            f"length={length} does not divide into cp*tp={share}; choose {-(-int(length) // share) * share}"
        )


def _settings(whole: Batch, length: int) -> dict[str, object]:
    """What all ranks must give alike. One that gives only its own documents would train on a part of them."""
    num, bounds = len(whole.bounds) - 1, torch.tensor(whole.bounds, device=whole.tokens.device)
    documents = f"{counted(num, 'document')} (checksum {checksum([whole.tokens, bounds])})"
    return {
        "length of batches()": length,
        "what batches() is to share out (all ranks give the documents of all; a rank's own go to mw.pack)": documents,
        "the checksum of labels or trained": checksum([whole.labels]),
        "the checksum of images": checksum([] if whole.images is None else [whole.images.patches_PC, _frames(whole)]),
        **{f"the checksum of the field {name!r}": checksum([whole.fields[name]]) for name in sorted(whole.fields)},
    }


def _frames(whole: Batch) -> Tensor:
    return torch.tensor([(frame.height, frame.width, frame.start) for frame in whole.frames])


def _bins(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents that fill one batch together: the longest first, each to the first batch with room."""
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


def _empty(whole: Batch, length: int) -> Batch:
    """A batch without targets, for a data rank that has come to the end of its documents."""
    zeros = {name: [torch.zeros_like(values[:1])] for name, values in whole.fields.items()}
    return pack([[0]], labels=[[IGNORE]], length=length, fields=zeros)
