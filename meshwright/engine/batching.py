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

from ..data import IGNORE, PLACEHOLDERS, Batch, ImagePatches, OverTokens, cut, pack
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
    length: int | None = None,
    max_tokens: int | None = None,
    labels: Sequence[Sequence[int]] | OverTokens | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    images: Sequence[Sequence[ImagePatches]] | None = None,
    placeholders: Sequence[int] = PLACEHOLDERS,
    fields: Mapping[str, Sequence[Any] | OverTokens] | None = None,
    groups: Sequence[int] | None = None,
    experts: Sequence[Any] | None = None,
) -> list[Batch]:
    """Return this data rank's batches. All ranks must give the same documents.

    Batches have `length` tokens; or, with `max_tokens`, as few as the fullest one needs, and at most that number. Each
    document goes whole to one batch of one data rank, and documents with the same number in `groups` share a batch.
    Every data rank gets the same number of batches; where documents run out, a batch is padding alone. The order of
    documents changes, since the longest are placed first: `batch.numbers` are their indices in your list, and
    `mw.by_document` restores your order. The other arguments are those of `pack`.

    >>> engine.step(mw.batches(documents, mesh, length=8192, trained=masks))      # doctest: +SKIP
    """

    def prepare() -> tuple[tuple[Batch, list[list[int]], int], Mapping[str, object], Data]:
        share = mesh.axes.cp * mesh.axes.tp
        limit = _check_length(length, max_tokens, share)
        # Every rank packs all documents: so all ranks refuse a bad document, by its index in the caller's list.
        whole = pack(
            documents, labels=labels, trained=trained, images=images, placeholders=placeholders, fields=fields,
            groups=groups, experts=experts,
        )  # fmt: skip
        sizes = [b - a for a, b in pairwise(whole.bounds)]
        rounded = f" (rounded down to a multiple of cp*tp={share})" if max_tokens not in (None, limit) else ""
        bins = _bins(_units(whole), sizes, limit, "length" if max_tokens is None else "max_tokens" + rounded)
        fullest = max(sum(sizes[number] for number in numbers) for numbers in bins)
        size = limit if max_tokens is None else -(-fullest // share) * share
        compared = {"max_tokens of batches()": max_tokens, **_settings_to_compare(whole, limit)}
        return (whole, bins, size), compared, Data()

    (whole, bins, size), _ = compare(mesh, BATCHES, prepare)
    local = [cut(whole, numbers, size) for numbers in bins[mesh.data_rank :: mesh.num_data_ranks]]
    num = -(-len(bins) // mesh.num_data_ranks)  # per data rank, rounded up
    return local + [_empty_batch(whole, size)] * (num - len(local))


@names_lost_ranks()
def by_document(mesh: Mesh, batches: Sequence[Batch], values: Sequence[Tensor]) -> list[Tensor]:
    """Split values `[T, ...]` of this data rank's batches into a tensor for each document. All ranks get the documents
    of all data ranks, in the order of the list that `mw.batches` got.

    >>> old = mw.by_document(mesh, batches, mw.logprobs(policy, batches))         # doctest: +SKIP
    """

    def prepare() -> tuple[tuple[Tensor, Tensor], Mapping[str, object], Data]:
        lists = isinstance(batches, list | tuple) and isinstance(values, list | tuple)
        if not lists or not batches or not all(isinstance(each, Tensor) for each in values):
            raise DataError("by_document takes a list of batches, and a list of tensors [T, ...], one for each batch")
        shapes = [tuple(each.shape[:1]) for each in values]
        if shapes != [(len(batch),) for batch in batches]:
            raise DataError(
                f"values have {shapes} rows for batches of {[*map(len, batches)]} tokens; give a row per token"
            )
        flat = torch.cat([*values]).detach()
        number_T = torch.cat([_number_of_tokens(batch) for batch in batches])
        settings = {"the tokens of by_document()": len(flat)}
        return (flat, number_T), settings, Data(num_targets=sum(batch.num_documents for batch in batches))

    (flat, number_T), gathered = compare(mesh, "by_document", prepare)
    axes, at, device = ("replicate", "fsdp"), "the values by document", flat.device
    # A data rank with padding alone may have values of another dtype or shape, but nothing is taken from them.
    kinds = mesh.gather_objects((flat.dtype, flat.shape[1:]) if number_T.any() else None, axes)
    kind = {each for each in kinds if each is not None}
    if len(kind) != 1:
        raise DataError(f"values of by_document have {len(kind)} kinds on the data ranks: {sorted(map(str, kind))}")
    if not number_T.any():
        dtype, shape = kind.pop()
        flat = torch.zeros(len(flat), *shape, dtype=dtype)
    # Move them to the device of the mesh: a process group with NCCL alone cannot gather from the host.
    number_T, flat = (mesh.gather_rows(each.to(mesh.device), axes, at) for each in (number_T, flat))
    # Number 0 is padding, which comes first.
    sizes, num = torch.bincount(number_T, minlength=1).tolist(), int(gathered.per_data_rank.column("num_targets").sum())
    if len(sizes) - 1 != num or not all(sizes[1:]):
        raise DataError(
            f"by_document got {num} documents with numbers up to {len(sizes) - 2}, some twice or none; give the "
            "batches that mw.batches returned, all of them"
        )
    return list(flat[number_T.argsort(stable=True)].to(device).split(sizes)[1:])


def _number_of_tokens(batch: Batch) -> Tensor:
    """Return for each token the number of its document plus 1, and 0 at padding."""
    spans = zip(batch.numbers, pairwise(batch.bounds), strict=False)
    return batch.join([torch.full((b - a,), number + 1) for number, (a, b) in spans]).long()


def _units(whole: Batch) -> list[list[int]]:
    """Return the documents that must go to one batch together."""
    units: dict[int, list[int]] = {}
    for number, group in enumerate(whole.groups):
        units.setdefault(group, []).append(number)
    return list(units.values())


def _check_length(length: object, max_tokens: object, share: int) -> int:
    """Return the most tokens of a batch. Refuse a length that cp x tp ranks cannot share evenly."""
    if (length is None) == (max_tokens is None):
        raise DataError(
            "give batches() either length=, the tokens of every batch, or max_tokens=, the most it may have"
        )
    name, given = ("length", length) if max_tokens is None else ("max_tokens", max_tokens)
    if not isinstance(given, Integral) or isinstance(given, bool):
        raise DataError(f"{name}={given!r} must be a whole number")
    number = int(given)
    if number % share and max_tokens is None:
        raise DataError(f"length={length} does not divide into cp*tp={share}; choose {-(-number // share) * share}")
    if number < share:
        raise DataError(f"{name}={number} is less than cp*tp={share}, which share the tokens of a batch")
    return number - number % share


def _settings_to_compare(whole: Batch, length: int) -> dict[str, object]:
    """Return the arguments that ranks compare. A rank that gave only its own documents would drop most of them: its
    bins would be cut up among all data ranks."""
    num, bounds = len(whole.bounds) - 1, torch.tensor(whole.bounds, device=whole.tokens.device)
    documents = f"{counted(num, 'document')} (checksum {checksum([whole.tokens, bounds])})"
    return {
        "length of batches()": length,
        "the documents of batches() (all ranks give the documents of all ranks; or pack your own: mw.pack)": documents,
        "the checksum of labels or trained": checksum([whole.labels]),
        "the checksum of groups": checksum([torch.tensor(whole.groups)]),
        "the checksum of experts": checksum([] if whole.experts is None else [whole.experts]),
        "the checksum of images": checksum([] if whole.images is None else [whole.images.patches_PC, _frames(whole)]),
        **{f"the checksum of the field {name!r}": checksum([whole.fields[name]]) for name in sorted(whole.fields)},
    }


def _frames(whole: Batch) -> Tensor:
    return torch.tensor([(frame.height, frame.width, frame.start) for frame in whole.frames])


def _bins(units: Sequence[Sequence[int]], sizes: Sequence[int], length: int, name: str) -> list[list[int]]:
    """Assign units of documents to batches, first fit decreasing: the longest first, each to the first with room.

    This packs tightly: first fit decreasing never needs more than 11/9 of the smallest number of bins, plus one.
    """
    tokens_of = [sum(sizes[number] for number in unit) for unit in units]
    longest = max(range(len(units)), key=tokens_of.__getitem__)
    if tokens_of[longest] > length:
        numbers = units[longest]
        what = f"document {numbers[0]}" if len(numbers) == 1 else f"the group of documents {[*numbers]}"
        raise DataError(
            f"{what} of {counted(tokens_of[longest], 'token')} does not fit into {name}={length}; split it, "
            f"leave it out, or choose a larger {name}"
        )
    bins: list[list[int]] = []
    room: list[int] = []
    for at_unit in sorted(range(len(units)), key=lambda i: -tokens_of[i]):
        at = next((i for i, free in enumerate(room) if free >= tokens_of[at_unit]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(length)
        bins[at].extend(units[at_unit])
        room[at] -= tokens_of[at_unit]
    return bins


def _empty_batch(whole: Batch, length: int) -> Batch:
    """Return a batch of padding. A data rank without documents runs it, because the other ranks wait for its
    collectives."""
    zeros = {name: values.new_zeros(length, *values.shape[1:]) for name, values in whole.fields.items()}
    tokens_T = whole.tokens.new_zeros(length)
    return Batch(tokens_T, torch.full_like(tokens_T, IGNORE), (0, length), zeros, num_filler=length)
