"""Operations on the meta device, where a step is run to see what it would hold, on a device that need not be there.

Nothing is computed there, so nothing can be read, and kernels of other packages do not run. What stands for them here
makes what they make, and keeps what they keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_meant = "cpu"  # not by thread: what is planned runs in one


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """Within it the meta device stands for devices of a kind, such as "cpu" or "cuda"."""
    global _meant  # noqa: PLW0603 - operations are far below whoever plans
    before, _meant = _meant, kind
    try:
        yield
    finally:
        _meant = before


def kind_of(device: torch.device) -> str:
    """The kind of device that work is for."""
    return _meant if device.type == "meta" else device.type


def on_host(counts: Sequence[Tensor], totals: Sequence[int]) -> list[list[int]]:
    """Copy counts to the host, which waits once for all of them. On the meta device each shares its total evenly."""
    sizes = [len(each) for each in counts]
    if counts[0].device.type == "meta":
        shares = zip(sizes, totals, strict=True)
        return [[total // num + (i < total % num) for i in range(num)] for num, total in shares]
    values = iter(torch.cat([*counts]).tolist())
    return [list(islice(values, num)) for num in sizes]


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, _docs: object = None) -> Tensor:
    o_THK: Tensor = _Attention.apply(q_THK, k_TGK, v_TGK)  # torch leaves apply untyped
    return o_THK


class _Attention(torch.autograd.Function):
    """A kernel that holds no scores: it keeps its operands, its result and a number for each row of scores."""

    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        o_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
        ctx.save_for_backward(q_THK, k_TGK, v_TGK, o_THK, _wide(o_THK[..., 0]))
        return o_THK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor, ...]:
        """Gradients of keys and values are first those of each query head."""
        q_THK, k_TGK, v_TGK, *_ = ctx.saved_tensors
        d_THK = d_THK.contiguous()
        sums = _wide(q_THK) if kind_of(q_THK.device) != "cpu" else q_THK
        dq, dk, dv = (torch.empty_like(q_THK) for _ in range(3))
        del sums, d_THK
        return dq, dk.new_empty(k_TGK.shape), dv.new_empty(v_TGK.shape)


def delta_rule(q_TGK: Tensor, k_TGK: Tensor, v_TGRV: Tensor, g_TGR: Tensor, beta_TGR: Tensor, _docs: object) -> Tensor:
    o_TGRV: Tensor = _Delta.apply(q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR)
    return o_TGRV


class _Delta(torch.autograd.Function):
    """flash-linear-attention's: it keeps its operands and the systems of its chunks, and makes states again."""

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
        of_keys, of_values = [_wide(key) for _ in range(3)], [torch.empty_like(v_TGRV) for _ in range(2)]
        grads = [torch.empty_like(t) for t in (q_TGK, k_TGK, v_TGRV, g, beta)]
        del states, of_keys, of_values
        return tuple(grads)


_CHUNK = 64


def _wide(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)
