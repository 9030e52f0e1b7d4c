"""Stand-ins for kernels on the meta device, which reproduce what they allocate and save, to simulate memory.

A plan runs a step of the model on meta tensors for hardware that need not be present. Nothing is computed, so values
cannot be read, and kernels of other packages do not run. A stand-in allocates the same buffers in the same order, so
that the peak is that of the real kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_planned_kind = "cpu"  # one per process: a plan runs in one thread


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
    """Copy counts to the host, with one wait for all of them. On the meta device each total is split evenly."""
    lengths = [len(each) for each in counts]
    if counts[0].device.type == "meta":
        shares = zip(lengths, totals, strict=True)
        return [[total // num + (i < total % num) for i in range(num)] for num, total in shares]
    values = iter(torch.cat([*counts]).tolist())
    return [list(islice(values, num)) for num in lengths]


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, _docs: object = None) -> Tensor:
    """Allocate the buffers of a varlen attention kernel."""
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
    """Allocate the buffers of our gated delta rule kernels (kernels/delta_rule.py). The next three functions belong to
    them."""
    return from_state((q_TGK, k_TGK, v_TGRV, g_TGR, beta_TGR), None, None)


def stream_of(_docs: object, _parts: int, _part: int) -> None:
    """Cut out nothing: only the sizes of tensors count."""


def from_state(inputs: Sequence[Tensor], _stream: object, state_GRKV: Tensor | None) -> Tensor:
    """Allocate the buffers that a run of a stream or a part of it needs."""
    o_TGRV: Tensor = _Delta.apply(*inputs, state_GRKV)
    return o_TGRV


def state_map(inputs: Sequence[Tensor], _stream: object) -> Tensor:
    """Allocate the buffers of `state_map` of a part."""
    _, k_TGK, v_TGRV, g_TGR, beta_TGR = inputs
    affine: Tensor = _LastState.apply(k_TGK, torch.nn.functional.pad(v_TGRV, (k_TGK.shape[2], 0)), g_TGR, beta_TGR)
    return affine


class _Delta(torch.autograd.Function):
    """The delta rule: saves its operands, the solved systems of its chunks, and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, state = arguments
        inputs, solved = _rows(inputs), _solved(*inputs[1:3])
        ctx.save_for_backward(*inputs, *solved)
        ctx.state = None if state is None else state.shape
        return inputs[2].new_empty(inputs[2].shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_TGRV: Tensor) -> tuple[Tensor | None, ...]:
        q_TGK, *others = ctx.saved_tensors
        d_TGRV = d_TGRV.contiguous()
        dk_TGRK = _float32(q_TGK, *others[1].shape[:3], q_TGK.shape[2])
        dq_TGRK = torch.empty_like(dk_TGRK, dtype=torch.float32 if dk_TGRK.shape[2] > 1 else q_TGK.dtype)
        dq_TGK = dq_TGRK.sum(2).to(q_TGK.dtype)
        del dq_TGRK
        state = None if ctx.state is None else _float32(q_TGK, *ctx.state)
        return dq_TGK, *_delta_gradients(others, dk_TGRK), state


class _LastState(torch.autograd.Function):
    """The last state of a part: saves the same tensors as `_Delta`, without q."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        (_, _, K), (_, G, R, V) = inputs[0].shape, inputs[1].shape
        ctx.save_for_backward(*_rows(inputs), *_solved(*inputs[:2]))
        return _float32(inputs[0], G, R, K, V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        k_TGK, v_TGRV, *_ = ctx.saved_tensors
        return _delta_gradients(ctx.saved_tensors, _float32(k_TGK, *v_TGRV.shape[:3], k_TGK.shape[2]))


def _rows(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copy the inputs whose rows are not contiguous."""
    return [x if x[:1].is_contiguous() else x.contiguous() for x in inputs]


def _solved(k_TGK: Tensor, v_TGRV: Tensor) -> list[Tensor]:
    """Allocate the systems, their two solutions, the states, and the norms of keys and queries."""
    T, G, R, V = v_TGRV.shape
    K, V = (max(16, _power_of_two(k_TGK.shape[2])), _padded_values(V))
    chunks = (-(-T // _CHUNK), G * R)
    systems = [v_TGRV.new_empty(*chunks, _CHUNK, width) for width in (_CHUNK, V, K)]
    norms = [_float32(v_TGRV, *chunks, _CHUNK) for _ in range(2)]
    return [*systems, v_TGRV.new_empty(*chunks, K, V), *norms]


def _delta_gradients(saved: Sequence[Tensor], dk_TGRK: Tensor) -> tuple[Tensor, ...]:
    """Allocate the gradients of k, v, g and beta, and on the way those of the solutions and of the states."""
    k_TGK, v_TGRV, g_TGR, beta_TGR, _, solution, _, states, *_ = saved
    work = [torch.empty_like(solution), torch.empty_like(states)]
    gates = [torch.empty_like(x) for x in (g_TGR, beta_TGR)]
    dv_TGRV, dk_TGK = v_TGRV.new_empty(v_TGRV.shape), dk_TGRK.sum(2).to(k_TGK.dtype)
    del work
    return dk_TGK, dv_TGRV, *gates


def _padded_values(width: int) -> int:
    """Return the columns of a solution; programs take at most 64 at a time."""
    columns = min(64, max(16, _power_of_two(width)))
    return -(-width // columns) * columns


def _power_of_two(width: int) -> int:
    """Return the least power of two that is at least `width`."""
    return 1 << (width - 1).bit_length()


# The chunk length of the kernels of the gated delta rule.
_CHUNK = 64


def _float32(like: Tensor, *shape: int) -> Tensor:
    """Allocate a float32 tensor on the device of another."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _float32_like(like: Tensor) -> Tensor:
    """Allocate a float32 tensor of the same shape."""
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)
