"""A batch: the micro-batch that everything works on, one packed stream of tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, counted
from ..ops import Documents, documents, to_device
from .field_values import OverTokens, joined, refuse_grad, to_terms
from .images import Frame, Images, turns_of

IGNORE = -100  # the label of a token that predicts nothing
_STREAMS = ("tokens", "labels")  # of every batch, beside its fields
_WHOLE = (torch.int64, torch.int32)  # uint8 would index as a mask


def _check_stream(name: str, values: object, num: int | None = None) -> None:
    if not isinstance(values, Tensor) or values.is_complex():
        raise DataError(f"{name} of the batch is no tensor of real numbers; make batches with mw.pack(...)")
    if name in _STREAMS and values.dtype not in _WHOLE:
        raise DataError(f"{name} of the batch are {values.dtype}, not whole numbers; use mw.pack(...)")
    if values.dim() != 1 or num not in (None, len(values)):
        of = "" if num is None else f" for {num} tokens"
        raise DataError(f"{name} has shape {tuple(values.shape)}{of}; give one value a token")


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Batch:
    """A micro-batch: T tokens of whole documents. `labels[t]` is what token t is to predict, -100 for nothing.

    A token has a term of the loss where it has a label, whatever the head. `bounds` are where documents begin and end:
    0, ..., T. `fields` are further values, one a token, such as weights or advantages: those of token t are for the
    term of token t. The last `num_filler` tokens are a document that loss and counts ignore. `images` stay on the host:
    each rank takes those that it runs. Without a frame, they are those of other ranks alone.
    """

    tokens: Tensor
    labels: Tensor
    bounds: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    num_filler: int = 0
    images: Images | None = None

    def __post_init__(self) -> None:
        """What `pack` makes right and a hand may get wrong. It reads no tensor, so it never waits for a device."""
        for name in {*_STREAMS} & {*self.fields}:
            raise DataError(f"a field cannot be named {name!r}, which a batch has already; give it another name")
        _check_stream("tokens", self.tokens)
        for name, values in {"labels": self.labels, **self.fields}.items():
            _check_stream(name, values, len(self))
        given: object = self.bounds
        bounds = tuple(given) if isinstance(given, Sequence) else ()
        if (bounds[:1], bounds[-1:]) != ((0,), (len(self),)) or any(a >= b for a, b in pairwise(bounds)):
            raise DataError(f"bounds of the batch must rise from 0 to {len(self)}; make batches with mw.pack(...)")
        if not 0 <= self.num_filler <= len(self):
            raise DataError(f"num_filler={self.num_filler} of {len(self)} tokens; make batches with mw.pack(...)")
        if self.num_filler and bounds[-2] != len(self) - self.num_filler:
            raise DataError(
                f"num_filler={self.num_filler}, but the last document begins at {bounds[-2]} of {len(self)} tokens: "
                "filler is a document of its own; make batches with mw.pack(...)"
            )

        self._check_frames(bounds)

    def _check_frames(self, bounds: tuple[int, ...]) -> None:
        for number, frame in enumerate(self.frames):
            at = bisect_right(bounds, frame.start)
            if frame.start < 0 or frame.stop > len(self) - self.num_filler or frame.stop > bounds[at]:
                raise DataError(f"frame {number} of the batch is in no document; make batches with mw.pack(...)")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def docs(self) -> Documents:
        """The documents as layers need them, where the tokens are. Made of `bounds`, they cannot disagree with them."""
        docs, frames = documents([b - a for a, b in pairwise(self.bounds)], self.tokens.device), self.frames
        return replace(docs, turns_T3=to_device(turns_of(self.bounds, frames), self.tokens.device)) if frames else docs

    @property
    def frames(self) -> tuple[Frame, ...]:
        return () if self.images is None else self.images.frames

    @property
    def is_target_T(self) -> Tensor:
        """Which tokens have a term of the loss, whatever the head: those with a label."""
        return self.labels != IGNORE

    @property
    def num_targets(self) -> int:
        return int(self.is_target_T.sum())

    def split(self, values: Tensor) -> list[Tensor]:
        """Values of each token of the batch, `[T, ...]`, as a tensor for each document: what `fields` of `pack` take.

        >>> batch = pack([[5, 6, 7], [8, 9]], length=6)           # doctest: +SKIP
        >>> batch.split(mw.logprobs(model, batch))                # doctest: +SKIP
        [tensor([-4.9, -5.1, 0.0]), tensor([-4.8, 0.0])]
        """
        values = torch.as_tensor(values)
        if values.shape[:1] != (len(self),):
            got = tuple(values.shape)
            raise DataError(f"split got the shape {got} for a batch of {len(self)} tokens; give one row a token")
        return [values[a:b] for a, b in pairwise(self.bounds) if b <= len(self) - self.num_filler]

    def with_fields(self, **fields: Any) -> Batch:
        """Return the batch with more fields, each `[T]`, such as the log-probabilities of another model."""
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
        pictures = f", {counted(len(self.frames), 'frame')}" if self.frames else ""
        num = len(self.bounds) - 1 - (self.num_filler > 0)
        return (
            f"Batch({counted(num, 'document')}, {counted(len(self), 'token')} of which {self.num_filler} are filler, "
            f"{counted(self.num_targets, 'target')}{fields}{pictures})"
        )

    def to(self, device: torch.device) -> Batch:
        """On the device. The host does not wait for what is queued there."""
        fields = {name: to_device(value, device) for name, value in self.fields.items()}
        moved = replace(
            self, tokens=to_device(self.tokens, device), labels=to_device(self.labels, device), fields=fields
        )
        _ = moved.docs  # made now, once, and not by each layer that asks
        return moved
