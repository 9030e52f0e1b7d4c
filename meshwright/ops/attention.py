"""Softmax attention over a packed stream of documents."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops.documents import Documents, check_tokens
from meshwright.ops.kernels import NARROW, SLOW, fastest, takes, uncompiled
from meshwright.ops.product import product_dtype


@uncompiled
def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """Causal attention inside each document, scale K**-0.5; query head h uses kv head h // (H // G). -> o_THK"""
    check_tokens(docs, q=q_THK, k=k_TGK, v=v_TGK)
    heads, kv_heads = q_THK.shape[1], k_TGK.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    op = fastest(_varlen, _by_document, (q_THK, k_TGK, v_TGK))
    return op(q_THK, k_TGK, v_TGK, docs)


def _varlen(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """torch's kernel for many lengths at once."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = docs.cu_seqlens[: len(docs.bounds)], max(docs.lengths, default=0)
    # torch 2.11 has grouped queries without saying so
    gqa: dict[str, Any] = {"enable_gqa": True} if takes(varlen_attn, "enable_gqa") else {}
    o_THK = varlen_attn(q_THK, k_TGK, v_TGK, bounds, bounds, longest, longest, window_size=(-1, 0), **gqa)
    assert isinstance(o_THK, Tensor)
    return o_THK


def _by_document(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """One call a document: slow for thousands of tiny ones."""
    dtype, wide = q_THK.dtype, product_dtype(q_THK)
    lengths = docs.lengths or (0,)  # no documents: one empty call keeps q, k, v in the graph
    # split and not slices: its backward is one cat, that of a slice writes a whole stream of zeros a document
    pieces = zip(*(x.to(wide).split(lengths) for x in (q_THK, k_TGK, v_TGK)), strict=True)
    return torch.cat([_causal(q, k, v) for q, k, v in pieces]).to(dtype)


def _causal(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
    if q_THK.device.type not in SLOW and q_THK.dtype not in NARROW:
        # no kernel of torch's shares kv heads in float32 there: it would hold all scores at once
        k_TGK, v_TGK = (x.repeat_interleave(q_THK.shape[1] // x.shape[1], dim=1) for x in (k_TGK, v_TGK))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
