"""Linear layers. What is hung on a weight of a model (an adapter, a precision) has its place here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .. import ops
from ..sharding import Init, Layout, weight

ALL = slice(None)


class Low(nn.Module):
    """What holds matrices that may be in 8 bits: as products are made of them, or as they are stored."""

    in_fp8: frozenset[str] = frozenset()  # those whose products are made of 8-bit numbers; `parallel` says it

    def __init__(self) -> None:
        super().__init__()
        self.grids: dict[str, ops.Grid] = {}  # of those that are frozen and stored as numbers; loading says it

    def meant(self, name: str, stored: Tensor) -> ops.Weight:
        """A parameter as products take it: numbers with their scales."""
        return ops.Numbers(stored, self.grids[name]) if name in self.grids else stored


class Linear(Low):
    """`x @ weight.T + bias`. `key` is their name in the files, up to `.weight` or `.bias`; or `layouts` say it."""

    low = True  # files may hold the weight in 8 bits, and products may be made of them

    def __init__(
        self, rows: Mapping[str, int], cols: Mapping[str, int], std: float, *,
        key: str = "", bias: bool = False, layouts: Sequence[Layout] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        at = None if layouts else key + ".weight"
        self.weight = weight(rows, cols, key=at, layouts=layouts, init=Init("normal", std), low=self.low)
        self.bias = weight(rows, key=key + ".bias", decay=False, init=Init("zeros")) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.matrix, self.bias, fp8="weight" in self.in_fp8)

    @property
    def matrix(self) -> ops.Weight:
        return self.meant("weight", self.weight)


class WideLinear(Linear):
    """One that nobody writes in 8 bits."""

    low = False


def joined(x: Tensor, *parts: tuple[Linear, slice]) -> tuple[Tensor, ...]:
    """Some rows of several linear layers of the same input, as one product: small products are slow.

    All of them have a bias, or none has. Those in 8 bits are a product of their own.
    """
    low = [bool(linear.in_fp8) for linear, _ in parts]
    products = []
    for fp8 in (False, True):
        alike = [part for part, is_low in zip(parts, low, strict=True) if is_low == fp8]
        products.append(iter(_joined(x, alike, fp8) if alike else ()))
    return tuple(next(products[is_low]) for is_low in low)


def _joined(x: Tensor, parts: Sequence[tuple[Linear, slice]], fp8: bool) -> tuple[Tensor, ...]:
    weights = [_rows_of(linear, rows) for linear, rows in parts]
    biases = [linear.bias[rows] for linear, rows in parts if linear.bias is not None]
    return ops.linears(x, weights, biases or None, fp8=fp8)


def _rows_of(linear: Linear, rows: slice) -> ops.Weight:
    """The matrix itself where these are all of its rows, as they are of what comes in 8 bits."""
    return linear.matrix if rows in (ALL, slice(0, len(linear.weight))) else linear.matrix[rows]
