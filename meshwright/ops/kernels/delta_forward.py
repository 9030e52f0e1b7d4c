"""Compute the gated delta rule in three Triton kernels, in the notation of `ops/delta.py`'s `_chunked`.

For each head and chunk that begins with the state S0 [K, V], with w_ij the decay from token j to i and d_i that from S0
to i, both 0 across the start of a document (WY representation, arXiv 2406.06484; decays, arXiv 2412.06464):

    A = beta_i (k_i.k_j) w_ij below the diagonal;  M = (I + A)^-1            `prepare`, all chunks at once
    U = M (beta v);  W = M (beta d k)
    u = U - W S0;    S1 = d_last S0 + (w_last k)^T u                         `states`, chunk after chunk
    o = d q S0 + (q k^T * w) u                                               `outputs`, all chunks at once

q and k enter products as they are stored; the norms that make them unit vectors scale rows or columns of the result, so
no normalised copy of them is rounded or written. Products take the dtype of the stream and accumulate in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from .delta_parts import (
    decay_from_start,
    decay_through,
    decay_to_end,
    decay_within,
    load_columns,
    load_gate,
    load_positions,
    load_rows,
    rows_left,
    store_rows,
    tile,
)

EPS = tl.constexpr(1e-6)  # of the norms, inside the root


@triton.jit
def inverse(A, C: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + A for a strictly lower triangular A.

    Diagonal blocks of B rows are inverted row by row, all blocks at once. The remainder E is nilpotent in C / B = 4
    blocks, so its inverse is a sum of 4 powers. A sum of powers of A itself would cancel: they grow like binomial
    coefficients of C.
    """
    i = tl.arange(0, C)
    same_block = (i[:, None] // B) == (i[None, :] // B)
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    diagonal, blocks = tl.where(same_block, A, 0.0), unit
    for r in range(1, B):
        is_row = (i % B) == r
        row = tl.sum(tl.where(is_row[:, None], diagonal, 0.0), 0)  # at j: row r of the block that j is in
        solved = -tl.sum(row[:, None] * blocks, 0)
        blocks = tl.where(is_row[:, None] & same_block & (i[:, None] > i[None, :]), solved[None, :], blocks)
    E = tl.dot(blocks, tl.where(same_block, 0.0, A), input_precision=PRECISION)
    E2 = tl.dot(E, E, input_precision=PRECISION)
    powers = unit - E + E2 - tl.dot(E, E2, input_precision=PRECISION)
    return tl.dot(powers, blocks, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions"])
def prepare(
    q, k, v, g, beta, positions, M, U, W, q_norm, k_norm, num, H, R, scale, q_stride, k_stride, v_stride,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute M, U, W and the norms of q and k, for a chunk and a head."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, head = n * C, n * H + h
    i, left = tl.arange(0, C), rows_left(num, start, C)
    q_CK = load_rows(q + start * q_stride + (h // R) * K, q_stride, left, 0, K, C, KP).to(tl.float32)
    tl.store(q_norm + head * C + i, scale * tl.rsqrt(tl.sum(q_CK * q_CK, 1) + EPS))
    k_at = k + start * k_stride + (h // R) * K
    k_CK, k_KC = load_rows(k_at, k_stride, left, 0, K, C, KP), load_columns(k_at, k_stride, left, 0, K, C, KP)
    # The same norms twice, once for each layout: Triton would convert one through shared memory.
    by_row = tl.rsqrt(tl.sum(k_CK.to(tl.float32) * k_CK.to(tl.float32), 1) + EPS)
    by_column = tl.rsqrt(tl.sum(k_KC.to(tl.float32) * k_KC.to(tl.float32), 0) + EPS)
    tl.store(k_norm + head * C + i, by_row)
    g_C, beta_C = load_gate(g + h, start, num, H, C), load_gate(beta + h, start, num, H, C)
    position_C = load_positions(positions, start, num, C)
    kk = tl.dot(k_CK, k_KC, input_precision=PRECISION) * by_row[:, None] * by_column[None, :]
    A = tl.where(i[:, None] > i[None, :], beta_C[:, None] * kk * decay_within(g_C, position_C, C), 0.0)
    m = inverse(A, C, B, PRECISION)
    tl.store(tile(M + head * C * C, C, 0, C, C), m.to(M.dtype.element_ty))
    of_k = (m * (beta_C * decay_from_start(g_C, position_C, C) * by_column)[None, :]).to(k.dtype.element_ty)
    of_v = (m * beta_C[None, :]).to(v.dtype.element_ty)
    w_CK = tl.dot(of_k, k_CK, input_precision=PRECISION)
    tl.store(tile(W + head * C * KP, KP, 0, C, KP), w_CK.to(W.dtype.element_ty))
    for first in range(0, VP, BV):
        v_CV = load_rows(v + start * v_stride + h * V, v_stride, left, first, V, C, BV)
        u_CV = tl.dot(of_v, v_CV, input_precision=PRECISION)
        tl.store(tile(U + head * C * VP, VP, first, C, BV), u_CV.to(U.dtype.element_ty))


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions", "bounds"])
def states(
    k, g, positions, bounds, U, W, k_norm, S, first_state, last_state, num, H, R, k_stride,
    K: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Carry the state through the chunks of a document: write S, the state before each, and u in the place of U.

    Documents run side by side. The one that has the first token of a chunk writes what belongs to the chunk. A document
    that begins later in the chunk only needs the state after it. Its rows of W are 0, so its U already is u.
    """
    document, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    begin, end = tl.load(bounds + document).to(tl.int64), tl.load(bounds + document + 1).to(tl.int64)
    n_first, n_last = begin // C, (end - 1) // C
    is_first, is_last = begin == 0, end == num
    if (begin < end) & ((n_first < n_last) | (n_first * C == begin) | (LAST & is_last)):
        state_KV, every = tl.zeros([KP, BV], tl.float32), (tl.arange(0, BV) >= 0)[None, :]
        if FIRST:
            reads = is_first & every
            state_KV += tl.load(tile(first_state + h * KP * VP, VP, first, KP, BV), mask=reads, other=0.0)
        for n in range(n_first, n_last + 1):
            head, start = n * H + h, n * C
            writes = (start >= begin) & every
            tl.store(tile(S + head * KP * VP, VP, first, KP, BV), state_KV.to(S.dtype.element_ty), mask=writes)
            w_CK = tl.load(tile(W + head * C * KP, KP, 0, C, KP))
            at_u = tile(U + head * C * VP, VP, first, C, BV)
            u_CV = tl.load(at_u).to(tl.float32)
            u_CV -= tl.dot(w_CK, state_KV.to(w_CK.dtype), input_precision=PRECISION)
            tl.store(at_u, u_CV.to(U.dtype.element_ty), mask=writes)
            position_C = load_positions(positions, start, num, C)
            to_end = decay_to_end(load_gate(g + h, start + 1, num, H, C), position_C, C)
            to_end *= tl.load(k_norm + head * C + tl.arange(0, C))
            k_KC = load_columns(k + start * k_stride + (h // R) * K, k_stride, rows_left(num, start, C), 0, K, C, KP)
            state_KV *= decay_through(load_gate(g + h, start, num, H, C), position_C, C)
            state_KV += tl.dot(k_KC, (u_CV * to_end[:, None]).to(k_KC.dtype), input_precision=PRECISION)
        if LAST:
            tl.store(tile(last_state + h * KP * VP, VP, first, KP, BV), state_KV, mask=is_last & every)


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions"])
def outputs(
    q, k, g, positions, U, S, q_norm, k_norm, o, num, H, R, q_stride, k_stride,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Read the state and the u of a chunk, for a head and BV columns of values."""
    n, h, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    start, head = n * C, n * H + h
    left = rows_left(num, start, C)
    q_CK = load_rows(q + start * q_stride + (h // R) * K, q_stride, left, 0, K, C, KP)
    k_KC = load_columns(k + start * k_stride + (h // R) * K, k_stride, left, 0, K, C, KP)
    q_scale, k_scale = tl.load(q_norm + head * C + tl.arange(0, C)), tl.load(k_norm + head * C + tl.arange(0, C))
    g_C, position_C = load_gate(g + h, start, num, H, C), load_positions(positions, start, num, C)
    s_KV = tl.load(tile(S + head * KP * VP, VP, first, KP, BV))
    o_CV = tl.dot(q_CK, s_KV, input_precision=PRECISION)
    o_CV *= (q_scale * decay_from_start(g_C, position_C, C))[:, None]
    qk = tl.dot(q_CK, k_KC, input_precision=PRECISION) * q_scale[:, None] * k_scale[None, :]
    qk *= decay_within(g_C, position_C, C)
    u_CV = tl.load(tile(U + head * C * VP, VP, first, C, BV))
    o_CV += tl.dot(qk.to(u_CV.dtype), u_CV, input_precision=PRECISION)
    store_rows(o + start * H * V + h * V, H * V, left, first, o_CV, V, C, BV)
