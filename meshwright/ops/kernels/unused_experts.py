"""Zero the weight gradients of experts without rows, and touch no other gradient.

The formula is `without_unused` of ops/experts.py, which stays the reference and the fallback: it reads and writes the
gradients of all experts. Each program of this kernel reads the count of its expert, and ends if it is not 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 8192  # elements that a program writes


@triton.jit(do_not_specialize_on_alignment=["counts"])
def _zero_unused(d, counts, size, B: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)  # the second dim of a grid has at most 65,535
    if tl.load(counts + expert) == 0:
        at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
        tl.store(d + expert * size + at, tl.zeros([B], d.dtype.element_ty), mask=at < size)


def zero_unused(d_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Zero the gradients of experts without rows, in place. `d` is contiguous."""
    size = d_EOI[0].numel() if len(d_EOI) else 0
    if size:
        launch(_zero_unused, (triton.cdiv(size, _BLOCK), len(d_EOI)), d_EOI, counts_E.contiguous(), size, _BLOCK)
    return d_EOI


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [
    (_zero_unused, {"d": dtype, "counts": "*i64", "size": "i32"}, {"B": _BLOCK}, {"num_warps": 4})
    for dtype in ("*bf16", "*fp32")
]
