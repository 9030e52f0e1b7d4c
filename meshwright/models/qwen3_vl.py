"""Qwen3-VL, its text: Qwen3, and Qwen3 with experts whose weights always add up to 1."""

from __future__ import annotations

from . import qwen3, qwen3_moe
from .decoder import Decoder
from .hf_config import Json

_THETA = 5e5


def build(config: Json, at: str, head: str) -> Decoder:
    return qwen3.build(config, at, head, _THETA)


def build_moe(config: Json, at: str, head: str) -> Decoder:
    """Files on the hub have the matrices of experts turned, those that transformers writes have not."""
    return qwen3_moe.with_experts(config, at, head, renormalise=True, turned=True, theta=_THETA)
