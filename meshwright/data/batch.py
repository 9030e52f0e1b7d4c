"""The micro-batch: one packed stream of T tokens from whole documents, with labels, document bounds and per-token
fields.

One object carries the bounds everywhere. If attention read `cu_seqlens` and the recurrence of a linear-attention layer
something else, one of them could be forgotten, and state would leak from one document into the next without an error
(transformers#46851, slime#1686).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted
from ..ops import Documents, documents, to_device
from .field_values import OverTokens, joined, refuse_grad, to_terms
from .images import Frame, Images, turns_of

IGNORE = -100  # the label of a token that predicts nothing
NO_EXPERT = -1  # in `experts`: the router chooses
_TOKEN_STREAMS = ("tokens", "labels")  # of every batch, apart from its fields
_INT_DTYPES = (torch.int64, torch.int32)  # not uint8: torch indexes with it as with a boolean mask


def _check_stream(name: str, values: object, num: int | None = None) -> None:
    """Check that a stream is a tensor with one value per token; a field may have a row of values per token."""
    if not isinstance(values, Tensor) or values.is_complex():
        raise DataError(f"{name} of the batch is not a tensor of real numbers; make batches with mw.pack(...)")
    if name in _TOKEN_STREAMS and values.dtype not in _INT_DTYPES:
        raise DataError(f"{name} of the batch are {values.dtype}, not whole numbers; use mw.pack(...)")
    if values.dim() not in ((1,) if name in _TOKEN_STREAMS else (1, 2)) or num not in (None, len(values)):
        for_tokens = "" if num is None else f" for {num} tokens"
        raise DataError(f"{name} has shape {tuple(values.shape)}{for_tokens}; give one value a token")


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Return a list, tensor or array of whole numbers as Python's: a tensor of one would be equal to itself alone."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if not all(isinstance(each, Integral) for each in listed):
        raise DataError(f"numbers and groups of a batch must be whole numbers, not {listed!r:.80}")
    return tuple(int(each) for each in listed)


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Batch:
    """A micro-batch: T tokens of whole documents. `labels[t]` is the token to predict at t, -100 for none.

    Labels are already shifted: the model compares the logits at t with `labels[t]`. Shifting inside the model, after
    the stream has been split over cp, would lose the last target of every shard (transformers#48570).

    A token has a loss term where it has a label, whatever the head. `bounds` are the starts and ends of documents, from
    0 to T. `fields` are further values, one per token or a row per token `[T, K]`, such as weights, advantages, or the
    likeliest next tokens of a teacher; those at t belong to the loss term at t. The last `num_filler` tokens are
    padding, a document that loss and counts ignore. `images` stay on the host: each rank takes those that it encodes.
    Images without frames belong to other ranks alone.

    `numbers`: the index of each document in the list that `mw.pack` or `mw.batches` got. `groups`: a number per
    document; documents with the same number belong together, such as the answers to one prompt. By default each is
    alone.

    `experts`: `[T, layers, k]`, the experts that each token must use in each layer with experts, -1 where the router
    chooses: the choices of the rollout (`mw.expert_choices`, R3, arXiv 2510.11370). They stand at the tokens
    themselves, unlike labels and fields.

    Example of fields for a policy-gradient loss: `{"old_logprobs": ..., "advantages": ...}`, both `[T]` and both at the
    position that predicts the token they belong to. `mw.over_tokens` marks values that are stored at the token
    itself.
    """

    tokens: Tensor
    labels: Tensor
    bounds: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    num_filler: int = 0
    images: Images | None = None
    numbers: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    experts: Tensor | None = None

    def __post_init__(self) -> None:
        """Check a batch that may be hand-made instead of packed. No tensor is read, so this never waits for a
        device."""
        # Losses read `batch.fields` and the streams by name, so a field called `labels` would shadow the real ones
        # somewhere.
        for name in {*_TOKEN_STREAMS} & {*self.fields}:
            raise DataError(f"a field cannot be named {name!r}, which a batch has already; give it another name")
        _check_stream("tokens", self.tokens)
        for name, values in {"labels": self.labels, **self.fields}.items():
            _check_stream(name, values, len(self))
        bounds_given: object = self.bounds
        bounds = tuple(bounds_given) if isinstance(bounds_given, Sequence) else ()
        if (bounds[:1], bounds[-1:]) != ((0,), (len(self),)) or any(a >= b for a, b in pairwise(bounds)):
            raise DataError(f"bounds of the batch must rise from 0 to {len(self)}; make batches with mw.pack(...)")
        if not 0 <= self.num_filler <= len(self):
            raise DataError(f"num_filler={self.num_filler} of {len(self)} tokens; make batches with mw.pack(...)")
        # Padding inside a real document would take part in its attention and its recurrence.
        if self.num_filler and bounds[-2] != len(self) - self.num_filler:
            raise DataError(
                f"num_filler={self.num_filler}, but the last document begins at {bounds[-2]} of {len(self)} tokens: "
                "padding must be its own document; make batches with mw.pack(...)"
            )
        self._check_frames(bounds)
        self._number_documents()
        experts: object = self.experts
        if experts is not None and not (
            isinstance(experts, Tensor) and experts.dim() == 3 and len(experts) == len(self)
        ):
            given = tuple(experts.shape) if isinstance(experts, Tensor) else type(experts).__name__
            raise DataError(
                f"experts of the batch is {given} for {len(self)} tokens; it must be a tensor [tokens, layers with "
                "experts, experts of a token]"
            )

    def _number_documents(self) -> None:
        """Fill in the numbers and groups that were not given; refuse lists of another length."""
        numbers = _whole_numbers(self.numbers) or tuple(range(self.num_documents))
        for name, given in (("numbers", numbers), ("groups", _whole_numbers(self.groups) or numbers)):
            if len(given) != self.num_documents:
                num = counted(len(given), "entry", "entries")
                raise DataError(f"{name} has {num} for {counted(self.num_documents, 'document')}")
            object.__setattr__(self, name, given)

    def _check_frames(self, bounds: tuple[int, ...]) -> None:
        """Check that every frame lies inside one document."""
        for number, frame in enumerate(self.frames):
            at = bisect_right(bounds, frame.start)
            if frame.start < 0 or frame.stop > len(self) - self.num_filler or frame.stop > bounds[at]:
                raise DataError(
                    f"frame {number} of the batch is not inside one document; make batches with mw.pack(...)"
                )

    def __len__(self) -> int:
        """Return the number of tokens, padding included."""
        return self.tokens.shape[0]

    @property
    def num_documents(self) -> int:
        """Return the number of documents, without padding."""
        return len(self.bounds) - 1 - (self.num_filler > 0)

    @cached_property
    def docs(self) -> Documents:
        """Return the documents as layers need them (cu_seqlens and positions), on the device of the tokens."""
        docs, frames = documents([b - a for a, b in pairwise(self.bounds)], self.tokens.device), self.frames
        # M-RoPE positions are needed only with images; text alone has equal numbers in all three.
        return replace(docs, turns_T3=to_device(turns_of(self.bounds, frames), self.tokens.device)) if frames else docs

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the frames of images and videos."""
        return () if self.images is None else self.images.frames

    @property
    def is_target_T(self) -> Tensor:
        """Return a mask of the tokens that have a loss term.

        The number of targets of all ranks and micro-batches is the denominator of the mean loss. A denominator per rank
        or micro-batch would give more weight to tokens of batches with few targets (torchtitan#2206, Megatron-LM#7513).
        """
        return self.labels != IGNORE

    @property
    def num_targets(self) -> int:
        """Return the number of loss terms."""
        return int(self.is_target_T.sum())

    def split(self, values: Tensor) -> list[Tensor]:
        """Split per-token values `[T, ...]` into a tensor for each document: the form that `pack(fields=)` takes.

        >>> batch = pack([[5, 6, 7], [8, 9]], length=6)           # doctest: +SKIP
        >>> batch.split(mw.logprobs(model, batch))                # doctest: +SKIP
        [tensor([-4.9, -5.1, 0.0]), tensor([-4.8, 0.0])]

        Padding is not included.
        """
        values = torch.as_tensor(values)
        if values.shape[:1] != (len(self),):
            shape = tuple(values.shape)
            raise DataError(f"split got the shape {shape} for a batch of {len(self)} tokens; give one row per token")
        return [values[a:b] for a, b in pairwise(self.bounds) if b <= len(self) - self.num_filler]

    def join(self, values: Sequence[Any]) -> Tensor:
        """Join the values of documents, one per token, into `[T, ...]`, with 0 at padding: the inverse of `split`."""
        parts = [torch.as_tensor(each) for each in values]
        sizes = [b - a for a, b in pairwise(self.bounds)][: self.num_documents]
        if [len(part) for part in parts] != sizes:
            given = [len(part) for part in parts]
            raise DataError(f"join got values of {given} tokens for documents of {sizes}; give what split returned")
        if not parts:
            return torch.zeros(len(self), device=self.tokens.device)
        return torch.cat([*parts, parts[0].new_zeros(self.num_filler, *parts[0].shape[1:])])

    def with_fields(self, **fields: Any) -> Batch:
        """Return the batch with more fields, `[T]` or `[T, K]`, such as the log-probabilities of a reference model."""
        return replace(
            self, fields={**self.fields, **{name: self._field(name, values) for name, values in fields.items()}}
        )

    def _field(self, name: str, values: Any) -> Tensor:
        if isinstance(values, OverTokens):
            values_T = self._field(name, values.values)
            _check_stream(name, values_T, len(self))
            return to_terms(values_T, self.bounds)
        refuse_grad(values, name)
        if isinstance(values, list | tuple) and any(hasattr(each, "__len__") and len(each) for each in values):
            raise DataError(
                f"{name} is a list by document; with_fields takes one tensor of all {len(self)} tokens, such as "
                "mw.logprobs gives. Lists by document go to pack(..., fields=)"
            )
        return joined([values], name, self.tokens.device)

    def __repr__(self) -> str:
        fields = f", fields {', '.join(self.fields)}" if self.fields else ""
        frames = f", {counted(len(self.frames), 'frame')}" if self.frames else ""
        return (
            f"Batch({counted(self.num_documents, 'document')}, {counted(len(self), 'token')} of which "
            f"{self.num_filler} are padding, "
            f"{counted(self.num_targets, 'target')}{fields}{frames})"
        )

    def to(self, device: torch.device) -> Batch:
        """Copy to the device asynchronously.

        Copies are pinned and non-blocking (`ops.to_device`), so the host can go on to launch the forward.
        """
        fields = {name: to_device(value, device) for name, value in self.fields.items()}
        experts = None if self.experts is None else to_device(self.experts, device)
        tokens, labels = to_device(self.tokens, device), to_device(self.labels, device)
        moved = replace(self, tokens=tokens, labels=labels, fields=fields, experts=experts)
        _ = moved.docs  # computed once now, not lazily in the middle of a forward
        return moved
