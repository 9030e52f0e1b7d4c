"""Stand-ins for kernels on the meta device, which reproduce what they allocate and save, to simulate memory.

A plan runs a step of the model on meta tensors for hardware that need not be present. Nothing is computed, so nothing
can be read, and kernels of other packages do not run. A stand-in allocates the same buffers in the same order, so that
the peak is that of the real kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_planned_kind = "cpu"  # of this process: a plan runs in one thread


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """Let the meta device stand for devices of a kind, such as "cpu" or "cuda"."""
    global _planned_kind  # noqa: PLW0603 - operations are far below whoever plans
    previous, _planned_kind = _planned_kind, kind
    try:
        yield
    finally:
        _planned_kind = previous


def kind_of(device: torch.device) -> str:
    """Return the kind of device that work on `device` is for."""
    return _planned_kind if device.type == "meta" else device.type


def to_host(counts: Sequence[Tensor], totals: Sequence[int]) -> list[list[int]]:
    """Copy counts to the host, with one wait for all of them. On the meta device each splits its total evenly."""
    lengths = [len(each) for each in counts]
    if counts[0].device.type == "meta":
        shares = zip(lengths, totals, strict=True)
        return [[total // num + (i < total % num) for i in range(num)] for num, total in shares]
    values = iter(torch.cat([*counts]).tolist())
    return [list(islice(values, num)) for num in lengths]


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, _docs: object = None) -> Tensor:
    """Allocate what a varlen attention kernel does."""
    o_THK: Tensor = _Attention.apply(q_THK, k_TGK, v_TGK)  # torch leaves apply untyped
    return o_THK


class _Attention(torch.autograd.Function):
    """FlashAttention (arXiv 2205.14135): it saves operands, result and the logsumexp of each row, and no [T, T]
    scores.
    """

    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        o_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, o_THK, _float32_like(o_THK[..., 0]))
        return o_THK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor, ...]:
        """Allocate dk and dv per query head first: the kernel computes them so, and then sums them over grouped heads.

        dq is accumulated in float32 on a GPU.
        """
        q_THK, k_TGK, v_TGK, *_ = ctx.saved_tensors
        d_THK = d_THK.contiguous()
        accumulator = _float32_like(q_THK) if kind_of(q_THK.device) != "cpu" else q_THK
        dq, dk, dv = (torch.empty_like(q_THK) for _ in range(3))
        del accumulator, d_THK
        return dq, dk.new_empty(k_TGK.shape), dv.new_empty(v_TGK.shape)


def delta_rule(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, _docs: object) -> Tensor:
    """Allocate what flash-linear-attention's gated delta rule does."""
    o_TGRV: Tensor = _Delta.apply(q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR)
    return o_TGRV


class _Delta(torch.autograd.Function):
    """It saves its operands and the triangular systems of its chunks, and recomputes the states in backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        q_TGK, _, v_TGRV, *_ = inputs
        heads, T = v_TGRV.shape[1] * v_TGRV.shape[2], len(v_TGRV)
        keys = [q_TGK.new_empty(T, heads, q_TGK.shape[2]) for _ in range(2)]
        systems = v_TGRV.new_empty(T, heads, _CHUNK)
        states = v_TGRV.new_empty(-(-T // _CHUNK), heads, q_TGK.shape[2], v_TGRV.shape[3])
        work = [torch.empty_like(v_TGRV), torch.empty_like(keys[0])]
        o_TGRV = torch.empty_like(v_TGRV)
        ctx.save_for_backward(*inputs, *keys, systems)
        del states, work
        return o_TGRV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TGRV: Tensor) -> tuple[Tensor, ...]:
        q_TGK, k_TGK, v_TGRV, g, beta, key, *_ = ctx.saved_tensors
        num_chunks, heads = -(-len(v_TGRV) // _CHUNK), key.shape[1]
        states = [v_TGRV.new_empty(num_chunks, heads, key.shape[2], v_TGRV.shape[3]) for _ in range(2)]
        key_grads, value_grads = [_float32_like(key) for _ in range(3)], [torch.empty_like(v_TGRV) for _ in range(2)]
        grads = [torch.empty_like(t) for t in (q_TGK, k_TGK, v_TGRV, g, beta)]
        del states, key_grads, value_grads
        return tuple(grads)


# The chunk length of flash-linear-attention.
_CHUNK = 64


def _float32_like(like: Tensor) -> Tensor:
    """Allocate a float32 tensor of the same shape."""
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)
