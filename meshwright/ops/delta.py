"""The gated delta net's sequence operations: short convolution, gates, gated delta rule.

All boundaries come from `positions_T`: token i-d is of the same document as token i if and only if i's position is at
least d. So nothing here loops over documents, pads them, or has a shape that depends on them.
"""

from __future__ import annotations

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
from .kernels import fastest, uncompiled
from .norms import at_least_float32, upcast
from .part_sizes import part_size

CHUNK = part_size(__name__, "CHUNK", 64, small=64)  # tokens that are solved for at once


def causal_conv(x_TC: Tensor, weight_CW: Tensor, docs: Documents, halo: Parts = WHOLE) -> Tensor:
    """Depthwise causal convolution over W tokens, each document starting from zeros; then SiLU. -> y_TC in x.dtype

    `halo`: x may be one of the parts of a stream, and `docs` are of the whole.
    """
    positions_T = part_of(docs, halo, x=x_TC)
    if halo.parts == 1:
        y_TC: Tensor = _Convolution.apply(x_TC, weight_CW, positions_T)
        return F.silu(y_TC).to(x_TC.dtype)
    num = weight_CW.shape[1] - 1
    more_TC = torch.cat([_before(x_TC, num, halo), x_TC])
    y_TC = _Convolution.apply(more_TC, weight_CW, F.pad(positions_T, (num, 0)))[num:]
    return F.silu(y_TC).to(x_TC.dtype)


def _before(x_TC: Tensor, num: int, halo: Parts) -> Tensor:
    """The `num` rows before this part, from as many parts as have them; zeros before the stream begins.

    The first part takes what the others bring too, though it needs nothing: in backward they would wait for it.
    """
    has = min(num, len(x_TC))
    tails_NC = halo(x_TC[len(x_TC) - has :])
    return F.pad(tails_NC, (0, 0, num, 0))[halo.part * has :][:num]


class _Convolution(torch.autograd.Function):
    """y[t] = sum over back = 0 .. W-1 of x[t - back] w[W - 1 - back], in at least float32; keeps x and no shifted copy.

    Tokens of another document are masked, not multiplied by 0: its inf must not become a NaN here.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, positions_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_CW, positions_T)
        return _convolved(x_TC, weight_CW, positions_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TC: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TC, weight_CW, positions_T = ctx.saved_tensors
        dx_TC, d_weight_CW = _convolution_gradients(x_TC, d_TC, weight_CW, positions_T)
        return dx_TC, d_weight_CW, None


@fused
def _convolved(x_TC: Tensor, weight_CW: Tensor, positions_T: Tensor) -> Tensor:
    x_TC, kernel = upcast(x_TC), upcast(weight_CW.to(x_TC.dtype)).T.flip(0)  # taps[back]
    y_TC = x_TC * kernel[0]
    for back in range(1, len(kernel)):
        y_TC[back:].addcmul_(_of_document(x_TC[:-back], positions_T[back:], back), kernel[back])
    return y_TC


@fused
def _convolution_gradients(
    given_TC: Tensor, d_TC: Tensor, weight_CW: Tensor, positions_T: Tensor
) -> tuple[Tensor, ...]:
    x_TC, kernel = upcast(given_TC), upcast(weight_CW.to(given_TC.dtype)).T.flip(0)
    dx_TC, d_taps = d_TC * kernel[0], [(d_TC * x_TC).sum(0)]
    for back in range(1, len(kernel)):
        d = _of_document(d_TC[back:], positions_T[back:], back)
        dx_TC[:-back].addcmul_(d, kernel[back])
        d_taps.append((d * _of_document(x_TC[:-back], positions_T[back:], back)).sum(0))
    d_weight_CW = torch.stack(d_taps).flip(0).T
    return dx_TC.to(given_TC.dtype), d_weight_CW.to(weight_CW.dtype)


def _of_document(x: Tensor, positions: Tensor, back: int) -> Tensor:
    """Rows that pair tokens t and t - back, 0 where these are not of one document."""
    return x.masked_fill((positions < back)[:, None], 0.0)


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log decay g < 0, write strength beta in (0, 1)), both in at least float32."""
    g = -upcast(A_log).exp() * F.softplus(upcast(a) + upcast(dt_bias))
    return g, upcast(b).sigmoid()


@uncompiled
def delta_rule(
    q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, gates: tuple[Tensor, Tensor], docs: Documents, states: Parts = WHOLE
) -> Tensor:
    """Gated delta rule; each of G key heads serves R value heads; the state restarts at each document. -> o_TGRV

    Token by token, with unit-length q and k, q also times K**-0.5, and the gates g and beta:
        S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q
    `states`: the tokens may be one of the parts of a stream, and `docs` are of the whole. Its weakness: a part is
    computed in our own form, whatever kernel there is.
    """
    inputs = (q_TGK, k_TGK, v_TGRV, *gates)
    positions_T = part_of(docs, states, q=q_TGK, k=k_TGK, v=v_TGRV, g=gates[0], beta=gates[1])
    if states.parts == 1:
        return fastest(_fla, chunked, inputs, _gated, planned=meta_kernels.delta_rule)(*inputs, docs)
    return _chunked(inputs, positions_T, states)


def _gated(noise: list[Tensor]) -> list[Tensor]:
    q, k, v, g, beta = noise
    return [q, k, v, -g.abs() / 4, beta.sigmoid()]


def _fla(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents) -> Tensor:
    """flash-linear-attention's, which wants as many key heads as value heads."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k = (x.repeat_interleave(v_TGRV.shape[2], dim=1) for x in (q_TGK, k_TGK))
    v, g, beta = (x.flatten(1, 2) for x in (v_TGRV, g_TGR, beta_TGR))
    o, _ = chunk_gated_delta_rule(
        q[None], k[None], v[None], g[None], beta[None], cu_seqlens=docs.exact_cu_seqlens, use_qk_l2norm_in_kernel=True
    )
    o_TGRV: Tensor = o[0].unflatten(1, v_TGRV.shape[1:3])
    return o_TGRV.to(v_TGRV.dtype)


def chunked(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, docs: Documents) -> Tensor:
    """Our own form, of a whole stream."""
    return _chunked((q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR), docs.positions_T, WHOLE)


def _chunked(inputs: Sequence[Tensor], positions_T: Tensor, states: Parts) -> Tensor:
    """In a chunk that begins with state S0, with D_ij the decay from j to i and d_i that from S0 to i:
        u_i + beta_i sum_{j<i} D_ij (k_i.k_j) u_j = beta_i (v_i - d_i S0^T k_i)       a unit triangular system for u
        o_i = d_i S0^T q_i + sum_{j<=i} D_ij (q_i.k_j) u_j
    so all but S0 is matrix products over all chunks at once. Chunks cut the stream, not the documents: D and d are 0
    across a boundary, wherever it lies in the chunk, and that alone separates documents. So one that is not finite
    takes those of its chunk, and all later ones, with it.
    Its weakness: several float32 tensors of T*G*R*CHUNK elements live at once.
    """
    num_tokens, dtype, work = len(inputs[2]), inputs[2].dtype, at_least_float32(inputs[2])
    q, k, v = (_chunks(x.to(work), CHUNK).movedim(1, -2) for x in inputs[:3])  # n chunks: v_nGRCV
    g, beta = (_chunks(x.to(work), CHUNK).movedim(1, -1) for x in inputs[3:])  # g_nGRC
    q, k = (_unit_length(x).unsqueeze(2) for x in (q, k))  # q_nG1CK: shared by R value heads
    q, beta = q * q.shape[-1] ** -0.5, beta.unsqueeze(-1)
    within, from_start = _decays(g, _going_on(positions_T, CHUNK))
    to_end, through = within[..., -1, :].unsqueeze(-1), from_start[..., -1, None, None]
    from_start = from_start.unsqueeze(-1)

    system = beta * (k @ k.mT) * within  # the solver takes its diagonal as 1 without reading it
    right = torch.cat([beta * v, beta * from_start * k], dim=-1)
    solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_free, u_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)  # u = u_free - u_state @ S0
    scan = _whole if states.parts == 1 else partial(_part, parts=states)
    S0, u = scan(u_free, u_state, to_end * k, through)
    o = (from_start * q) @ S0 + ((q @ k.mT) * within) @ u
    o_TGRV: Tensor = o.movedim(-2, 1).flatten(0, 1)[:num_tokens]
    return o_TGRV.to(dtype)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[T, ...] -> [n, C, ...], padded with zeros, which are inert: they decay nothing and write nothing.

    At least one chunk, so that an empty stream too gives every input a gradient.
    """
    num_chunks = max(1, -(-x.shape[0] // chunk))
    padding = (0, 0) * (x.dim() - 1) + (0, num_chunks * chunk - x.shape[0])
    padded: Tensor = F.pad(x, padding)
    return padded.view(num_chunks, chunk, *x.shape[1:])


def _going_on(positions_T: Tensor, chunk: int) -> Tensor:
    """The same of positions. What is padded goes on with the last document, so that its state passes through."""
    num_chunks = max(1, -(-len(positions_T) // chunk))
    more = torch.arange(1, num_chunks * chunk - len(positions_T) + 1, device=positions_T.device)
    return torch.cat([positions_T, positions_T[-1:].sum() + more]).view(num_chunks, chunk)


def _unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _decays(g_nGRC: Tensor, positions_nC: Tensor) -> tuple[Tensor, Tensor]:
    """The decay from token j to i of a chunk [n, G, R, C, C], and from the state before the chunk to i [n, G, R, C].

    Both 0 across a document's start. Log decays are summed from j on for each j, not as a difference of sums from the
    chunk's start: one very negative g (of an earlier document, even) would take all digits from that difference.
    Masked before exp, so that nothing masked can overflow and give NaN in backward.
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
    """The only sequential part: the state [G, R, K, V] before each chunk and after the last, and u [G, R, C, V]."""
    states, us = [state], []
    for free, coupling, keys, decay in zip(*(x.unbind(0) for x in (u_free, u_state, k_to_end, through)), strict=True):
        us.append(free - coupling @ states[-1])
        states.append(decay * states[-1] + keys.mT @ us[-1])
    return states, us


def _whole(u_free: Tensor, u_state: Tensor, k_to_end: Tensor, through: Tensor) -> tuple[Tensor, Tensor]:
    """The states before the chunks [n, G, R, K, V] and u [n, G, R, C, V], from no state at all."""
    state = u_free.new_zeros(*u_free.shape[1:3], k_to_end.shape[-1], u_free.shape[-1])
    states, us = _scan(u_free, u_state, k_to_end, through, state)
    return torch.stack(states[:-1]), torch.stack(us)


def _part(u_free: Tensor, u_state: Tensor, k_to_end: Tensor, through: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """The same from the state that the parts before leave.

    What tokens make of a state S is A S + b. A is what they make of the identity without their values, b what they make
    of no state. One scan makes both side by side, before any rank knows its S, so that no rank waits for its turn.
    """
    K, (_, G, R, _, V) = k_to_end.shape[-1], u_free.shape
    identity = torch.eye(K, K + V, dtype=u_free.dtype, device=u_free.device).expand(G, R, K, K + V)
    pairs, _ = _scan(F.pad(u_free, (K, 0)), u_state, k_to_end, through, identity)
    of_parts = parts(pairs[-1][None])
    # a sum over no part, of which backward knows: else the first part took nothing, and the others would wait for it
    state = of_parts[:0].sum(0)[..., K:]
    for pair in of_parts[: parts.part]:
        state = pair[..., :K] @ state + pair[..., K:]
    A, b = torch.stack(pairs[:-1]).split([K, V], dim=-1)
    states = A @ state + b
    return states, u_free - u_state @ states
