"""Documents -> one packed stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .arguments import (
    check_aligned,
    check_documents,
    check_lengths,
    check_mask,
    check_values,
    check_whole_numbers,
    lengths_of,
)
from .batch import IGNORE, Batch


def pack(
    documents: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]] | None = None,
    *,
    trained: Sequence[Sequence[bool]] | None = None,
    length: int | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
) -> Batch:
    """Pack documents in their order into one stream, filled up to `length` with a document that nothing counts.

    `labels`: for each document, what each of its tokens is to predict (already shifted); by default the next token
    of the same document, and nothing for its last one. `trained`: instead of labels, a mask over the tokens, as chat
    templates give it: token t is learnt where `trained[t]` is true. `fields`: per-token values, a list or tensor for
    each document; those at t are for the term of token t, which predicts token t+1 (`shift`).

    >>> batch = pack([[5, 6, 7], [8, 9]], length=6)
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.docs.bounds
    ([5, 6, 7, 8, 9, 0], [6, 7, -100, 9, -100, -100], (0, 3, 5, 6))
    >>> pack([[5, 6, 7, 8]], trained=[[0, 0, 1, 1]]).labels.tolist()
    [-100, 7, 8, -100]
    """
    check_documents(documents, fields, labels=labels, trained=trained)
    if labels is not None and trained is not None:
        raise DataError("labels and trained say the same in two ways; give one of them")
    sizes = lengths_of(documents, "documents")
    check_lengths(sizes, length)
    documents = [_plain(document) for document in documents]
    shifted = [[*d[1:], IGNORE] for d in documents] if labels is None else [_plain(each) for each in labels]
    if trained is not None:
        check_values(trained, sizes, "trained")
        shifted = [_learnt(d, mask) for d, mask in zip(shifted, trained, strict=True)]
    num_filler = 0 if length is None else int(length) - sum(sizes)

    def stream(values: Sequence[Sequence[Any]], what: str, fill: int) -> Tensor:
        check_values(values, sizes, what)
        flat = _joined(values, what)
        # filler takes the dtype of the values: a 0 among booleans would turn them all into numbers
        return torch.cat([flat, flat.new_full((num_filler, *flat.shape[1:]), fill)])

    batch = Batch(
        tokens=_whole(stream(documents, "documents", 0), "documents"),
        labels=_whole(stream(shifted, "labels", IGNORE), "labels"),
        bounds=tuple(accumulate(sizes + [num_filler] * (num_filler > 0), initial=0)),
        fields={name: stream(values, f"fields[{name!r}]", 0) for name, values in (fields or {}).items()},
        num_filler=num_filler,
    )
    check_aligned(batch)
    return batch


def shift(values: Sequence[Any], fill: float = 0) -> list[Any]:
    """Values of the tokens themselves, by document, as values of the terms: those of token t go to t-1.

    For what other libraries keep beside token t: advantages, old log-probabilities, masks. What belongs to a first
    token has no term and is left out; the last token of a document gets `fill`.

    >>> shift([[0.0, 0.0, 0.5, 0.7], [0.0, 1.0]])
    [[0.0, 0.5, 0.7, 0], [1.0, 0]]
    """
    lengths_of(values, "values")
    return [torch.cat([v[1:], v.new_full((1,), fill)]) if isinstance(v, Tensor) else [*v[1:], fill] for v in values]


def _learnt(next_tokens: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """The labels of a document of which only some tokens are learnt."""
    over_tokens = _joined([mask], "trained")
    check_mask(over_tokens)
    return [
        token if learnt else IGNORE for token, learnt in zip(next_tokens, [*over_tokens[1:].tolist(), 0], strict=True)
    ]


def _plain(numbers: Sequence[int]) -> Sequence[int]:
    """A tensor or array of whatever width as a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _whole(flat: Tensor, what: str) -> Tensor:
    check_whole_numbers(flat, what)
    return flat.long()


def _joined(values: Sequence[Any], what: str) -> Tensor:
    try:
        return _flat(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers: {error}") from None


def _flat(values: Sequence[Any]) -> Tensor:
    """Tensors and arrays keep their dtype, except that no field is narrower than float32."""
    if values and all(hasattr(v, "__array__") for v in values):
        flat = torch.cat([torch.as_tensor(v if isinstance(v, Tensor) else v.copy(), device="cpu") for v in values])
        return flat.float() if _is_narrow(flat) else flat
    numbers = [x for v in values for x in v]
    flat = torch.tensor(numbers, device="cpu")
    return torch.tensor(numbers, dtype=torch.float32, device="cpu") if _is_narrow(flat) else flat


def _is_narrow(flat: Tensor) -> bool:
    """In bfloat16 or float16: given so, or by torch.set_default_dtype."""
    return flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize
