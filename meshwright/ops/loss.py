"""What a loss needs of the vocabulary, without ever holding [T, V] logits.

Each holder of a slice of the vocabulary reduces its logits to three numbers a token (`token_stats`). Those of all
slices are then combined (`combine_stats`): on one device or, after an all-gather of [T, 3], on many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ops.norms import upcast
from meshwright.ops.product import operand, product_dtype

_CAST_WORDS = 4096  # of a weight that is cast for a product


def token_stats(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int = 1024, entropy: bool = True) -> Tensor:
    """Of each token's logits over these V words, in at least float32, stats_T3:

    logsumexp; the label's logit (0 where the label is not one of 0..V-1); the mean logit under their own softmax.
    `entropy=False` leaves out the third: it is zeros, and its gradient is ignored.
    """
    return _TokenStats.apply(x_TD, weight_VD, labels_T, chunk, entropy)


def combine_stats(stats_NT3: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy), both [T], from the stats of N slices that make the whole vocabulary.

    A token whose label is in no slice (-100, say) gets -logsumexp: its loss must be masked.
    With `entropy=False` before, the entropy here means nothing and must not be used.
    """
    lse_NT, target_NT, mean_NT = stats_NT3.unbind(-1)
    lse_T = lse_NT.logsumexp(0)
    share_NT = (lse_NT - lse_T).exp()
    return target_NT.sum(0) - lse_T, lse_T - (share_NT * mean_NT).sum(0)


class _TokenStats(torch.autograd.Function):
    """Chunks of tokens. Backward makes the logits again rather than keep them. The last chunk, which it wants first,
    is still at hand as exponentials, except where the entropy's gradient needs the logits themselves."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, entropy: bool) -> Tensor:
        stats_T3 = x_TD.new_zeros(x_TD.shape[0], 3, dtype=torch.promote_types(x_TD.dtype, torch.float32))
        ctx.last = None
        for x, labels, stats in zip(*(t.split(chunk) for t in (x_TD, labels_T, stats_T3)), strict=True):
            ctx.last = None  # freed before the next chunk needs as much
            ctx.last = _stats_into(stats, _logits(x, weight_VD), labels, entropy)
        ctx.save_for_backward(x_TD, weight_VD, labels_T, stats_T3)
        ctx.chunk, ctx.entropy = chunk, entropy
        return stats_T3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stats_T3: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_TD, weight_VD, labels_T, stats_T3 = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        wide = product_dtype(x_TD)
        dx_TD = torch.empty_like(x_TD) if need_x else None
        dw_VD: Tensor | None = None
        last, ctx.last = ctx.last, None  # to be overwritten: a second backward makes its own
        for begin in reversed(range(0, max(1, len(x_TD)), ctx.chunk)):
            rows = slice(begin, begin + ctx.chunk)
            x, stats, labels, d_stats = x_TD[rows], stats_T3[rows], labels_T[rows], d_stats_T3[rows]
            d_TV = _softmax_gradient(last, x, weight_VD, stats, d_stats, ctx.entropy)
            last = None
            d_TV = _add_at_labels(d_TV, labels, d_stats[:, 1:2]).to(wide)
            if dx_TD is not None:
                dx_TD[rows] = _times(d_TV, weight_VD, x)
            if need_weight:
                # summed over chunks in at least float32: bf16 would lose the later chunks' small addends
                part_VD = (d_TV.T @ x.to(wide)).to(stats.dtype)
                dw_VD = part_VD if dw_VD is None else dw_VD.add_(part_VD)
        return dx_TD, None if dw_VD is None else dw_VD.to(weight_VD.dtype), None, None, None


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    x_wide = x_TD.to(product_dtype(x_TD))
    logits_TV = x_wide.new_empty(len(x_TD), len(weight_VD))
    for words in _words(weight_VD, x_TD):
        torch.mm(x_wide, operand(weight_VD[words], x_TD).T, out=logits_TV[:, words])
    return upcast(logits_TV)


def _times(d_TV: Tensor, weight_VD: Tensor, x_TD: Tensor) -> Tensor:
    """d @ weight, in x.dtype."""
    dx_TD = d_TV.new_zeros(x_TD.shape)
    for words in _words(weight_VD, x_TD):
        dx_TD.addmm_(d_TV[:, words], operand(weight_VD[words], x_TD))
    return dx_TD.to(x_TD.dtype)


def _words(weight_VD: Tensor, x_TD: Tensor) -> list[slice]:
    """All at once; but a weight that is cast for the product, part by part: whole, the copy may be gigabytes."""
    num, cast = len(weight_VD), not weight_VD.dtype == x_TD.dtype == product_dtype(x_TD)
    step = _CAST_WORDS if cast else max(1, num)
    return [slice(at, at + step) for at in range(0, num, step)]


def _local(labels_T: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """(whether the label is one of these words, its index or 0), both [T, 1]."""
    here_T = (labels_T >= 0) & (labels_T < num_words)
    return here_T[:, None], labels_T.where(here_T, 0)[:, None]


def _stats_into(stats_T3: Tensor, logits_TV: Tensor, labels_T: Tensor, entropy: bool) -> tuple[Tensor, Tensor] | None:
    """Without entropy logits_TV is overwritten and comes back as (exponentials, their sum), to be kept."""
    here_T1, index_T1 = _local(labels_T, logits_TV.shape[-1])
    stats_T3[:, 1:2] = logits_TV.gather(-1, index_T1).masked_fill(~here_T1, 0.0)
    if entropy:
        stats_T3[:, 0:1] = lse_T1 = logits_TV.logsumexp(-1, keepdim=True)
        stats_T3[:, 2] = torch.linalg.vecdot((logits_TV - lse_T1).exp_(), logits_TV)
        return None
    largest_T1 = logits_TV.amax(-1, keepdim=True)
    exp_TV = logits_TV.sub_(largest_T1).exp_()
    sum_T1 = exp_TV.sum(-1, keepdim=True)
    stats_T3[:, 0:1] = sum_T1.log() + largest_T1
    return exp_TV, sum_T1


def _softmax_gradient(
    kept: tuple[Tensor, Tensor] | None, x_TD: Tensor, weight_VD: Tensor, stats_T3: Tensor, d_T3: Tensor, entropy: bool
) -> Tensor:
    """p * (d_lse + d_mean * (1 + logit - mean)), for p the softmax of the logits."""
    lse, _, mean = stats_T3.split(1, dim=-1)
    d_lse, _, d_mean = d_T3.split(1, dim=-1)
    if kept is not None:
        exp_TV, sum_T1 = kept
        return exp_TV.mul_(d_lse / sum_T1)
    logits_TV = _logits(x_TD, weight_VD)
    if entropy:
        return (logits_TV - lse).exp_().mul_((logits_TV - mean + 1).mul_(d_mean).add_(d_lse))
    return logits_TV.sub_(lse).exp_().mul_(d_lse)


def _add_at_labels(d_TV: Tensor, labels_T: Tensor, d_target_T1: Tensor) -> Tensor:
    here_T1, index_T1 = _local(labels_T, d_TV.shape[-1])
    return d_TV.scatter_add_(-1, index_T1, d_target_T1.masked_fill(~here_T1, 0.0))
