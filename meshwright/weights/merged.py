"""Weights with their adapters merged, `W + scale * B @ A`, made one parameter at a time as they are written or sent."""

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
    expert). Both factors are whole: `a` is `[groups, rank, columns]`, `b` `[rows, rank]`.
    """

    a: Tensor
    b: Tensor
    scale: float

    def of(self, piece: Piece) -> Tensor:
        """Return the part of a piece, in the dtype of the factors. Only the contraction over the rank is needed, so any
        rows and columns can be had from the same rows of B and columns of A.
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
    """A mapping like `Values`, with adapters merged. Nothing that is stored changes: un-merging would not be exact."""

    deltas: Mapping[str, Delta] = field(default_factory=dict)
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    _last: dict[str, Tensor] = field(
        default_factory=dict
    )  # experts have hundreds of keys, which ask one after the other

    def __getitem__(self, name: str) -> Tensor:
        if name in self._last:
            return self._last[name]
        value = super().__getitem__(name)
        if name not in self.deltas or not value.numel():
            return value
        # Added in at least float32 and never rounded in memory: the writer rounds once, to the dtype of the file.
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
