"""Documents -> one packed stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batch import IGNORE, Batch
from .field_values import OverTokens, joined, to_terms
from .images import PLACEHOLDERS, Picture, are_of_processor, ids_of, images_of, joined_images, of_processor
from .pack_checks import (
    check_documents,
    check_lengths,
    check_mask,
    check_unlearnt,
    check_values,
    check_whole_numbers,
    lengths_of,
)


def pack(
    documents: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]],
    *,
    labels: Sequence[Sequence[int]] | OverTokens | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    images: Sequence[Sequence[Picture]] | None = None,
    placeholders: Sequence[int] = PLACEHOLDERS,
    length: int | None = None,
    fields: Mapping[str, Sequence[Any] | OverTokens] | None = None,
) -> Batch:
    """Pack documents in their order into one stream, filled up to `length` with a document that nothing counts.

    `labels`: for each document, what each of its tokens is to predict (already shifted); by default the next token
    of the same document, and nothing for its last one. `trained`: instead of labels, a mask over the tokens, as chat
    templates give it: token t is learnt where `trained[t]` is true. `fields`: per-token values, a list or tensor for
    each document; those at t are for the term at t, which predicts token t+1. `over_tokens` marks labels or values
    that stand at the tokens they are about instead.

    `images`: for each document its pictures and videos in the order of their places, each as (pixels, (time, height,
    width)) in patches, as a processor of Hugging Face gives them (`pixel_values`, `image_grid_thw`). `placeholders`:
    the tokens that stand for them; nothing is learnt of or at them. Instead of lists, documents may be what such a
    processor made of each: `pack([processor(text=..., images=...), ...])`.

    >>> batch = pack([[5, 6, 7], [8, 9]], length=6)
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.docs.bounds
    ([5, 6, 7, 8, 9, 0], [6, 7, -100, 9, -100, -100], (0, 3, 5, 6))
    >>> pack([[5, 6, 7, 8]], trained=[[0, 0, 1, 1]]).labels.tolist()
    [-100, 7, 8, -100]
    """
    documents, images, placeholders = _from_processor(documents, images, ids_of(placeholders))
    check_documents(documents, fields, labels=labels, trained=trained)
    if labels is not None and trained is not None:
        raise DataError("labels and trained say the same in two ways; give one of them")
    sizes = lengths_of(documents, "documents")
    check_lengths(sizes, length)
    documents = [_plain(document) for document in documents]
    seen = None if images is None else images_of(documents, images, placeholders)
    places = placeholders if seen else ()
    bounds = tuple(accumulate(sizes, initial=0))

    def stream(values: Sequence[Any] | OverTokens, what: str) -> Tensor:
        if isinstance(values, OverTokens):
            return to_terms(stream(values.values, what), bounds)
        check_values(values, sizes, what)
        return joined(values, what)

    def ids(values: Sequence[Any] | OverTokens, what: str) -> Tensor:
        if isinstance(values, OverTokens):
            return to_terms(ids(values.values, what), bounds, IGNORE)
        values_T = stream([_plain(each) for each in values], what)
        check_whole_numbers(values_T, what)
        return values_T.long()

    tokens_T = ids(documents, "documents")
    if labels is None:
        labels_T = _next_tokens(tokens_T, bounds, places)
    else:
        labels_T = ids(labels, "labels")
    if trained is not None:
        mask_T = stream(trained, "trained")
        check_mask(mask_T)
        labels_T = labels_T.where(to_terms(mask_T, bounds) != 0, IGNORE)
    streams = {name: stream(values, f"fields[{name!r}]") for name, values in (fields or {}).items()}
    batch = Batch(tokens_T, labels_T, bounds, streams, images=seen)
    check_unlearnt(batch, places)
    return batch if length is None else filled(batch, int(length))


def _from_processor(
    documents: Any, images: Sequence[Sequence[Picture]] | None, placeholders: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[Picture]] | None, Sequence[int]]:
    """Documents that a processor made, as lists."""
    made = isinstance(documents, list | tuple) and documents and all(isinstance(each, Mapping) for each in documents)
    if not made or not any(are_of_processor(each) for each in documents):
        return documents, images, placeholders
    if images is not None:
        raise DataError("documents of a processor bring their pictures; leave images= out")
    read = [of_processor(each, number) for number, each in enumerate(documents)]
    return [tokens for tokens, _, _ in read], [each for _, each, _ in read], sorted(set().union(*(i for *_, i in read)))


def _next_tokens(tokens_T: Tensor, bounds: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the next token of each, but nothing of and at the places of pictures."""
    labels_T = to_terms(tokens_T, bounds, IGNORE)
    if places:
        of_picture_T = torch.isin(torch.stack([tokens_T, labels_T]), torch.tensor([*places], device=tokens_T.device))
        labels_T[of_picture_T.any(0)] = IGNORE
    return labels_T


def cut(batch: Batch, numbers: Sequence[int], length: int) -> Batch:
    """The documents of these numbers of a batch without filler, as a batch of `length`."""
    spans = [slice(batch.bounds[number], batch.bounds[number + 1]) for number in numbers]
    bounds = tuple(accumulate((span.stop - span.start for span in spans), initial=0))
    chosen = lambda values: torch.cat([values[span] for span in spans])  # noqa: E731 - one line reads better
    parts = [] if batch.images is None else [
        batch.images.within(span.start, span.stop, to) for span, to in zip(spans, bounds, strict=False)
    ]  # fmt: skip
    return filled(
        Batch(
            tokens=chosen(batch.tokens),
            labels=chosen(batch.labels),
            bounds=bounds,
            fields={name: chosen(values) for name, values in batch.fields.items()},
            images=joined_images(parts),
        ),
        length,
    )


def joined_batches(batches: Sequence[Batch]) -> Batch:
    """One stream of the documents of all, without their filler."""
    nums = [len(batch) - batch.num_filler for batch in batches]
    starts = list(accumulate(nums, initial=0))
    bounds = [start + bound for batch, num, start in zip(batches, nums, starts, strict=False)
              for bound in batch.bounds if bound < num]  # fmt: skip
    images = [b.images.within(0, num, start) for b, num, start in zip(batches, nums, starts, strict=False) if b.images]
    return Batch(
        tokens=torch.cat([batch.tokens[:num] for batch, num in zip(batches, nums, strict=True)]),
        labels=torch.cat([batch.labels[:num] for batch, num in zip(batches, nums, strict=True)]),
        bounds=(*bounds, starts[-1]),
        fields={name: torch.cat([b.fields[name][:num] for b, num in zip(batches, nums, strict=True)])
                for name in batches[0].fields},
        images=joined_images(images) if images else None,
    )  # fmt: skip


def filled(batch: Batch, length: int) -> Batch:
    num = length - len(batch)
    # filler takes the dtype of the values: a 0 among booleans would turn them all into numbers
    longer = lambda values, fill: torch.cat([values, values.new_full((num,), fill)])  # noqa: E731 - as above
    return Batch(
        tokens=longer(batch.tokens, 0),
        labels=longer(batch.labels, IGNORE),
        bounds=(*batch.bounds, length) if num else batch.bounds,
        fields={name: longer(values, 0) for name, values in batch.fields.items()},
        num_filler=num,
        images=batch.images,
    )


def _plain(numbers: Sequence[int]) -> Sequence[int]:
    """A tensor or array of whatever width as a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers
