"""Linear layers, with what may attach to a weight: an adapter (LoRA), FP8 matmuls, storage in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from .. import ops
from ..sharding import Init, Layout, weight
from .lora import Adapter

ALL = slice(None)


class Quantisable(nn.Module):
    """A module with matrices that may be stored in 8 or 4 bits, or have FP8 matmuls."""

    in_fp8: frozenset[str] = frozenset()  # names of those with FP8 matmuls; set by `parallel`

    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, ops.Grid] = {}  # scales of those that are frozen and stored as codes; set when loading
        self.blocks: dict[str, ops.Blocks] = {}  # of those that a step has quantised; `parallel` sets and drops them

    def as_operand(self, name: str, stored: Tensor) -> ops.Weight:
        """Return a parameter as matmuls take it: with its scales, if it is stored as codes."""
        return ops.FrozenWeight(stored, self.grids[name]) if name in self.grids else stored

    def fp8(self, name: str) -> ops.Fp8:
        """Return whether matmuls with a parameter run in FP8, with its blocks if they were quantised before."""
        return name in self.in_fp8 and (self.blocks.get(name),)


class Linear(Quantisable):
    """`x @ weight.T + bias`.

    `key` is their common key in the files, up to `.weight` or `.bias`; or `layouts` say it.
    """

    low = True  # whether the weight may be quantised, in files and for matmuls
    steep = False  # whether rounding decides its gradient (`sharding.Param`)

    def __init__(
        self, rows: Mapping[str, int], cols: Mapping[str, int], std: float, *,
        key: str = "", bias: bool = False, layouts: Sequence[Layout] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        at = None if layouts else key + ".weight"
        init = Init("normal", std)
        self.weight = weight(
            rows, cols, key=at, layouts=layouts, init=init, low=self.low, steep=self.steep, matrices={}
        )
        self.bias = weight(rows, key=key + ".bias", decay=False, init=Init("zeros")) if bias else None
        self.lora: Adapter | None = None

    def of_matrices(self, **sizes: tuple[int, ...]) -> Self:
        """Declare the weight as several matrices: the dims that divide them, with the sizes of their parts."""
        self.weight.param = replace(self.weight.param, matrices=sizes)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = ops.linear(x, self.matrix, self.bias, fp8=self.fp8("weight"))
        adapter = self.adapter
        return y if adapter is None else adapter.add_to(y, ops.linear(x, adapter.a))

    @property
    def adapter(self) -> Adapter | None:
        """Return the adapter, unless there is none or it is switched off."""
        return self.lora if self.lora is not None and self.lora.on else None

    @property
    def matrix(self) -> ops.Weight:
        """Return the weight as matmuls take it."""
        return self.as_operand("weight", self.weight)


class WideLinear(Linear):
    """A linear layer that is never quantised: its output is narrow, or controls a gate."""

    low = False


def joined(x: Tensor, *parts: tuple[Linear, slice]) -> tuple[Tensor, ...]:
    """Multiply x with some rows of several linear layers in one GEMM, because small ones are slow (such as q, k and v).

    All have a bias, or none has. Those with FP8 matmuls form a GEMM of their own.
    """
    is_fp8 = [bool(linear.in_fp8) for linear, _ in parts]
    outputs = []
    for fp8 in (False, True):
        same_precision = [part for part, this in zip(parts, is_fp8, strict=True) if this == fp8]
        outputs.append(iter(_adapted(x, same_precision, _joined(x, same_precision, fp8)) if same_precision else ()))
    return tuple(next(outputs[this]) for this in is_fp8)


def _adapted(x: Tensor, parts: Sequence[tuple[Linear, slice]], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Add the outputs of the adapters for x, with one GEMM for all of their A.

    The results are views of one tensor, as the base's are: later kernels may round contiguous tensors differently, and
    with B = 0 the model must equal its base bit for bit.
    """
    adapters = [linear.adapter for linear, _ in parts]
    if not any(adapters):
        return outputs
    lows = iter(ops.linears(x, [adapter.a for adapter in adapters if adapter is not None]))
    added = [
        y if adapter is None else adapter.add_to(y, next(lows), None if _is_whole(rows, adapter.b) else rows)
        for y, adapter, (_, rows) in zip(outputs, adapters, parts, strict=True)
    ]
    return torch.cat(added, -1).split([y.shape[-1] for y in outputs], -1)


def _joined(x: Tensor, parts: Sequence[tuple[Linear, slice]], fp8: bool) -> tuple[Tensor, ...]:
    blocks = [linear.blocks.get("weight") for linear, _ in parts]
    weights = [_rows_of(linear, rows) for linear, rows in parts]
    biases = [linear.bias[rows] for linear, rows in parts if linear.bias is not None]
    return ops.linears(x, weights, biases or None, fp8=fp8 and blocks)


def _rows_of(linear: Linear, rows: slice) -> ops.Weight:
    """Return the matrix itself if these are all its rows, as always with FP8, whose blocks must not be cut."""
    return linear.matrix if _is_whole(rows, linear.weight) else linear.matrix[rows]


def _is_whole(rows: slice, matrix: Tensor) -> bool:
    return rows in (ALL, slice(0, len(matrix)))
