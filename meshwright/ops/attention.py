"""Softmax attention over packed documents (varlen, block-diagonal causal), with grouped-query heads.

Documents of a micro-batch lie end to end in one stream, without padding; a token attends to its own document only.
Shapes: T tokens, H query heads, G kv heads (grouped-query attention, arXiv 2305.13245), K dims of a head.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import meta_kernels
from .documents import Documents, check_tokens
from .kernels import NARROW, SLOW, accepts, fastest, uncompiled
from .matmul import matmul_dtype
from .meta_kernels import kind_of

# The kernel for one document is compiled for each length, which takes half a second. So it serves only multiples of
# this length: there are few of them, and padded or truncated data has no other lengths.
_LENGTH_STEP = 256
# One call per document is faster from this mean number of multiply-adds (q . k): 4096 tokens, 8 heads of 128.
_LONG_MACS = 1 << 34


@uncompiled
def attention(
    q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, first: int = 0, *, causal: bool = True
) -> Tensor:
    """Attend within each document, with scale K**-0.5; query head h uses kv head h // (H // G). -> o_THK

    Keys and values cover the whole stream. Queries may be a contiguous part of it that begins at token `first`: that is
    how context parallelism calls it, with keys gathered from all ranks. With `causal=False` a token also sees the
    tokens after it; then queries must cover the whole stream, which may be empty (the vision tower of a rank without
    frames).
    """
    num_queries, num_tokens = q_THK.shape[0], docs.positions_T.shape[0]
    if not 0 <= first <= first + num_queries <= num_tokens:
        raise ValueError(f"q has {num_queries} tokens from token {first} on but its documents have {num_tokens}")
    check_tokens(docs, k=k_TGK, v=v_TGK)
    heads, kv_heads = q_THK.shape[1], k_TGK.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    if not causal:
        qkv = (q_THK, k_TGK, v_TGK)
        op = (
            fastest(_varlen_bidirectional, _bidirectional, qkv, planned=meta_kernels.attention)
            if num_queries
            else _bidirectional
        )
        return op(q_THK, k_TGK, v_TGK, docs)
    if num_queries == num_tokens and _prefers_one_call_each(q_THK, docs):
        # torch's fused kernels take heads of at most 256 in steps of 8. Otherwise its formula would hold the scores of
        # all documents at once.
        is_fused = q_THK.shape[-1] <= 256 and q_THK.shape[-1] % 8 == 0
        are_equal = is_fused and len(docs.lengths) > 1 and len({*docs.lengths}) == 1
        by_torch = _equal_documents if are_equal else _by_document
        return by_torch(q_THK, k_TGK, v_TGK, docs)
    if num_queries == num_tokens:
        op = fastest(_varlen, _by_document, (q_THK, k_TGK, v_TGK), planned=meta_kernels.attention)
        return op(q_THK, k_TGK, v_TGK, docs)
    # Only documents with tokens among the queries matter. The first of them keeps its beginning, so the kernel sees
    # more keys than queries, with the last query at the last key.
    start, docs = docs.reaching(first, first + num_queries)
    k_TGK, v_TGK = (x[start : start + docs.bounds[-1]] for x in (k_TGK, v_TGK))
    op = fastest(
        _varlen_last_queries, _by_document, (q_THK, k_TGK, v_TGK), _last_queries, (67, 130), meta_kernels.attention
    )
    return op(q_THK, k_TGK, v_TGK, docs)


def _prefers_one_call_each(q_THK: Tensor, docs: Documents) -> bool:
    """Return whether one call per document is faster on a GPU than one varlen call for all of them.

    torch's kernel for one dense sequence has the highest throughput, but each call costs a launch. It pays off once the
    mean document is long. Documents of equal length share one call, as a batch.
    """
    if kind_of(q_THK.device) == "cpu" or not docs.lengths or any(length % _LENGTH_STEP for length in docs.lengths):
        return False
    pairs = sum(length**2 for length in docs.lengths) / len(docs.lengths)
    return q_THK.shape[1] * q_THK.shape[2] * pairs >= _LONG_MACS


def _last_queries(noise: list[Tensor]) -> list[Tensor]:
    """Keep the last three quarters of the queries, to try a kernel with fewer queries than keys."""
    q_THK, k_TGK, v_TGK = noise
    return [q_THK[len(q_THK) // 4 :], k_TGK, v_TGK]


def _varlen_last_queries(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """Attend with the queries of the last tokens only.

    It has a trial of its own, apart from `_varlen`: kernels differ in how they align a causal mask when there are fewer
    queries than keys. FlashAttention 2.1 aligns it bottom right, as needed; before, it was top left, where the first
    query sees only the first key.
    """
    return _varlen(q_THK, k_TGK, v_TGK, docs)


def _varlen_bidirectional(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    return _varlen(q_THK, k_TGK, v_TGK, docs, causal=False)


def _bidirectional(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    return _by_document(q_THK, k_TGK, v_TGK, docs, causal=False)


def _varlen(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, causal: bool = True) -> Tensor:
    """Call torch's varlen kernel, which takes all documents at once.

    Queries are the last tokens of the stream and cover at least the last document. Their bounds are those of the keys,
    shifted left by the number of keys without a query.
    """
    from torch.nn.attention.varlen import varlen_attn

    keys, missing = docs.cu_seqlens[: len(docs.bounds)], len(k_TGK) - len(q_THK)
    queries = (keys - missing).clamp(min=0) if missing else keys
    longest = max(docs.lengths, default=0)
    # torch 2.11 serves grouped queries without this argument
    gqa: dict[str, Any] = {"enable_gqa": True} if accepts(varlen_attn, "enable_gqa") else {}
    o_THK = varlen_attn(
        q_THK, k_TGK, v_TGK, queries, keys, longest, longest, window_size=(-1, 0 if causal else -1), **gqa
    )
    assert isinstance(o_THK, Tensor)
    return o_THK


def _by_document(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents, causal: bool = True) -> Tensor:
    """Call `scaled_dot_product_attention` once per document. Queries are the last tokens of the stream.

    Slow for thousands of tiny documents.
    """
    dtype, wide, missing = q_THK.dtype, matmul_dtype(q_THK), len(k_TGK) - len(q_THK)
    keys = docs.lengths or (0,)  # no documents: one empty call keeps q, k, v in the graph
    queries = [max(0, stop - missing) - max(0, start - missing) for start, stop in pairwise(docs.bounds)] or [0]
    # split and not slices: its backward is one cat; each slice's would write a whole stream of zeros
    pieces = zip(*(x.to(wide).split(n) for x, n in ((q_THK, queries), (k_TGK, keys), (v_TGK, keys))), strict=True)
    outputs = [_one_document(q, k, v, causal) for q, k, v in pieces]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype)  # cat would copy a single one


def _equal_documents(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """Call `scaled_dot_product_attention` once for documents of one length: a batch, which is a view of the stream.

    Nothing is copied to join outputs or gradients, in forward or backward.
    """
    q_THK, k_TGK, v_TGK = _with_heads_of_torch(q_THK, k_TGK, v_TGK)
    if q_THK.device.type == "meta":
        return meta_kernels.attention(q_THK, k_TGK, v_TGK)
    q, k, v = (x.unflatten(0, (len(docs.lengths), -1)).transpose(1, 2) for x in (q_THK, k_TGK, v_TGK))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).flatten(0, 1)


def _with_heads_of_torch(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat the kv heads in float32 on a GPU.

    No fused kernel of torch accepts grouped heads in float32 there, and its math kernel would materialise the scores
    [H, T, T].
    """
    if q_THK.device.type in SLOW or q_THK.dtype in NARROW:
        return q_THK, k_TGK, v_TGK
    times = q_THK.shape[1] // k_TGK.shape[1]
    return q_THK, k_TGK.repeat_interleave(times, dim=1), v_TGK.repeat_interleave(times, dim=1)


def _one_document(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, causal: bool) -> Tensor:
    """Attend within one document, whose last query is at its last key.

    `is_causal=True` of torch aligns the mask top left, which is wrong with fewer queries than keys. Then the mask is
    built by hand, aligned bottom right.
    """
    q_THK, k_TGK, v_TGK = _with_heads_of_torch(q_THK, k_TGK, v_TGK)
    if q_THK.device.type == "meta":
        return meta_kernels.attention(q_THK, k_TGK, v_TGK)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    num_queries, num_keys = len(q_THK), len(k_TGK)
    mask = (
        None
        if num_queries == num_keys or not causal
        else torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    )
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True)
    return o[0].transpose(0, 1)
