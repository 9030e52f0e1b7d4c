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
    """Chunks of tokens; backward computes the logits again from x and weight rather than keep them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, entropy: bool) -> Tensor:
        stats_T3 = x_TD.new_zeros(x_TD.shape[0], 3, dtype=torch.promote_types(x_TD.dtype, torch.float32))
        for x, labels, stats in zip(*(t.split(chunk) for t in (x_TD, labels_T, stats_T3)), strict=True):
            _stats_into(stats, _logits(x, weight_VD), labels, entropy)
        ctx.save_for_backward(x_TD, weight_VD, labels_T, stats_T3)
        ctx.chunk, ctx.entropy = chunk, entropy
        return stats_T3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stats_T3: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_TD, weight_VD, labels_T, stats_T3 = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if need_x else None
        # summed over chunks in at least float32: bf16 would lose the later chunks' small addends
        dw_VD = torch.zeros_like(weight_VD, dtype=stats_T3.dtype) if need_weight else None
        for begin in range(0, x_TD.shape[0], ctx.chunk):
            rows = slice(begin, begin + ctx.chunk)
            x, logits = x_TD[rows], _logits(x_TD[rows], weight_VD)
            d = _logits_gradient(logits, labels_T[rows], stats_T3[rows], d_stats_T3[rows], ctx.entropy).to(x.dtype)
            if dx_TD is not None:
                dx_TD[rows] = d @ weight_VD.to(x.dtype)
            if dw_VD is not None:
                dw_VD += d.T @ x
        return dx_TD, None if dw_VD is None else dw_VD.to(weight_VD.dtype), None, None, None


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return upcast(x_TD @ weight_VD.to(x_TD.dtype).T)


def _local(labels_T: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """(whether the label is one of these words, its index or 0), both [T, 1]."""
    here_T = (labels_T >= 0) & (labels_T < num_words)
    return here_T[:, None], labels_T.where(here_T, 0)[:, None]


def _stats_into(stats_T3: Tensor, logits_TV: Tensor, labels_T: Tensor, entropy: bool) -> None:
    here_T1, index_T1 = _local(labels_T, logits_TV.shape[-1])
    lse_T1 = logits_TV.logsumexp(-1, keepdim=True)
    stats_T3[:, 0:1] = lse_T1
    stats_T3[:, 1:2] = logits_TV.gather(-1, index_T1).masked_fill(~here_T1, 0.0)
    if entropy:
        stats_T3[:, 2] = torch.linalg.vecdot((logits_TV - lse_T1).exp_(), logits_TV)


def _logits_gradient(logits_TV: Tensor, labels_T: Tensor, stats_T3: Tensor, d_T3: Tensor, entropy: bool) -> Tensor:
    """p * (d_lse + d_mean * (1 + logit - mean)) + d_target at the label; may overwrite logits_TV to save memory."""
    lse, _, mean = stats_T3.split(1, dim=-1)
    d_lse, d_target, d_mean = d_T3.split(1, dim=-1)
    here_T1, index_T1 = _local(labels_T, logits_TV.shape[-1])
    grad_TV: Tensor
    if entropy:
        grad_TV = (logits_TV - lse).exp_().mul_((logits_TV - mean + 1).mul_(d_mean).add_(d_lse))
    else:
        grad_TV = logits_TV.sub_(lse).exp_().mul_(d_lse)
    return grad_TV.scatter_add_(-1, index_T1, d_target.masked_fill(~here_T1, 0.0))
