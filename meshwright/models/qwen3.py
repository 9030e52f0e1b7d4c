"""Qwen3, dense (arXiv 2505.09388): pre-norm layers, grouped-query attention with QK-norm, SwiGLU.

The other families reuse its attention and MLP. Shapes: T tokens, D model width, H query heads, G kv heads, K head dim,
F hidden width of the MLP, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import ATTENTION, ENTER, LEAVE, Block, Box, Door, Join, Layout, Span, Swap
from .decoder import Decoder, Layer, Norm, Rope, Shape
from .hf_config import Json, divides, labels_of, listed, refuse, take
from .linear import ALL, Linear, joined
from .rope_config import THETA, rotary_of

# Fields of config.json with the values that this attention and MLP compute; any other value is refused.
PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,), "attention_dropout": (0,),
    "is_causal": (True,),
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Grouped-query attention (arXiv 2305.13245): its shape, and what a family adds or leaves out."""

    heads: int
    kv: int
    head: int
    normed: bool = True  # RMSNorm of queries and keys over each head (QK-norm), which bounds attention logits
    bias: bool = False  # on q, k and v
    gated: bool = False  # whether a sigmoid gate next to each query scales the output (Qwen3.5)


def shape_of(config: Json, rotary: ops.Rotary, *, zero_centred: bool = False) -> Shape:
    """Read the fields that all families share."""
    return Shape(
        vocab=take(config, "vocab_size", int), width=take(config, "hidden_size", int),
        eps=take(config, "rms_norm_eps", float, 1e-6), rotary=rotary,
        tied=take(config, "tie_word_embeddings", bool, False), std=take(config, "initializer_range", float, 0.02),
        labels=labels_of(config), zero_centred=zero_centred,
    )  # fmt: skip


def heads_of(config: Json, default_head: int, *, normed: bool = True, bias: bool = False, gated: bool = False) -> Heads:
    """Read the shape of attention."""
    heads = take(config, "num_attention_heads", int)
    # Required: its default differs between families in transformers, and a wrong guess would still load.
    kv = take(config, "num_key_value_heads", int)
    divides("num_key_value_heads", kv, "num_attention_heads", heads)
    return Heads(heads, kv, take(config, "head_dim", int, default_head), normed, bias, gated)


def depth_of(config: Json) -> int:
    """Return the number of layers, all of full attention."""
    num_layers, kinds = take(config, "num_hidden_layers", int), listed(config, "layer_types", str)
    if set(kinds) - {"full_attention"} or len(kinds) not in (0, num_layers):
        raise ConfigError(f"config.json: layer_types {kinds} must be {num_layers} of 'full_attention', or absent")
    return num_layers


def build(config: Json, at: str, head: str, theta: float = THETA) -> Decoder:
    """Build a Qwen3 model from its config. `theta`: the base of RoPE where the config has none."""
    refuse(config, PLAIN)
    heads = heads_of(config, default_head=128)
    shape = shape_of(config, rotary_of(config, heads.head, theta=theta))
    return Decoder(shape, at, [lambda at: dense(shape, heads, config, at)] * depth_of(config), head)


def dense(shape: Shape, heads: Heads, config: Json, at: str) -> Layer:
    """Build a layer of attention and an MLP."""
    mlp = MLP(shape, take(config, "intermediate_size", int), at + "mlp.")
    return Layer(shape, Attention(shape, heads, at + "self_attn."), mlp, at)


class Attention(nn.Module):
    """Grouped-query attention, tensor-parallel by heads and context-parallel by swap and gather.

    Under tp each rank has the q, k, v and o of its own heads: enter (all-gather of tokens), attend, leave
    (reduce-scatter). Under cp `swap` exchanges tokens for heads (Ulysses), and `all_k`, `all_v` gather keys and values
    over the remaining cp ranks. On one process all of these are the identity.
    """

    mixer = ATTENTION

    def __init__(self, shape: Shape, heads: Heads, at: str) -> None:
        super().__init__()
        D, H, G, K = shape.width, heads.heads, heads.kv, heads.head
        self.head = K
        queries = K * (1 + heads.gated)  # files hold [q | gate] per head, not all queries and then all gates
        q = Linear({"heads": H, "head": queries}, {"embed": D}, shape.std, key=at + "q_proj", bias=heads.bias)
        self.q = q.of_matrices(head=(K,) * (1 + heads.gated))
        self.k = Linear({"kv": G, "head": K}, {"embed": D}, shape.std, key=at + "k_proj", bias=heads.bias)
        self.v = Linear({"kv": G, "head": K}, {"embed": D}, shape.std, key=at + "v_proj", bias=heads.bias)
        self.o = Linear({"embed": D}, {"heads": H, "head": K}, shape.std, key=at + "o_proj")
        self.q_norm = Norm(shape, at + "q_norm.weight", K, "head") if heads.normed else nn.Identity()
        self.k_norm = Norm(shape, at + "k_norm.weight", K, "head") if heads.normed else nn.Identity()
        self.heads, self.kv = Span("heads", H), Span("kv", G)
        # q has one head per query head; a head of k or v serves H / G query heads, and is sent once to each rank that
        # needs it.
        self.swap = Swap(self.heads, [(K, 1), (K, H // G), (K, H // G)], K, self.mixer)
        self.all_k, self.all_v = Join(self.swap, K, serves=H // G), Join(self.swap, K, serves=H // G)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        q_THK, k_TGK, v_TGK, gate = self.project(self.enter(x_TD), rope)
        first = self.swap.group * len(q_THK)  # the offset of the queries among the gathered keys
        return self.output(ops.attention(q_THK, k_TGK, v_TGK, docs, first), gate)

    def project(self, x_TD: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return queries, keys and values of the heads and tokens on which this rank works, and gates of its own."""
        K, kv = self.head, self.kv_rows()
        q_TC, *kv_TC = joined(x_TD, (self.q, ALL), (self.k, kv), (self.v, kv))
        q_THK, *gate = q_TC.unflatten(1, (len(self.heads), -1)).split(K, -1)
        k_TGK, v_TGK = (y_TC.unflatten(1, (-1, K)) for y_TC in kv_TC)
        # QK-norm before RoPE: a rotation keeps norms, but the norm's weight does not commute with it.
        q_THK, k_TGK = ops.rotate(self.q_norm(q_THK), *rope), ops.rotate(self.k_norm(k_TGK), *rope)
        q_THK, k_TGK, v_TGK = self.swap(q_THK, k_TGK, v_TGK)
        # Gathering after the swap sends only the kv heads that this rank works on.
        return q_THK, self.shared(self.all_k(k_TGK)), self.shared(self.all_v(v_TGK)), gate

    def output(self, o_THK: Tensor, gate: list[Tensor]) -> Tensor:
        """Return the output of the mixer, from the attention outputs of this rank's heads."""
        o_THK = self.swap.back(o_THK)
        if gate:
            o_THK = o_THK * gate[0].sigmoid()
        return self.leave(self.o(o_THK.flatten(1)))

    def kv_rows(self) -> slice:
        """Return the rows of k and v for the kv heads that this rank's query heads use.

        With fewer kv heads than tp ranks, each rank stores all of them. It computes only those that it uses: every
        rank's gradient is then a partial sum, and their sum is right without any factor.
        """
        first, last = (at - self.kv.start for at in self.used())
        return slice(first * self.head, last * self.head)

    def used(self) -> tuple[int, int]:
        """Return the range of kv heads that this rank's query heads use."""
        serves = self.heads.size // self.kv.size
        return self.heads.start // serves, (self.heads.stop - 1) // serves + 1

    def shared(self, x_TGK: Tensor) -> Tensor:
        """Repeat kv heads so that each serves the same number of query heads on this rank. Nearly always they already
        do.

        An uneven case: 3 query heads of a rank, where the first two share a kv head and the third has another.
        """
        serves, num = self.heads.size // self.kv.size, x_TGK.shape[1]
        local = self.swap.deal.serving(serves)[self.swap.part]
        kv_of_query = [local.index(head // serves) for head in self.swap.own_heads]
        even = len(kv_of_query) % num == 0 and kv_of_query == [
            i * num // len(kv_of_query) for i in range(len(kv_of_query))
        ]
        if even:
            return x_TGK
        heads_TK = x_TGK.unbind(1)  # indexing with a list would copy it to the device, and the host would wait for that
        return torch.stack([heads_TK[at] for at in kv_of_query], 1)


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)` (arXiv 2002.05202).

    `gate_up` is `[2, F, D]`, so that a cut of F cuts gate and up equally.
    """

    def __init__(self, shape: Shape, ffn: int, at: str, dim: str) -> None:
        super().__init__()
        D = shape.width
        gate_up = Linear({"half": 2, dim: ffn}, {"embed": D}, shape.std, layouts=[halves(at, ffn, D)])
        self.gate_up = gate_up.of_matrices(half=(1, 1))
        self.down = Linear({"embed": D}, {dim: ffn}, shape.std, key=at + "down_proj")

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(ops.swiglu(self.gate_up(x_TD)))


class MLP(SwiGLU):
    """SwiGLU with its hidden units split by tp: gate_up by columns, down by rows, as in Megatron (arXiv 1909.08053)."""

    def __init__(self, shape: Shape, ffn: int, at: str) -> None:
        super().__init__(shape, ffn, at, "ffn")
        self.enter, self.leave = Door(ENTER, shape.width), Door(LEAVE, shape.width)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.leave(super().forward(self.enter(x_TD)))


def halves(at: str, ffn: int, width: int) -> Layout:
    """Return the layout with `gate_proj` and `up_proj` as separate keys, one after the other in ours."""
    blocks = [
        Block(Box((i, 0, 0), (i + 1, ffn, width)), at + name, (ffn, width), Box.whole((ffn, width)))
        for i, name in enumerate(("gate_proj.weight", "up_proj.weight"))
    ]
    return Layout("halves", tuple(blocks))
