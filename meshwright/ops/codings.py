"""Quantisation formats of frozen weights (NF4, NVFP4, MXFP4, FP8): how a row is stored in 8 or 4 bits, and decoded.

A row in 4 bits has its codes, two in a byte, then the scales of its blocks:

    [code code] ... | scale ...          value[j] = table[code[j]] * scale[j // block]

So FSDP shards and all-gathers codes together with their scales, and each row can be decoded alone. NVFP4 also divides
its scales by one number per matrix, which a `Grid` keeps (ops/fp8_storage.py).

- NF4 (QLoRA, arXiv:2305.14314; bitsandbytes): 16 quantiles of a normal distribution, blocks of 64, scales in float32.
- NVFP4 (compressed-tensors): E2M1, blocks of 16, scales in E4M3.
- MXFP4 (OCP MX, arXiv:2310.10537): E2M1, blocks of 32, scales are powers of two (E8M0).

Each is decoded in float32, as its file format defines. There is no Triton kernel yet: a GPU runs the same torch
formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FP8_FORM = torch.float8_e4m3fn
_FP8_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8_FORM).to(torch.float32)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Coding:
    """The form of a stored row. `scale`: the dtype of the scales in it; None: one byte per code, and all scales in a
    grid.

    `block`: the number of consecutive elements with one scale. `high_first`: whether the first of two codes has the
    high bits of their byte. `divided`: whether scales are divided by one number per matrix.
    """

    name: str
    block: int = 1
    scale: torch.dtype | None = None
    table: tuple[float, ...] = ()
    high_first: bool = False
    divided: bool = False

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row."""
        return columns if self.scale is None else columns // 2 + columns // self.block * self.scale.itemsize

    def stored(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the bytes of a matrix, or of a stack of matrices."""
        return (*shape[:-1], self.row_bytes(shape[-1]))

    def decode(self, rows: Tensor, columns: int, divisors: Tensor) -> Tensor:
        """Return the values of 4-bit rows `[R, bytes]` in float32. `divisors`: `[R, 1]`."""
        codes, stored = rows[:, : columns // 2], rows[:, columns // 2 :]
        # A pair of float32 values as one 8-byte integer: one lookup per byte.
        pairs = _pairs(self, rows.device).index_select(0, codes.reshape(-1).int()).view(torch.float32)
        return (pairs.view(len(rows), -1, self.block) * (self._wide(stored) / divisors)[..., None]).flatten(1)

    def values_of(self, codes: Tensor) -> Tensor:
        """Return the table's value of each code, one code a byte."""
        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table.index_select(0, codes.contiguous().view(-1).int()).view(codes.shape)

    def _wide(self, stored: Tensor) -> Tensor:
        """Return stored scales in float32."""
        assert self.scale is not None, "its scales are in the row"
        stored = stored.clone(memory_format=torch.contiguous_format)  # a view of a row may be at any byte
        return wide(stored) if self.scale == FP8_FORM else stored.view(self.scale).to(torch.float32)

    def pack(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return rows of bytes. `codes`: `[R, columns]` in uint8. `scales`: `[R, blocks]`, in the dtype of scales."""
        first, second = codes[:, 0::2], codes[:, 1::2]
        packed = (first << 4) | second if self.high_first else first | (second << 4)
        return torch.cat([packed, scales.contiguous().view(torch.uint8)], 1)

    def encode(self, values: Tensor, divisors: Tensor) -> Tensor:
        """Quantise whole rows of values to 4 bits. `divisors`: `[R, 1]`."""
        blocks = values.to(torch.float32).unflatten(1, (-1, self.block))
        amax = blocks.abs().amax(-1)
        if self.scale == torch.float32:
            # bitsandbytes multiplies by the inverse. A block of zeros has the scale 0.
            inverse = torch.where(amax > 0, 1 / amax, torch.ones_like(amax))
            codes = torch.bucketize(blocks * inverse[..., None], _nf4_middles(values.device))
            return self.pack(codes.flatten(1).to(torch.uint8), amax)
        scales = _e4m3_scales(amax, divisors) if self.scale == FP8_FORM else _e8m0_scales(amax)
        used = (scales.to(torch.float32) / divisors)[..., None]
        scaled = torch.where(used > 0, blocks / used, torch.zeros_like(blocks))
        codes = torch.bucketize(scaled.abs(), _e2m1_middles(values.device)) + 8 * scaled.signbit()
        return self.pack(codes.flatten(1).to(torch.uint8), scales)


FP8 = Coding("fp8")
NF4 = Coding("nf4", 64, torch.float32, _NF4, high_first=True)
NVFP4 = Coding("nvfp4", 16, FP8_FORM, (*_E2M1, *(-size for size in _E2M1)), divided=True)
MXFP4 = Coding("mxfp4", 32, torch.float8_e8m0fnu, NVFP4.table)
FOUR_BITS = {coding.name: coding for coding in (NF4, NVFP4, MXFP4)}


def in_memory(shape: Sequence[int], form: torch.dtype | Coding) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and the dtype in which a matrix is stored, as values or as codes.

    Codes are integers: FSDP would cast a floating-point dtype, and gloo does not support float8.
    """
    return (form.stored(shape), torch.uint8) if isinstance(form, Coding) else (tuple(shape), form)


def divisor_for_amax(amax: Tensor) -> Tensor:
    """Return what NVFP4 divides the scales of a matrix by, so that its largest block gets the largest scale, 448."""
    return torch.where(amax > 0, 448 * 6 / amax, torch.ones_like(amax))


def _e4m3_scales(amax: Tensor, divisors: Tensor) -> Tensor:
    """Return scales with which the largest element of a block becomes 6, the largest code."""
    return (amax / 6 * divisors).clamp(max=448).to(FP8_FORM)


def _e8m0_scales(amax: Tensor) -> Tensor:
    """Return 2^(floor(log2(amax)) - 2), as OCP MX defines it: elements above 6 times this scale saturate."""
    _, exponent = torch.frexp(amax)  # amax = m * 2^exponent, with m from 0.5 to 1
    stored = torch.where(amax > 0, exponent - 3 + 127, 127).clamp(0, 254)
    return stored.to(torch.uint8).view(torch.float8_e8m0fnu)


def wide(codes: Tensor) -> Tensor:
    """Convert FP8 codes to float32. On a CPU a table lookup is three times as fast as torch's conversion."""
    flat = codes.contiguous().view(-1).view(torch.uint8)
    if codes.device.type != "cpu":
        return flat.view(FP8_FORM).to(torch.float32).view(codes.shape)
    return _FP8_VALUES.index_select(0, flat.int()).view(codes.shape)


def _pairs(coding: Coding, device: torch.device) -> Tensor:
    """Return the two values of each byte."""
    # A cached meta tensor would count as memory of the first simulation that uses it.
    return torch.empty(256, dtype=torch.int64, device=device) if device.type == "meta" else _pairs_on(coding, device)


@functools.cache
def _pairs_on(coding: Coding, device: torch.device) -> Tensor:
    table = torch.tensor(coding.table, dtype=torch.float32, device=device)
    high, low = table.repeat_interleave(16), table.repeat(16)
    return torch.stack([high, low] if coding.high_first else [low, high], 1).view(torch.int64).view(-1)


@functools.cache
def _nf4_middles(device: torch.device) -> Tensor:
    """Return the borders between codes. A value on one gets the lower code, as in bitsandbytes."""
    table = torch.tensor(_NF4, dtype=torch.float32, device=device)
    return (table[1:] + table[:-1]) / 2


@functools.cache
def _e2m1_middles(device: torch.device) -> Tensor:
    """Return the borders between codes. A value on a border gets the even code: where the upper code is even, the
    border is the next smaller float32."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=device)
    middles = (table[1:] + table[:-1]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    return middles
