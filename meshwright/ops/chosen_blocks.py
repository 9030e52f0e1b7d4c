"""Sparse attention over chosen blocks (Qwen4-Exp's QSA): an indexer scores key blocks, and a query sees the best.

Each document is cut into blocks of r tokens from its beginning. A query may choose among the blocks that end at or
before it; it also sees the tokens after the last whole block. Its own block is not forced in.

Shapes: T tokens (of this part), S tokens of the stream, B blocks of the stream, b chosen ones; h heads of the indexer,
d their dims; H query heads, G key heads, K their dims.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .documents import documents
from .kernels import NARROW, SLOW, TOLERANCE
from .kernels.trials import agrees
from .meta_kernels import kind_of
from .norms import at_least_float32, upcast
from .part_sizes import part_size

NO_BLOCK = -1
Inputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values
# Number of queries that are scored, or attend, at once: the scores of each are a row as long as the stream.
QUERIES = part_size(__name__, "QUERIES", 1024, small=5)


class TokenBlocks(NamedTuple):
    """The whole blocks of all documents of a stream, in order.

    There are always `S // r`, so that no shape depends on the data; those behind the last whole one are unused.
    """

    size: int
    last_B: Tensor  # the last token of each
    before_S: Tensor  # how many blocks lie in documents before that of a token
    visible_S: Tensor  # how many blocks of its own document end at or before a token


def blocks_of(positions_S: Tensor, size: int) -> TokenBlocks:
    """Cut documents into blocks. A block is whole at its last token, so positions alone say where blocks are."""
    num, whole_S = len(positions_S) // size, (positions_S + 1) % size == 0
    until_S = whole_S.cumsum(0)
    place_S = (until_S - 1).where(whole_S, num)
    tokens_S = torch.arange(len(positions_S), device=positions_S.device)
    last_B = torch.full_like(tokens_S, size - 1)[: num + 1].scatter(0, place_S, tokens_S)[:num]
    visible_S = (positions_S + 1) // size
    return TokenBlocks(size, last_B, until_S - visible_S, visible_S)


def block_keys(k_Sd: Tensor, blocks: TokenBlocks) -> Tensor:
    """Return the mean of the raw keys of each block, computed in at least float32 and rounded to their dtype."""
    tokens_Br = blocks.last_B[:, None] - torch.arange(blocks.size - 1, -1, -1, device=k_Sd.device)
    return k_Sd[tokens_Br.clamp(min=0)].to(at_least_float32(k_Sd)).mean(1).to(k_Sd.dtype)


@torch.no_grad()
def choose_blocks(q_Thd: Tensor, keys_Bd: Tensor, blocks: TokenBlocks, first: int, num: int) -> Tensor:
    """Return the numbers of the `num` best visible blocks of each query, `[T, num]`, ascending, then NO_BLOCK.

    The score is the sum over heads of relu(q . key). Of equal scores, which are common because of relu, the earlier
    block wins, so the choice is the same on any device and mesh, and for any chunk of queries. `first`: the place of
    the queries in the stream.
    """
    number_B, out = torch.arange(len(keys_Bd), device=keys_Bd.device), []
    keys_Bd = upcast(keys_Bd)  # scores in bfloat16 would tie far more often
    for at in range(0, len(q_Thd), QUERIES):
        q, own = q_Thd[at : at + QUERIES], slice(first + at, first + min(at + QUERIES, len(q_Thd)))
        start_T1, count_T1 = blocks.before_S[own, None], blocks.visible_S[own, None]
        is_visible_TB = (number_B >= start_T1) & (number_B < start_T1 + count_T1)
        score_TB = torch.einsum("thd,bd->thb", upcast(q), keys_Bd).relu().sum(1)
        best = _order(score_TB).masked_fill(~is_visible_TB, -1).topk(min(num, len(keys_Bd)), dim=-1)
        chosen = best.indices.masked_fill(best.values < 0, len(keys_Bd)).sort(-1).values
        out.append(
            F.pad(chosen.masked_fill(chosen == len(keys_Bd), NO_BLOCK), (0, num - chosen.shape[1]), value=NO_BLOCK)
        )
    return torch.cat(out)


def _order(score_TB: Tensor) -> Tensor:
    """Return numbers that no two blocks of a query share, in the order of score, and then of the earlier block.

    Scores are at least 0, so the bits of a float32 are in the order of its value. They leave 31 bits for the block.
    """
    num = score_TB.shape[-1]
    if score_TB.dtype == torch.float64:  # verify's: places in a stable sort
        place = torch.sort(score_TB, descending=True, stable=True).indices
        rank = torch.arange(num, 0, -1, device=place.device).expand_as(place)
        return torch.empty_like(place).scatter(-1, place, rank)
    bits = score_TB.float().abs().view(torch.int32).long()  # abs: -0.0 has other bits than 0.0
    return (bits << 31) | (num - 1 - torch.arange(num, device=bits.device))


class Choice(NamedTuple):
    """The blocks that some queries of a stream have chosen, `[T, b]`.

    `bounds`: of the documents, on the host. `first`: the place of the first query.
    """

    chosen_Tb: Tensor
    blocks: TokenBlocks
    positions_S: Tensor
    bounds: tuple[int, ...]
    first: int = 0

    def part(self, start: int, stop: int) -> Choice:
        """Return the choice of the queries from `start` to `stop`."""
        return self._replace(chosen_Tb=self.chosen_Tb[start:stop], first=self.first + start)

    @property
    def reach(self) -> tuple[int, int]:
        """Return the range of keys that any of the queries may see: from the beginning of the first one's document."""
        if self.chosen_Tb.is_meta:  # a plan: assume the last part of a stream, which needs most
            return 0, len(self.positions_S)
        return self.bounds[bisect_right(self.bounds, self.first) - 1], self.first + len(self.chosen_Tb)

    def visible_keys(self) -> Tensor:
        """Return a mask of the keys of `reach` that each query sees: its blocks, and all behind the last whole one."""
        (start, stop), device, size = self.reach, self.positions_S.device, self.blocks.size
        num = stop - start
        mask = torch.zeros(len(self.chosen_Tb), num + 1, dtype=torch.bool, device=device)
        last_B = F.pad(self.blocks.last_B, (0, 1))  # there may be no block at all
        keys_Tbr = last_B[self.chosen_Tb.long().clamp(min=0)][..., None] - torch.arange(
            start, start + size, device=device
        )
        mask.scatter_(1, keys_Tbr.masked_fill((self.chosen_Tb == NO_BLOCK)[..., None], num).flatten(1), True)
        back_TS = torch.arange(self.first, stop, device=device)[:, None] - torch.arange(start, stop, device=device)
        tail_T1 = (self.positions_S[self.first : stop, None] + 1) % size
        return mask[:, :num] | ((back_TS >= 0) & (back_TS < tail_T1))


def block_attention(q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, choice: Choice) -> Tensor:
    """Attend to the keys that each query sees. -> o_THK

    kernels/block_attention.py runs where it agrees with the formula, and reads only the keys that a query sees. The
    formula is dense: for some queries at a time it computes and masks the scores of all keys from the beginning of
    their documents, in forward and again in backward. Autograd keeps q, k, v and the choices; with the kernel also o
    and its logsumexp.
    """
    o_THK: Tensor = _BlockAttention.apply(q_THK, k_SGK, v_SGK, choice)
    return o_THK


def _attended(q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, choice: Choice) -> Tensor:
    # Keys are repeated for their query heads: torch's fast kernels take a mask, or grouped heads, but not both.
    serves = q_THK.shape[1] // k_SGK.shape[1]
    wide = (x[:, :, None].expand(-1, -1, serves, -1).flatten(1, 2) for x in (k_SGK, v_SGK))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, *wide))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=choice.visible_keys())[0].transpose(0, 1)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, choice: Choice) -> Tensor:
        ctx.size, ctx.bounds, ctx.first = choice.blocks.size, choice.bounds, choice.first
        kept = q_THK, k_SGK, v_SGK, choice.chosen_Tb, choice.positions_S, *choice.blocks[1:]
        ctx.by_kernel = _has_kernel(q_THK, k_SGK, choice)
        if not ctx.by_kernel:
            ctx.save_for_backward(*kept)
            return _forward((q_THK, k_SGK, v_SGK), choice)
        o_THK, lse_TH = _by_kernel(q_THK, k_SGK, v_SGK, choice)
        ctx.save_for_backward(*kept, o_THK, lse_TH)
        return o_THK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_THK: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_SGK, v_SGK, chosen_Tb, positions_S, *others = ctx.saved_tensors
        choice = Choice(chosen_Tb, TokenBlocks(ctx.size, *others[:3]), positions_S, ctx.bounds, ctx.first)
        if ctx.by_kernel:
            return *_gradients_by_kernel((q_THK, k_SGK, v_SGK), choice, others[3:], d_THK), None
        return *_gradients((q_THK, k_SGK, v_SGK), choice, d_THK), None


def _forward(inputs: Inputs, choice: Choice) -> Tensor:
    """Compute the formula for some queries at a time."""
    q_THK, k_SGK, v_SGK = inputs
    out = []
    for at in range(0, len(q_THK), QUERIES):
        part = choice.part(at, at + QUERIES)
        seen = slice(*part.reach)
        out.append(_attended(q_THK[at : at + QUERIES], k_SGK[seen], v_SGK[seen], part))
    return torch.cat(out)


def _gradients(inputs: Inputs, choice: Choice, d_THK: Tensor) -> Inputs:
    """Compute the scores of some queries again, and the gradients through them; keys sum in at least float32."""
    q_THK, k_SGK, v_SGK = inputs
    wide = at_least_float32(k_SGK)
    dk, dv, dq = k_SGK.new_zeros(k_SGK.shape, dtype=wide), v_SGK.new_zeros(v_SGK.shape, dtype=wide), []
    for at in range(0, len(q_THK), QUERIES):
        part = choice.part(at, at + QUERIES)
        seen = slice(*part.reach)
        q, k, v = (x.detach().requires_grad_() for x in (q_THK[at : at + QUERIES], k_SGK[seen], v_SGK[seen]))
        with torch.enable_grad():
            o = _attended(q, k, v, part)
        part_dq, part_dk, part_dv = torch.autograd.grad(o, (q, k, v), d_THK[at : at + QUERIES])
        dq.append(part_dq)
        dk[seen] += part_dk
        dv[seen] += part_dv
    return torch.cat(dq), dk.to(k_SGK.dtype), dv.to(v_SGK.dtype)


def _has_kernel(q_THK: Tensor, k_SGK: Tensor, choice: Choice) -> bool:
    """Return whether kernels/block_attention.py attends: on an accelerator where it agrees with the formula."""
    if kind_of(q_THK.device) in SLOW or q_THK.dtype not in NARROW:
        return False
    kind = (q_THK.dtype, q_THK.shape[1:], k_SGK.shape[1:], choice.blocks.size)
    trial = partial(_compare_kernel, q_THK, k_SGK, choice.blocks.size)
    return q_THK.is_meta or agrees("block_attention", kind, q_THK.device, trial, TOLERANCE)


def _seen(choice: Choice) -> Any:
    """Return what the kernel reads of a choice."""
    from .kernels.block_attention import Seen

    chosen_Tb, size = choice.chosen_Tb.long(), choice.blocks.size
    starts_Tb = F.pad(choice.blocks.last_B, (0, 1))[chosen_Tb.clamp(min=0)] - (size - 1)
    tails_T = (choice.positions_S[choice.first : choice.first + len(chosen_Tb)] + 1) % size
    counts_T = (chosen_Tb != NO_BLOCK).sum(1)
    return Seen(starts_Tb.int(), counts_T.int(), tails_T.int(), choice.blocks.last_B, size, choice.first)


def _by_kernel(q_THK: Tensor, k_SGK: Tensor, v_SGK: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    if q_THK.is_meta:
        return torch.empty_like(q_THK), q_THK.new_empty(q_THK.shape[:2], dtype=torch.float32)
    from .kernels import block_attention as kernel

    return kernel.attend(q_THK, k_SGK, v_SGK, _seen(choice))


def _gradients_by_kernel(inputs: Inputs, choice: Choice, outputs: Sequence[Tensor], d_THK: Tensor) -> Inputs:
    q_THK, k_SGK, v_SGK = inputs
    if q_THK.is_meta:
        wide = [x.new_empty(x.shape, dtype=torch.float32) for x in (k_SGK, v_SGK)]  # sums of all queries
        return torch.empty_like(q_THK), wide[0].to(k_SGK.dtype), wide[1].to(v_SGK.dtype)
    from .kernels import block_attention as kernel

    return kernel.gradients(inputs, _seen(choice), (outputs[0], outputs[1]), d_THK)


def _compare_kernel(q_THK: Tensor, k_SGK: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of a few documents, by the kernel and by the formula."""
    docs, device = documents((1, 2, 67, 130), q_THK.device), q_THK.device
    num, generator = docs.bounds[-1], torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = q_THK.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = normal(num, *q_THK.shape[1:]), normal(num, *k_SGK.shape[1:]), normal(num, *k_SGK.shape[1:])
    d_THK, blocks, first = normal(num, *q_THK.shape[1:]), blocks_of(docs.positions_T, size), num // 2
    results: tuple[list[Tensor], list[Tensor]] = ([], [])
    for at, q in ((0, inputs[0]), (first, inputs[0][first:])):  # the whole stream, and its last part
        chosen = choose_blocks(normal(len(q), 2, 8), normal(len(blocks.last_B), 8), blocks, at, 5)
        choice, d = Choice(chosen, blocks, docs.positions_T, docs.bounds, at), d_THK[at:]
        by_kernel = _by_kernel(q, *inputs[1:], choice)
        results[0].extend([by_kernel[0], *_gradients_by_kernel((q, *inputs[1:]), choice, by_kernel, d)])
        results[1].extend([_forward((q, *inputs[1:]), choice), *_gradients((q, *inputs[1:]), choice, d)])
    return results
