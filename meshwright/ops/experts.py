"""Mixture of experts on one device: who goes where, and the experts' MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops.norms import swiglu, upcast
from meshwright.ops.product import linear, product_dtype


def route(logits_TE: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(weights_Tk in at least float32, indices_Tk): softmax over all experts, then the k largest."""
    weights_Tk, indices_Tk = upcast(logits_TE).softmax(-1).topk(k, dim=-1)
    if renormalise:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, indices_Tk


def experts(x_ND: Tensor, gate_up_ERD: Tensor, down_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """SwiGLU experts on rows sorted by expert, counts_E (int64) of them each; R = 2F rows, [gate; up]. -> y_ND

    An expert without rows, or all of them, still get gradients: zeros, never None.
    """
    if counts_E.device.type == "cpu" and int(counts_E.sum()) != x_ND.shape[0]:
        # the grouped kernel would leave the rows beyond the counts uninitialised, here and in dX
        raise ValueError(f"counts of experts sum to {int(counts_E.sum())} but there are {x_ND.shape[0]} rows")
    if can_group(x_ND, gate_up_ERD, down_EDF):
        return _grouped(x_ND, gate_up_ERD, down_EDF, counts_E)
    return _looped(x_ND, gate_up_ERD, down_EDF, counts_E)


def can_group(x_ND: Tensor, gate_up_ERD: Tensor, down_EDF: Tensor) -> bool:
    """Whether grouped_mm takes these, in backward too: it has no float64, and wants strides of whole 16 bytes.

    The strides are D, 2F and F elements; an F that does not fit passes forward and fails only in backward.
    """
    dtypes = {x_ND.dtype, gate_up_ERD.dtype, down_EDF.dtype, product_dtype(x_ND)}
    if dtypes not in ({torch.float32}, {torch.bfloat16}):
        return False
    return all(width * x_ND.element_size() % 16 == 0 for width in down_EDF.shape[1:])


def _grouped(x_ND: Tensor, gate_up_ERD: Tensor, down_EDF: Tensor, counts_E: Tensor) -> Tensor:
    ends_E = counts_E.cumsum(0).to(torch.int32)
    hidden_NR = _grouped_linear(x_ND, gate_up_ERD, ends_E)
    return _grouped_linear(swiglu(*hidden_NR.chunk(2, dim=-1)), down_EDF, ends_E)


def _grouped_linear(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    y: Tensor = F.grouped_mm(_contiguous(x), weight.contiguous().mT, offs=ends_E)
    return _ContiguousGradient.apply(y)  # torch leaves apply untyped


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


def _looped(x_ND: Tensor, gate_up_ERD: Tensor, down_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """One expert after the other, empty ones too. Needs the counts on the host: on a GPU it waits for the device."""
    rows = x_ND.split(counts_E.tolist())
    experts = zip(rows, gate_up_ERD.unbind(0), down_EDF.unbind(0), strict=True)
    return torch.cat([linear(swiglu(*linear(x, gate_up).chunk(2, dim=-1)), down) for x, gate_up, down in experts])
