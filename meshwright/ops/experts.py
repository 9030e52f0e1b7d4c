"""Mixture-of-experts on one device: softmax top-k routing, and SwiGLU experts as grouped GEMMs or as a loop.

Shapes: T tokens, k experts per token, E experts, D model width, F hidden width, R = 2F, N rows (copies of tokens sorted
by expert, see ops/rows.py). There is no capacity and no dropped token (unlike GShard, arXiv 2006.16668, and Switch,
2101.03961): a dropped token would depend on the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .deferred_weight_grads import deferred, is_deferring
from .fp8_matmul import Matrix, fp8_linear
from .fp8_storage import Weight, join_weights, split_weights
from .fp8_tensor import Blocks, Fp8
from .kernels import NARROW, uncompiled
from .kernels.launch import is_dense
from .kernels.trials import agrees
from .matmul import matmul_dtype, operand
from .meta_kernels import kind_of, to_host
from .norms import swiglu, upcast
from .replayed_choices import replayed
from .rows import ROUNDING, Rows

Multiply = Callable[[Tensor, Weight, Fp8], Tensor]  # rows, a matrix for each expert, whether in FP8
Product = Callable[..., Tensor]  # called as torch's `grouped_mm`

# An operation of torch, so that recompute="selective" keeps its results. Not in `meshwright::`, whose operations
# `verify` records as collectives.
_library = torch.library.Library("meshwright_ops", "FRAGMENT")
_library.define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor")


def _our_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    from .kernels.grouped_matmul import grouped_mm

    return grouped_mm(a, b, offs=offs)


_library.impl("grouped_mm", _our_product, "CompositeExplicitAutograd")
OUR_PRODUCT: Product = torch.ops.meshwright_ops.grouped_mm.default

_GROUPING = (9, 10)  # compute capabilities with a grouped GEMM in torch: Hopper and Blackwell
_TILE = 16  # rows of an AMX tile on a CPU


@uncompiled
def route(logits_TE: Tensor, k: int, renormalise: bool, given_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose k experts per token: softmax over all experts, then the k largest. -> weights_Tk (at least float32),
    indices_Tk

    `renormalise`: weights of a token sum to 1, as in Mixtral and Qwen3-MoE (`norm_topk_prob`). Activation checkpointing
    replays the indices: recomputed logits may differ in the last bit and flip a tie, and then rows would return to the
    wrong tokens. `given_Tk`: choices to use instead, -1 where the router chooses (rollout routing replay, arXiv
    2510.11370). Their weights come from the logits of all experts, so the router still has its gradient.
    """
    shares_TE = upcast(logits_TE).softmax(-1)
    indices_Tk = replayed(lambda: _choose(shares_TE.detach(), k, given_Tk))
    # The router gets its gradient through the weights of the chosen experts; the choice itself has none.
    weights_Tk = shares_TE.gather(-1, indices_Tk)
    if renormalise:
        weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
    return weights_Tk, indices_Tk


def _choose(shares_TE: Tensor, k: int, given_Tk: Tensor | None) -> Tensor:
    """Return the k likeliest experts of each token, or those that are given for it."""
    own_Tk = shares_TE.topk(k, dim=-1).indices
    return own_Tk if given_Tk is None else torch.where(given_Tk >= 0, given_Tk.to(own_Tk.dtype), own_Tk)


class LowRank(NamedTuple):
    """A low-rank addition `scale * B @ A` to the matrix of each expert (LoRA): A `[E, r, I]`, B `[E, O, r]`."""

    a_ErI: Tensor
    b_EOr: Tensor
    scale: float


@uncompiled
def experts(
    rows: Rows, gate_up_ERD: Weight, down_EDF: Weight, *, fp8: tuple[Fp8, Fp8] = (False, False),
    lora: tuple[LowRank | None, LowRank | None] = (None, None),
) -> Tensor:  # fmt: skip
    """Run SwiGLU experts on rows sorted by expert. -> y_ND, each row times its routing weight

    `gate_up` has R = 2F rows, [gate; up]. The routing weight is applied before `down`, where rows are F wide and
    nothing else has to be kept for its gradient. `_multiply` chooses what runs.

    Experts without rows still get gradients: zeros, never None. `fp8`: run the matmuls with `gate_up` and `down` in
    FP8. A scale covers one row, or a block of one expert, so routing moves no scale. `lora`: adapters of `gate_up` and
    of `down`, whose matmuls are never in FP8.
    """
    x_ND, counts_E, weight_N = rows.x_ND, rows.counts_E, rows.weight_N
    if counts_E.device.type == "cpu" and int(counts_E.sum()) != x_ND.shape[0]:
        # The grouped kernel would leave the rows beyond the counts uninitialised, in the output and in dX.
        raise ValueError(f"counts of experts sum to {int(counts_E.sum())} but there are {x_ND.shape[0]} rows")
    # Choose for the base weights alone: where B is 0 the result must be bitwise that of the base model.
    multiply = _looped(rows) if any(fp8) else _multiply(x_ND, (gate_up_ERD, down_EDF), rows)
    hidden_NR = _adapted(multiply(x_ND, gate_up_ERD, fp8[0]), x_ND, lora[0], rows)
    x_NF = swiglu(hidden_NR, weight_N)
    return _adapted(multiply(x_NF, down_EDF, fp8[1]), x_NF, lora[1], rows)


def _adapted(y: Tensor, x: Tensor, lora: LowRank | None, rows: Rows) -> Tensor:
    """Add the output of each expert's adapters to its rows, as `Adapter.add_to` does."""
    if lora is None:
        return y
    multiply = _multiply(x, (lora.a_ErI, lora.b_EOr), rows)
    return torch.add(y, multiply(multiply(x, lora.a_ErI, False), lora.b_EOr, False), alpha=lora.scale)


def _multiply(x: Tensor, weights: Sequence[Weight], rows: Rows) -> Multiply:
    """Choose the product of rows like x with these weights, in backward too. No grouped product takes FP8 block scales.

    It is torch's where that has a kernel, else ours where it agrees with the formula, else a loop over experts. The
    loop copies the counts to the host, if `rows.counts` lacks them, and so waits for the device. Measured times play no
    part: a run would not be reproducible.
    """
    if all(can_group(x, weight) for weight in weights):
        return _grouped(rows.counts_E, F.grouped_mm)
    if all(_has_product(x, weight) for weight in weights):
        return _grouped(rows.counts_E, OUR_PRODUCT)
    return _looped(rows)


def _grouped(counts_E: Tensor, product: Product) -> Multiply:
    """Return a grouped GEMM: one kernel launch for all experts, whatever their numbers of rows."""
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return lambda x, weight_EOI, _: _grouped_linear(x, weight_EOI, counts_E, ends_E, product)


def _looped(rows: Rows) -> Multiply:
    """Return a matmul that runs one expert after the other."""
    counts = to_host([rows.counts_E], [len(rows.x_ND)])[0] if rows.counts is None else rows.counts
    return lambda x, weight_EOI, fp8: _LoopedLinear.apply(x, weight_EOI, counts, fp8)


def can_group(x_ND: Tensor, down_EDF: Weight) -> bool:
    """Return whether torch's `grouped_mm` takes these operands, in backward too.

    It has no float64 and wants strides of whole 16 bytes. The strides are D, 2F and F elements; an F that does not fit
    passes forward and fails only in backward. On a CPU it does not pad rows, which bfloat16 needs there (`_factor`). On
    a GPU its bfloat16 kernel exists for Hopper to Blackwell; elsewhere torch loops, and waits for the device at each
    matmul.
    """
    if kind_of(x_ND.device) == "cpu":
        kernel = x_ND.dtype == torch.float32
    else:
        kernel = x_ND.dtype == torch.bfloat16 and _capability(x_ND.device)[0] in _GROUPING
    return kernel and all(width * x_ND.element_size() % 16 == 0 for width in down_EDF.shape[1:])


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, looked up once per device."""
    if device.type == "meta":
        # A plan assumes a GPU that has the kernel.
        return _GROUPING[0], 0
    capability: tuple[int, int] = torch.get_device_module(device).get_device_capability(device)
    return capability


def _has_product(x: Tensor, weight_EOI: Weight) -> bool:
    """Return whether kernels/grouped_matmul.py multiplies: on an accelerator where it agrees with the formula."""
    if x.dtype not in NARROW:
        return False
    # Try one width of each kind: the kernel is compiled for the tile, and for whether 16 divides the width.
    out, width = (size if size <= 256 else 129 + (size - 1) % 128 for size in weight_EOI.shape[1:])
    trial = functools.partial(_try_product, x, out, width)
    return agrees("grouped_matmul", (x.dtype, out, width), x.device, trial, ROUNDING[x.dtype])


def _try_product(x: Tensor, out: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return y, dx and dW of a few rows, by the kernel and by its formula, for tensors of the kind of x."""
    counts = [3, 0, 131, *[0] * 126, 1]  # more experts than are searched at once, more rows than a tile
    noise = torch.Generator().manual_seed(0)
    rows_NI, d_NO, weight_EOI = (
        torch.randn(shape, generator=noise, device="cpu").to(x.device, x.dtype)
        for shape in ((sum(counts), width), (sum(counts), out), (len(counts), out, width))
    )
    ends_E = torch.tensor(counts, device="cpu").cumsum(0).to(x.device, torch.int32)
    results = [
        OUR_PRODUCT(rows_NI, weight_EOI.mT, offs=ends_E), OUR_PRODUCT(d_NO, weight_EOI, offs=ends_E),
        OUR_PRODUCT(d_NO.mT, rows_NI, offs=ends_E),
    ]  # fmt: skip
    due = [torch.zeros_like(each) for each in (d_NO, rows_NI, weight_EOI)]
    each_expert = zip(*(t.split(counts) for t in (rows_NI, d_NO, *due[:2])), weight_EOI, due[2], strict=True)
    for x_NI, d, y, dx, matrix, dw in each_expert:
        y.copy_(x_NI.float() @ matrix.float().mT)
        dx.copy_(d.float() @ matrix.float())
        dw.copy_(d.float().mT @ x_NI.float())
    return results, due


def _grouped_linear(x: Tensor, weight_EOI: Weight, counts_E: Tensor, ends_E: Tensor, product: Product) -> Tensor:
    """Multiply each expert's rows by its matrix; groups end at `ends_E`, which stays on the device."""
    if isinstance(weight_EOI, Tensor):
        weight_EOI = weight_EOI.to(x.dtype)
    if product is not F.grouped_mm or is_deferring() or not isinstance(weight_EOI, Tensor):
        return _LateGroups.apply(x, weight_EOI, counts_E, ends_E, product)  # torch leaves apply untyped
    used_EOI: Tensor = _ZeroGradient.apply(weight_EOI, counts_E)
    y: Tensor = F.grouped_mm(_contiguous(x), used_EOI.contiguous().mT, offs=ends_E)
    return _ContiguousGradient.apply(y)


class _LateGroups(torch.autograd.Function):
    """A grouped matmul by any product, whose backward can defer the weight gradient (zero bubble).

    For weights in 8 or 4 bits it saves the codes, and dequantises them again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_EOI: Weight, counts_E: Tensor, ends_E: Tensor, product: Product
    ) -> Tensor:  # fmt: skip
        tensors, ctx.grids = split_weights([weight_EOI])
        ctx.save_for_backward(x, counts_E, ends_E, *tensors)
        ctx.product, ctx.weights = product, (weight_EOI,) if is_deferring() else ()
        return product(_contiguous(x), weight_EOI.to(x.dtype).contiguous().mT, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, counts_E, ends_E, *tensors = ctx.saved_tensors
        (weight_EOI,) = join_weights(tensors, ctx.grids)
        d, (need_x, need_weight, *_) = _contiguous(d), ctx.needs_input_grad
        product: Product = ctx.product
        dx = product(d, weight_EOI.to(x.dtype).contiguous(), offs=ends_E) if need_x else None

        def gradients() -> list[Tensor]:
            d_EOI = product(d.mT, _contiguous(x), offs=ends_E)
            return [without_unused(d_EOI, counts_E) if product is F.grouped_mm else d_EOI]  # ours writes zeros

        if not need_weight or deferred(ctx.weights, gradients):
            return dx, None, None, None, None
        return dx, gradients()[0], None, None, None


class _ZeroGradient(torch.autograd.Function):
    """The identity; its backward zeroes the gradients of experts without rows.

    On some GPUs grouped_mm leaves them uninitialised (pytorch#172439, pytorch#193633).
    """

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
    """Zero the gradients of experts without rows, in place and without waiting for the device.

    `masked_fill_` and not a multiplication: uninitialised memory may hold NaN, and 0 * NaN is NaN.
    """
    if is_dense(d_EOI) and _has_kernel(d_EOI):
        from .kernels import unused_experts

        return unused_experts.zero_unused(d_EOI, counts_E)
    return _without_unused(d_EOI, counts_E)


def _without_unused(d_EOI: Tensor, counts_E: Tensor) -> Tensor:
    return d_EOI.masked_fill_((counts_E == 0)[:, None, None], 0.0)


def _has_kernel(d_EOI: Tensor) -> bool:
    """Return whether kernels/unused_experts.py writes zeros on this device, and nothing but zeros."""
    odd = d_EOI[0].numel() % 16 > 0 if len(d_EOI) else False  # Triton compiles the kernel once for each

    def trial() -> tuple[list[Tensor], list[Tensor]]:
        from .kernels import unused_experts

        counts_E = torch.tensor([0, 3, 0, 0, 1], device=d_EOI.device)
        shape = (5, 16 - odd, 1025)
        before_EOI = torch.linspace(1, 2, math.prod(shape), device=d_EOI.device).view(shape).to(d_EOI.dtype)
        before_EOI[counts_E == 0] = torch.nan
        after = [zero(before_EOI.clone(), counts_E) for zero in (unused_experts.zero_unused, _without_unused)]
        return after[:1], after[1:]

    return agrees("unused_experts", (d_EOI.dtype, odd), d_EOI.device, trial, 0.0)


class _ContiguousGradient(torch.autograd.Function):
    """The identity; its backward makes gradients contiguous. grouped_mm refuses expanded ones, such as those of
    `.sum()`.
    """

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: object, d: Tensor) -> Tensor:
        return _contiguous(d)


def _contiguous(x: Tensor) -> Tensor:
    """Return x with dense strides, even without rows: `is_contiguous()` is true for an empty expanded tensor, but
    grouped_mm refuses it.
    """
    return x.contiguous() if x.numel() else x.clone(memory_format=torch.contiguous_format)


class _LoopedLinear(torch.autograd.Function):
    """A matmul per expert that writes into one output: no weight gradient is held twice.

    Autograd over a list of slices would allocate each expert's gradient and then copy it into that of the whole
    parameter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_EOI: Weight, counts: list[int], fp8: Fp8) -> Tensor:
        tensors, ctx.grids = split_weights([weight_EOI])
        ctx.save_for_backward(x, *tensors)
        ctx.counts, ctx.fp8, ctx.weights = counts, fp8, (weight_EOI,) if is_deferring() else ()
        y = x.new_empty(len(x), weight_EOI.shape[1])
        for expert, (rows, into) in enumerate(zip(x.split(counts), y.split(counts), strict=True)):
            if len(rows):
                into.copy_(_matmul(rows, _matrix(weight_EOI, expert, x, fp8), fp8))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, kept_EOI = ctx.saved_tensors  # FP8 codes if the weight is stored in FP8: it then needs no gradient
        (weight_EOI,) = join_weights([kept_EOI], ctx.grids)
        need_x, need_weight = ctx.needs_input_grad[:2]
        if need_weight and deferred(ctx.weights, lambda: [_weight_gradients(x, d, kept_EOI, ctx.counts)]):
            need_weight = False
        dx = torch.empty_like(x) if need_x else None
        d_weight_EOI = torch.empty_like(kept_EOI) if need_weight else None
        end = 0
        for expert, count in enumerate(ctx.counts):
            rows, end = slice(end, end + count), end + count
            if dx is not None and count:
                dx[rows] = _matmul(d[rows], _matrix(weight_EOI, expert, x, ctx.fp8).mT, ctx.fp8)
            if d_weight_EOI is not None:
                d_weight_EOI[expert] = _factor(d[rows]).mT @ _factor(x[rows]) if count else 0
        return dx, d_weight_EOI, None, None


def _matrix(weight_EOI: Weight, expert: int, x: Tensor, fp8: Fp8) -> Matrix:
    """Return the matrix of an expert, ready for a matmul with x: its FP8 blocks, if it is already quantised."""
    blocks_EOI = None if isinstance(fp8, bool) else fp8[0]
    return operand(weight_EOI[expert], x) if blocks_EOI is None else blocks_EOI[expert]


def _matmul(rows: Tensor, weight_OI: Matrix, fp8: Fp8) -> Tensor:
    """Return rows @ weight.T."""
    if fp8 or isinstance(weight_OI, Blocks):
        return fp8_linear(rows, weight_OI)
    return (_factor(rows) @ weight_OI.mT)[: len(rows)]


def _weight_gradients(x: Tensor, d: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
    """Compute the gradients of all experts' weights alone."""
    out = torch.empty_like(weight_EOI)
    for into, rows, inputs in zip(out, d.split(counts), x.split(counts), strict=True):
        into.copy_(_factor(rows).mT @ _factor(inputs) if len(rows) else 0)
    return out


def _factor(rows: Tensor) -> Tensor:
    """Return rows in the dtype of the matmul; for bfloat16 on a CPU, padded with some rows of zeros.

    oneDNN compiles a kernel for each number of rows, which takes milliseconds and a megabyte, and the rows of an expert
    change with every step. Rounding the number up to an eighth of a power of two leaves few distinct ones.
    """
    wide = rows.to(matmul_dtype(rows))
    if wide.dtype != torch.bfloat16 or kind_of(rows.device) != "cpu":
        return wide
    step = max(_TILE, (1 << len(rows).bit_length()) >> 4)  # an eighth of the power of two below: at most 12% padding
    return F.pad(wide, (0, 0, 0, -len(rows) % step))
