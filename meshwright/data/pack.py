"""Documents -> one packed stream: the unit that everything else works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import DataError
from ..ops import Documents

IGNORE = -100  # the label of a token that predicts nothing
_FEW = 4  # documents of one target each whose label may be its own token by chance


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Batch:
    """A micro-batch: T tokens of whole documents. `labels[t]` is what token t is to predict, -100 for nothing.

    `fields` are further values a token, such as weights or advantages. `num_filler` tokens at the end belong to a
    document that loss and counts ignore.
    """

    tokens: Tensor
    labels: Tensor
    docs: Documents
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    num_filler: int = 0

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        docs = replace(
            self.docs, cu_seqlens=self.docs.cu_seqlens.to(device), positions_T=self.docs.positions_T.to(device)
        )
        fields = {name: value.to(device) for name, value in self.fields.items()}
        return replace(self, tokens=self.tokens.to(device), labels=self.labels.to(device), docs=docs, fields=fields)


def pack(
    documents: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]] | None = None,
    *,
    length: int | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
) -> Batch:
    """Pack documents in their order into one stream, filled up to `length` with a document that nothing counts.

    `labels`: for each document, what each of its tokens is to predict (already shifted); by default the next token
    of the same document, and nothing for its last one. `fields`: per-token values, a list or tensor for each document.

    >>> batch = pack([[5, 6, 7], [8, 9]], length=6)
    >>> batch.tokens.tolist(), batch.labels.tolist(), batch.docs.bounds
    ([5, 6, 7, 8, 9, 0], [6, 7, -100, 9, -100, -100], (0, 3, 5, 6))
    """
    wanted: object = length
    if not isinstance(wanted, Integral | None) or isinstance(wanted, bool):
        raise DataError(f"length={length!r} must be a whole number")
    _refuse_other_kinds(documents, fields)
    sizes = _lengths(documents, "documents")
    empty = next((i for i, size in enumerate(sizes) if size == 0), None)
    if empty is not None or not sizes:
        none = "there are no documents to pack; where data has run out, give one without targets: pack([[0]], [[-100]])"
        raise DataError(f"document {empty} is empty; leave it out" if sizes else none)
    total = sum(sizes)
    num_filler = (total if length is None else int(length)) - total
    if num_filler < 0:
        raise DataError(
            f"{len(sizes)} documents of {total} tokens do not fit into length={length}; pack fewer, "
            f"or split the longest (document {sizes.index(max(sizes))}, {max(sizes)} tokens)"
        )
    documents = [_plain(document) for document in documents]
    shifted = [[*d[1:], IGNORE] for d in documents] if labels is None else [_plain(each) for each in labels]
    filler = [num_filler] if num_filler else []
    batch = Batch(
        tokens=_flat(documents, sizes, "documents", num_filler, 0),
        labels=_flat(shifted, sizes, "labels", num_filler, IGNORE),
        docs=ops.documents(sizes + filler, torch.device("cpu")),
        fields={
            name: _flat(values, sizes, f"fields[{name!r}]", num_filler, 0) for name, values in (fields or {}).items()
        },
        num_filler=num_filler,
    )
    _refuse_unshifted(batch)
    return batch


def _refuse_other_kinds(documents: object, fields: object) -> None:
    if not isinstance(fields, Mapping | None):
        raise DataError("fields must be a dict by name, of a list for each document")
    inner = documents if isinstance(documents, list | tuple) else ()
    if any(isinstance(each, str | bytes | Mapping | Set) for each in (documents, *inner)):
        raise DataError(
            "documents must be lists of token ids, no text and no dicts; give those that a tokenizer makes: "
            'tokenizer(texts)["input_ids"]'
        )
    if not hasattr(documents, "__getitem__"):
        raise DataError("documents must be a list of lists of tokens")


def _refuse_unshifted(batch: Batch) -> None:
    """Labels as other libraries take them, the tokens themselves, would train a model to repeat what it reads.

    A document tells by two of its targets, documents of one target only together.
    """
    given, own = batch.labels != IGNORE, batch.labels == batch.tokens
    next_T = batch.tokens.roll(-1)
    next_T[torch.tensor(batch.docs.bounds[1:], device="cpu") - 1] = IGNORE  # of a last token nothing is known
    if not (own & (batch.labels != next_T)).any():
        return  # as nearly always
    suspects = []  # of each document with targets the number of them, if they may be its own tokens
    for a, b in pairwise(batch.docs.bounds):
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


def _lengths(values: Sequence[Sequence[Any]], what: str) -> list[int]:
    try:
        return [len(v) for v in values]
    except TypeError:
        raise DataError(f"{what} must be a list for each document, as in pack([[5, 6, 7], [8, 9]])") from None


def _plain(numbers: Sequence[int]) -> Sequence[int]:
    """Tensors and arrays of whatever width as a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _flat(values: Sequence[Sequence[Any]], sizes: list[int], what: str, num_filler: int, fill: int) -> Tensor:
    lengths = _lengths(values, what)
    if lengths != sizes:
        at = next(
            (i for i, (a, b) in enumerate(zip(lengths, sizes, strict=False)) if a != b), min(len(lengths), len(sizes))
        )
        raise DataError(
            f"{what}: document {at} differs in length: {lengths[at : at + 1]} values, {sizes[at : at + 1]} tokens"
        )
    if any(isinstance(v, Tensor) and v.requires_grad for v in values):
        raise DataError(f"{what} requires grad, and a batch is data: gradients end here; give {what}.detach()")
    try:
        flat = _joined(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} must be numbers: {error}") from None
    # filler takes the dtype of the values: a 0 among booleans would make numbers of them all
    flat = torch.cat([flat, flat.new_full((num_filler, *flat.shape[1:]), fill)])
    if what not in ("documents", "labels"):
        return flat
    if flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool:
        raise DataError(f"{what} must be whole numbers, got {flat.dtype}")
    if flat.dim() > 1:
        raise DataError(f"{what} must be a list of numbers for each document, got lists of {list(flat.shape[1:])}")
    return flat.long()


def _joined(values: Sequence[Any]) -> Tensor:
    """Tensors and arrays keep their dtype, except that no field is narrower than float32."""
    if values and all(hasattr(v, "__array__") for v in values):
        flat = torch.cat([torch.as_tensor(v if isinstance(v, Tensor) else v.copy(), device="cpu") for v in values])
        return flat.float() if flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize else flat
    numbers = [x for v in values for x in v]
    flat = torch.tensor(numbers, device="cpu")
    narrow = flat.is_floating_point() and flat.dtype.itemsize < torch.float32.itemsize  # of torch.set_default_dtype
    return torch.tensor(numbers, dtype=torch.float32, device="cpu") if narrow else flat
