"""Softmax attention over a packed stream of documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops.documents import Documents, check_tokens
from meshwright.ops.product import product_dtype


def attention(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, docs: Documents) -> Tensor:
    """Causal attention inside each document, scale K**-0.5; query head h uses kv head h // (H // G). -> o_THK

    One kernel call a document: plain and right, slow for thousands of tiny documents.
    """
    check_tokens(docs, q=q_THK, k=k_TGK, v=v_TGK)
    heads, kv_heads = q_THK.shape[1], k_TGK.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} query heads")
    dtype, wide = q_THK.dtype, product_dtype(q_THK)
    lengths = docs.lengths or (0,)  # no documents: one empty call keeps q, k, v in the graph
    # split and not slices: its backward is one cat, that of a slice writes a whole stream of zeros a document
    pieces = zip(*(x.to(wide).split(lengths) for x in (q_THK, k_TGK, v_TGK)), strict=True)
    return torch.cat([_causal(q, k, v) for q, k, v in pieces]).to(dtype)


def _causal(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_TGK, v_TGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
