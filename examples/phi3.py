"""Phi-3 and Phi-4, dense: a family that the package does not have, in one file that may be anywhere.

`docs/add-a-model.md` walks through it.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright import ops
from meshwright.models import FAMILIES, Family
from meshwright.models.decoder import Decoder, Layer, Rope, Shape
from meshwright.models.hf_config import Json, divides, refuse, take
from meshwright.models.linear import ALL, Linear, joined
from meshwright.models.qwen3 import Heads, depth_of, heads_of, shape_of
from meshwright.models.rope_config import rotary_of
from meshwright.sharding import ENTER, LEAVE, Block, Box, Door, Layout, Span

REFUSED = {  # fields that would change the numbers, and the values that this file computes
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "sliding_window": (None,),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), (0,)),
}


def build(config: Json, at: str, head: str) -> Decoder:
    refuse(config, REFUSED)
    width, num_heads = take(config, "hidden_size", int), take(config, "num_attention_heads", int)
    heads = heads_of(config, default_head=divides("num_attention_heads", num_heads, "hidden_size", width))
    rotary = rotary_of(config, heads.head, partial=1.0, scaled=False)  # transformers reads yarn as longrope in Phi-3
    shape = shape_of({"rms_norm_eps": 1e-5, **config}, rotary)
    ffn = take(config, "intermediate_size", int)

    def layer(at: str) -> Layer:
        return Layer(shape, Attention(shape, heads, at + "self_attn."), MLP(shape, ffn, at + "mlp."), at)

    return Decoder(shape, at, [layer] * depth_of(config), head)


class MLP(nn.Module):
    """`down(silu(gate x) * up x)`. The file has gate and up in one tensor, and so does this parameter."""

    def __init__(self, shape: Shape, ffn: int, at: str) -> None:
        super().__init__()
        D = shape.width
        self.gate_up = Linear({"half": 2, "ffn": ffn}, {"embed": D}, shape.std, key=at + "gate_up_proj")
        self.down = Linear({"embed": D}, {"ffn": ffn}, shape.std, key=at + "down_proj")
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = self.enter(x_TD)
        return self.leave(self.down(ops.swiglu(self.gate_up(x_TD))))


class Attention(nn.Module):
    """Grouped-query attention. The file stacks all rows of q, k and v in one tensor."""

    def __init__(self, shape: Shape, heads: Heads, at: str) -> None:
        super().__init__()
        D, H, G, K = shape.width, heads.heads, heads.kv, heads.head
        std, key, rows = shape.std, at + "qkv_proj.weight", (H + 2 * G) * K
        query, kv, cols = {"heads": H, "head": K}, {"kv": G, "head": K}, {"embed": D}
        self.q = Linear(query, cols, std, layouts=[part(key, rows, 0, (H, K, D))])
        self.k = Linear(kv, cols, std, layouts=[part(key, rows, H * K, (G, K, D))])
        self.v = Linear(kv, cols, std, layouts=[part(key, rows, (H + G) * K, (G, K, D))])
        self.o = Linear(cols, query, std, key=at + "o_proj")
        self.head, self.heads, self.kv = K, Span("heads", H), Span("kv", G)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        qkv = joined(self.enter(x_TD), (self.q, ALL), (self.k, ALL), (self.v, ALL))
        q_THK, k_TGK, v_TGK = (y_TC.unflatten(1, (-1, self.head)) for y_TC in qkv)
        q_THK, k_TGK = ops.rotate(q_THK, *rope), ops.rotate(k_TGK, *rope)
        kv_H = self.kv_of_queries()
        o_THK = ops.attention(q_THK, k_TGK[:, kv_H], v_TGK[:, kv_H], docs)
        return self.leave(self.o(o_THK.flatten(1)))

    def kv_of_queries(self) -> list[int]:
        """Return the kv head of each query head of this rank, counted from the first kv head that the rank has."""
        serves = self.heads.size // self.kv.size
        return [h // serves - self.kv.start for h in range(self.heads.start, self.heads.stop)]


def part(key: str, rows: int, first: int, shape: tuple[int, int, int]) -> Layout:
    """Return the layout of a `[heads, head, embed]` parameter stored as rows `first` and following of a file tensor."""
    heads, head, width = shape
    file_box = Box((first, 0), (first + heads * head, width))
    return Layout("part", (Block(Box.whole(shape), key, (rows, width), file_box),))


FAMILIES["phi3"] = Family(build)
