"""Phi-3 and Phi-4, dense: a family that meshwright does not know, in one file that may lie anywhere.

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
    rotary = rotary_of(config, heads.head, partial=1.0, scaled=False)  # transformers takes yarn for longrope here
    shape = shape_of({"rms_norm_eps": 1e-5, **config}, rotary)
    ffn = take(config, "intermediate_size", int)

    def layer(at: str) -> Layer:
        return Layer(shape, Attention(shape, heads, at + "self_attn."), MLP(shape, ffn, at + "mlp."), at)

    return Decoder(shape, at, [layer] * depth_of(config), head)


class MLP(nn.Module):
    """`down(silu(gate x) * up x)`; the file has gate and up in one tensor, as we do."""

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
    """Grouped-query attention; the file has all q, all k and all v below each other in one tensor."""

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
        mine = self.kv_of_queries()
        o_THK = ops.attention(q_THK, k_TGK[:, mine], v_TGK[:, mine], docs)
        return self.leave(self.o(o_THK.flatten(1)))

    def kv_of_queries(self) -> list[int]:
        """For each query head of this rank its kv head, counted from the first that this rank has."""
        serves = self.heads.size // self.kv.size
        return [h // serves - self.kv.start for h in range(self.heads.start, self.heads.stop)]


def part(key: str, rows: int, first: int, shape: tuple[int, int, int]) -> Layout:
    """A parameter of `[heads, head, embed]` that is the rows from `first` on of a tensor of `rows` rows."""
    heads, head, width = shape
    file_box = Box((first, 0), (first + heads * head, width))
    return Layout("part", (Block(Box.whole(shape), key, (rows, width), file_box),))


FAMILIES["phi3"] = Family(build)
