"""What a loss needs of the vocabulary, without ever holding [T, V] logits.

Each holder of a slice of the vocabulary reduces its logits to three numbers a token (`token_stats`). Those of all
slices are then combined (`combine_stats`): on one device or, after an all-to-all of [T, 3], on many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .matmul import operand, product_dtype
from .meta_kernels import kind_of
from .norms import at_least_float32, upcast
from .part_sizes import part_size

# tokens whose logits exist at once on a CPU, or more than the next line allows elsewhere
CHUNK = part_size(__name__, "CHUNK", 1024, small=301)
# that exist at once elsewhere: products of few tokens, and sums for each few, are slow
_LOGITS = part_size(__name__, "_LOGITS", 1 << 29, small=1)
# words of a weight or its gradient that are cast for a product
_CAST_WORDS_ON_CPU = part_size(__name__, "_CAST_WORDS_ON_CPU", 1 << 12, small=37)
_CAST_WORDS = part_size(__name__, "_CAST_WORDS", 1 << 15, small=37)
# logits that are widened at a time: few enough for a cache, elsewhere for few launches
_WIDENED_ON_CPU = part_size(__name__, "_WIDENED_ON_CPU", 1 << 19, small=701)
_WIDENED = part_size(__name__, "_WIDENED", 1 << 25, small=701)


def token_stats(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int = 0, entropy: bool = True) -> Tensor:
    """Of each token's logits over these V words, in at least float32, stats_T3:

    logsumexp; the label's logit (0 where the label is not one of 0..V-1); minus the entropy of their own softmax.
    `entropy=False` leaves out the third: it is zeros, and its gradient is ignored.
    """
    return _TokenStats.apply(x_TD, weight_VD, labels_T, chunk or _chunk(x_TD, weight_VD), entropy)


def _chunk(x_TD: Tensor, weight_VD: Tensor) -> int:
    """Tokens whose logits exist at once."""
    return CHUNK if kind_of(x_TD.device) == "cpu" else max(CHUNK, _LOGITS // max(1, len(weight_VD)))


def combine_stats(stats_NT3: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy), both [T], from the stats of N slices that make the whole vocabulary.

    A token whose label is in no slice (-100, say) gets -logsumexp: its loss must be masked.
    With `entropy=False` before, the entropy here means nothing and must not be used.
    """
    lse_NT, target_NT, sure_NT = stats_NT3.unbind(-1)
    lse_T = lse_NT.logsumexp(0)
    share_NT = lse_NT - lse_T
    return target_NT.sum(0) - lse_T, -(share_NT.exp() * (share_NT + sure_NT)).sum(0)


class _TokenStats(torch.autograd.Function):
    """Chunks of tokens. Backward makes the logits again rather than keep them; but those of the last chunk, which it
    wants first, are still at hand: as the shares that forward turned them into, where no entropy needs them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, entropy: bool) -> Tensor:
        stats_T3 = x_TD.new_zeros(x_TD.shape[0], 3, dtype=at_least_float32(x_TD))
        ctx.last, last = None, (len(x_TD) - 1) // chunk
        for i, (x, labels, stats) in enumerate(zip(*(t.split(chunk) for t in (x_TD, labels_T, stats_T3)), strict=True)):
            ctx.last = None  # freed before the next chunk needs as much
            ctx.last = _logits(x, weight_VD)
            stats.copy_(_stats(ctx.last, labels, entropy, into_shares=i == last and not entropy))
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
        dw_VD = torch.empty_like(weight_VD, dtype=stats_T3.dtype) if need_weight else None
        last, ctx.last = ctx.last, None  # to be overwritten: a second backward makes its own
        for begin in reversed(range(0, max(1, len(x_TD)), ctx.chunk)):
            rows = slice(begin, begin + ctx.chunk)
            is_first = begin + ctx.chunk >= len(x_TD)
            are_shares = last is not None and not ctx.entropy
            d_TV = _logits(x_TD[rows], weight_VD) if last is None else last
            last = None
            _turn_into_gradient(d_TV, stats_T3[rows], d_stats_T3[rows], labels_T[rows], ctx.entropy, are_shares)
            if dx_TD is not None:
                dx_TD[rows] = _times(d_TV, weight_VD, x_TD)
            if dw_VD is not None:
                _weight_gradient(dw_VD, d_TV, x_TD[rows], add=not is_first)
        return dx_TD, None if dw_VD is None else dw_VD.to(weight_VD.dtype), None, None, None


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """In the dtype of the product; whoever reckons with them widens a few rows at a time."""
    x_wide = x_TD.to(product_dtype(x_TD))
    logits_TV = x_wide.new_empty(len(x_TD), len(weight_VD))
    for words in _words(weight_VD, x_TD):
        torch.mm(x_wide, operand(weight_VD[words], x_TD).T, out=logits_TV[:, words])
    return logits_TV


def _times(d_TV: Tensor, weight_VD: Tensor, x_TD: Tensor) -> Tensor:
    """d @ weight, its parts summed in at least float32."""
    dx_TD = d_TV.new_zeros(len(d_TV), x_TD.shape[1], dtype=at_least_float32(x_TD))
    for words in _words(weight_VD, x_TD):
        dx_TD += d_TV[:, words] @ operand(weight_VD[words], x_TD)
    return dx_TD


def _weight_gradient(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, add: bool) -> None:
    """dw = d.T @ x, or added to it; part by part where a product of another dtype is cast."""
    x_wide = x_TD.to(d_TV.dtype)
    if dw_VD.dtype == d_TV.dtype:
        dw_VD.addmm_(d_TV.T, x_wide, beta=int(add))  # beta=0: whatever lies there is not read
        return
    words = _cast_words(x_TD)
    for dw, d in zip(dw_VD.split(words), d_TV.split(words, dim=1), strict=True):
        write = dw.add_ if add else dw.copy_
        write(d.T @ x_wide)


def _words(weight_VD: Tensor, x_TD: Tensor) -> list[slice]:
    """All at once; but a weight that is cast for the product, part by part: whole, the copy may be gigabytes."""
    num, cast = len(weight_VD), not weight_VD.dtype == x_TD.dtype == product_dtype(x_TD)
    step = _cast_words(x_TD) if cast else max(1, num)
    return [slice(at, at + step) for at in range(0, num, step)]


def _cast_words(x_TD: Tensor) -> int:
    return _CAST_WORDS_ON_CPU if kind_of(x_TD.device) == "cpu" else _CAST_WORDS


def _local(labels_T: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    """(whether the label is one of these words, its index or 0), both [T, 1]."""
    here_T = (labels_T >= 0) & (labels_T < num_words)
    return here_T[:, None], labels_T.where(here_T, 0)[:, None]


def _few_rows(logits_TV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all of them, as many as are widened together."""
    at_once = _WIDENED_ON_CPU if kind_of(logits_TV.device) == "cpu" else _WIDENED
    rows = max(1, at_once // max(1, logits_TV.shape[1]))
    return zip(*(t.split(rows) for t in (logits_TV, *others)), strict=True)


def _stats(logits_TV: Tensor, labels_T: Tensor, entropy: bool, into_shares: bool) -> Tensor:
    here_T1, index_T1 = _local(labels_T, logits_TV.shape[1])
    target_T1 = upcast(logits_TV.gather(-1, index_T1)).masked_fill(~here_T1, 0.0)
    sums_T3 = torch.cat([_sums(few_TV, entropy, into_shares) for (few_TV,) in _few_rows(logits_TV)])
    largest_T1, sum_T1, weighted_T1 = sums_T3.split(1, dim=-1)
    sure_T1 = weighted_T1 / sum_T1 - sum_T1.log() if entropy else weighted_T1
    return torch.cat([largest_T1 + sum_T1.log(), target_T1, sure_T1], dim=-1)


def _sums(few_TV: Tensor, entropy: bool, into_shares: bool) -> Tensor:
    """Of each row: the largest logit; the sum of exp(logit - largest); with entropy, that of its product with
    logit - largest, in which no digits are lost where all logits are large.

    `into_shares`: each exp(logit - largest) over their sum is left in place of its logit.
    """
    logits = upcast(few_TV)
    largest_T1 = logits.amax(-1, keepdim=True)
    # a fresh block would double what the cache must hold
    spare = logits if into_shares or logits is not few_TV else None
    shifted = torch.sub(logits, largest_T1, out=spare)
    exp = shifted.exp() if entropy else shifted.exp_()
    sum_T1 = exp.sum(-1, keepdim=True)
    if into_shares:
        few_TV.copy_(exp.div_(sum_T1))
    weighted_T1 = exp.mul_(shifted).sum(-1, keepdim=True) if entropy else torch.zeros_like(sum_T1)
    return torch.cat([largest_T1, sum_T1, weighted_T1], dim=-1)


def _turn_into_gradient(
    block_TV: Tensor, stats_T3: Tensor, d_T3: Tensor, labels_T: Tensor, entropy: bool, are_shares: bool
) -> None:
    """Of logits, or their shares: the share times its factor, and d_target more at the label."""
    for few_TV, stats, d_stats in _few_rows(block_TV, stats_T3, d_T3):
        few = upcast(few_TV)
        few_TV.copy_(few.mul_(d_stats[:, :1]) if are_shares else _turned_into_share(few, stats, d_stats, entropy))
    here_T1, index_T1 = _local(labels_T, block_TV.shape[1])
    d_target_T1 = _turned_into_share(stats_T3[:, 1:2].clone(), stats_T3, d_T3, entropy) + d_T3[:, 1:2]
    rows_T1 = torch.arange(len(block_TV), device=block_TV.device)[:, None]  # scatter_ would copy all of the block
    block_TV[rows_T1, index_T1] = d_target_T1.to(block_TV.dtype).where(here_T1, block_TV[rows_T1, index_T1])


def _turned_into_share(logits: Tensor, stats_T3: Tensor, d_T3: Tensor, entropy: bool) -> Tensor:
    """p * (d_lse + d_sure * (log p - sure)), for p the softmax of the logits, which it overwrites."""
    (lse, _, sure), (d_lse, _, d_sure) = stats_T3.split(1, dim=-1), d_T3.split(1, dim=-1)
    log_p = logits.sub_(lse)
    factor = (log_p - sure).mul_(d_sure).add_(d_lse) if entropy else d_lse
    return log_p.exp_().mul_(factor)
