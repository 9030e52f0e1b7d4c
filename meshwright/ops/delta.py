"""Gated DeltaNet's sequence ops (arXiv 2412.06464): short causal convolution, gates, chunked gated delta rule.

Document boundaries come from `positions_T` alone: tokens i - d and i belong to the same document if and only if the
position of i is at least d. So no function loops over documents, pads them, or has a shape that depends on them, and
`torch.compile` needs one graph for all batches.

Shapes: T tokens, G key heads, R value heads per key head, K dims of a key, V dims of a value, C channels (or tokens of
a chunk), W taps of the convolution.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import meta_kernels
from .documents import WHOLE, Documents, Parts, part_of
from .fused import fused
from .kernels import Op, fastest, uncompiled
from .norms import at_least_float32, upcast
from .part_sizes import part_size

# Tokens of a chunk, solved at once. A longer chunk needs fewer sequential steps, but work within it grows with the
# square; flash-linear-attention uses 64 too.
CHUNK = part_size(__name__, "CHUNK", 64, small=64)


def causal_conv(x_TC: Tensor, weight_CW: Tensor, docs: Documents, halo: Parts = WHOLE, dilation: int = 1) -> Tensor:
    """Convolve each channel causally over W tokens, from zeros at each document's start, then SiLU. -> y_TC in x.dtype

    `halo`: x may be one of several parts of the stream (context parallelism); `docs` always describe the whole. A part
    needs the last (W - 1) * dilation rows before it. `dilation`: the distance between two of the W tokens.
    """
    positions_T = part_of(docs, halo, x=x_TC)
    if halo.parts == 1:
        y_TC: Tensor = _Convolution.apply(x_TC, weight_CW, positions_T, dilation)
        return F.silu(y_TC).to(x_TC.dtype)
    num_rows = (weight_CW.shape[1] - 1) * dilation
    extended_TC = torch.cat([_before(x_TC, num_rows, halo), x_TC])
    # Position 0 for the halo rows: their own outputs are dropped, and none of them may look further back.
    y_TC = _Convolution.apply(extended_TC, weight_CW, F.pad(positions_T, (num_rows, 0)), dilation)[num_rows:]
    return F.silu(y_TC).to(x_TC.dtype)


def _before(x_TC: Tensor, num: int, halo: Parts) -> Tensor:
    """Return the `num` rows before this part, from as many earlier parts as needed; zeros before the stream begins.

    The first part calls the collective too and slices its result, although it needs nothing: otherwise its backward
    would not take part in the reduce-scatter for which the other ranks wait.
    """
    num_own = min(num, len(x_TC))
    tails_NC = halo(x_TC[len(x_TC) - num_own :])
    return F.pad(tails_NC, (0, 0, num, 0))[halo.part * num_own :][:num]


class _Convolution(torch.autograd.Function):
    """Depthwise convolution y[t] = sum over j = 0 .. W-1 of x[t - j dilation] w[W - 1 - j], in at least float32.

    It saves x and no shifted copies of it. Tokens of another document are masked out instead of multiplied by 0: 0 *
    inf would turn their overflow into a NaN.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, positions_T: Tensor, dilation: int) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW, positions_T)
        ctx.dilation = dilation
        return _convolved(x_TC, weight_CW, positions_T, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW, positions_T = ctx.saved_tensors
        dx_TC, d_weight_CW = _convolution_gradients(x_TC, d_TC, weight_CW, positions_T, ctx.dilation)
        return dx_TC, d_weight_CW, None, None


@fused
def _convolved(x_TC: Tensor, weight_CW: Tensor, positions_T: Tensor, dilation: int) -> Tensor:
    """Compute the forward sum, one tap after the other."""
    x_TC, kernel = upcast(x_TC), upcast(weight_CW.to(x_TC.dtype)).T.flip(0)  # kernel[tap], as F.conv1d correlates
    y_TC = x_TC * kernel[0]
    for tap, back in _taps(kernel, dilation):
        y_TC[back:].addcmul_(_of_document(x_TC[:-back], positions_T[back:], back), kernel[tap])
    return y_TC


def _taps(kernel: Tensor, dilation: int) -> list[tuple[int, int]]:
    """Return the numbers of all taps but the first, and how many tokens each looks back."""
    return [(tap, tap * dilation) for tap in range(1, len(kernel))]


@fused
def _convolution_gradients(
    raw_TC: Tensor, d_TC: Tensor, weight_CW: Tensor, positions_T: Tensor, dilation: int
) -> tuple[Tensor, ...]:
    """Compute the gradients of x and of the weight. The weight's sum over tokens stays in at least float32."""
    x_TC, kernel = upcast(raw_TC), upcast(weight_CW.to(raw_TC.dtype)).T.flip(0)
    dx_TC, d_taps = d_TC * kernel[0], [(d_TC * x_TC).sum(0)]
    for tap, back in _taps(kernel, dilation):
        d = _of_document(d_TC[back:], positions_T[back:], back)
        dx_TC[:-back].addcmul_(d, kernel[tap])
        d_taps.append((d * _of_document(x_TC[:-back], positions_T[back:], back)).sum(0))
    d_weight_CW = torch.stack(d_taps).flip(0).T
    return dx_TC.to(raw_TC.dtype), d_weight_CW.to(weight_CW.dtype)


def _of_document(x: Tensor, positions: Tensor, back: int) -> Tensor:
    """Zero the rows that pair tokens t and t - back where these belong to different documents."""
    return x.masked_fill((positions < back)[:, None], 0.0)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the log decay g < 0 and the write strength beta in (0, 1) of each token, in at least float32.

    g = -exp(A_log) softplus(a + dt_bias), as in Mamba 2. It stays a logarithm: a product of exp(g) over many tokens
    underflows, the sum of g does not.
    """
    g = -upcast(A_log).exp() * F.softplus(upcast(a) + upcast(dt_bias))
    return g, upcast(b).sigmoid()


@uncompiled
def delta_rule(
    q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, gates: tuple[Tensor, Tensor], docs: Documents, states: Parts = WHOLE
) -> Tensor:
    """Run the gated delta rule, from an empty state for each document; each of G key heads serves R value heads. ->
    o_TGRV

    Token by token, with q and k normalised to unit length, q also scaled by K**-0.5, and the gates g and beta:

        S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

    The state S [K, V] is an associative memory: u is the error of reading k, so writing k u^T corrects what S stores
    for k instead of adding to it (the delta rule). `states`: the tokens may be one of several parts of a stream; `docs`
    always describe the whole.
    """
    inputs = (q_TGK, k_TGK, v_TGRV, *gates)
    positions_T = part_of(docs, states, q=q_TGK, k=k_TGK, v=v_TGRV, g=gates[0], beta=gates[1])
    if states.parts == 1:
        return _fastest(inputs)(*inputs, docs)
    halves = _fastest_halves(inputs) if len(positions_T) else None
    return _chunked(inputs, positions_T, states) if halves is None else _part_by(halves, inputs, docs, states)


def _fastest(inputs: Sequence[Tensor]) -> Op:
    """Choose the implementation for a whole stream: our kernels, else flash-linear-attention's, else the formula."""
    op = fastest(_triton_delta_rule, chunked, inputs, _gated, planned=meta_kernels.delta_rule)
    return fastest(_fla, chunked, inputs, _gated) if op is chunked else op


def _fastest_halves(inputs: Sequence[Tensor]) -> Any:
    """Choose the module whose `state_map` and `from_state` run a part of a stream; None: the formula."""
    op = fastest(_triton_delta_rule_in_parts, chunked, inputs, _gated, planned=meta_kernels.delta_rule)
    if op is meta_kernels.delta_rule:
        return meta_kernels
    return None if op is chunked else _triton_module()


def _triton_module() -> Any:
    """Import our kernels. Only a GPU needs them, and only there is Triton installed."""
    return importlib.import_module("meshwright.ops.kernels.delta_rule")


def _triton_delta_rule(
    q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents
) -> Tensor:
    """Run our own kernels. They do not take an empty stream, so the formula does."""
    if not len(v_TGRV):
        return chunked(q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR, docs)
    kernels, inputs = _triton_module(), (q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR)
    return kernels.from_state(inputs, kernels.stream_of(docs, 1, 0), None)


def _triton_delta_rule_in_parts(
    q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents
) -> Tensor:
    """Run our own kernels as two ranks would, each with half of the stream, to compare them with the formula."""
    inputs, kernels = (q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR), _triton_module()
    halves = list(zip(*(x.chunk(2) for x in inputs), strict=True))
    streams = [kernels.stream_of(docs, 2, part) for part in range(2)]
    maps = torch.stack([kernels.state_map(half, stream) for half, stream in zip(halves, streams, strict=True)])
    states = [_state_before(maps, part, q_TGK.shape[-1]) for part in range(2)]
    return torch.cat([kernels.from_state(*each) for each in zip(halves, streams, states, strict=True)])


def _part_by(kernels: Any, inputs: Sequence[Tensor], docs: Documents, parts: Parts) -> Tensor:
    """Run one part of a stream with kernels, in the two halves that `_part` explains."""
    stream = kernels.stream_of(docs, parts.parts, parts.part)
    maps = parts(kernels.state_map(inputs, stream)[None])
    o_TGRV: Tensor = kernels.from_state(inputs, stream, _state_before(maps, parts.part, inputs[0].shape[-1]))
    return o_TGRV


def _gated(noise: list[Tensor]) -> list[Tensor]:
    """Make gates from random numbers: g negative and beta in (0, 1)."""
    q, k, v, g, beta = noise
    return [q, k, v, -g.abs() / 4, beta.sigmoid()]


def _fla(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents) -> Tensor:
    """Call flash-linear-attention's kernel, which wants as many key heads as value heads."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k = (x.repeat_interleave(v_TGRV.shape[2], dim=1) for x in (q_TGK, k_TGK))
    v, g, beta = (x.flatten(1, 2) for x in (v_TGRV, g_TGR, beta_TGR))
    o, _ = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], cu_seqlens=docs.exact_cu_seqlens, use_qk_l2norm_in_kernel=True
    )
    o_TGRV: Tensor = o[0].unflatten(1, v_TGRV.shape[1:3])
    return o_TGRV.to(v_TGRV.dtype)


def chunked(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents) -> Tensor:
    """Run our own chunked form on a whole stream."""
    return _chunked((q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR), docs.positions_T, WHOLE)


def _chunked(inputs: Sequence[Tensor], positions_T: Tensor, states: Parts) -> Tensor:
    """Solve the delta rule chunk by chunk (the WY form of arXiv 2406.06484, with the decays of 2412.06464).

    In a chunk that begins with the state S0, let D_ij be the decay from token j to i, and d_i that from S0 to i.
    Unrolling the recurrence gives

        u_i + beta_i sum_{j<i} D_ij (k_i.k_j) u_j = beta_i (v_i - d_i S0^T k_i)       a unit triangular system for u
        o_i = d_i S0^T q_i + sum_{j<=i} D_ij (q_i.k_j) u_j

    Everything except S0 is matmuls over all chunks at once; only the scan over S0 is sequential. Chunks cut the stream
    and not the documents: D and d are 0 across a boundary, wherever it lies in the chunk, and that alone separates
    documents. So a document with NaN or inf spoils the documents that share its chunk, and all later ones.

    A weakness: several float32 tensors of T*G*R*CHUNK elements live at once.
    """
    num_tokens, dtype, work = len(inputs[2]), inputs[2].dtype, at_least_float32(inputs[2])
    # Suffix n: the number of chunks. v_nGRCV is [chunks, key heads, value heads per key head, tokens, value dims].
    q, k, v = (_chunks(x.to(work), CHUNK).movedim(1, -2) for x in inputs[:3])
    g, beta = (_chunks(x.to(work), CHUNK).movedim(1, -1) for x in inputs[3:])
    q, k = (_unit_length(x).unsqueeze(2) for x in (q, k))  # q_nG1CK: shared by R value heads
    q, beta = q * q.shape[-1] ** -0.5, beta.unsqueeze(-1)
    within, from_start = _decays(g, _padded_positions(positions_T, CHUNK))
    to_end, through = within[..., -1, :].unsqueeze(-1), from_start[..., -1, None, None]
    from_start = from_start.unsqueeze(-1)

    system = beta * (k @ k.mT) * within  # the solver takes its diagonal as 1 without reading it
    right = torch.cat([beta * v, beta * from_start * k], dim=-1)
    # Two right-hand sides in one solve: with and without the unknown S0, on which the solution depends linearly.
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_free, u_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # u = u_free - u_state @ S0
    scan = _whole if states.parts == 1 else partial(_part, parts=states)
    S0, u = scan(u_free, u_state, to_end * k, through)
    o = (from_start * q) @ S0 + ((q @ k.mT) * within) @ u
    o_TGRV: Tensor = o.movedim(-2, 1).flatten(0, 1)[:num_tokens]
    return o_TGRV.to(dtype)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Reshape [T, ...] to [n, C, ...], padded with zeros. They are inert: they decay nothing and write nothing.

    There is at least one chunk, so that an empty stream still gives every input a gradient.
    """
    num_chunks = max(1, -(-x.shape[0] // chunk))
    padding = (0, 0) * (x.dim() - 1) + (0, num_chunks * chunk - x.shape[0])
    padded: Tensor = F.pad(x, padding)
    return padded.view(num_chunks, chunk, *x.shape[1:])


def _padded_positions(positions_T: Tensor, chunk: int) -> Tensor:
    """Chunk the positions. Padding continues the last document, so that its final state passes through the padding."""
    num_chunks = max(1, -(-len(positions_T) // chunk))
    more = torch.arange(1, num_chunks * chunk - len(positions_T) + 1, device=positions_T.device)
    return torch.cat([positions_T, positions_T[-1:].sum() + more]).view(num_chunks, chunk)


def _unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last dim to unit length, with the eps of flash-linear-attention inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _decays(g_nGRC: Tensor, positions_nC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decay from token j to i of a chunk [n, G, R, C, C], and from the state before it to i [n, G, R, C].

    Both are 0 across the start of a document. Log decays are summed from j on for each j, and not taken as a difference
    of two prefix sums: one very negative g (even of an earlier document) would cancel all digits of that difference.
    Masked entries become -inf before exp, so that nothing masked can overflow and make a NaN in backward.
    """
    i_C = torch.arange(g_nGRC.shape[-1], device=g_nGRC.device)
    distance_CC = i_C[:, None] - i_C
    unseen_nCC = (distance_CC < 0) | (positions_nC[:, :, None] < distance_CC)
    sums = g_nGRC.unsqueeze(-1).expand(*g_nGRC.shape, i_C.shape[0]).tril(-1).cumsum(-2)
    within = sums.masked_fill(unseen_nCC[:, None, None], -torch.inf).exp()
    from_start = g_nGRC.cumsum(-1).masked_fill((positions_nC <= i_C)[:, None, None], -torch.inf).exp()
    return within, from_start


def _scan(
    u_free: Tensor, u_state: Tensor, k_to_end: Tensor, through: Tensor, state: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Carry the state through the chunks; return the states before each and after the last, and u.

    States are [G, R, K, V], u is [G, R, C, V]. This is the only sequential part: two small matmuls per chunk.
    """
    states, us = [state], []
    for free, coupling, keys, decay in zip(*(x.unbind(0) for x in (u_free, u_state, k_to_end, through)), strict=True):
        us.append(free - coupling @ states[-1])
        states.append(decay * states[-1] + keys.mT @ us[-1])
    return states, us


def _whole(u_free: Tensor, u_state: Tensor, k_to_end: Tensor, through: Tensor) -> tuple[Tensor, Tensor]:
    """Scan from an empty state; return the states before the chunks [n, G, R, K, V] and u [n, G, R, C, V]."""
    state = u_free.new_zeros(*u_free.shape[1:3], k_to_end.shape[-1], u_free.shape[-1])
    states, us = _scan(u_free, u_state, k_to_end, through, state)
    return torch.stack(states[:-1]), torch.stack(us)


def _part(u_free: Tensor, u_state: Tensor, k_to_end: Tensor, through: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """Scan one part of a stream, from the state that the earlier parts leave; return states and u as `_whole` does.

    A part maps the state S before it to A S + b after it, because the recurrence is linear in S. A is the result for
    the identity as state if no values are written, b the result for an empty state. One scan computes [A | b] side by
    side, before any rank knows its own S; one all-gather of [A | b] then gives every rank the maps of the parts before
    it. So ranks run in parallel, where passing the state along would make each wait for the previous one.
    """
    K, (_, G, R, _, V) = k_to_end.shape[-1], u_free.shape
    identity = torch.eye(K, K + V, dtype=u_free.dtype, device=u_free.device).expand(G, R, K, K + V)
    affine, _ = _scan(F.pad(u_free, (K, 0)), u_state, k_to_end, through, identity)
    state = _state_before(parts(affine[-1][None]), parts.part, K)
    A, b = torch.stack(affine[:-1]).split([K, V], dim=-1)
    states = A @ state + b
    return states, u_free - u_state @ states


def _state_before(maps: Tensor, part: int, K: int) -> Tensor:
    """Apply the maps [A | b] of the earlier parts in turn; return the state before a part."""
    # An empty sum instead of zeros: it ties the first part's graph to `maps`, so that its backward also joins the
    # reduce-scatter. With plain zeros the other ranks would wait for it.
    state: Tensor = maps[:0].sum(0)[..., K:]
    for affine_map in maps[:part]:
        state = affine_map[..., :K] @ state + affine_map[..., K:]
    return state
