"""Softmax attention over a packed stream of documents."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import meta_kernels
from .documents import Documents, check_tokens
from .kernels import NARROW, SLOW, fastest, takes, uncompiled
from .matmul import product_dtype
from .meta_kernels import kind_of

_EVEN = 256  # lengths of which there are few: the kernel for one document is compiled for each, in half a second
_LONG = 1 << 34  # multiplications of a document's queries with its keys: 4096 tokens with 8 heads of 128


@uncompiled
def attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, first: int = 0, *, causal: bool = True
) -> Tensor:
    """Attention inside each document, scale K**-0.5; query head h uses kv head h // (H // G). -> o_THK

    Keys and values are of the whole stream. Queries may be of a part of it, which begins at token `first`. Not
    `causal`: a token sees also those behind it, and queries are of the whole stream, which may be empty.
    """
    num, whole = q_THK.shape[0], docs.positions_T.shape[0]
    if not 0 <= first <= first + num <= whole:
        raise ValueError(f"q has {num} tokens from token {first} on but its documents have {whole}")
    check_tokens(docs, k=k_TGK, v=v_TGK)
    heads, kv_heads = q_THK.shape[1], k_TGK.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    if not causal:
        given = (q_THK, k_TGK, v_TGK)
        op = fastest(_varlen_both_ways, _both_ways, given, planned=meta_kernels.attention) if num else _both_ways
        return op(q_THK, k_TGK, v_TGK, docs)
    if num == whole and _are_long(q_THK, docs):
        return _by_document(q_THK, k_TGK, v_TGK, docs)
    if num == whole:
        op = fastest(_varlen, _by_document, (q_THK, k_TGK, v_TGK), planned=meta_kernels.attention)
        return op(q_THK, k_TGK, v_TGK, docs)
    start, docs = docs.reaching(first, first + num)
    k_TGK, v_TGK = (x[start : start + docs.bounds[-1]] for x in (k_TGK, v_TGK))
    op = fastest(_varlen_late, _by_document, (q_THK, k_TGK, v_TGK), _late, (67, 130), meta_kernels.attention)
    return op(q_THK, k_TGK, v_TGK, docs)


def _are_long(q_THK: Tensor, docs: Documents) -> bool:
    """Whether a kernel for one document, which is torch's fastest, makes up for a call of each of them on a GPU."""
    if kind_of(q_THK.device) == "cpu" or not docs.lengths or any(length % _EVEN for length in docs.lengths):
        return False
    pairs = sum(length**2 for length in docs.lengths) / len(docs.lengths)
    return q_THK.shape[1] * q_THK.shape[2] * pairs >= _LONG


def _late(noise: list[Tensor]) -> list[Tensor]:
    q_THK, k_TGK, v_TGK = noise
    return [q_THK[len(q_THK) // 4 :], k_TGK, v_TGK]


def _varlen_late(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """The same with queries of the last tokens alone, which must agree by itself: a kernel may let the first query see
    the first key alone."""
    return _varlen(q_THK, k_TGK, v_TGK, docs)


def _varlen_both_ways(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    return _varlen(q_THK, k_TGK, v_TGK, docs, causal=False)


def _both_ways(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    return _by_document(q_THK, k_TGK, v_TGK, docs, causal=False)


def _varlen(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, causal: bool = True) -> Tensor:
    """torch's kernel for many lengths at once. Queries are of the last tokens, and at least of the last document."""
    from torch.nn.attention.varlen import varlen_attn

    keys, missing = docs.cu_seqlens[: len(docs.bounds)], len(k_TGK) - len(q_THK)
    queries = (keys - missing).clamp(min=0) if missing else keys
    longest = max(docs.lengths, default=0)
    # torch 2.11 has grouped queries without saying so
    gqa: dict[str, Any] = {"enable_gqa": True} if takes(varlen_attn, "enable_gqa") else {}
    o_THK = varlen_attn(
        q_THK, k_TGK, v_TGK, queries, keys, longest, longest, window_size=(-1, 0 if causal else -1), **gqa
    )
    assert isinstance(o_THK, Tensor)
    return o_THK


def _by_document(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, causal: bool = True) -> Tensor:
    """One call a document: slow for thousands of tiny ones. Queries are of the last tokens."""
    dtype, wide, missing = q_THK.dtype, product_dtype(q_THK), len(k_TGK) - len(q_THK)
    keys = docs.lengths or (0,)  # no documents: one empty call keeps q, k, v in the graph
    queries = [max(0, stop - missing) - max(0, start - missing) for start, stop in pairwise(docs.bounds)] or [0]
    # split and not slices: its backward is one cat, that of a slice writes a whole stream of zeros a document
    pieces = zip(*(x.to(wide).split(n) for x, n in ((q_THK, queries), (k_TGK, keys), (v_TGK, keys))), strict=True)
    found = [_of_one(q, k, v, causal) for q, k, v in pieces]
    return (found[0] if len(found) == 1 else torch.cat(found)).to(dtype)  # of one, cat would make a copy


def _of_one(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, causal: bool) -> Tensor:
    """The last query is of the last token. Torch's `is_causal` would see the first query at the first token."""
    if q_THK.device.type not in SLOW and q_THK.dtype not in NARROW:
        # no kernel of torch's shares kv heads in float32 there: it would hold all scores at once
        k_TGK, v_TGK = (x.repeat_interleave(q_THK.shape[1] // x.shape[1], dim=1) for x in (k_TGK, v_TGK))
    if q_THK.device.type == "meta":
        return meta_kernels.attention(q_THK, k_TGK, v_TGK)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    num, whole = len(q_THK), len(k_TGK)
    seen = (
        None
        if num == whole or not causal
        else torch.ones(num, whole, dtype=torch.bool, device=q.device).tril(whole - num)
    )
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal and seen is None, enable_gqa=True)
    return o[0].transpose(0, 1)
