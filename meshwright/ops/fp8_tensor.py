"""A trained matrix whose 8-bit numbers came in the place of its values, with the scales of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


class Quantised(Tensor):
    """A matrix, or several of the same shape. For autograd it is a tensor of `dtype`, which gets gradients of `dtype`.

    It has no values of its own, so that no operation can take it for a plain weight: only products in 8 bits
    (ops/fp8_matmul.py) read it. What FSDP and autograd do to a parameter beside that stands at the end of this file.
    """

    codes: Tensor  # uint8 [..., N, K]: E4M3
    scales: Tensor  # [..., N / 128, K / 128]

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        made.codes, made.scales = codes, scales
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has that of a function that is switched off
        cls, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _KNOWN or not isinstance(args[0], Quantised):
            raise ValueError(
                f"{func} was given a weight that is gathered as 8-bit numbers, which only products in 8 bits read; "
                "leave its parameter out with fp8_skip="
            )
        return _KNOWN[func](*args, **(kwargs or {}))

    def __repr__(self, **_: object) -> str:  # type: ignore[override] # without values
        return f"Quantised({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise ValueError("a weight that is gathered as 8-bit numbers is not copied; take mw.gather(model)")

    def changed(self, change: Callable[[Tensor], Tensor], of_scales: Callable[[Tensor], Tensor]) -> Quantised:
        """The same memory, seen in another way."""
        return Quantised(change(self.codes), of_scales(self.scales), self.dtype)

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.codes.shape[-2] // self.scales.shape[-2]


def _same(x: Quantised, *_: object) -> Quantised:
    return x.changed(torch.detach, torch.detach)


def _as_strided(x: Quantised, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Quantised:
    """As FSDP asks for the whole."""
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        raise ValueError(f"{x!r} cannot be cut by strides")
    return _same(x)


def _view(x: Quantised, size: Sequence[int]) -> Quantised:
    """Whole columns: rows may become those of several matrices."""
    if len(size) < 2 or size[-1] != x.shape[-1] or size[-2] % x.block:
        raise ValueError(f"{x!r} cannot be seen as {tuple(size)}, which cuts its blocks")
    *lead, rows, _ = size
    return x.changed(lambda t: t.view(size), lambda t: t.view(*lead, rows // x.block, t.shape[-1]))


def _select(x: Quantised, dim: int, index: int) -> Quantised:
    if dim or x.dim() != 3:
        raise ValueError(f"{x!r} has no matrices to choose from in dim {dim}")
    return x.changed(lambda t: t[index], lambda t: t[index])


def _unbind(x: Quantised, dim: int = 0) -> list[Quantised]:
    return [_select(x, dim, index) for index in range(len(x))]


def _transpose(x: Quantised, one: int, other: int) -> Quantised:
    if {one % x.dim(), other % x.dim()} != {x.dim() - 2, x.dim() - 1}:
        raise ValueError(f"{x!r} is turned by exchanging rows and columns, not dims {one} and {other}")
    return x.changed(lambda t: t.mT, lambda t: t.mT)


def _empty_like(x: Quantised, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """For a gradient, which has values."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _zeros_like(x: Quantised, **options: Any) -> Tensor:
    return _empty_like(x, **options).zero_()


_KNOWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.as_strided.default: _as_strided,
    _aten.view.default: _view,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.transpose.int: _transpose,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
}
