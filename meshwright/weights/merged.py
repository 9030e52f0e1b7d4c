"""Merge LoRA adapters, `W + scale * B @ A`, one parameter at a time as weights are written or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..sharding import Box, Piece
from .frozen_scales import QuantisedView, Values


@dataclass(frozen=True)
class Delta:
    """The addition of an adapter to a parameter: `scale * B_g @ A_g` per group of rows (a half of gate and up, or an
    expert). Both factors are unsharded: `a` is `[groups, rank, columns]`, `b` `[rows, rank]`.
    """

    a: Tensor
    b: Tensor
    scale: float

    def of(self, piece: Piece) -> Tensor:
        """Return the part of a piece, in the dtype of the factors. The product contracts only over the rank, so any
        rows and columns need just the same rows of B and columns of A.
        """
        rows = piece.row_numbers(self.b.device)
        columns = slice(piece.first_col, piece.first_col + piece.shape[1])
        out, group = self.b.new_empty(piece.shape), rows // (len(self.b) // len(self.a))
        for number in group.unique().tolist():
            own = group == number
            out[own] = self.b[rows[own]] @ self.a[number][:, columns] * self.scale
        return out


@dataclass(frozen=True, eq=False)
class MergedValues(Values):
    """A mapping like `Values`, with adapters merged. Stored weights do not change, because un-merging would not be
    exact."""

    deltas: Mapping[str, Delta] = field(default_factory=dict)
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    _last: dict[str, Tensor] = field(
        default_factory=dict
    )  # cached: experts have hundreds of keys, which request it one after the other

    def __getitem__(self, name: str) -> Tensor:
        if name in self._last:
            return self._last[name]
        value = super().__getitem__(name)
        if name not in self.deltas or not value.numel():
            return value
        # Add in at least float32 and do not round in memory: the writer rounds once, to the dtype of the file.
        delta = self.deltas[name].of(self.pieces[name])
        merged = value.to(torch.promote_types(value.dtype, delta.dtype)) + delta.to(value.device)
        self._last.clear()
        self._last[name] = merged
        return merged

    def views(self, piece: Piece) -> Iterator[tuple[Box, Tensor | QuantisedView]]:
        """Yield the boxes of a piece with their merged values."""
        if piece.param.name in self.deltas:
            yield from piece.views(self[piece.param.name])
        else:
            yield from super().views(piece)
