"""Pack documents into one stream without padding between them, with next-token labels shifted before anything is split.

Example of two documents in a stream of 6:

  tokens   5  6     7     8   9     0
  labels   6  7  -100     9  -100  -100      the last token of a document predicts nothing
  bounds   0, 3, 5, 6                        the padding is a document of its own

Shifting after packing would make token 7 predict 8, the first token of another document (bionemo-recipes#1449).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batch import IGNORE, Batch
from .field_values import check_aligned, joined
from .images import PLACEHOLDERS, Picture, are_of_processor, ids_of, images_of, joined_images, of_processor
from .pack_checks import (
    check_documents,
    check_lengths,
    check_mask,
    check_named,
    check_unlearnt,
    check_values,
    check_whole_numbers,
    lengths_of,
    warn_of_padding,
)


def pack(
    documents: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]],
    *_others: object,
    labels: Sequence[Sequence[int]] | None = None,
    trained: Sequence[Sequence[bool]] | None = None,
    images: Sequence[Sequence[Picture]] | None = None,
    placeholders: Sequence[int] = PLACEHOLDERS,
    length: int | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
) -> Batch:
    """Pack documents in their order into one stream, padded to `length` with a document that loss and counts ignore.

    `labels`: for each document, what each of its tokens is to predict (already shifted); by default the next token
    of the same document, and nothing for its last one. `trained`: instead of labels, a mask over the tokens, as chat
    templates give it: token t is trained on where `trained[t]` is true. `fields`: per-token values, a list or tensor
    for each document; those at t belong to the term of token t, which predicts token t+1 (`shift`).

    `images`: for each document its pictures and videos in the order of their places, each as (pixels, (time, height,
    width)) in patches, as a processor of Hugging Face gives them (`pixel_values`, `image_grid_thw`). `placeholders`:
    the tokens that stand for them; they have no labels and are no labels. Instead of lists, documents may be the output
    of such a processor for each: `pack([processor(text=..., images=...), ...])`.

    >>> batch = pack([[5, 6, 7], [8, 9]], length=6)
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.docs.bounds
    ([5, 6, 7, 8, 9, 0], [6, 7, -100, 9, -100, -100], (0, 3, 5, 6))
    >>> pack([[5, 6, 7, 8]], trained=[[0, 0, 1, 1]]).labels.tolist()
    [-100, 7, 8, -100]
    """
    check_named(_others)
    documents, images, placeholders = _from_processor(documents, images, ids_of(placeholders))
    check_documents(documents, fields, labels=labels, trained=trained)
    if labels is not None and trained is not None:
        raise DataError("labels and trained are two ways to say what is trained on; give one of them")
    sizes = lengths_of(documents, "documents")
    check_lengths(sizes, length)
    documents = [_as_list(document) for document in documents]
    packed_images = None if images is None else images_of(documents, images, placeholders)
    placeholder_ids = frozenset(placeholders if packed_images else ())
    shifted = (
        [_next_of(d, placeholder_ids) for d in documents] if labels is None else [_as_list(each) for each in labels]
    )
    if trained is not None:
        check_values(trained, sizes, "trained")
        shifted = [_mask_labels(d, mask) for d, mask in zip(shifted, trained, strict=True)]

    def stream(values: Sequence[Any], what: str) -> Tensor:
        check_values(values, sizes, what)
        return joined(values, what)

    batch = Batch(
        tokens=_to_int64(stream(documents, "documents"), "documents"),
        labels=_to_int64(stream(shifted, "labels"), "labels"),
        bounds=tuple(accumulate(sizes, initial=0)),
        fields={name: stream(values, f"fields[{name!r}]") for name, values in (fields or {}).items()},
        images=packed_images,
    )
    # After packing, on the flat tensors: one pass instead of one for each document.
    check_unlearnt(batch, placeholder_ids)
    check_aligned(batch.is_target_T, batch.bounds, batch.fields)
    # With labels or a mask, padding is already excluded.
    if labels is None and trained is None:
        warn_of_padding(documents)
    return batch if length is None else filled(batch, int(length))


def _from_processor(
    documents: Any, images: Sequence[Sequence[Picture]] | None, placeholders: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[Picture]] | None, Sequence[int]]:
    """Return tokens, pictures and placeholders of documents that are the output of a processor."""
    is_list_of_dicts = (
        isinstance(documents, list | tuple) and documents and all(isinstance(each, Mapping) for each in documents)
    )
    if not is_list_of_dicts or not any(are_of_processor(each) for each in documents):
        return documents, images, placeholders
    if images is not None:
        raise DataError("documents from a processor contain their pictures; leave images= out")
    outputs = [of_processor(each, number) for number, each in enumerate(documents)]
    return (
        [tokens for tokens, _, _ in outputs],
        [each for _, each, _ in outputs],
        sorted(set().union(*(i for *_, i in outputs))),
    )


def _next_of(document: Sequence[int], placeholder_ids: frozenset[int]) -> list[int]:
    """Return next-token labels: -100 at the last token, and at and of placeholders.

    The token before a placeholder has no label either: its next token is not text.
    """
    labels = [*document[1:], IGNORE]
    if not placeholder_ids:
        return labels
    return [
        IGNORE if {token, label} & placeholder_ids else label for token, label in zip(document, labels, strict=True)
    ]


def cut(batch: Batch, numbers: Sequence[int], length: int) -> Batch:
    """Select documents of a batch without padding, as a batch of `length`.

    Used to redistribute the documents of a batch, when ranks are given other micro-batches than the user packed.
    """
    spans = [slice(batch.bounds[number], batch.bounds[number + 1]) for number in numbers]
    bounds = tuple(accumulate((span.stop - span.start for span in spans), initial=0))
    pick = lambda values: torch.cat([values[span] for span in spans])  # noqa: E731 - one line reads better
    parts = [] if batch.images is None else [
        batch.images.within(span.start, span.stop, to) for span, to in zip(spans, bounds, strict=False)
    ]  # fmt: skip
    return filled(
        Batch(
            tokens=pick(batch.tokens),
            labels=pick(batch.labels),
            bounds=bounds,
            fields={name: pick(values) for name, values in batch.fields.items()},
            images=joined_images(parts),
        ),
        length,
    )


def joined_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate the documents of batches in one stream, without their padding.

    Bounds are shifted by the length of the batches before. The padding of each batch is dropped, so that the result has
    only real documents.
    """
    lengths = [len(batch) - batch.num_filler for batch in batches]
    starts = list(accumulate(lengths, initial=0))
    bounds = [start + bound for batch, num, start in zip(batches, lengths, starts, strict=False)
              for bound in batch.bounds if bound < num]  # fmt: skip
    images = [
        b.images.within(0, num, start) for b, num, start in zip(batches, lengths, starts, strict=False) if b.images
    ]
    return Batch(
        tokens=torch.cat([batch.tokens[:num] for batch, num in zip(batches, lengths, strict=True)]),
        labels=torch.cat([batch.labels[:num] for batch, num in zip(batches, lengths, strict=True)]),
        bounds=(*bounds, starts[-1]),
        fields={name: torch.cat([b.fields[name][:num] for b, num in zip(batches, lengths, strict=True)])
                for name in batches[0].fields},
        images=joined_images(images) if images else None,
    )  # fmt: skip


def filled(batch: Batch, length: int) -> Batch:
    """Pad a batch to `length`.

    The padding is one document: attention and recurrence treat it like any other, at no extra case. Its tokens are 0,
    have no label, and are masked in the router's statistics (transformers#28505).
    """
    num_padding = length - len(batch)
    # Padding takes the dtype of the values: a Python 0 would turn booleans into integers.
    padded = lambda values, fill: torch.cat([values, values.new_full((num_padding,), fill)])  # noqa: E731 - as above
    return Batch(
        tokens=padded(batch.tokens, 0),
        labels=padded(batch.labels, IGNORE),
        bounds=(*batch.bounds, length) if num_padding else batch.bounds,
        fields={name: padded(values, 0) for name, values in batch.fields.items()},
        num_filler=num_padding,
        images=batch.images,
    )


def shift(values: Sequence[Any], fill: float | None = None) -> list[Any]:
    """Shift values of tokens to values of loss terms, by document: those of token t go to t-1, whose term predicts t.

    For what other libraries store at token t: advantages, old log-probabilities, masks. The first token of a document
    is never predicted, so its value is dropped; the last token gets `fill`.

    >>> shift([[0.0, 0.0, 0.5, 0.7], [0.0, 1.0]])
    [[0.0, 0.5, 0.7, 0], [1.0, 0]]
    """
    per_document = values if isinstance(values, list | tuple) else ()
    if any(isinstance(each, Mapping | str) for each in (values, *per_document)):
        raise DataError(
            "mw.shift takes the values of one field, a list for each document; for several: "
            "{name: mw.shift(values) for name, values in fields.items()}"
        )
    lengths_of(values, "values")
    if fill is None:  # labels as Hugging Face takes them are over tokens: nothing follows the last one
        fill = IGNORE if any(_are_labels(of_document) for of_document in values) else 0
    return [_shift_document(of_document, fill) for of_document in values]


def _are_labels(values: Any) -> bool:
    """Return whether values are integers with some -100. A reward may be -100.0."""
    if hasattr(values, "__array__"):
        array = torch.as_tensor(values)
        return not array.is_floating_point() and bool((array == IGNORE).any())
    return any(isinstance(value, int) and value == IGNORE for value in values)


def _shift_document(values: Any, fill: float) -> Any:
    """Shift in the values' own type: booleans stay booleans, so that `~` still negates them."""
    if isinstance(values, Tensor):
        return torch.cat([values[1:], values.new_full((1, *values.shape[1:]), fill)])
    if hasattr(values, "__array__"):
        moved = values.copy()
        moved[:-1], moved[-1:] = values[1:], fill
        return moved
    are_bools = all(isinstance(value, bool) for value in values) and fill in (0, 1)
    return [*values[1:], bool(fill) if are_bools else fill]


def _mask_labels(next_tokens: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Keep the labels of trained tokens only.

    `mask[t]` says whether token t is trained on, labels are at t-1; hence the shift by one, and a 0 for the last.
    """
    over_tokens = joined([mask], "trained")
    check_mask(over_tokens)
    return [
        token if is_trained else IGNORE
        for token, is_trained in zip(next_tokens, [*over_tokens[1:].tolist(), 0], strict=True)
    ]


def _as_list(numbers: Sequence[int]) -> Sequence[int]:
    """Return the list of a tensor or array of any width; anything else unchanged."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _to_int64(flat: Tensor, what: str) -> Tensor:
    """Check for integers and convert to int64."""
    check_whole_numbers(flat, what)
    return flat.long()
