"""What a caller of `pack` may get wrong, refused before anything is packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted
from .batch import IGNORE, Batch
from .field_values import refuse_grad, to_terms

WEIGHT = "weight"  # the field that weighs the terms of a loss


def lengths_of(values: Sequence[Sequence[Any]], what: str) -> list[int]:
    try:
        return [len(v) for v in values]
    except TypeError:
        raise DataError(f"{what} must be a list for each document, as in pack([[5, 6, 7], [8, 9]])") from None


def check_documents(documents: object, fields: object, **by_document: object) -> None:
    for name, values in by_document.items():
        if isinstance(values, int | float | str | Mapping):
            raise DataError(
                f"{name}={values!r:.80} must be a list for each document; for a length, length={values!r:.80}"
            )
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
            "there are no documents to pack; where data has run out, give one without targets: "
            "pack([[0]], labels=[[-100]])"
        )
    if 0 in sizes:
        raise DataError(f"document {sizes.index(0)} is empty; leave it out")
    if length is not None and sum(sizes) > length:
        raise DataError(
            f"length={length} has no room for {counted(len(sizes), 'document')} of {counted(sum(sizes), 'token')}; "
            f"pack fewer, or split the longest (document {sizes.index(max(sizes))}, {counted(max(sizes), 'token')})"
        )


def check_values(values: Sequence[Sequence[Any]], sizes: Sequence[int], what: str) -> None:
    """One value for each token of each document, and no gradients: a batch is data."""
    found = lengths_of(values, what)
    if len(found) != len(sizes):
        raise DataError(
            f"{what}: {counted(len(found), 'list')} for {counted(len(sizes), 'document')}; give one for each document"
        )
    if found != list(sizes):
        at = next(i for i, (a, b) in enumerate(zip(found, sizes, strict=True)) if a != b)
        raise DataError(
            f"{what}: document {at} differs in length: {counted(found[at], 'value')} for {counted(sizes[at], 'token')}"
        )
    for of_document in values:
        refuse_grad(of_document, what)


def check_whole_numbers(flat: Tensor, what: str) -> None:
    if flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool:
        raise DataError(f"{what} must be whole numbers, not {flat.dtype}")
    if flat.dim() > 1:
        raise DataError(f"{what} must be a list of numbers for each document, got lists of {list(flat.shape[1:])}")


def check_shifted(*batches: Batch) -> None:
    """Refuse labels as other libraries take them, the tokens themselves: a model would learn to repeat what it reads.

    Certain is a batch whose labels, two or more, all repeat their own tokens, of which one is not the next token too.
    """
    for batch in batches:
        targets_T, own_T = batch.is_target_T, batch.labels == batch.tokens
        next_T = to_terms(batch.tokens, batch.bounds, IGNORE)
        other_T = targets_T & (next_T != IGNORE) & (next_T != batch.labels)
        if batch.num_targets > 1 and own_T[targets_T].all() and other_T.any():
            raise DataError(
                "the labels are the tokens themselves; labels[t] is what token t is to predict, the next one. "
                "Leave labels= out, give trained= over the tokens, or labels=mw.over_tokens(labels)"
            )


def check_unlearnt(batch: Batch, places: Sequence[int]) -> None:
    """What stands for a picture is not a word: no label may name it."""
    if not places:
        return
    wrong_T = torch.isin(batch.labels, torch.tensor([*places], device=batch.labels.device))
    if wrong_T.any():
        at = int(wrong_T.nonzero()[0])
        raise DataError(
            f"the label at token {at} is {int(batch.labels[at])}, which stands for a picture and cannot be learnt; "
            "give -100 there"
        )


def check_mask(mask: Tensor) -> None:
    """`trained` of `pack`."""
    if mask.dim() > 1 or not ((mask == 0) | (mask == 1)).all():
        raise DataError("trained must be True or False (or 1 or 0) for each token, as assistant_masks of a tokenizer")
