"""Pack documents into one stream without padding between them, with next-token labels shifted before anything is split.

Example of two documents in a stream of 6:

  tokens   5  6     7     8   9     0
  labels   6  7  -100     9  -100  -100      the last token of a document predicts nothing
  bounds   0, 3, 5, 6                        the padding is its own document

Shifting after packing would make token 7 predict 8, the first token of another document (bionemo-recipes#1449).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .batch import IGNORE, NO_EXPERT, Batch
from .field_values import OverTokens, joined, to_terms
from .images import PLACEHOLDERS, ImagePatches, are_of_processor, ids_of, images_of, joined_images, of_processor
from .pack_checks import (
    check_documents,
    check_experts,
    check_groups,
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
    images: Sequence[Sequence[ImagePatches]] | None = None,
    placeholders: Sequence[int] = PLACEHOLDERS,
    length: int | None = None,
    fields: Mapping[str, Sequence[Any] | OverTokens] | None = None,
    groups: Sequence[int] | None = None,
    experts: Sequence[Any] | None = None,
) -> Batch:
    """Pack documents in their order into one stream, padded to `length` with a document that loss and counts ignore.

    `labels`: for each document, the token to predict at each of its tokens (already shifted); by default the next token
    of the same document, and none at its last token. `trained`: instead of labels, a mask over the tokens, as chat
    templates give it: token t is trained on where `trained[t]` is true. `fields`: per-token values, a list or tensor
    for each document; the value at t belongs to the term at t, which predicts token t+1. `over_tokens` marks labels or
    values that are stored at the tokens they are about instead. `groups`: a number for each document; a loss sees
    documents with the same number together, such as the answers to one prompt. `experts`: for each document `[tokens,
    layers, k]`, the experts that its tokens must use (`mw.expert_choices`).

    `images`: for each document its images and videos in the order of their places, each as (pixels, (time, height,
    width)) in patches, as a processor of Hugging Face gives them (`pixel_values`, `image_grid_thw`). `placeholders`:
    the tokens that stand for them; they have no label, and no label is one of them. Instead of a list, a document may
    be the output of such a processor: `pack([processor(text=..., images=...), ...])`.

    >>> batch = pack([[5, 6, 7], [8, 9]], length=6)
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.docs.bounds
    ([5, 6, 7, 8, 9, 0], [6, 7, -100, 9, -100, -100], (0, 3, 5, 6))
    >>> pack([[5, 6, 7, 8]], trained=[[0, 0, 1, 1]]).labels.tolist()
    [-100, 7, 8, -100]
    """
    documents, images, placeholders = _from_processor(documents, images, ids_of(placeholders))
    check_documents(documents, fields, labels=labels, trained=trained)
    if labels is not None and trained is not None:
        raise DataError("labels and trained are two ways to say what is trained on; give one of them")
    sizes = lengths_of(documents, "documents")
    check_lengths(sizes, length)
    documents = [_as_list(document) for document in documents]
    packed_images = None if images is None else images_of(documents, images, placeholders)
    placeholder_ids = placeholders if packed_images else ()
    bounds = tuple(accumulate(sizes, initial=0))
    tokens_T = _stream_of_ids(documents, bounds, "documents")
    if labels is None:
        labels_T = _next_tokens(tokens_T, bounds, placeholder_ids)
    else:
        labels_T = _stream_of_ids(labels, bounds, "labels")
    if trained is not None:
        mask_T = _stream(trained, bounds, "trained")
        check_mask(mask_T)
        labels_T = labels_T.where(to_terms(mask_T, bounds) != 0, IGNORE)
    streams = {name: _stream(values, bounds, f"fields[{name!r}]") for name, values in (fields or {}).items()}
    batch = Batch(
        tokens_T, labels_T, bounds, streams, images=packed_images, groups=check_groups(groups, len(sizes)),
        experts=None if experts is None else check_experts(experts, sizes),
    )  # fmt: skip
    # After packing, on the flat tensors: one pass instead of one for each document.
    check_unlearnt(batch, placeholder_ids)
    return batch if length is None else filled(batch, int(length))


def _from_processor(
    documents: Any, images: Sequence[Sequence[ImagePatches]] | None, placeholders: Sequence[int]
) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[ImagePatches]] | None, Sequence[int]]:
    """Return tokens, images and placeholders of documents that are the output of a processor."""
    is_list_of_dicts = (
        isinstance(documents, list | tuple) and documents and all(isinstance(each, Mapping) for each in documents)
    )
    if not is_list_of_dicts or not any(are_of_processor(each) for each in documents):
        return documents, images, placeholders
    if images is not None:
        raise DataError("documents from a processor contain their images; leave images= out")
    outputs = [of_processor(each, number) for number, each in enumerate(documents)]
    return (
        [tokens for tokens, _, _ in outputs],
        [each for _, each, _ in outputs],
        sorted(set().union(*(i for *_, i in outputs))),
    )


def _stream(values: Sequence[Any] | OverTokens, bounds: Sequence[int], what: str) -> Tensor:
    """Concatenate the values of documents, one for each loss term; values over tokens are shifted to terms."""
    if isinstance(values, OverTokens):
        return to_terms(_stream(values.values, bounds, what), bounds)
    check_values(values, [stop - start for start, stop in pairwise(bounds)], what)
    return joined(values, what)


def _stream_of_ids(values: Sequence[Any] | OverTokens, bounds: Sequence[int], what: str) -> Tensor:
    """Concatenate the ids of documents as int64. Ids over tokens are shifted to terms; a last term gets -100."""
    if isinstance(values, OverTokens):
        return to_terms(_stream_of_ids(values.values, bounds, what), bounds, IGNORE)
    values_T = _stream([_as_list(each) for each in values], bounds, what)
    check_whole_numbers(values_T, what)
    return values_T.long()


def _next_tokens(tokens_T: Tensor, bounds: Sequence[int], placeholder_ids: Sequence[int]) -> Tensor:
    """Return next-token labels: -100 at the last token of a document, at placeholders, and where the next token is one.

    The token before a placeholder has no label either: its next token is not text.
    """
    labels_T = to_terms(tokens_T, bounds, IGNORE)
    if placeholder_ids:
        ids_N = torch.tensor([*placeholder_ids], device=tokens_T.device)
        of_image_T = torch.isin(torch.stack([tokens_T, labels_T]), ids_N)
        labels_T[of_image_T.any(0)] = IGNORE
    return labels_T


def cut(batch: Batch, numbers: Sequence[int], length: int) -> Batch:
    """Select documents of a batch without padding, as a batch of `length`.

    Used to redistribute documents when ranks get other micro-batches than the user packed.
    """
    spans = [slice(batch.bounds[number], batch.bounds[number + 1]) for number in numbers]
    bounds = tuple(accumulate((span.stop - span.start for span in spans), initial=0))
    pick = lambda values: torch.cat([values[span] for span in spans])  # noqa: E731 - one line reads better
    parts = [] if batch.images is None else [
        batch.images.within(span.start, span.stop, to) for span, to in zip(spans, bounds, strict=False)
    ]  # fmt: skip
    numbered = max(numbers, default=0) < batch.num_documents  # padding, taken as a document, has no number
    return filled(
        Batch(
            tokens=pick(batch.tokens),
            labels=pick(batch.labels),
            bounds=bounds,
            fields={name: pick(values) for name, values in batch.fields.items()},
            images=joined_images(parts),
            numbers=tuple(batch.numbers[number] for number in numbers) if numbered else (),
            groups=tuple(batch.groups[number] for number in numbers) if numbered else (),
            experts=None if batch.experts is None else pick(batch.experts),
        ),
        length,
    )


def joined_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate the documents of batches in one stream, without their padding.

    Bounds are shifted by the lengths of earlier batches. The padding of each batch is dropped, so the result has only
    real documents.
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
        experts=_joined_experts(batches, lengths),
        images=joined_images(images) if images else None,
    )  # fmt: skip


def _joined_experts(batches: Sequence[Batch], lengths: Sequence[int]) -> Tensor | None:
    """Concatenate expert choices; where a batch has none, the router chooses."""
    shape = next((batch.experts.shape[1:] for batch in batches if batch.experts is not None), None)
    if shape is None:
        return None
    none = [torch.full((num, *shape), NO_EXPERT, dtype=torch.int32) for num in lengths]
    pairs = zip(batches, none, lengths, strict=True)
    return torch.cat([own if b.experts is None else b.experts[:num] for b, own, num in pairs])


def filled(batch: Batch, length: int) -> Batch:
    """Pad a batch to `length`.

    The padding is one document: attention and recurrence treat it like any other document, without a special case. Its
    tokens are 0, have no label, and are masked in the router's statistics (transformers#28505).
    """
    num_padding = length - len(batch)
    # Padding takes the dtype of the values: a Python 0 would turn booleans into integers.
    padded = lambda values, fill: torch.cat([values, values.new_full((num_padding, *values.shape[1:]), fill)])  # noqa: E731 - as above
    return Batch(
        tokens=padded(batch.tokens, 0),
        labels=padded(batch.labels, IGNORE),
        bounds=(*batch.bounds, length) if num_padding else batch.bounds,
        fields={name: padded(values, 0) for name, values in batch.fields.items()},
        num_filler=num_padding,
        images=batch.images,
        numbers=batch.numbers,
        groups=batch.groups,
        experts=None if batch.experts is None else padded(batch.experts, NO_EXPERT),
    )


def _as_list(numbers: Sequence[int]) -> Sequence[int]:
    """Return the list of a tensor or array of any width; anything else unchanged."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers
