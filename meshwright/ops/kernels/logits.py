"""Logits: statistics of each row in one pass (online softmax, arXiv 1805.02867), and their gradient in place in one.

The formula is in ops/loss.py, which stays the reference and the fallback. It moves some 66 bytes per logit to and from
memory, because each operation writes a float32 result; these kernels move 6. Logits still exist in memory, a chunk of
tokens at a time: Cut Cross-Entropy (arXiv 2411.09009) recomputes them in registers, but its products are slower than
those of cuBLAS.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 8192  # logits that a program holds in registers
_NUM_WARPS = 16


@triton.jit(do_not_specialize_on_alignment=["labels", "stats"])
def _token_stats(
    logits, labels, stats, V, stride, temperature, TEMPERED: tl.constexpr, ENTROPY: tl.constexpr, B: tl.constexpr
):
    """Write logsumexp, the label's logit, and sum of p (log p) of one row, or its largest logit.

    `total` and `weighted` are sums of exp(x - largest) and of that times x - largest, over what was read so far; a
    larger logit rescales both.
    """
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * stride
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for first in range(0, V, B):
        at = first + tl.arange(0, B)
        x = tl.load(row + at, mask=at < V, other=-float("inf")).to(tl.float32)
        if TEMPERED:
            x = x / temperature
        higher = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(
            higher == -float("inf"), 0.0, higher
        )  # -inf - -inf would be NaN in a row that has other logits
        exp = tl.exp(x - shift)
        rescale = tl.exp(largest - shift)
        if ENTROPY:
            moved = tl.where(largest == -float("inf"), 0.0, (largest - shift) * total)
            # The formula gives NaN for a logit of -inf, so only places beyond the row count as 0.
            weighted = rescale * (weighted + moved) + tl.sum(tl.where(at < V, exp * (x - shift), 0.0), 0)
        total = rescale * total + tl.sum(exp, 0)
        largest = higher
    label = tl.load(labels + t)
    target = tl.load(row + label, mask=(label >= 0) & (label < V), other=0.0).to(tl.float32)
    if TEMPERED:
        target = target / temperature
    lse = tl.where(largest == -float("inf"), float("nan"), largest + tl.log(total))
    tl.store(stats + t * 3, lse)
    tl.store(stats + t * 3 + 1, target)
    if ENTROPY:
        tl.store(stats + t * 3 + 2, weighted / total - tl.log(total))
    else:
        tl.store(stats + t * 3 + 2, largest)


@triton.jit(do_not_specialize_on_alignment=["labels", "stats", "d_stats"])
def _logit_gradients(
    logits, labels, stats, d_stats, V, stride, temperature, TEMPERED: tl.constexpr, ENTROPY: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """Overwrite logits with p * (d_lse + d_neg_entropy * (log p - neg_entropy)), plus d_target at the label."""
    t, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    logit = logits + t * stride + at
    x = tl.load(logit, mask=at < V, other=0.0).to(tl.float32)
    if TEMPERED:
        x = x / temperature
    log_p = x - tl.load(stats + t * 3)
    factor = tl.load(d_stats + t * 3)
    if ENTROPY:
        factor += tl.load(d_stats + t * 3 + 2) * (log_p - tl.load(stats + t * 3 + 2))
    d_target = tl.where(at == tl.load(labels + t), tl.load(d_stats + t * 3 + 1), 0.0)
    d = tl.exp(log_p) * factor + d_target
    tl.store(logit, d.to(logits.dtype.element_ty), mask=at < V)


def token_stats(logits_TV: Tensor, labels_T: Tensor, entropy: bool, temperature: float = 1.0) -> Tensor:
    """Reduce each row over the temperature to logsumexp, the label's logit or 0, and minus the entropy or the largest.

    -> stats_T3, float32
    """
    num_tokens, vocab_size = logits_TV.shape
    stats_T3 = logits_TV.new_empty(num_tokens, 3, dtype=torch.float32)
    if num_tokens:
        launch(
            _token_stats, (num_tokens,), logits_TV, labels_T.contiguous(), stats_T3, vocab_size, logits_TV.stride(0),
            temperature, temperature != 1, entropy, _BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return stats_T3


def overwrite_with_gradient(
    logits_TV: Tensor, stats_T3: Tensor, d_T3: Tensor, labels_T: Tensor, entropy: bool, temperature: float = 1.0
) -> None:  # fmt: skip
    """Overwrite logits with their gradient, from their stats and the gradient of the stats over the temperature."""
    num_tokens, vocab_size = logits_TV.shape
    if num_tokens:
        launch(
            _logit_gradients, (num_tokens, triton.cdiv(vocab_size, _BLOCK)), logits_TV, labels_T.contiguous(),
            stats_T3.contiguous(), d_T3.contiguous(), vocab_size, logits_TV.stride(0), temperature, temperature != 1,
            entropy, _BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


def _compiled(
    kernel: Any, dtype: str, entropy: bool, tempered: bool
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    types = {"logits": dtype, "labels": "*i64", "stats": "*fp32", "d_stats": "*fp32", "V": "i32", "stride": "i32"}
    types["temperature"] = "fp32"
    used = {name: types[name] for name in kernel.arg_names if name in types}
    return kernel, used, {"TEMPERED": tempered, "ENTROPY": entropy, "B": _BLOCK}, {"num_warps": _NUM_WARPS}


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [
    _compiled(kernel, dtype, entropy, tempered)
    for kernel in (_token_stats, _logit_gradients)
    for dtype, entropy, tempered in (("*bf16", False, False), ("*bf16", True, True), ("*fp32", True, False))
]
