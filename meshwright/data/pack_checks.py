"""What a caller of `pack` may get wrong, refused before anything is packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted
from ..log import logger
from .batch import IGNORE, Batch
from .field_values import refuse_grad

WEIGHT = "weight"  # the field that weighs the terms of a loss
_FEW = 4  # documents of one target each whose label may be its own token by chance


def lengths_of(values: Sequence[Sequence[Any]], what: str) -> list[int]:
    try:
        return [len(v) for v in values]
    except TypeError:
        raise DataError(f"{what} must be a list for each document, as in pack([[5, 6, 7], [8, 9]])") from None


def warn_of_padding(documents: Sequence[Sequence[int]]) -> None:
    """Nobody can know that a token is padding, but documents of one length that end in a run of one token look so."""
    ends = {document[-1] for document in documents if len(document) > 1 and document[-1] == document[-2]}
    alike = len(documents) > 1 and len({len(document) for document in documents}) == 1
    if alike and len(ends) == 1 and any(document[-1] not in ends for document in documents):
        logger.warning(
            "all %d documents have %d tokens, and some end in a run of token %s: if that is padding, it is learnt; "
            "tokenize without padding=, or cut it off",
            len(documents), len(documents[0]), *ends,
        )  # fmt: skip


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
        hint = ""
        if all(size - num == 1 for num, size in zip(found, sizes, strict=True)):
            hint = "; the value at t is for token t+1, so what is known from the second token on gets a 0 at the end"
        raise DataError(
            f"{what}: document {at} differs in length: {counted(found[at], 'value')} for {counted(sizes[at], 'token')}"
            + hint
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

    A document shows the mistake by itself if it has two targets or more, or if nothing but its last token is one. Those
    of another single target show it only together, be they in one batch or in several.
    """
    if not any(_repeats_tokens(batch) for batch in batches):
        return  # as nearly always
    by_batch = [_suspects(batch) for batch in batches]
    together = [suspect for suspects in by_batch for suspect in suspects]
    for suspects in (*by_batch, together):
        most = 2 * sum(num > 0 for num in suspects) > len(suspects)
        if most and (max(suspects) > 1 or len(suspects) >= _FEW):
            raise DataError(
                "the labels are the tokens themselves; labels[t] is what token t is to predict, the next one. "
                "Leave labels= out, give trained= over the tokens, or shift them: tokens[1:] + [-100]"
            )


def _repeats_tokens(batch: Batch) -> bool:
    return bool(((batch.labels == batch.tokens) & (batch.labels != _next(batch))).any())


def _next(batch: Batch) -> Tensor:
    """The token behind each; what follows a last token is not known."""
    next_T = batch.tokens.roll(-1)
    next_T[torch.tensor(batch.bounds[1:], device="cpu") - 1] = IGNORE
    return next_T


def _suspects(batch: Batch) -> list[int]:
    """For each document with targets: how sure it is that they are its own tokens; 0 if they are not."""
    given, own, next_T = batch.is_target_T, batch.labels == batch.tokens, _next(batch)
    suspects = []
    for a, b in pairwise(batch.bounds):
        targets, known = given[a:b], given[a:b] & (next_T[a:b] != IGNORE)
        if targets.any():
            shifted = known.any() and (batch.labels[a:b] == next_T[a:b])[known].all()
            only_last = b - a > 1 and bool(targets[-1])
            suspects.append(0 if shifted or not own[a:b][targets].all() else int(targets.sum()) + only_last)
    return suspects


def check_unlearnt(batch: Batch, places: Set[int]) -> None:
    """What stands for a picture is not a word: no label may name it."""
    if not places:
        return
    wrong_T = torch.isin(batch.labels, torch.tensor(sorted(places), device=batch.labels.device))
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
