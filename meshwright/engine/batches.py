"""Documents of a whole step -> batches of one length, as many on every data rank."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..axes import DENSE
from ..data import IGNORE, Batch, pack
from ..errors import DataError, RankError, counted
from ..mesh import Mesh


def batches(
    documents: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    length: int,
    labels: Sequence[Sequence[int]] | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
) -> list[Batch]:
    """This data rank's batches of `length` tokens, of documents that all ranks give alike.

    Each document goes whole to one batch of one data rank. Every data rank gets equally many batches; those that come
    short get one without targets. The order of documents changes: the longest are placed first.

    >>> engine.step(mw.batches(documents, mesh, length=8192, trained=masks))      # doctest: +SKIP
    """
    share = mesh.axes.cp * mesh.axes.tp
    if length % share:
        raise DataError(f"length={length} does not divide into cp*tp={share}; choose {-(-length // share) * share}")
    _refuse_others(documents, mesh)
    bins = _bins([len(document) for document in documents], length)
    per_rank = -(-len(bins) // mesh.num_data_ranks)
    given = {"labels": labels, "trained": trained}
    made = []
    for of_batch in bins[mesh.data_rank :: mesh.num_data_ranks]:
        pick = lambda values, of_batch=of_batch: [values[i] for i in of_batch]  # noqa: E731 - one line reads better
        chosen = {name: pick(values) for name, values in given.items() if values is not None}
        by_name = {name: pick(values) for name, values in (fields or {}).items()}
        made.append(pack(pick(documents), **chosen, length=length, fields=by_name))
    return made + [_empty(length, fields or {})] * (per_rank - len(made))


def _refuse_others(documents: Sequence[Sequence[int]], mesh: Mesh) -> None:
    """A rank that gives only its own documents would train on a part of them, and nobody would see it."""
    crc = 0
    for document in documents:
        crc = zlib.crc32(torch.as_tensor(document, dtype=torch.int64, device=mesh.host).numpy().tobytes() + b";", crc)
    told = torch.tensor([[len(documents), crc]], device=mesh.device)
    for rank, other in enumerate(mesh.gather_rows(told, DENSE, "the agreement on batches").tolist()):
        if other != told[0].tolist():
            what = "others" if other[0] == len(documents) else counted(other[0], "document")
            raise RankError(
                f"rank {rank} gives batches() {what}, rank {mesh.rank} {counted(len(documents), 'document')}; all "
                "ranks give the documents of all, and batches() shares them out. For a rank's own, use mw.pack"
            )


def _bins(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents that fill one batch together: the longest first, each to the first batch with room."""
    if not sizes:
        raise DataError("there are no documents to make batches of")
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


def _empty(length: int, fields: Mapping[str, Sequence[Any]]) -> Batch:
    """A batch without targets, for a data rank that has come to the end of its documents."""
    zeros = {name: [torch.zeros_like(torch.as_tensor(values[0])[:1])] for name, values in fields.items()}
    return pack([[0]], [[IGNORE]], length=length, fields=zeros)
