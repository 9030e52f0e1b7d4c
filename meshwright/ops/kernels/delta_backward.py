"""Differentiate the gated delta rule in three Triton kernels, which follow those of `delta_forward` from last to first.

Let P_ij = do_i.u_j. Let b = M^T du: the gradient of beta v, and of the right-hand side of the system. Then

    du = (q k^T * w)^T do + w_last k dS1       dS0 = d_last dS1 + (d q)^T do - W^T du
    dA = -b u^T below the diagonal             d(beta d k) = -b S0^T
    d(d q) = do S0                             d(q k^T * w) = P

The gradient of a log decay g_t is a sum over all terms that decay by it. A product of i and j that decays from j to i
counts for t in j+1 .. i: it is added at i, taken off at j, and summed from the end of the chunk on.
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
    through_norm,
    tile,
    turned_decay_within,
    turned_tile,
)


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions"])
def output_gradients(
    q, k, g, positions, U, S, q_norm, k_norm, do, dU, dq, dk, dg, num, H, R, scale, q_stride, k_stride,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go back through `outputs`: write dq, and the shares of du, dk and dg that the other kernels add to.

    dk is the gradient of the unit vector, for each value head. dg is not yet summed over the tokens of the chunk.
    """
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, head = n * C, n * H + h
    i, left = tl.arange(0, C), rows_left(num, start, C)
    q_at, k_at = q + start * q_stride + (h // R) * K, k + start * k_stride + (h // R) * K
    q_CK, q_KC = load_rows(q_at, q_stride, left, 0, K, C, KP), load_columns(q_at, q_stride, left, 0, K, C, KP)
    k_CK = load_rows(k_at, k_stride, left, 0, K, C, KP)
    q_scale, k_scale = tl.load(q_norm + head * C + i), tl.load(k_norm + head * C + i)
    g_C, position_C = load_gate(g + h, start, num, H, C), load_positions(positions, start, num, C)
    turned = turned_decay_within(g_C, position_C, C) * q_scale[None, :] * k_scale[:, None]
    kq = (tl.dot(k_CK, q_KC, input_precision=PRECISION) * turned).to(q.dtype.element_ty)
    P, turned_P = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    d_read = tl.zeros([C, KP], tl.float32)
    for first in range(0, VP, BV):
        do_at = do + start * H * V + h * V
        do_CV = load_rows(do_at, H * V, left, first, V, C, BV)
        do_VC = load_columns(do_at, H * V, left, first, V, C, BV)
        u_CV = tl.load(tile(U + head * C * VP, VP, first, C, BV))
        u_VC = tl.load(turned_tile(U + head * C * VP, VP, first, C, BV))
        s_VK = tl.load(turned_tile(S + head * KP * VP, VP, first, KP, BV))
        du_CV = tl.dot(kq, do_CV, input_precision=PRECISION)
        tl.store(tile(dU + head * C * VP, VP, first, C, BV), du_CV.to(dU.dtype.element_ty))
        P += tl.dot(do_CV, u_VC, input_precision=PRECISION)
        turned_P += tl.dot(u_CV, do_VC, input_precision=PRECISION)
        d_read += tl.dot(do_CV, s_VK, input_precision=PRECISION)
    P *= decay_within(g_C, position_C, C) * k_scale[None, :]
    d_read *= decay_from_start(g_C, position_C, C)[:, None]
    k_KC = load_columns(k_at, k_stride, left, 0, K, C, KP)
    pairs = P * tl.dot(q_CK, k_KC, input_precision=PRECISION) * q_scale[:, None]
    pairs = tl.where(i[:, None] > i[None, :], pairs, 0.0)
    of_state = tl.sum(d_read * q_CK.to(tl.float32), 1) * q_scale
    dg_C = tl.sum(pairs, 1) - tl.sum(pairs, 0) + of_state
    tl.store(dg + (start + i) * H + h, dg_C, mask=i < left)
    dq_CK = d_read + tl.dot(P.to(k_CK.dtype), k_CK, input_precision=PRECISION)
    dq_CK = through_norm(dq_CK, q_CK.to(tl.float32), q_scale, scale)
    turned_P *= turned_decay_within(g_C, position_C, C) * q_scale[None, :]
    dk_CK = tl.dot(turned_P.to(q_CK.dtype), q_CK, input_precision=PRECISION)
    store_rows(dq + start * H * K + h * K, H * K, left, 0, dq_CK, K, C, KP)
    store_rows(dk + start * H * K + h * K, H * K, left, 0, dk_CK, K, C, KP)


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions", "bounds"])
def state_gradients(
    q, k, g, positions, bounds, W, q_norm, k_norm, do, dU, dS, d_first, d_last, num, H, R, q_stride, k_stride,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, OUTPUTS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Go back through `states`: write dS, the gradient of the state after each chunk, and complete du in its place.

    Documents run side by side. The one that has the last token of a chunk writes what belongs to the chunk. For a
    document that ends earlier in the chunk du is already complete: none of its tokens reaches the state after the
    chunk.
    """
    document, h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BV
    begin, end = tl.load(bounds + document).to(tl.int64), tl.load(bounds + document + 1).to(tl.int64)
    n_first, n_last = begin // C, (end - 1) // C
    is_first, is_last = begin == 0, end == num
    writes_any = (n_first < n_last) | (end == (n_last + 1) * C) | is_last | (FIRST & is_first)
    if (begin < end) & writes_any:
        d_KV, every = tl.zeros([KP, BV], tl.float32), (tl.arange(0, BV) >= 0)[None, :]
        if LAST:
            d_KV += tl.load(tile(d_last + h * KP * VP, VP, first, KP, BV), mask=is_last & every, other=0.0)
        for back in range(n_last - n_first + 1):
            n = n_last - back
            head, start = n * H + h, n * C
            left = rows_left(num, start, C)
            writes = ((start + C <= end) | is_last) & every
            tl.store(tile(dS + head * KP * VP, VP, first, KP, BV), d_KV.to(dS.dtype.element_ty), mask=writes)
            g_C, position_C = load_gate(g + h, start, num, H, C), load_positions(positions, start, num, C)
            to_end = decay_to_end(load_gate(g + h, start + 1, num, H, C), position_C, C)
            to_end *= tl.load(k_norm + head * C + tl.arange(0, C))
            k_CK = load_rows(k + start * k_stride + (h // R) * K, k_stride, left, 0, K, C, KP)
            at_du = tile(dU + head * C * VP, VP, first, C, BV)
            du_CV = tl.load(at_du).to(tl.float32)
            du_CV += to_end[:, None] * tl.dot(k_CK, d_KV.to(k_CK.dtype), input_precision=PRECISION)
            tl.store(at_du, du_CV.to(dU.dtype.element_ty), mask=writes)
            d_KV *= decay_through(g_C, position_C, C)
            w_KC = tl.load(turned_tile(W + head * C * KP, KP, 0, C, KP))
            d_KV -= tl.dot(w_KC, du_CV.to(w_KC.dtype), input_precision=PRECISION)
            if OUTPUTS:
                read = tl.load(q_norm + head * C + tl.arange(0, C)) * decay_from_start(g_C, position_C, C)
                do_CV = load_rows(do + start * H * V + h * V, H * V, left, first, V, C, BV)
                q_KC = load_columns(q + start * q_stride + (h // R) * K, q_stride, left, 0, K, C, KP)
                d_KV += tl.dot(q_KC, (do_CV * read[:, None]).to(q_KC.dtype), input_precision=PRECISION)
        if FIRST:
            tl.store(tile(d_first + h * KP * VP, VP, first, KP, BV), d_KV, mask=is_first & every)


@triton.jit(do_not_specialize=["num", "H", "R"], do_not_specialize_on_alignment=["positions"])
def solved_gradients(  # noqa: PLR0915 - its tiles stay in registers from the first line to the last
    k, v, g, beta, positions, M, U, S, k_norm, dU, dS, dk, dv, dg, dbeta, num, H, R, k_stride, v_stride,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go back through `prepare`: write dv and dbeta, and complete dk and dg by adding to their shares."""
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, head = n * C, n * H + h
    i, left = tl.arange(0, C), rows_left(num, start, C)
    beta_C = load_gate(beta + h, start, num, H, C)
    dA, turned_dA = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    d_written, d_bdk = tl.zeros([C, KP], tl.float32), tl.zeros([C, KP], tl.float32)
    dbeta_C, d_through_K = tl.zeros([C], tl.float32), tl.zeros([KP], tl.float32)
    m_CC = tl.load(tile(M + head * C * C, C, 0, C, C))
    turned_m = tl.load(turned_tile(M + head * C * C, C, 0, C, C))
    for first in range(0, VP, BV):
        u_CV = tl.load(tile(U + head * C * VP, VP, first, C, BV))
        u_VC = tl.load(turned_tile(U + head * C * VP, VP, first, C, BV))
        s_VK = tl.load(turned_tile(S + head * KP * VP, VP, first, KP, BV))
        ds_VK = tl.load(turned_tile(dS + head * KP * VP, VP, first, KP, BV))
        d_written += tl.dot(u_CV, ds_VK, input_precision=PRECISION)
        d_through_K += tl.sum(s_VK.to(tl.float32) * ds_VK.to(tl.float32), 0)
        b_CV = tl.dot(turned_m, tl.load(tile(dU + head * C * VP, VP, first, C, BV)), input_precision=PRECISION)
        du_VC = tl.load(turned_tile(dU + head * C * VP, VP, first, C, BV))
        b_VC = tl.dot(du_VC, m_CC, input_precision=PRECISION)  # the transpose of b, as a product of its own
        dA -= tl.dot(b_CV.to(u_VC.dtype), u_VC, input_precision=PRECISION)
        turned_dA -= tl.dot(u_CV, b_VC.to(u_CV.dtype), input_precision=PRECISION)
        d_bdk -= tl.dot(b_CV.to(s_VK.dtype), s_VK, input_precision=PRECISION)
        v_CV = load_rows(v + start * v_stride + h * V, v_stride, left, first, V, C, BV)
        dbeta_C += tl.sum(b_CV * v_CV.to(tl.float32), 1)
        store_rows(dv + start * H * V + h * V, H * V, left, first, b_CV * beta_C[:, None], V, C, BV)
    k_at = k + start * k_stride + (h // R) * K
    k_CK, k_KC = load_rows(k_at, k_stride, left, 0, K, C, KP), load_columns(k_at, k_stride, left, 0, K, C, KP)
    k_scale = tl.load(k_norm + head * C + i)
    g_C, position_C = load_gate(g + h, start, num, H, C), load_positions(positions, start, num, C)
    to_end = decay_to_end(load_gate(g + h, start + 1, num, H, C), position_C, C)
    from_start = decay_from_start(g_C, position_C, C)
    dA = tl.where(i[:, None] > i[None, :], dA * decay_within(g_C, position_C, C), 0.0)
    turned_dA = tl.where(i[:, None] < i[None, :], turned_dA * turned_decay_within(g_C, position_C, C), 0.0)
    pairs = dA * tl.dot(k_CK, k_KC, input_precision=PRECISION) * k_scale[:, None] * k_scale[None, :]
    of_state = from_start * k_scale * tl.sum(d_bdk * k_CK.to(tl.float32), 1)
    of_end = to_end * k_scale * tl.sum(d_written * k_CK.to(tl.float32), 1)
    dbeta_C += tl.sum(pairs, 1) + of_state
    pairs *= beta_C[:, None]
    dg_at, inside = dg + (start + i) * H + h, i < left
    dg_C = tl.load(dg_at, mask=inside, other=0.0) + tl.sum(pairs, 1) - tl.sum(pairs, 0)
    dg_C = tl.cumsum(dg_C + beta_C * of_state, 0, reverse=True)
    # A token's write into the state after the chunk decays by the tokens after it, so it counts for those tokens.
    dg_C += tl.cumsum(of_end, 0) - of_end + decay_through(g_C, position_C, C) * tl.sum(d_through_K, 0)
    tl.store(dg_at, dg_C, mask=inside)
    tl.store(dbeta + (start + i) * H + h, dbeta_C, mask=inside)
    both = (beta_C[:, None] * dA + beta_C[None, :] * turned_dA) * k_scale[None, :]
    dk_at = dk + start * H * K + h * K
    dk_CK = load_rows(dk_at, H * K, left, 0, K, C, KP)
    dk_CK += tl.dot(both.to(k_CK.dtype), k_CK, input_precision=PRECISION)
    dk_CK += to_end[:, None] * d_written + (beta_C * from_start)[:, None] * d_bdk
    store_rows(dk_at, H * K, left, 0, through_norm(dk_CK, k_CK.to(tl.float32), k_scale, 1.0), K, C, KP)
