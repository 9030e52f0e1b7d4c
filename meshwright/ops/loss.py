"""Vocabulary cross-entropy without [T, V] logits: a chunked, vocab-parallel log-softmax with optional entropy.

Logits of 32,768 tokens over a vocabulary of 151,936 are 20 GB in float32, and autograd would keep them. Here each
holder of a slice of the vocabulary reduces its logits to three numbers per token (`token_stats`). The stats of all
slices are then combined (`combine_stats`): on one device, or after an all-to-all of [T, 3] under tensor parallelism,
where Megatron (arXiv 1909.08053) needs three all-reduces of [T].

Shapes: T tokens, V vocabulary, K candidates, D model width, N slices of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .kernels import NARROW
from .kernels.launch import is_dense
from .kernels.trials import agrees
from .matmul import matmul_dtype, operand
from .meta_kernels import kind_of
from .norms import at_least_float32, upcast
from .part_sizes import part_size

# Tokens whose logits exist at once on a CPU. Elsewhere it is the minimum, whatever `_LOGITS` allows.
CHUNK = part_size(__name__, "CHUNK", 1024, small=301)
# Logits that exist at once elsewhere (1 GiB in bfloat16): a GPU is slow at matmuls and reductions of few tokens.
_LOGITS = part_size(__name__, "_LOGITS", 1 << 29, small=1)
# Rows of the weight, or of its gradient, that are cast at a time for a matmul.
_CAST_ROWS_ON_CPU = part_size(__name__, "_CAST_ROWS_ON_CPU", 1 << 12, small=37)
_CAST_ROWS = part_size(__name__, "_CAST_ROWS", 1 << 15, small=37)
# Logits that are widened to float32 at a time: on a CPU few enough for its cache, elsewhere enough for few launches.
_WIDENED_ON_CPU = part_size(__name__, "_WIDENED_ON_CPU", 1 << 19, small=701)
_WIDENED = part_size(__name__, "_WIDENED", 1 << 25, small=701)

# Allowed error of kernels/logits.py, relative to the norm: both sides round the gradient once to this dtype.
_OFF = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


class Kind(NamedTuple):
    """The kind of statistics: whether they include the entropy, and the temperature that divides logits."""

    entropy: bool
    temperature: float


class Candidates(NamedTuple):
    """Vocabulary entries whose logits are wanted for each token, as indices in a slice of the vocabulary. Any index
    outside of it, such as -1, is not in the slice. `rest`: whether the logsumexp of all other entries is wanted too."""

    ids_TK: Tensor
    temperature: float = 1.0
    rest: bool = False


def token_stats(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int = 0, entropy: bool = True, temperature: float = 1.0
) -> Tensor:  # fmt: skip
    """Reduce each token's logits over these V entries to three numbers, in at least float32. -> stats_T3

    Logits are divided by the temperature after they are widened, as samplers do: x divided in its own dtype would
    round, and trainer and rollout would disagree. The numbers are logsumexp; the label's logit (0 where the label is
    not one of 0..V-1); and minus the entropy of the softmax over these entries. With `entropy=False` the third is the
    largest logit instead, and its gradient is ignored.
    """
    kind = Kind(entropy, temperature)
    return _TokenStats.apply(x_TD, weight_VD, labels_T, chunk or _chunk(x_TD, weight_VD), kind, None)


def candidate_stats(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, candidates: Candidates, entropy: bool = False,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Reduce each token's logits over these V entries to the numbers of `token_stats`, and K + 1 more. -> stats_TS

    These are, over the temperature of the candidates, the logsumexp of all logits and the logit of each candidate, 0
    where it is not one of 0..V-1. Both temperatures share one product with the weight. With `candidates.rest` the last
    number is the logsumexp of all entries that are no candidates, or the least number of the dtype if all are.
    """
    kind = Kind(entropy, temperature)
    return _TokenStats.apply(x_TD, weight_VD, labels_T, _chunk(x_TD, weight_VD), kind, candidates)


@torch.no_grad()
def top_k(x_TD: Tensor, weight_VD: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    """Reduce each token's logits over the temperature to their logsumexp, the k largest, and the indices of these.

    -> `[T, 1 + 2k]` in at least float32, which holds indices up to 16 million exactly. With fewer than k entries, the
    rest is -inf and 0.
    """
    kind, few = Kind(False, temperature), min(k, len(weight_VD))
    parts = []
    for x in x_TD.split(_chunk(x_TD, weight_VD)):
        logits_TV = _logits(x, weight_VD)
        best_Tk, index_Tk = logits_TV.topk(few, -1)
        best_Tk = functional.pad(_tempered(best_Tk, temperature), (0, k - few), value=-torch.inf)
        parts.append(torch.cat([_logsumexp(logits_TV, kind), best_Tk, functional.pad(index_Tk, (0, k - few))], -1))
    return torch.cat(parts)


def _chunk(x_TD: Tensor, weight_VD: Tensor) -> int:
    """Return how many tokens' logits exist at once.

    On a device other than a CPU, chunks have equal sizes: the logits of the last one are kept for backward, so a large
    last chunk saves recompute.
    """
    if kind_of(x_TD.device) == "cpu":
        return CHUNK
    most, num_tokens = max(CHUNK, _LOGITS // max(1, len(weight_VD))), len(x_TD)
    return -(-num_tokens // -(-num_tokens // most)) if num_tokens > most else most


def combine_stats(stats_NT3: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the stats of N slices that make up the vocabulary. -> (log-probability of the label, entropy), both [T]

    With l_n the logsumexp of slice n, lse = logsumexp_n(l_n) and the share p_n = exp(l_n - lse) of the slice, the
    entropy is -sum_n p_n (log p_n + s_n), where s_n is minus the entropy within the slice.

    A token whose label is in no slice (-100, say) gets -logsumexp: its loss must be masked. If the stats were computed
    with `entropy=False`, the entropy is meaningless.
    """
    lse_NT, target_NT, neg_entropy_NT = stats_NT3.unbind(-1)
    lse_T = lse_NT.logsumexp(0)
    share_NT = lse_NT - lse_T
    return target_NT.sum(0) - lse_T, -(share_NT.exp() * (share_NT + neg_entropy_NT)).sum(0)


def combine_candidate_stats(stats_NTS: Tensor, num_candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the stats of `candidate_stats`. -> (log-probability of the label, entropy, log-probabilities of the
    candidates `[T, K]`, and that of all other entries `[T, 1]`, or `[T, 0]` if `candidates.rest` did not ask for it).

    `num_candidates`: K. Candidates that are in no slice get -logsumexp, and must be masked.
    """
    lse_NT1, logit_NTK, rest_NTR = stats_NTS[..., 3:].tensor_split([1, 1 + num_candidates], -1)
    lse_T1 = lse_NT1.logsumexp(0)
    return *combine_stats(stats_NTS[..., :3]), logit_NTK.sum(0) - lse_T1, rest_NTR.logsumexp(0) - lse_T1


def combine_top_k(stats_NTS: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the results of `top_k` for N slices, with indices in the whole vocabulary. -> (the k largest
    log-probabilities, their indices), both `[T, k]`."""
    k = stats_NTS.shape[-1] // 2
    lse_NT1, best_NTk, index_NTk = stats_NTS.split([1, k, k], -1)
    best_Tk, at_Tk = best_NTk.transpose(0, 1).flatten(1).topk(k, -1)
    return best_Tk - lse_NT1.logsumexp(0), index_NTk.transpose(0, 1).flatten(1).gather(-1, at_Tk)


def is_likeliest(stats_NT3: Tensor) -> Tensor:
    """Return for each token whether no entry has a larger logit than its label, from stats without entropy."""
    _, target_NT, largest_NT = stats_NT3.detach().unbind(-1)
    return target_NT.sum(0) == largest_NT.amax(0)


class _TokenStats(torch.autograd.Function):
    """Compute the stats chunk by chunk of tokens; recompute the logits in backward.

    Backward starts with the last chunk, whose logits forward leaves in memory: without entropy, already as
    probabilities. So a batch of one chunk recomputes nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, kind: Kind,
        candidates: Candidates | None,
    ) -> Tensor:  # fmt: skip
        ids_TK = labels_T.new_empty(len(labels_T), 0) if candidates is None else candidates.ids_TK
        columns = 3 if candidates is None else 4 + ids_TK.shape[1] + candidates.rest
        stats_TS = x_TD.new_zeros(x_TD.shape[0], columns, dtype=at_least_float32(x_TD))
        ctx.by_kernel = candidates is None and _has_kernel(x_TD, len(weight_VD))
        ctx.last, last, ctx.keeps_probs = None, (len(x_TD) - 1) // chunk, not kind.entropy and candidates is None
        split = (t.split(chunk) for t in (x_TD, labels_T, ids_TK, stats_TS))
        for i, (x, labels, ids, stats) in enumerate(zip(*split, strict=True)):
            ctx.last = None  # freed before the next chunk needs as much
            ctx.last = _logits(x, weight_VD)
            if ctx.by_kernel:
                stats.copy_(_stats_by_kernel(ctx.last, labels, kind))
                continue
            stats[:, :3].copy_(_stats(ctx.last, labels, kind, into_probs=i == last and ctx.keeps_probs))
            if candidates is not None:
                lse = stats[:, :1] if candidates.temperature == kind.temperature else None
                stats[:, 3:].copy_(_candidate_stats(ctx.last, candidates._replace(ids_TK=ids), lse))
        ctx.save_for_backward(x_TD, weight_VD, labels_T, stats_TS, ids_TK)
        ctx.chunk, ctx.kind = chunk, kind
        ctx.candidate_temperature, ctx.rest = (1.0, False) if candidates is None else candidates[1:]
        return stats_TS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stats_TS: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_TD, weight_VD, labels_T, stats_TS, ids_TK = ctx.saved_tensors
        # Gradients of logits are linear in those of the stats, so the derivative of the division by the temperature is
        # applied here.
        d_stats_TS = _over_temperatures(d_stats_TS, ctx.kind.temperature, ctx.candidate_temperature)
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_TD = torch.empty_like(x_TD) if need_x else None
        # Accumulate over chunks in at least float32: bfloat16 would lose the later chunks' small addends.
        dw_VD = torch.empty_like(weight_VD, dtype=stats_TS.dtype) if need_weight else None
        cached, ctx.last = ctx.last, None  # it is overwritten below, so a second backward must recompute it
        for begin in reversed(range(0, max(1, len(x_TD)), ctx.chunk)):
            rows = slice(begin, begin + ctx.chunk)
            is_first = begin + ctx.chunk >= len(x_TD)
            are_probs = cached is not None and ctx.keeps_probs
            d_TV = _logits(x_TD[rows], weight_VD) if cached is None else cached
            cached = None
            of_rows = (d_TV, stats_TS[rows], d_stats_TS[rows], labels_T[rows])
            if ctx.by_kernel:
                _overwrite_by_kernel(*of_rows, ctx.kind)
            elif stats_TS.shape[1] > 3:
                candidates = Candidates(ids_TK[rows], ctx.candidate_temperature, ctx.rest)
                _overwrite_with_candidate_gradient(*of_rows, candidates, ctx.kind)
            else:
                _overwrite_with_gradient(*of_rows, ctx.kind, are_probs)
            if dx_TD is not None:
                dx_TD[rows] = _input_gradient(d_TV, weight_VD, x_TD)
            if dw_VD is not None:
                _weight_gradient(dw_VD, d_TV, x_TD[rows], add=not is_first)
        return dx_TD, None if dw_VD is None else dw_VD.to(weight_VD.dtype), None, None, None, None


def _logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Compute logits in the dtype of the matmul; callers widen a few rows at a time."""
    x_wide = x_TD.to(matmul_dtype(x_TD))
    logits_TV = x_wide.new_empty(len(x_TD), len(weight_VD))
    for part in _vocab_slices(weight_VD, x_TD):
        torch.mm(x_wide, operand(weight_VD[part], x_TD).T, out=logits_TV[:, part])
    return logits_TV


def _input_gradient(d_TV: Tensor, weight_VD: Tensor, x_TD: Tensor) -> Tensor:
    """Return d @ weight, accumulated over slices of the vocabulary in at least float32."""
    dx_TD = d_TV.new_zeros(len(d_TV), x_TD.shape[1], dtype=at_least_float32(x_TD))
    for part in _vocab_slices(weight_VD, x_TD):
        dx_TD += d_TV[:, part] @ operand(weight_VD[part], x_TD)
    return dx_TD


def _weight_gradient(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, add: bool) -> None:
    """Write d.T @ x to dw, or add it; slice by slice where the result has to be cast."""
    x_wide = x_TD.to(d_TV.dtype)
    if dw_VD.dtype == d_TV.dtype:
        dw_VD.addmm_(d_TV.T, x_wide, beta=int(add))  # beta=0 ignores what dw holds, even NaN
        return
    if _accumulates_wide(d_TV, dw_VD):
        _add_product(dw_VD, d_TV, x_wide, add)
        return
    rows = _cast_rows(x_TD)
    for dw, d in zip(dw_VD.split(rows), d_TV.split(rows, dim=1), strict=True):
        write = dw.add_ if add else dw.copy_
        write(d.T @ x_wide)


def _add_product(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, add: bool) -> None:
    """Write d.T @ x to a wider dw, or add it, in one matmul: no narrow product, and no pass to add it."""
    if not dw_VD.is_meta:
        torch.addmm(dw_VD, d_TV.T, x_TD, out_dtype=dw_VD.dtype, beta=int(add), out=dw_VD)


def _accumulates_wide(d_TV: Tensor, dw_VD: Tensor) -> bool:
    """Return whether torch multiplies 16-bit matrices into a float32 result here, as cuBLAS can.

    cuBLAS chooses kernels by the alignment of rows, so each kind of widths is tried.
    """
    if kind_of(d_TV.device) == "cpu" or d_TV.dtype not in NARROW or dw_VD.dtype != torch.float32:
        return False
    left = [width % 16 for width in dw_VD.shape]

    def trial() -> tuple[list[Tensor], list[Tensor]]:
        d, x = _normal(d_TV, 67, 128 + left[0]), _normal(d_TV, 67, 64 + left[1])
        got = torch.full((d.shape[1], x.shape[1]), float("nan"), device=d.device)
        for add in (False, True):
            _add_product(got, d, x, add)
        return [got], [2 * (d.T.float() @ x.float())]

    # The formula may multiply in TF32, whose products of 16-bit factors are exact.
    return d_TV.is_meta or agrees("addmm with a float32 result", (d_TV.dtype, *left), d_TV.device, trial, 1e-4)


def _normal(like: Tensor, *shape: int) -> Tensor:
    """Draw the same normal numbers on every device."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return noise.to(like.device, like.dtype)


def _vocab_slices(weight_VD: Tensor, x_TD: Tensor) -> list[slice]:
    """Slice the vocabulary for matmuls: one slice, or several where the weight is cast (a whole copy may be
    gigabytes).
    """
    num, cast = len(weight_VD), not weight_VD.dtype == x_TD.dtype == matmul_dtype(x_TD)
    step = _cast_rows(x_TD) if cast else max(1, num)
    return [slice(at, at + step) for at in range(0, num, step)]


def _cast_rows(x_TD: Tensor) -> int:
    return _CAST_ROWS_ON_CPU if kind_of(x_TD.device) == "cpu" else _CAST_ROWS


def _local_labels(labels_T: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return whether each label is in this slice of the vocabulary, and its index or 0, both [T, 1]."""
    return _local_ids(labels_T[:, None], vocab_size)


def _local_ids(ids_TK: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return whether each index is in this slice of the vocabulary, and the index or 0, both [T, K]."""
    is_local_TK = (ids_TK >= 0) & (ids_TK < vocab_size)
    return is_local_TK, ids_TK.where(is_local_TK, 0).long()


def _row_blocks(logits_TV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split all tensors into the same blocks of rows, each as large as is widened at a time."""
    num_logits = _WIDENED_ON_CPU if kind_of(logits_TV.device) == "cpu" else _WIDENED
    rows = max(1, num_logits // max(1, logits_TV.shape[1]))
    return zip(*(t.split(rows) for t in (logits_TV, *others)), strict=True)


def _has_kernel(x_TD: Tensor, vocab_size: int) -> bool:
    """Return whether kernels/logits.py reads logits of x: on an accelerator where it agrees with the formula below."""
    if kind_of(x_TD.device) == "cpu" or x_TD.dtype not in (*NARROW, torch.float32) or not vocab_size:
        return False
    trial = partial(_compare_kernel, x_TD, vocab_size)
    return x_TD.is_meta or agrees("logits", (x_TD.dtype, vocab_size), x_TD.device, trial, _OFF[x_TD.dtype])


def _compare_kernel(x_TD: Tensor, vocab_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return stats and gradients of a few rows of `vocab_size` logits, by the kernel and by the formula."""
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    slope_T1 = torch.tensor([[9.0], [-9.0], [0.0], [1.0]], device=x_TD.device)  # the largest logit comes late, or early
    slope_TV = slope_T1 * torch.linspace(-1, 1, vocab_size, device=x_TD.device)
    logits_TV, d_T3 = 3 * _normal(x_TD, 4, vocab_size) + slope_TV.to(x_TD.dtype), _normal(x_TD, 4, 3).float()
    labels_T = torch.tensor([0, vocab_size - 1, -100, vocab_size], device=x_TD.device)
    for kind in (Kind(entropy=True, temperature=1.0), Kind(entropy=False, temperature=0.7)):
        by_kernel, by_formula = logits_TV.clone(), logits_TV.clone()
        stats_T3 = _stats(by_formula, labels_T, kind, into_probs=False)
        results[0].append(_stats_by_kernel(by_kernel, labels_T, kind))
        _overwrite_by_kernel(by_kernel, stats_T3, d_T3, labels_T, kind)
        _overwrite_with_gradient(by_formula, stats_T3, d_T3, labels_T, kind, are_probs=False)
        results[0].append(by_kernel)
        results[1].extend([stats_T3, by_formula])
    return results


def _stats_by_kernel(logits_TV: Tensor, labels_T: Tensor, kind: Kind) -> Tensor:
    if logits_TV.is_meta:
        return logits_TV.new_empty(len(logits_TV), 3, dtype=torch.float32)
    from .kernels import logits

    assert is_dense(logits_TV), "as in the trial"
    return logits.token_stats(logits_TV, labels_T, *kind)


def _overwrite_by_kernel(block_TV: Tensor, stats_T3: Tensor, d_T3: Tensor, labels_T: Tensor, kind: Kind) -> None:
    if block_TV.is_meta:
        return
    from .kernels import logits

    assert is_dense(block_TV), "as in the trial"
    logits.overwrite_with_gradient(block_TV, stats_T3, d_T3, labels_T, *kind)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits in at least float32, divided by the temperature. At temperature 1, float32 logits are not
    copied."""
    return upcast(logits) if temperature == 1 else upcast(logits) / temperature


def _stats(logits_TV: Tensor, labels_T: Tensor, kind: Kind, into_probs: bool) -> Tensor:
    """Reduce a chunk of logits to stats; with `into_probs`, leave probabilities in place of the logits."""
    is_local_T1, index_T1 = _local_labels(labels_T, logits_TV.shape[1])
    target_T1 = _tempered(logits_TV.gather(-1, index_T1), kind.temperature).masked_fill(~is_local_T1, 0.0)
    blocks = _row_blocks(logits_TV)
    sums_T3 = torch.cat([_row_sums(rows_TV, kind, into_probs) for (rows_TV,) in blocks])
    largest_T1, sum_T1, weighted_T1 = sums_T3.split(1, dim=-1)
    third_T1 = weighted_T1 / sum_T1 - sum_T1.log() if kind.entropy else largest_T1
    return torch.cat([largest_T1 + sum_T1.log(), target_T1, third_T1], dim=-1)


def _row_sums(rows_TV: Tensor, kind: Kind, into_probs: bool) -> Tensor:
    """Return for each row: the largest logit; sum of exp(logit - largest); and, with entropy, sum of that times its
    exponent.

    The entropy's term uses logit - largest and not the logit itself, so that no digits cancel where all logits are
    large. `into_probs`: overwrite each logit with exp(logit - largest) over the sum.
    """
    logits = _tempered(rows_TV, kind.temperature)
    largest_T1 = logits.amax(-1, keepdim=True)
    # Reuse the block: another one would double what the CPU's cache must hold.
    spare = logits if into_probs or logits is not rows_TV else None
    shifted = torch.sub(logits, largest_T1, out=spare)
    exp = shifted.exp() if kind.entropy else shifted.exp_()
    sum_T1 = exp.sum(-1, keepdim=True)
    if into_probs:
        rows_TV.copy_(exp.div_(sum_T1))
    weighted_T1 = exp.mul_(shifted).sum(-1, keepdim=True) if kind.entropy else torch.zeros_like(sum_T1)
    return torch.cat([largest_T1, sum_T1, weighted_T1], dim=-1)


def _overwrite_with_gradient(
    block_TV: Tensor, stats_T3: Tensor, d_T3: Tensor, labels_T: Tensor, kind: Kind, are_probs: bool
) -> None:
    """Overwrite logits, or probabilities, with the gradient of the logits.

    It is the probability times a factor of the row, plus the gradient of the target logit at the label; `d_T3` is
    divided by the temperature already.
    """
    for rows_TV, stats, d_stats in _row_blocks(block_TV, stats_T3, d_T3):
        few = upcast(rows_TV) if are_probs else _tempered(rows_TV, kind.temperature)
        rows_TV.copy_(few.mul_(d_stats[:, :1]) if are_probs else _logit_gradient(few, stats, d_stats, kind.entropy))
    is_local_T1, index_T1 = _local_labels(labels_T, block_TV.shape[1])
    d_target_T1 = _logit_gradient(stats_T3[:, 1:2].clone(), stats_T3, d_T3, kind.entropy) + d_T3[:, 1:2]
    # An index and not scatter_, which would copy the block.
    rows_T1 = torch.arange(len(block_TV), device=block_TV.device)[:, None]
    block_TV[rows_T1, index_T1] = d_target_T1.to(block_TV.dtype).where(is_local_T1, block_TV[rows_T1, index_T1])


def _logit_gradient(logits: Tensor, stats_T3: Tensor, d_T3: Tensor, entropy: bool) -> Tensor:
    """Overwrite logits with p * (d_lse + d_neg_entropy * (log p - neg_entropy)), for their softmax p."""
    (lse, _, neg_entropy), (d_lse, _, d_neg_entropy) = stats_T3.split(1, dim=-1), d_T3.split(1, dim=-1)
    log_p = logits.sub_(lse)
    factor = (log_p - neg_entropy).mul_(d_neg_entropy).add_(d_lse) if entropy else d_lse
    return log_p.exp_().mul_(factor)


def _over_temperatures(d_TS: Tensor, temperature: float, candidate_temperature: float) -> Tensor:
    """Divide the gradient of stats by the temperatures of the logits."""
    if temperature == candidate_temperature == 1:
        return d_TS
    return torch.cat([d_TS[:, :3] / temperature, d_TS[:, 3:] / candidate_temperature], -1)


def _logsumexp(logits_TV: Tensor, kind: Kind) -> Tensor:
    """Return the logsumexp of each row over the temperature. -> `[T, 1]`"""
    largest_T1, sum_T1, _ = torch.cat(
        [_row_sums(rows_TV, kind, into_probs=False) for (rows_TV,) in _row_blocks(logits_TV)]
    ).split(1, dim=-1)
    return largest_T1 + sum_T1.log()


def _candidate_stats(logits_TV: Tensor, candidates: Candidates, lse_T1: Tensor | None) -> Tensor:
    """Return over the temperature: the logsumexp (given as `lse_T1` if known), the logits of the candidates, and with
    `candidates.rest` the logsumexp of all other entries."""
    ids_TK, temperature, rest = candidates
    is_local_TK, index_TK = _local_ids(ids_TK, logits_TV.shape[1])
    logit_TK = _tempered(logits_TV.gather(-1, index_TK), temperature).masked_fill(~is_local_TK, 0.0)
    lse_T1 = _logsumexp(logits_TV, Kind(False, temperature)) if lse_T1 is None else lse_T1
    if not rest:
        return torch.cat([lse_T1, logit_TK], dim=-1)
    others = (_without_candidates(rows_TV, ids, temperature) for rows_TV, ids in _row_blocks(logits_TV, ids_TK))
    rest_T1 = torch.cat([rows_TV.logsumexp(-1, keepdim=True) for rows_TV in others])
    # A finite number even where no other entry is left: backward subtracts it from -inf.
    return torch.cat([lse_T1, logit_TK, rest_T1.clamp(min=torch.finfo(rest_T1.dtype).min)], dim=-1)


def _without_candidates(rows_TV: Tensor, ids_TK: Tensor, temperature: float) -> Tensor:
    """Return a copy of logits over the temperature, with -inf at the candidates.

    1 - sum of p(candidate) has no digits left in float32 where the candidates have almost all probability. So they are
    removed before the sum.
    """
    is_local_TK, index_TK = _local_ids(ids_TK, rows_TV.shape[1])
    few = _tempered(rows_TV, temperature)
    nothing_TK = few.new_zeros(index_TK.shape)  # added to the logit at index 0, for candidates of another slice
    return few.scatter_add(-1, index_TK, nothing_TK.masked_fill(is_local_TK, -torch.inf))


def _overwrite_with_candidate_gradient(
    block_TV: Tensor, stats_TS: Tensor, d_TS: Tensor, labels_T: Tensor, candidates: Candidates, kind: Kind
) -> None:
    """Overwrite logits with their gradient: a softmax for each temperature, one over all other entries, and terms at
    the label and at the candidates.

    All terms are summed before they are rounded to the dtype of the block. A candidate may be the label, or occur
    twice.
    """
    ids_TK, temperature, rest = candidates
    num = ids_TK.shape[1]
    for rows_TV, stats, d_stats, labels, ids in _row_blocks(block_TV, stats_TS, d_TS, labels_T[:, None], ids_TK):
        d_own, d_lse_T1, d_candidates = d_stats[:, :3].clone(), d_stats[:, 3:4], d_stats[:, 4 : 4 + num]
        of_candidates = of_rest = None
        if rest:
            of_rest = (_without_candidates(rows_TV, ids, temperature) - stats[:, -1:]).exp_().mul_(d_stats[:, -1:])
        if temperature == kind.temperature:
            d_own[:, :1] += d_lse_T1
        else:
            of_candidates = (_tempered(rows_TV, temperature) - stats[:, 3:4]).exp_().mul_(d_lse_T1)
        few = _logit_gradient(_tempered(rows_TV, kind.temperature), stats[:, :3], d_own, kind.entropy)
        for more in (of_candidates, of_rest):
            if more is not None:
                few += more
        for given_TK, d_TK in ((labels, d_own[:, 1:2]), (ids, d_candidates)):
            is_local_TK, index_TK = _local_ids(given_TK, rows_TV.shape[1])
            few.scatter_add_(-1, index_TK, d_TK.masked_fill(~is_local_TK, 0.0))
        rows_TV.copy_(few)
