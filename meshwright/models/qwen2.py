"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671): Qwen3 with biases on q, k and v, and without normalised heads."""

from __future__ import annotations

from .decoder import Decoder
from .hf_config import Json, divides, refuse, take
from .qwen3 import PLAIN, dense, depth_of, heads_of, shape_of
from .rope_config import rotary_of


def build(config: Json, at: str, head: str) -> Decoder:
    """Build a Qwen2 model from its config."""
    refuse(config, {**PLAIN, "attention_bias": (True,)})
    width = divides(
        "num_attention_heads", take(config, "num_attention_heads", int), "hidden_size", take(config, "hidden_size", int)
    )
    heads = heads_of(config, default_head=width, normed=False, bias=True)
    shape = shape_of(config, rotary_of(config, heads.head))
    return Decoder(shape, at, [lambda at: dense(shape, heads, config, at)] * depth_of(config), head)
