"""What a caller of `pack` may get wrong, refused before anything is packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batch import IGNORE, Batch

_FEW = 4  # documents of one target each whose label may be its own token by chance


def lengths_of(values: Sequence[Sequence[Any]], what: str) -> list[int]:
    try:
        return [len(v) for v in values]
    except TypeError:
        raise DataError(f"{what} must be a list for each document, as in pack([[5, 6, 7], [8, 9]])") from None


def check_documents(documents: object, fields: object) -> None:
    if not isinstance(fields, Mapping | None):
        raise DataError("fields must be a dict by name, of a list for each document")
    inner = documents if isinstance(documents, list | tuple) else ()
    if any(isinstance(each, str | bytes | Mapping | Set) for each in (documents, *inner)):
        raise DataError(
            "documents must be lists of token ids, not text or dicts; give those that a tokenizer makes: "
            'tokenizer(texts)["input_ids"]'
        )
    if not hasattr(documents, "__getitem__"):
        raise DataError("documents must be a list of lists of tokens")


def check_lengths(sizes: Sequence[int], length: object) -> None:
    """Documents are there, none is empty, and all fit into `length`."""
    if not isinstance(length, Integral | None) or isinstance(length, bool):
        raise DataError(f"length={length!r} must be a whole number")
    if not sizes:
        raise DataError(
            "there are no documents to pack; where data has run out, give one without targets: pack([[0]], [[-100]])"
        )
    if 0 in sizes:
        raise DataError(f"document {sizes.index(0)} is empty; leave it out")
    if length is not None and sum(sizes) > length:
        raise DataError(
            f"{number(len(sizes), 'document')} of {number(sum(sizes), 'token')} do not fit into length={length}; pack "
            f"fewer, or split the longest (document {sizes.index(max(sizes))}, {number(max(sizes), 'token')})"
        )


def number(count: int, what: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def check_values(values: Sequence[Sequence[Any]], sizes: Sequence[int], what: str) -> None:
    """One value for each token of each document, and no gradients: a batch is data."""
    found = lengths_of(values, what)
    if found != list(sizes):
        unequal = (i for i, (a, b) in enumerate(zip(found, sizes, strict=False)) if a != b)
        at = next(unequal, min(len(found), len(sizes)))
        raise DataError(
            f"{what}: document {at} differs in length: {found[at : at + 1]} values, {list(sizes[at : at + 1])} tokens"
        )
    if any(isinstance(v, Tensor) and v.requires_grad for v in values):
        raise DataError(f"{what} requires grad, and a batch is data: gradients end here; give {what}.detach()")


def check_whole_numbers(flat: Tensor, what: str) -> None:
    if flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool:
        raise DataError(f"{what} must be whole numbers, not {flat.dtype}")
    if flat.dim() > 1:
        raise DataError(f"{what} must be a list of numbers for each document, got lists of {list(flat.shape[1:])}")


def check_shifted(batch: Batch) -> None:
    """Refuse labels as other libraries take them, the tokens themselves: a model would learn to repeat what it reads.

    A document with two targets or more shows the mistake by itself. Those of one target show it only together.
    """
    given, own = batch.labels != IGNORE, batch.labels == batch.tokens
    next_T = batch.tokens.roll(-1)
    next_T[torch.tensor(batch.bounds[1:], device="cpu") - 1] = IGNORE  # what follows a last token is not known
    if not (own & (batch.labels != next_T)).any():
        return  # as nearly always
    suspects = []  # for each document with targets: how many, if they may be its own tokens
    for a, b in pairwise(batch.bounds):
        targets, known = given[a:b], given[a:b] & (next_T[a:b] != IGNORE)
        if targets.any():
            shifted = known.any() and (batch.labels[a:b] == next_T[a:b])[known].all()
            suspects.append(0 if shifted or not own[a:b][targets].all() else int(targets.sum()))
    most = 2 * sum(num > 0 for num in suspects) > len(suspects)
    if most and (max(suspects) > 1 or len(suspects) >= _FEW):
        raise DataError(
            "the labels are the tokens themselves; labels[t] is what token t is to predict, the next one. "
            "Leave labels= out, or shift them: tokens[1:] + [-100]"
        )
