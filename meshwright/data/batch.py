"""A batch: the micro-batch that everything works on, one packed stream of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import DataError
from ..ops import Documents, documents

IGNORE = -100  # the label of a token that predicts nothing
_WHOLE = (torch.int64, torch.int32)  # uint8 would index as a mask


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Batch:
    """A micro-batch: T tokens of whole documents. `labels[t]` is what token t is to predict, -100 for nothing.

    `bounds` are where documents begin and end: 0, ..., T. `fields` are further values, one a token, such as weights or
    advantages. The last `num_filler` tokens are a document that loss and counts ignore.
    """

    tokens: Tensor
    labels: Tensor
    bounds: tuple[int, ...]
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    num_filler: int = 0

    def __post_init__(self) -> None:
        """What `pack` makes right and a hand may get wrong. It reads no tensor, so it never waits for a device."""
        streams: dict[str, object] = {"tokens": self.tokens, "labels": self.labels, **self.fields}
        for name, values in streams.items():
            if not isinstance(values, Tensor) or values.is_complex():
                raise DataError(f"{name} of the batch is no tensor of real numbers; make batches with mw.pack(...)")
            if name in ("tokens", "labels") and values.dtype not in _WHOLE:
                raise DataError(f"{name} of the batch are {values.dtype}, not whole numbers; use mw.pack(...)")
            if values.shape != (len(self),):
                raise DataError(
                    f"{name} has shape {tuple(values.shape)} for {len(self)} tokens; give one value a token"
                )
        if (self.bounds[0], self.bounds[-1]) != (0, len(self)) or any(a >= b for a, b in pairwise(self.bounds)):
            raise DataError(f"bounds of the batch must rise from 0 to {len(self)}; make batches with mw.pack(...)")
        if not 0 <= self.num_filler <= len(self):
            raise DataError(f"num_filler={self.num_filler} of {len(self)} tokens; make batches with mw.pack(...)")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def docs(self) -> Documents:
        """The documents as layers need them, where the tokens are. Made of `bounds`, they cannot disagree with them."""
        return documents([b - a for a, b in pairwise(self.bounds)], self.tokens.device)

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        fields = {name: value.to(device) for name, value in self.fields.items()}
        moved = replace(self, tokens=self.tokens.to(device), labels=self.labels.to(device), fields=fields)
        _ = moved.docs  # made now: a copy to the device waits for all work that is queued before it
        return moved
