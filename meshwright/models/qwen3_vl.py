"""Qwen3-VL, its text model: Qwen3 with a larger RoPE base; its MoE variant renormalises routing weights."""

from __future__ import annotations

from . import qwen3, qwen3_moe
from .decoder import Decoder
from .hf_config import Json

# The default of transformers where the config has no rope_theta.
_THETA = 5e5


def build(config: Json, at: str, head: str) -> Decoder:
    """Build the text model of a dense Qwen3-VL."""
    return qwen3.build(config, at, head, _THETA)


def build_moe(config: Json, at: str, head: str) -> Decoder:
    """Build the text model of a Qwen3-VL-MoE. Files on the hub hold experts transposed; those of transformers
    do not.
    """
    return qwen3_moe.with_experts(config, at, head, renormalise=True, turned=True, theta=_THETA)
