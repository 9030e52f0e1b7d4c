"""Quantise to FP8 (E4M3) in blocks with one kernel: 1 x 128 of activations, 128 x 128 of weights (arXiv 2412.19437).

The formula is in ops/fp8_matmul.py, which stays the reference and the fallback. It takes some 25 operations and moves
39 bytes per element; these kernels only read an element and write its code. Codes and scales are bitwise equal, so
results do not depend on which of the two ran.

Integer arithmetic rounds to E4M3: hardware conversions need compute capability 8.9, and Triton's interpreter rounds
toward zero.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, dense_rows, launch

_SIDE = 128  # of a block
_ROWS = 32  # rows of activations that a program takes
_ROW_WARPS, _MATRIX_WARPS = 4, 8


@triton.jit
def _e4m3(x):
    """Round to the nearest E4M3 number, ties to even. -> its code, uint8

    NaN stays NaN, with its sign. The caller must not pass a magnitude above 448, the largest E4M3 number.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign, magnitude = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Keep 3 bits of the mantissa; the exponent's bias of 127 becomes 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 codes count steps of 2^-9; adding 2^14 rounds to these steps.
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (tl.where(magnitude > 0x7F800000, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def _scale(largest, num_nans):
    """Return the scale of a block: 1 where all is zero, too small, or not a number."""
    scale = tl.div_rn(largest, 448.0)  # `/` is an approximation on a GPU
    return tl.where((scale > 0) & (num_nans == 0), scale, 1.0)


@triton.jit
def _code(x, scale):
    """Divide by the scale and round; rounding may push a quotient above 448. NaN fails both comparisons."""
    x = tl.div_rn(x, scale)
    x = tl.where(x > 448.0, 448.0, x)
    return _e4m3(tl.where(x < -448.0, -448.0, x))


@triton.jit(do_not_specialize=["M", "num_out"])
def _quantise_rows(x, codes, scales, M, num_out, stride_m, stride_k, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Quantise rows of 128 columns. Rows from M to `num_out` are zeros; scales are column-major, as `scaled_mm`
    needs."""
    row, block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    col = block.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    K = tl.num_programs(1) * SIDE
    wide = tl.load(x + row[:, None] * stride_m + col[None, :] * stride_k, mask=(row < M)[:, None], other=0.0)
    wide = wide.to(tl.float32)
    scale = _scale(tl.max(tl.abs(wide), 1), tl.sum((wide != wide).to(tl.int32), 1))
    code = _code(wide, tl.broadcast_to(scale[:, None], (ROWS, SIDE)))
    tl.store(codes + row[:, None] * K + col[None, :], code, mask=(row < num_out)[:, None])
    tl.store(scales + block.to(tl.int64) * num_out + row, scale, mask=row < num_out)


@triton.jit
def _quantise_blocks(weight, codes, scales, stride_n, stride_k, TRANSPOSED: tl.constexpr, SIDE: tl.constexpr):
    """Quantise a block of 128 x 128. `TRANSPOSED`: columns are contiguous, so it is read by columns."""
    n, k = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    first = weight + n.to(tl.int64) * SIDE * stride_n + k.to(tl.int64) * SIDE * stride_k
    if TRANSPOSED:
        wide = tl.load(first + i.to(tl.int64) * stride_k + j * stride_n).to(tl.float32)
    else:
        wide = tl.load(first + i.to(tl.int64) * stride_n + j * stride_k).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), 1), 0)
    scale = _scale(largest, tl.sum(tl.sum((wide != wide).to(tl.int32), 1), 0))
    code = _code(wide, tl.broadcast_to(scale, (SIDE, SIDE)))
    if TRANSPOSED:
        code = tl.trans(code)
    K = tl.num_programs(1).to(tl.int64) * SIDE
    tl.store(codes + (n * SIDE + i) * K + k * SIDE + j, code)
    tl.store(scales + n * tl.num_programs(1) + k, scale)


@triton.jit
def _turn_blocks(codes, turned, SIDE: tl.constexpr):
    """Transpose a block of codes, of 128 x 128: reads and writes are both of contiguous bytes."""
    n, k = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    N, K = tl.num_programs(0).to(tl.int64) * SIDE, tl.num_programs(1).to(tl.int64) * SIDE
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    block = tl.load(codes + (n * SIDE + i) * K + k * SIDE + j)
    tl.store(turned + (k * SIDE + i) * N + n * SIDE + j, tl.trans(block))


def quantised_rows(x_MK: Tensor, num_padding: int = 0) -> tuple[Tensor, Tensor]:
    """Quantise activations, followed by `num_padding` rows of zeros.

    -> codes [M + padding, K], scales [M + padding, K / 128], which lie by column
    """
    x_MK, (num_rows, width) = _as_tried(x_MK), x_MK.shape
    num_out = num_rows + num_padding
    codes = x_MK.new_empty(num_out, width, dtype=torch.uint8)
    scales = x_MK.new_empty(width // _SIDE, num_out, dtype=torch.float32)
    if num_out:
        launch(
            _quantise_rows, (triton.cdiv(num_out, _ROWS), width // _SIDE),
            x_MK, codes, scales, num_rows, num_out, *x_MK.stride(), _ROWS, _SIDE, num_warps=_ROW_WARPS,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales.t()


def quantised_matrix(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight, or the transpose of one. -> codes [N, K], contiguous, scales [N / 128, K / 128]"""
    weight_NK, (num_rows, width) = _as_tried(weight_NK), weight_NK.shape
    codes = torch.empty(num_rows, width, dtype=torch.uint8, device=weight_NK.device)
    scales = weight_NK.new_empty(num_rows // _SIDE, width // _SIDE, dtype=torch.float32)
    launch(
        _quantise_blocks, (*scales.shape,),
        weight_NK, codes, scales, *weight_NK.stride(), weight_NK.stride(0) == 1, _SIDE, num_warps=_MATRIX_WARPS,
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def _as_tried(x_MK: Tensor) -> Tensor:
    """Return x, or a dense copy where neither its rows nor its columns lie as in the trial."""
    by_column = x_MK.stride(0) == 1 < len(x_MK) and x_MK.stride(1) % 16 == x_MK.data_ptr() % 16 == 0
    return x_MK if by_column else dense_rows(x_MK)


def turned(codes_NK: Tensor) -> Tensor:
    """Transpose contiguous codes of whole blocks, uint8. -> [K, N], contiguous"""
    num_rows, width = codes_NK.shape
    out = codes_NK.new_empty(width, num_rows)
    launch(_turn_blocks, (num_rows // _SIDE, width // _SIDE), dense(codes_NK), out, _SIDE, num_warps=_MATRIX_WARPS)
    return out


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
_TENSORS = {"codes": "*u8", "scales": "*fp32"}
_OF_ROWS = {**_TENSORS, **dict.fromkeys(("M", "num_out", "stride_m", "stride_k"), "i32")}
_OF_BLOCKS = {**_TENSORS, **dict.fromkeys(("stride_n", "stride_k"), "i32")}
COMPILED = [
    (_turn_blocks, {"codes": "*u8", "turned": "*u8"}, {"SIDE": _SIDE}, {"num_warps": _MATRIX_WARPS}),
    (_quantise_rows, {"x": "*bf16", **_OF_ROWS}, {"ROWS": _ROWS, "SIDE": _SIDE}, {"num_warps": _ROW_WARPS}),
    *(
        (
            _quantise_blocks, {"weight": dtype, **_OF_BLOCKS}, {"TRANSPOSED": transposed, "SIDE": _SIDE},
            {"num_warps": _MATRIX_WARPS},
        )
        for dtype in ("*bf16", "*fp32") for transposed in (False, True)
    ),
]  # fmt: skip
