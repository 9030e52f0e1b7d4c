"""Gated residual streams (hyper-connections, arXiv 2409.19606) of Qwen4-Exp: n residuals of width D per token.

A block reads a gated mean of the normalised streams, and its output is added to each stream with a gate per stream. The
streams themselves are neither normalised nor mixed with each other.

Shapes: T tokens, n streams, D width of one, C = n D, P rank of the mixing gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .norms import upcast


class StreamGates(NamedTuple):
    """The parameters of a read. `inject_nC` is None at the end of the model, where nothing more is added."""

    norm_C: Tensor
    down_PC: Tensor
    up_CP: Tensor
    inject_nC: Tensor | None


def grouped_rms_norm(x_TC: Tensor, weight_C: Tensor, groups: int, eps: float) -> Tensor:
    """Normalise each of n equal groups of the last dim by its own root mean square, zero-centred, in x.dtype."""
    wide = upcast(x_TC).unflatten(-1, (groups, -1))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (1 + upcast(weight_C.to(x_TC.dtype)))).to(x_TC.dtype)


def read_streams(x_TC: Tensor, mixer: StreamGates, streams: int, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return what a block sees, `[T, D]`, and how much of its output goes to each stream, `[T, n]`; None at the end.

    Only x is kept for backward, which recomputes the rest: the norm, the gate and their product would be three tensors
    as wide as all streams, twice per layer.
    """
    mixed_TD, inject_Tn = _Read.apply(x_TC, streams, eps, *mixer)
    return mixed_TD, inject_Tn


def _read(x_TC: Tensor, mixer: StreamGates, streams: int, eps: float) -> tuple[Tensor, Tensor | None]:
    y_TC, dtype = grouped_rms_norm(x_TC, mixer.norm_C, streams, eps), x_TC.dtype
    low_TP = F.silu(F.linear(y_TC, mixer.down_PC.to(dtype)) / streams)
    gate_TC = F.linear(low_TP, mixer.up_CP.to(dtype)).sigmoid()
    mixed_TD = (gate_TC * y_TC).unflatten(-1, (streams, -1)).mean(-2)  # of y, not of x; a mean, not a sum
    if mixer.inject_nC is None:
        return mixed_TD, None
    return mixed_TD, 2 * (F.linear(y_TC, mixer.inject_nC.to(dtype)) / streams).sigmoid()


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, streams: int, eps: float, *mixer: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x_TC, *mixer)
        ctx.streams, ctx.eps = streams, eps
        return _read(x_TC, StreamGates(*mixer), streams, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d: Tensor) -> tuple[Tensor | None, ...]:
        saved: list[Any] = [None if each is None else each.detach() for each in ctx.saved_tensors]
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        wanted = [i for i, each in enumerate(saved) if each is not None and needed[i]]
        with torch.enable_grad():
            for i in wanted:
                saved[i].requires_grad_()
            outputs = _read(saved[0], StreamGates(*saved[1:]), ctx.streams, ctx.eps)
        used = [(out, each) for out, each in zip(outputs, d, strict=True) if out is not None]
        grads = torch.autograd.grad([out for out, _ in used], [saved[i] for i in wanted], [each for _, each in used])
        by_place = dict(zip(wanted, grads, strict=True))
        return by_place.get(0), None, None, *(by_place.get(i) for i in range(1, len(saved)))


def write_streams(x_TC: Tensor, out_TD: Tensor, inject_Tn: Tensor) -> Tensor:
    """Add the output of a block to each stream: `x[s] + inject[s] * out`."""
    return x_TC + (inject_Tn[:, :, None] * out_TD[:, None, :]).flatten(1)
