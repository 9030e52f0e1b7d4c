"""Check the arguments of `pack`, with errors that name the fix. Most mistakes would train to a plausible loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted
from .batch import IGNORE, Batch
from .field_values import OverTokens, refuse_grad, to_terms

WEIGHT = "weight"  # the field that weighs the terms of a loss


def lengths_of(values: Sequence[Sequence[Any]], what: str) -> list[int]:
    """Return the length of each document's values."""
    try:
        return [len(v) for v in values]
    except TypeError:
        raise DataError(f"{what} must be a list for each document, as in pack([[5, 6, 7], [8, 9]])") from None


def check_documents(documents: object, fields: object, **by_document: object) -> None:
    """Check the types of documents and fields.

    A list of strings is iterable, and would otherwise fail much later, where a letter is converted to a number.
    """
    for name, values in by_document.items():
        if isinstance(values, int | float | str | Mapping):
            raise DataError(
                f"{name}={values!r:.80} must be a list for each document; for a length, length={values!r:.80}"
            )
    if isinstance(by_document.get("trained"), OverTokens):  # would be moved twice
        raise DataError("trained is a mask over tokens already; give it without over_tokens")
    if not isinstance(fields, Mapping | None):
        raise DataError("fields must be a dict by name, of a list for each document")
    items = documents if isinstance(documents, list | tuple) else ()
    if any(isinstance(each, str | bytes | Mapping | Set) for each in (documents, *items)):
        raise DataError(
            "documents must be lists of token ids, not text or dicts; give a tokenizer's: "
            'tokenizer(texts)["input_ids"]'
        )
    if not hasattr(documents, "__getitem__"):
        raise DataError("documents must be a list of lists of tokens")


def check_experts(experts: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    """Return the experts of documents as one tensor `[T, layers, k]` of small integers."""
    try:
        parts = [torch.as_tensor(each) for each in experts]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"experts must be whole numbers for each document: {error}") from None
    shapes = [tuple(part.shape) for part in parts]
    if [shape[:1] for shape in shapes] != [(size,) for size in sizes] or len({shape[1:] for shape in shapes}) > 1:
        raise DataError(
            f"experts has the shapes {shapes} for documents of {list(sizes)} tokens; give [tokens, layers with "
            "experts, experts of a token] for each"
        )
    if any(part.is_floating_point() or part.dim() != 3 for part in parts):
        raise DataError("experts must be whole numbers [tokens, layers with experts, experts of a token], -1 for none")
    flat = torch.cat(parts)
    if len(flat) and not -1 <= int(flat.min()) <= int(flat.max()) < 2**31:  # a cast would wrap around
        raise DataError(f"experts must be numbers from -1, not {int(flat.min())} to {int(flat.max())}")
    return flat.to(torch.int32)


def check_groups(groups: object, num: int) -> tuple[int, ...]:
    """Return the group of each document; an empty tuple where each is alone."""
    if groups is None:
        return ()
    listed = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(listed, Sequence) or not all(isinstance(group, Integral) for group in listed):
        raise DataError(f"groups={groups!r:.80} must be a whole number for each document, such as [0, 0, 1, 1]")
    if len(listed) != num:
        raise DataError(f"groups has {len(listed)} numbers for {counted(num, 'document')}; give one for each")
    return tuple(map(int, listed))


def check_lengths(sizes: Sequence[int], length: object) -> None:
    """Check that there are documents, none is empty, and all fit into `length`.

    An empty document would have no bounds. A rank without data instead packs one dummy document without targets, so
    that all ranks run the same collectives.
    """
    if not isinstance(length, Integral | None) or isinstance(length, bool):
        raise DataError(f"length={length!r} must be a whole number")
    if not sizes:
        raise DataError(
            "there are no documents to pack; where a rank has run out of data, give a document without targets: "
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
    """Check for one value for each token, without gradients.

    The most common mistake is one value too few, from libraries that store log-probabilities for predictions 1 .. n-1;
    the hint says where the missing value goes.
    """
    lengths = lengths_of(values, what)
    if len(lengths) != len(sizes):
        raise DataError(
            f"{what}: {counted(len(lengths), 'list')} for {counted(len(sizes), 'document')}; give one for each document"
        )
    if lengths != list(sizes):
        at = next(i for i, (a, b) in enumerate(zip(lengths, sizes, strict=True)) if a != b)
        raise DataError(
            f"{what}: document {at} differs in length: {counted(lengths[at], 'value')} for "
            f"{counted(sizes[at], 'token')}"
        )
    for of_document in values:
        refuse_grad(of_document, what)


def check_whole_numbers(flat: Tensor, what: str) -> None:
    """Check for 1-D integers."""
    if flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool:
        raise DataError(f"{what} must be whole numbers, not {flat.dtype}")
    if flat.dim() > 1:
        raise DataError(f"{what} must be a list of numbers for each document, got lists of {list(flat.shape[1:])}")


def check_shifted(*batches: Batch) -> None:
    """Refuse unshifted labels, as Hugging Face models take them: the model would learn to repeat its input.

    A batch is refused if it has two labels or more, all of them repeat their own tokens, and one of them is not the
    next token too.

    Hugging Face models take `labels = input_ids` and shift inside the model. A user who brings such labels gets a loss
    that falls quickly to zero, since copying the input is easy; nothing else in the curves looks wrong.
    """
    for batch in batches:
        targets_T, own_T = batch.is_target_T, batch.labels == batch.tokens
        next_T = to_terms(batch.tokens, batch.bounds, IGNORE)
        other_T = targets_T & (next_T != IGNORE) & (next_T != batch.labels)
        if batch.num_targets > 1 and own_T[targets_T].all() and other_T.any():
            raise DataError(
                "the labels are the tokens themselves, but labels[t] is what token t is to predict: the next token. "
                "Leave labels= out, give trained= over the tokens, or labels=mw.over_tokens(labels)"
            )


def check_unlearnt(batch: Batch, placeholder_ids: Sequence[int]) -> None:
    """Refuse labels that are placeholders."""
    if not placeholder_ids:
        return
    wrong_T = torch.isin(batch.labels, torch.tensor([*placeholder_ids], device=batch.labels.device))
    if wrong_T.any():
        at = int(wrong_T.nonzero()[0])
        raise DataError(
            f"the label at token {at} is {int(batch.labels[at])}, which stands for an image and cannot be a target; "
            "give such tokens the label -100"
        )


def check_mask(mask: Tensor) -> None:
    """Check `trained` of `pack`."""
    if mask.dim() > 1 or not ((mask == 0) | (mask == 1)).all():
        raise DataError("trained must be True or False (or 1 or 0) for each token, as assistant_masks of a tokenizer")
