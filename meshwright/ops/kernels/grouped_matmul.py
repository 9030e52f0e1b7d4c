"""Grouped GEMM for MoE experts in one launch: rows by the expert's matrix, and rows by rows for its gradient.

The formula is the loop of ops/experts.py, which stays the reference and the fallback. The loop copies the numbers of
rows to the host; here they stay on the device, and the grid covers the worst case. Tile `begin // ROWS + expert` is the
first of an expert whose rows begin at `begin`; all its tiles fit before the first tile of the next expert. A program
without a tile ends at once.

Products are summed in float32, in an order that depends on the shapes alone, and rounded once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch

_ROWS = 128  # rows of one expert that a program multiplies
_COLUMNS = 128  # at most, of a result
_STEP_BYTES = 128  # of each row that is read at once
_LEAST = 16  # what `tl.dot` takes
_SEARCHED = 128  # experts whose ends a program reads at once
_LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def _expert_of(tile, ends, num_experts, ROWS: tl.constexpr, SEARCHED: tl.constexpr):
    """Return the expert of a tile: the number of experts whose tiles all lie before it."""
    expert = 0
    for begin in range(0, num_experts, SEARCHED):
        at = begin + tl.arange(0, SEARCHED)
        next_tile = tl.load(ends + at, mask=at < num_experts, other=0) // ROWS + at + 1
        expert += tl.sum(((next_tile <= tile) & (at < num_experts)).to(tl.int32))
    return expert


@triton.jit(do_not_specialize=["num_experts"], do_not_specialize_on_alignment=["ends"])
def _by_matrices(
    x, weight, ends, y, num_experts, K, C, BY_COLUMN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    """Multiply rows [N, K] by matrices [E, K, C]. `BY_COLUMN`: matrices are stored as [E, C, K]. Column tiles vary
    fastest."""
    num_across = tl.cdiv(C, COLUMNS)
    tile = tl.program_id(0) // num_across
    expert = _expert_of(tile, ends, num_experts, ROWS, SEARCHED)
    known = expert < num_experts
    begin = tl.load(ends + expert - 1, mask=known & (expert > 0), other=0)
    end = tl.load(ends + expert, mask=known, other=0)
    first = begin + (tile - begin // ROWS - expert) * ROWS
    if first < end:
        # Scalars are 64-bit, but offsets within a tile 32-bit, which takes half of the registers.
        left = (tl.program_id(0) % num_across) * COLUMNS
        row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
        in_rows, in_columns = row < end - first, col < C - left
        x += first.to(tl.int64) * K
        weight += expert.to(tl.int64) * K * C + left.to(tl.int64) * (K if BY_COLUMN else 1)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(0, K, STEP):
            along, down = tl.arange(0, STEP)[None, :], tl.arange(0, STEP)[:, None]
            a = tl.load(x + step + (row * K + along), mask=in_rows & (along < K - step), other=0.0)
            if BY_COLUMN:
                b = tl.load(weight + step + (col * K + down), mask=(down < K - step) & in_columns, other=0.0)
            else:
                at = weight + tl.cast(step, tl.int64) * C
                b = tl.load(at + (down * C + col), mask=(down < K - step) & in_columns, other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        y += first.to(tl.int64) * C + left
        tl.store(y + (row * C + col), total.to(y.dtype.element_ty), mask=in_rows & in_columns)


@triton.jit(do_not_specialize_on_alignment=["ends"])
def _by_rows(d, x, ends, out, R, C, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Multiply the rows d of an expert, [n, R], transposed, by its rows x, [n, C]; zeros without rows. -> [E, R, C]"""
    num_across = tl.cdiv(C, COLUMNS)
    num_tiles = tl.cdiv(R, HEIGHT) * num_across
    expert, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    top, left = (tile // num_across) * HEIGHT, (tile % num_across) * COLUMNS
    r, col = tl.arange(0, HEIGHT)[:, None], tl.arange(0, COLUMNS)[None, :]
    across, down = tl.arange(0, STEP)[None, :], tl.arange(0, STEP)[:, None]
    in_height, in_columns = r < R - top, col < C - left
    total = tl.zeros([HEIGHT, COLUMNS], tl.float32)
    for step in range(begin, end, STEP):
        row = tl.cast(step, tl.int64)
        a = tl.load(d + (row * R + top) + (across * R + r), mask=(across < end - step) & in_height, other=0.0)
        b = tl.load(x + (row * C + left) + (down * C + col), mask=(down < end - step) & in_columns, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    out += (expert.to(tl.int64) * R + top) * C + left
    tl.store(out + (r * C + col), total.to(out.dtype.element_ty), mask=in_height & in_columns)


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply by groups, with the signature of torch's `grouped_mm`. Groups end at `offs`, int32, and the last ends
    with the rows.

    a [N, K], b [E, K, C] -> [N, C]: the rows of each group by its matrix.
    a [R, N], b [N, C] -> [E, R, C]: the columns of each group by its rows, zeros where it has none.
    """
    return _grouped_rows(dense(a), b, offs) if b.dim() == 3 else _grouped_columns(dense(a.mT), dense(b), offs)


def _grouped_rows(x_NK: Tensor, weight_EKC: Tensor, ends_E: Tensor) -> Tensor:
    num_experts, depth, width = weight_EKC.shape
    y_NC = x_NK.new_empty(len(x_NK), width)
    by_column = weight_EKC.stride(1) < weight_EKC.stride(2)
    columns, step = _tile(width, _COLUMNS), _tile(depth, _STEP_BYTES // x_NK.element_size())
    num_tiles = len(x_NK) // _ROWS + num_experts
    if y_NC.numel():
        launch(
            _by_matrices, (num_tiles * triton.cdiv(width, columns),),
            x_NK, dense(weight_EKC.mT if by_column else weight_EKC), ends_E.contiguous(), y_NC, num_experts, depth,
            width, by_column, _ROWS, columns, step, _SEARCHED, **_LAUNCH,
        )  # fmt: skip
    return y_NC


def _grouped_columns(d_NR: Tensor, x_NC: Tensor, ends_E: Tensor) -> Tensor:
    height, width = d_NR.shape[1], x_NC.shape[1]
    out_ERC = x_NC.new_empty(len(ends_E), height, width)
    tile = _tile(height, _ROWS), _tile(width, _COLUMNS)
    if out_ERC.numel():
        num_tiles = triton.cdiv(height, tile[0]) * triton.cdiv(width, tile[1])
        launch(
            _by_rows, (len(ends_E) * num_tiles,), d_NR, x_NC, ends_E.contiguous(), out_ERC, height, width, *tile,
            _STEP_BYTES // x_NC.element_size(), **_LAUNCH,
        )  # fmt: skip
    return out_ERC


def _tile(size: int, most: int) -> int:
    """Return the side of a tile: a power of two that covers `size`, within the limits."""
    return min(most, max(_LEAST, triton.next_power_of_2(size)))


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
def _compiled(dtype: str, step: int, narrow: int) -> list[Any]:
    tensors, sizes = {"x": dtype, "ends": "*i32"}, {"K": "i32", "C": "i32"}
    rows = {**tensors, **sizes, "weight": dtype, "y": dtype, "num_experts": "i32"}
    constants = {"ROWS": _ROWS, "COLUMNS": narrow, "STEP": step, "SEARCHED": _SEARCHED}
    columns = {**tensors, "d": dtype, "out": dtype, "R": "i32", "C": "i32"}
    return [
        *((_by_matrices, rows, {"BY_COLUMN": by_column, **constants}, _LAUNCH) for by_column in (True, False)),
        (_by_rows, columns, {"HEIGHT": narrow, "COLUMNS": _COLUMNS, "STEP": step}, _LAUNCH),
    ]


COMPILED = [*_compiled("*bf16", 64, _COLUMNS), *_compiled("*bf16", 64, _LEAST), *_compiled("*fp32", 32, _COLUMNS)]
