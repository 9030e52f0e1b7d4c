"""Mixture of experts on one device: who goes where, and the experts' MLPs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .deferred_weight_grads import is_late, left_for_later
from .fp8_matmul import fp8_linear
from .fp8_storage import Weight, kept, restored
from .kernels import uncompiled
from .matmul import operand, product_dtype
from .meta_kernels import kind_of, on_host
from .norms import swiglu, upcast
from .replayed_choices import once
from .rows import Rows

_GROUPING = (9, 10)  # GPUs from Hopper to Blackwell
_TILE = 16  # rows that CPUs with matrix registers multiply at once


@uncompiled
def route(logits_TE: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights_Tk in at least float32, indices_Tk): softmax over all experts, then the k largest."""
    shares_TE = upcast(logits_TE).softmax(-1)
    indices_Tk = once(lambda: shares_TE.detach().topk(k, dim=-1).indices)
    weights_Tk = shares_TE.gather(-1, indices_Tk)
    if renormalise:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, indices_Tk


@uncompiled
def experts(rows: Rows, gate_up_ERD: Weight, down_EDF: Weight, *, fp8: tuple[bool, bool] = (False, False)) -> Tensor:
    """SwiGLU experts on rows sorted by expert; R = 2F rows, [gate; up]. -> y_ND, each row times its weight: before
    `down`, where rows are narrow and nothing else keeps them.

    If the host does not know how many rows each expert has, the loop over experts asks the device, and waits for it.

    An expert without rows, or all of them, still get gradients: zeros, never None. `fp8`: whether the products with
    `gate_up` and `down` are in 8 bits. A scale is of one row, or of one expert, so no routing moves it.
    """
    x_ND, counts_E, weight_N = rows.x_ND, rows.counts_E, rows.weight_N
    if counts_E.device.type == "cpu" and int(counts_E.sum()) != x_ND.shape[0]:
        # the grouped kernel would leave the rows beyond the counts uninitialised, here and in dX
        raise ValueError(f"counts of experts sum to {int(counts_E.sum())} but there are {x_ND.shape[0]} rows")
    if can_group(x_ND, down_EDF) and not any(fp8):  # no grouped kernel has scales for such blocks
        return _grouped(x_ND, gate_up_ERD, down_EDF, counts_E, weight_N)
    known = on_host([counts_E], [len(x_ND)])[0] if rows.counts is None else rows.counts
    return _looped(x_ND, gate_up_ERD, down_EDF, known, weight_N, fp8)


def can_group(x_ND: Tensor, down_EDF: Weight) -> bool:
    """Whether grouped_mm takes these, in backward too: it has no float64, and wants strides of whole 16 bytes.

    The strides are D, 2F and F elements; an F that does not fit passes forward and fails only in backward. On a CPU
    it does not pad rows, which bf16 wants there (`_factor`). On a GPU it has a kernel for bf16 from Hopper to
    Blackwell; elsewhere it loops as we do, but waits for the device at each product.
    """
    if kind_of(x_ND.device) == "cpu":
        kernel = x_ND.dtype == torch.float32
    else:
        kernel = x_ND.dtype == torch.bfloat16 and _capability(x_ND.device)[0] in _GROUPING
    return kernel and all(width * x_ND.element_size() % 16 == 0 for width in down_EDF.shape[1:])


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    if device.type == "meta":  # a GPU is planned for that has the kernel
        return _GROUPING[0], 0
    found: tuple[int, int] = torch.get_device_module(device).get_device_capability(device)
    return found


def _grouped(x_ND: Tensor, gate_up_ERD: Weight, down_EDF: Weight, counts_E: Tensor, weight_N: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0).to(torch.int32)
    hidden_NR = _grouped_linear(x_ND, gate_up_ERD, counts_E, ends_E)
    return _grouped_linear(swiglu(hidden_NR, weight_N), down_EDF, counts_E, ends_E)


def _grouped_linear(x: Tensor, weight_EOI: Weight, counts_E: Tensor, ends_E: Tensor) -> Tensor:
    if isinstance(weight_EOI, Tensor):
        weight_EOI = weight_EOI.to(x.dtype)
    if is_late() or not isinstance(weight_EOI, Tensor):
        return _LateGroups.apply(x, weight_EOI, counts_E, ends_E)  # torch leaves apply untyped
    used_EOI: Tensor = _ZeroGradient.apply(weight_EOI, counts_E)
    y: Tensor = F.grouped_mm(_contiguous(x), used_EOI.contiguous().mT, offs=ends_E)
    return _ContiguousGradient.apply(y)


class _LateGroups(torch.autograd.Function):
    """The same with a backward that can leave the gradient of the weights for later. Of weights in 8 bits it keeps
    these, and makes their values again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_EOI: Weight, counts_E: Tensor, ends_E: Tensor) -> Tensor:
        tensors, ctx.grids = kept([weight_EOI])
        ctx.save_for_backward(x, counts_E, ends_E, *tensors)
        ctx.weights = (weight_EOI,)
        return F.grouped_mm(_contiguous(x), weight_EOI.to(x.dtype).contiguous().mT, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, counts_E, ends_E, *tensors = ctx.saved_tensors
        (weight_EOI,) = restored(tensors, ctx.grids)
        d, (need_x, need_weight, *_) = _contiguous(d), ctx.needs_input_grad
        dx = F.grouped_mm(d, weight_EOI.to(x.dtype).contiguous(), offs=ends_E) if need_x else None

        def gradients() -> list[Tensor]:
            return [without_unused(F.grouped_mm(d.mT, _contiguous(x), offs=ends_E), counts_E)]

        if not need_weight or left_for_later(ctx.weights, gradients):
            return dx, None, None, None
        return dx, gradients()[0], None, None


class _ZeroGradient(torch.autograd.Function):
    """The identity. On some GPUs grouped_mm leaves the gradient of an expert without rows as it found its memory
    (pytorch#172439, #193633)."""

    @staticmethod
    def forward(ctx: Any, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_EOI: Tensor) -> tuple[Tensor, None]:
        (counts_E,) = ctx.saved_tensors
        return d_EOI if d_EOI.device.type == "cpu" else without_unused(d_EOI, counts_E), None


def without_unused(d_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Zeros, in place, for the experts without rows, whatever is there; it does not wait for the device."""
    return d_EOI.masked_fill_((counts_E == 0)[:, None, None], 0.0)


class _ContiguousGradient(torch.autograd.Function):
    """The identity. grouped_mm's backward refuses expanded gradients, such as a bare `.sum()` gives."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: object, d: Tensor) -> Tensor:
        return _contiguous(d)


def _contiguous(x: Tensor) -> Tensor:
    """Of honest strides even without rows: an empty expanded tensor calls itself contiguous, and is refused."""
    return x.contiguous() if x.numel() else x.clone(memory_format=torch.contiguous_format)


def _looped(
    x_ND: Tensor, gate_up_ERD: Weight, down_EDF: Weight, counts: list[int], weight_N: Tensor,
    fp8: tuple[bool, bool],
) -> Tensor:  # fmt: skip
    """One expert after the other."""
    hidden_NR = _LoopedLinear.apply(x_ND, gate_up_ERD, counts, fp8[0])
    y_ND: Tensor = _LoopedLinear.apply(swiglu(hidden_NR, weight_N), down_EDF, counts, fp8[1])
    return y_ND


class _LoopedLinear(torch.autograd.Function):
    """Each expert's product written where it belongs: no gradient of one expert's weight is held beside that of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_EOI: Weight, counts: list[int], fp8: bool) -> Tensor:
        tensors, ctx.grids = kept([weight_EOI])
        ctx.save_for_backward(x, *tensors)
        ctx.counts, ctx.fp8, ctx.weights = counts, fp8, (weight_EOI,) if is_late() else ()
        y = x.new_empty(len(x), weight_EOI.shape[1])
        for rows, into, weight in zip(x.split(counts), y.split(counts), weight_EOI, strict=True):
            if len(rows):
                into.copy_(_times(rows, operand(weight, x), fp8))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, kept_EOI = ctx.saved_tensors  # numbers, where the weight is in 8 bits: then it needs no gradient
        (weight_EOI,) = restored([kept_EOI], ctx.grids)
        need_x, need_weight = ctx.needs_input_grad[:2]
        if need_weight and left_for_later(ctx.weights, lambda: [_of_weights(x, d, kept_EOI, ctx.counts)]):
            need_weight = False
        dx = torch.empty_like(x) if need_x else None
        d_weight_EOI = torch.empty_like(kept_EOI) if need_weight else None
        end = 0
        for expert, count in enumerate(ctx.counts):
            rows, end = slice(end, end + count), end + count
            if dx is not None and count:
                dx[rows] = _times(d[rows], operand(weight_EOI[expert], x).mT, ctx.fp8)
            if d_weight_EOI is not None:
                d_weight_EOI[expert] = _factor(d[rows]).mT @ _factor(x[rows]) if count else 0
        return dx, d_weight_EOI, None, None


def _times(rows: Tensor, weight_OI: Tensor, fp8: bool) -> Tensor:
    """rows @ weight.T"""
    return fp8_linear(rows, weight_OI) if fp8 else (_factor(rows) @ weight_OI.mT)[: len(rows)]


def _of_weights(x: Tensor, d: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
    """The gradients of all experts' weights alone."""
    out = torch.empty_like(weight_EOI)
    for into, rows, of_rows in zip(out, d.split(counts), x.split(counts), strict=True):
        into.copy_(_factor(rows).mT @ _factor(of_rows) if len(rows) else 0)
    return out


def _factor(rows: Tensor) -> Tensor:
    """Rows as they meet a weight in a product; on a CPU in bf16 with some rows of zeros behind them.

    There oneDNN compiles a kernel for each number of rows, in milliseconds and for a megabyte, and experts have another
    number in every step.
    """
    wide = rows.to(product_dtype(rows))
    if wide.dtype != torch.bfloat16 or kind_of(rows.device) != "cpu":
        return wide
    step = max(_TILE, (1 << len(rows).bit_length()) >> 4)  # an eighth of the power of two below: few numbers, few zeros
    return F.pad(wide, (0, 0, 0, -len(rows) % step))
