"""Split a tensor of a Hugging Face file into its matrices, from its key and config.json alone.

Oracle O1 uses it before the plain update of an optimizer of whole matrices, such as Muon. It shares no code with the
declarations of `models/`, so a wrong declaration shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

# Tensors with two dims or more that count as no matrix: embeddings, score heads, convolutions, tables, rows of gates.
_OTHERS = re.compile(
    r"embed_tokens|lm_head|score\.|conv|ple_embedding|shared_expert_gate|patch_embed|pos_embed|block_inject|index_qk|\.lora_"
)


def indices_of_matrices(
    key: str, shape: Sequence[int], config: Mapping[str, Any], *, by_head: bool = False
) -> list[Tensor]:
    """Return the matrices of a tensor as indices into its flat elements; an empty list if it is no matrix.

    `by_head`: split queries, keys and values further, into a matrix for each head, or key head of a delta net.
    """
    if not 2 <= len(shape) <= 3 or _OTHERS.search(key):
        return []
    text, at = config.get("text_config", config), torch.arange(prod(shape)).view(*shape)
    if len(shape) == 3:  # experts, fused: [experts, rows, columns]
        return [half for each in at for half in _halves(each, text.get("hidden_size"), "gate_up" in key)]
    if "visual." in key:
        return [*at.chunk(3)] if "attn.qkv" in key else [at]
    if key.endswith("mtp.fc.weight"):  # [embedding | hidden state]
        return [*at.chunk(2, 1)]
    if "in_proj_" in key:
        return _of_delta_net(key, at, text, by_head)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if "q_proj" in key and shape[0] == 2 * head * text["num_attention_heads"]:  # [query | gate] per head
        at = torch.cat([half.reshape(-1, shape[1]) for half in at.view(-1, 2, head, shape[1]).unbind(1)])
        return [*at.split(head)] if by_head else [*at.chunk(2)]
    if by_head and re.search(r"self_attn\.[qkv]_proj", key):
        return [*at.split(head)]
    return [at]


def _halves(expert: Tensor, hidden: Any, is_pair: bool) -> list[Tensor]:
    """Return gate and up of an expert, which some files store transposed."""
    rows = expert.T if is_pair and expert.shape[0] == hidden and expert.shape[1] != hidden else expert
    return [*rows.chunk(2)] if is_pair else [rows]


def _of_delta_net(key: str, at: Tensor, text: Mapping[str, Any], by_head: bool) -> list[Tensor]:
    """Return q, k and v, their gate z, b and a: stacked in Qwen3.5, interleaved by key head in Qwen3-Next."""
    num, key_dim = text["linear_num_key_heads"], text["linear_key_head_dim"]
    ratio = text["linear_num_value_heads"] // num
    value_dim = ratio * text["linear_value_head_dim"]
    if "qkvz" in key or "ba" in key.split("in_proj_")[1]:
        sizes = [key_dim, key_dim, value_dim, value_dim] if "qkvz" in key else [ratio, ratio]
        parts = at.view(num, -1, at.shape[1]).split(sizes, 1)
        whole = lambda part: [part.reshape(-1, at.shape[1])]  # noqa: E731 - short
        return [rows for part in parts for rows in (part if by_head and "qkvz" in key else whole(part))]
    if "qkv" not in key:
        return [at]
    parts = at.split([num * key_dim, num * key_dim, num * value_dim])
    return [rows for part in parts for rows in (part.chunk(num) if by_head else [part])]
