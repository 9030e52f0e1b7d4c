"""Attention over chosen blocks of keys (Qwen4-Exp's QSA): each query reads only the keys that it sees.

One program serves a query and kv head: its tile is the query heads of that kv head, which all see the same keys. It
visits the chosen blocks with an online softmax (FlashAttention, arXiv 2205.14135). Backward visits the queries of each
block in the order of the stream, so gradients of keys are summed in a fixed order and without atomic adds.

The formula is in ops/chosen_blocks.py, which stays the reference and the fallback: it computes all scores of a
document. Shapes: T queries, S keys, B blocks of `size` tokens, b blocks that a query may choose; H query heads, G kv
heads, R = H / G, K dims of a head.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch

_KEYS = 64  # keys of a tile
_ROWS = 64  # rows of a tile in the gradient of a block: some queries, with all heads of one kv head each
_LEAST = 16  # the smallest side of a product


@triton.jit
def _scores(q, k, scale, PRECISION: tl.constexpr):
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale


@triton.jit
def _load(at, rows, valid, stride, K: tl.constexpr, KP: tl.constexpr):
    """Load rows of K elements at some places; zeros where a row is not valid."""
    c = tl.arange(0, KP)
    return tl.load(
        at + rows.to(tl.int64)[:, None] * stride + c[None, :], mask=valid[:, None] & (c < K)[None, :], other=0.0
    )


@triton.jit
def _seen_at(at, starts, count, tail, query, SIZE: tl.constexpr, N: tl.constexpr):
    """Return the keys of an iteration, and which exist: the blocks from number `at` on, or in the last one the tail."""
    n = tl.arange(0, N)
    block, is_tail = at + n // SIZE, at >= count
    chosen = (block < count) & (n < N // SIZE * SIZE)
    start = tl.load(starts + block, mask=chosen, other=0)
    keys = tl.where(is_tail, query - tail + 1 + n, start + n % SIZE)
    return keys, tl.where(is_tail, n < tail, chosen)


@triton.jit(do_not_specialize=["first", "b"])
def _outputs(
    q, k, v, starts, counts, tails, o, lse, first, scale, b, G, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the output and the logsumexp of the heads of one query and kv head."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, RP)
    heads = t * G * R + g * R + h
    q_RK = _load(q, heads, h < R, K, K, KP)
    count, tail = tl.load(counts + t), tl.load(tails + t)
    largest = tl.full([RP], -float("inf"), tl.float32)
    total, sums = tl.zeros([RP], tl.float32), tl.zeros([RP, KP], tl.float32)
    PER: tl.constexpr = N // SIZE
    for at in range(0, count + PER, PER):  # the last iteration takes the tail
        keys, valid = _seen_at(at, starts + t * b, count, tail, first + t, SIZE, N)
        k_NK = _load(k + g * K, keys, valid, G * K, K, KP)
        s = tl.where(valid[None, :], _scores(q_RK, k_NK, scale, PRECISION), -float("inf"))
        higher = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        p, rescale = tl.exp(s - shift[:, None]), tl.exp(largest - shift)
        v_NK = _load(v + g * K, keys, valid, G * K, K, KP)
        sums = sums * rescale[:, None] + tl.dot(p.to(v_NK.dtype), v_NK, input_precision=PRECISION)
        total, largest = total * rescale + tl.sum(p, 1), higher
    c = tl.arange(0, KP)
    at_o = o + heads[:, None] * K + c[None, :]
    tl.store(at_o, (sums / total[:, None]).to(o.dtype.element_ty), mask=(h < R)[:, None] & (c < K)[None, :])
    tl.store(lse + heads, largest + tl.log(total), mask=h < R)


@triton.jit(do_not_specialize=["first", "b"])
def _query_gradients(
    q, k, v, starts, counts, tails, lse, d_o, delta, dq, first, scale, b, G, R: tl.constexpr, RP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one query, for the heads of one kv head. `delta`: the product of each output with its
    gradient."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, RP)
    heads = t * G * R + g * R + h
    q_RK, d_RK = _load(q, heads, h < R, K, K, KP), _load(d_o, heads, h < R, K, K, KP)
    lse_R, delta_R = tl.load(lse + heads, mask=h < R, other=0.0), tl.load(delta + heads, mask=h < R, other=0.0)
    count, tail = tl.load(counts + t), tl.load(tails + t)
    sums = tl.zeros([RP, KP], tl.float32)
    PER: tl.constexpr = N // SIZE
    for at in range(0, count + PER, PER):
        keys, valid = _seen_at(at, starts + t * b, count, tail, first + t, SIZE, N)
        k_NK, v_NK = _load(k + g * K, keys, valid, G * K, K, KP), _load(v + g * K, keys, valid, G * K, K, KP)
        p = tl.exp(_scores(q_RK, k_NK, scale, PRECISION) - lse_R[:, None])
        d_p = tl.dot(d_RK, tl.trans(v_NK), input_precision=PRECISION)
        d_s = tl.where(valid[None, :], p * (d_p - delta_R[:, None]) * scale, 0.0)
        sums += tl.dot(d_s.to(k_NK.dtype), k_NK, input_precision=PRECISION)
    c = tl.arange(0, KP)
    mask = (h < R)[:, None] & (c < K)[None, :]
    tl.store(dq + heads[:, None] * K + c[None, :], sums.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _key_gradients(
    q, k, v, last, queries, ends, lse, d_o, delta, dk, dv, scale, G, R: tl.constexpr, RP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr, NP: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the keys and values of one block: sums over the queries that chose it, in their order.

    `queries`: the queries of all blocks, block after block; those of this block end at `ends[block]`.
    """
    block, g = tl.program_id(0), tl.program_id(1)
    m, n, c = tl.arange(0, M), tl.arange(0, NP), tl.arange(0, KP)
    start = tl.load(ends + block - 1, mask=block > 0, other=0)
    stop = tl.load(ends + block)
    keys = tl.load(last + block) - (SIZE - 1) + n
    is_key = (n < SIZE) & (start < stop)
    k_NK, v_NK = _load(k + g * K, keys, is_key, G * K, K, KP), _load(v + g * K, keys, is_key, G * K, K, KP)
    dk_NK, dv_NK = tl.zeros([NP, KP], tl.float32), tl.zeros([NP, KP], tl.float32)
    PER: tl.constexpr = M // RP
    for at in range(start, stop, PER):
        row_at = at + m // RP
        is_row = (row_at < stop) & (m % RP < R)
        t = tl.load(queries + row_at, mask=is_row, other=0).to(tl.int64)
        heads = t * G * R + g * R + m % RP
        q_MK, d_MK = _load(q, heads, is_row, K, K, KP), _load(d_o, heads, is_row, K, K, KP)
        lse_M, delta_M = tl.load(lse + heads, mask=is_row, other=0.0), tl.load(delta + heads, mask=is_row, other=0.0)
        seen = is_row[:, None] & is_key[None, :]
        p_MN = tl.where(seen, tl.exp(_scores(q_MK, k_NK, scale, PRECISION) - lse_M[:, None]), 0.0)
        d_p = tl.dot(d_MK, tl.trans(v_NK), input_precision=PRECISION)
        d_s = p_MN * (d_p - delta_M[:, None]) * scale
        dv_NK += tl.dot(tl.trans(p_MN.to(d_MK.dtype)), d_MK, input_precision=PRECISION)
        dk_NK += tl.dot(tl.trans(d_s.to(q_MK.dtype)), q_MK, input_precision=PRECISION)
    at_row = keys.to(tl.int64)[:, None] * G * K + g * K + c[None, :]
    mask = is_key[:, None] & (c < K)[None, :]
    tl.store(dk + at_row, dk_NK, mask=mask)
    tl.store(dv + at_row, dv_NK, mask=mask)


class Seen(NamedTuple):
    """The keys that queries see: the first of each chosen block, the number of blocks, and that of keys after them."""

    starts_Tb: Tensor
    counts_T: Tensor
    tails_T: Tensor
    last_B: Tensor
    size: int
    first: int


def attend(q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """Attend to the keys that each query sees. -> o_THK, and the logsumexp of the scores, lse_TH in float32"""
    q_THK, k_SGK, v_SGK = dense(q_THK), dense(k_SGK), dense(v_SGK)
    o_THK, lse_TH = torch.empty_like(q_THK), q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
    launch(
        _outputs, (len(q_THK), k_SGK.shape[1]), q_THK, k_SGK, v_SGK, seen.starts_Tb, seen.counts_T, seen.tails_T, o_THK,
        lse_TH, seen.first, q_THK.shape[2] ** -0.5, seen.starts_Tb.shape[1], k_SGK.shape[1], **_sizes(q_THK, k_SGK),
        SIZE=seen.size, N=_KEYS, num_warps=4,
    )  # fmt: skip
    return o_THK, lse_TH


def gradients(
    inputs: tuple[Tensor, Tensor, Tensor], seen: Seen, outputs: tuple[Tensor, Tensor], d_THK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; those of k and v are summed in float32 and rounded once. `outputs`: the
    results of `attend`."""
    (q_THK, k_SGK, v_SGK), (o_THK, lse_TH), d_THK = map(dense, inputs), outputs, dense(d_THK)
    delta_TH = (o_THK.float() * d_THK.float()).sum(-1)
    dq_THK, scale, num_kv = torch.empty_like(q_THK), q_THK.shape[2] ** -0.5, k_SGK.shape[1]
    launch(
        _query_gradients, (len(q_THK), num_kv), q_THK, k_SGK, v_SGK, seen.starts_Tb, seen.counts_T, seen.tails_T,
        lse_TH, d_THK, delta_TH, dq_THK, seen.first, scale, seen.starts_Tb.shape[1], num_kv, **_sizes(q_THK, k_SGK),
        SIZE=seen.size, N=_KEYS, num_warps=4,
    )  # fmt: skip
    dk_SGK, dv_SGK = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k_SGK, v_SGK))
    sizes = _sizes(q_THK, k_SGK)
    if len(seen.last_B):
        queries, ends_B = _queries_of_blocks(seen)
        launch(
            _key_gradients, (len(seen.last_B), num_kv), q_THK, k_SGK, v_SGK, seen.last_B, queries, ends_B, lse_TH,
            d_THK, delta_TH, dk_SGK, dv_SGK, scale, num_kv, **sizes, SIZE=seen.size,
            NP=max(_LEAST, triton.next_power_of_2(seen.size)), M=max(_ROWS, sizes["RP"]), num_warps=4,
        )  # fmt: skip
    _add_tails(dk_SGK, dv_SGK, (q_THK, k_SGK, v_SGK), seen, (lse_TH, delta_TH, d_THK))
    return dq_THK, dk_SGK.to(k_SGK.dtype), dv_SGK.to(v_SGK.dtype)


def _sizes(q_THK: Tensor, k_SGK: Tensor) -> dict[str, Any]:
    """Return the constants that both passes are compiled for."""
    ratio, width = q_THK.shape[1] // k_SGK.shape[1], q_THK.shape[2]
    rows, columns = (max(_LEAST, triton.next_power_of_2(size)) for size in (ratio, width))
    precision = "ieee" if q_THK.dtype == torch.float32 else "tf32"  # only applies to float32 products
    return {"R": ratio, "RP": rows, "K": width, "KP": columns, "PRECISION": precision}


def _queries_of_blocks(seen: Seen) -> tuple[Tensor, Tensor]:
    """Return the queries that have chosen each block, block after block and ascending, and where those of each end."""
    most = seen.starts_Tb.shape[1]
    is_chosen = torch.arange(most, device=seen.starts_Tb.device) < seen.counts_T[:, None]
    # A stable sort by the first key keeps the order of the queries; unused places sort behind all blocks.
    beyond = torch.iinfo(torch.int32).max
    order = seen.starts_Tb.masked_fill(~is_chosen, beyond).flatten().sort(stable=True)
    firsts_B = (seen.last_B - (seen.size - 1)).int()
    return (order.indices // most).int(), torch.searchsorted(order.values, firsts_B, right=True).int()


def _add_tails(
    dk_SGK: Tensor, dv_SGK: Tensor, inputs: tuple[Tensor, Tensor, Tensor], seen: Seen,
    of_queries: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    """Add the gradients of the keys behind the last block of each query, for one distance to the query at a time."""
    (q_THK, k_SGK, v_SGK), (lse_TH, delta_TH, d_THK) = inputs, of_queries
    num, num_kv, scale = len(q_THK), k_SGK.shape[1], q_THK.shape[2] ** -0.5
    for back in range(seen.size - 1):
        lost = max(back - seen.first, 0)  # queries whose key would lie before the stream
        rows, keys = slice(lost, num), slice(seen.first + lost - back, seen.first + num - back)
        k, v = (x[keys].float()[:, :, None] for x in (k_SGK, v_SGK))
        q, d = (x[rows].float().unflatten(1, (num_kv, -1)) for x in (q_THK, d_THK))
        lse, delta = (x[rows].unflatten(1, (num_kv, -1)) for x in (lse_TH, delta_TH))
        is_seen = (seen.tails_T[rows] > back)[:, None, None]
        p = torch.where(is_seen, ((q * k).sum(-1) * scale - lse).exp(), 0.0)
        d_s = p * ((d * v).sum(-1) - delta) * scale
        dk_SGK[keys] += (d_s[..., None] * q).sum(2)
        dv_SGK[keys] += (p[..., None] * d).sum(2)


def _compiled(kernel: Any, dtype: str) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    floats, ints = ("lse", "delta", "dk", "dv"), ("starts", "counts", "tails", "queries", "ends")
    types = dict.fromkeys(floats, "*fp32") | dict.fromkeys(ints, "*i32") | dict.fromkeys(("first", "b", "G"), "i32")
    types |= dict.fromkeys(("q", "k", "v", "o", "d_o", "dq"), dtype) | {"last": "*i64", "scale": "fp32"}
    constants = {"R": 12, "RP": 16, "K": 256, "KP": 256, "SIZE": 4, "N": _KEYS, "NP": _LEAST, "M": _ROWS,
                 "PRECISION": "tf32"}  # fmt: skip
    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    return kernel, {name: types[name] for name in names if name in types}, used, {"num_warps": 4}


# What tests/test_kernels_compile.py compiles, without a device: kernel, types of its arguments, constants, options.
COMPILED = [_compiled(kernel, "*bf16") for kernel in (_outputs, _query_gradients, _key_gradients)]
