"""A tensor subclass for trained weights that arrive as FP8 codes and block scales (FP8 all-gather).

FSDP gathers one byte per element instead of two (arXiv 2412.19437 keeps a master weight in higher precision too): the
owner of a shard quantises it, and the matmul takes these codes directly. Autograd must still see a parameter of
`dtype`, so that gradients keep their precision; hence a wrapper subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Blocks:
    """A matrix, or several of one shape, as FP8 codes with a scale for each block of 128 x 128.

    It holds plain tensors, so `torch.compile` can trace it.
    """

    codes: Tensor  # uint8 [..., N, K]: E4M3
    scales: Tensor  # [..., N / 128, K / 128]

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def mT(self) -> Blocks:
        """Exchange rows and columns; blocks are square, so scales are just transposed too."""
        return Blocks(self.codes.mT, self.scales.mT)

    def stacked(self, num: int) -> Blocks:
        """View the rows as `num` matrices."""
        return Blocks(self.codes.unflatten(0, (num, -1)), self.scales.unflatten(0, (num, -1)))

    def __getitem__(self, index: int) -> Blocks:
        return Blocks(self.codes[index], self.scales[index])


# Whether a matmul runs in FP8: False, True, or the blocks of each weight that is already quantised.
Fp8 = bool | Sequence[Blocks | None]


class Quantised(Tensor):
    """A matrix in FP8, or several of one shape. Autograd sees a tensor of `dtype`, which gets gradients of `dtype`.

    It has no values, so no operation can take it for a plain weight by mistake: only FP8 matmuls (ops/fp8_matmul.py)
    read it. The few other operations that FSDP and autograd apply to a parameter are at the end of this file.
    """

    codes: Tensor  # uint8 [..., N, K]: E4M3
    scales: Tensor  # [..., N / 128, K / 128]

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Quantised:
        tensor: Quantised = Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        tensor.codes, tensor.scales = codes, scales
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub has that of a function that is switched off
        cls, func: Any, _types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _KNOWN or not isinstance(args[0], Quantised):
            raise ValueError(
                f"{func} got a weight that is all-gathered in FP8, which only FP8 matmuls can read; "
                "leave its parameter out with fp8_skip="
            )
        return _KNOWN[func](*args, **(kwargs or {}))

    def __repr__(self, **_: object) -> str:  # type: ignore[override] # without values
        return f"Quantised({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise ValueError("a weight that is all-gathered in FP8 cannot be copied; use mw.gather(model)")

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.codes, self.scales)

    def changed(self, change: Callable[[Tensor], Tensor], of_scales: Callable[[Tensor], Tensor]) -> Quantised:
        """Return a view of the same memory: apply one change of shape to the codes and another to the scales."""
        return Quantised(change(self.codes), of_scales(self.scales), self.dtype)

    @property
    def block(self) -> int:
        """Return the rows of a block."""
        return self.codes.shape[-2] // self.scales.shape[-2]


def _alias(x: Quantised, *_: object) -> Quantised:
    """Return a new tensor on the same memory, for detach and alias."""
    return x.changed(torch.detach, torch.detach)


def _as_strided(x: Quantised, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Quantised:
    """Return the whole tensor, which is all that FSDP asks for."""
    if (tuple(size), tuple(stride), offset or 0) != (tuple(x.shape), x.stride(), 0):
        raise ValueError(f"{x!r} cannot be cut by strides")
    return _alias(x)


def _view(x: Quantised, size: Sequence[int]) -> Quantised:
    """View the rows as several matrices; columns stay whole, and no block is cut."""
    if len(size) < 2 or size[-1] != x.shape[-1] or size[-2] % x.block:
        raise ValueError(f"{x!r} cannot be viewed as {tuple(size)}, which cuts its blocks")
    *lead, rows, _ = size
    return x.changed(lambda t: t.view(size), lambda t: t.view(*lead, rows // x.block, t.shape[-1]))


def _select(x: Quantised, dim: int, index: int) -> Quantised:
    """Return one matrix of a stack."""
    if dim or x.dim() != 3:
        raise ValueError(f"{x!r} has no matrices to choose from in dim {dim}")
    return x.changed(lambda t: t[index], lambda t: t[index])


def _unbind(x: Quantised, dim: int = 0) -> list[Quantised]:
    return [_select(x, dim, index) for index in range(len(x))]


def _transpose(x: Quantised, one: int, other: int) -> Quantised:
    """Exchange rows and columns; blocks are square, so scales are just transposed too."""
    if {one % x.dim(), other % x.dim()} != {x.dim() - 2, x.dim() - 1}:
        raise ValueError(f"{x!r} can only exchange its rows and columns, not dims {one} and {other}")
    return x.changed(lambda t: t.mT, lambda t: t.mT)


def _empty_like(x: Quantised, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """Return a plain tensor, for a gradient."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _zeros_like(x: Quantised, **options: Any) -> Tensor:
    return _empty_like(x, **options).zero_()


_KNOWN: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.as_strided.default: _as_strided,
    _aten.view.default: _view,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.transpose.int: _transpose,
    _aten.empty_like.default: _empty_like,
    _aten.zeros_like.default: _zeros_like,
}
