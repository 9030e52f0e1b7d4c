"""MoE combine: sum the k rows of each token while reading them, without a sorted copy of all rows.

The formula is `sum_rows` of ops/rows.py, which stays the reference and the fallback. It first copies the N = k T rows
into the order of tokens, then reads that copy: 6 bytes per element in bfloat16, where this kernel moves 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import dense_rows, launch

_BLOCK = 1024  # columns that a program sums


@triton.jit(do_not_specialize_on_alignment=["at"])
def _sum_rows(y, at, sums, D, stride, NUM: tl.constexpr, B: tl.constexpr):
    """Sum in the order of `at`, in float32, and round once: the same bits in every run."""
    t, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for nth in range(NUM):
        row = tl.load(at + t * NUM + nth)
        total += tl.load(y + row * stride + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(sums + t * D + col, total.to(sums.dtype.element_ty), mask=col < D)


def sum_rows(y_ND: Tensor, at_N: Tensor, num: int) -> Tensor:
    """Sum `num` rows per token: those at `at_N`, where the indices of a token lie side by side. -> x_TD"""
    y_ND = dense_rows(y_ND)
    num_tokens, width = len(at_N) // num, y_ND.shape[1]
    sums_TD = y_ND.new_empty(num_tokens, width)
    if sums_TD.numel():
        launch(
            _sum_rows, (num_tokens, triton.cdiv(width, _BLOCK)),
            y_ND, at_N.contiguous(), sums_TD, width, y_ND.stride(0), num, _BLOCK,
        )  # fmt: skip
    return sums_TD


_TYPES = {"at": "*i64", "D": "i32", "stride": "i32"}
# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [
    (_sum_rows, {"y": dtype, "sums": dtype, **_TYPES}, {"NUM": 8, "B": _BLOCK}, {"num_warps": 4})
    for dtype in ("*bf16", "*fp32")
]
