"""Qwen3, dense: pre-norm blocks, grouped-query attention with normed heads, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..layout import ENTER, LEAVE, Block, Box, Door, Init, Layout, Span, weight
from .config import Json, divides, refuse, rope_theta, take
from .decoder import Decoder, Norm, Rope, Trunk

PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,), "attention_dropout": (0,)}


@dataclass(frozen=True)
class Heads:
    """The shape of grouped-query attention."""

    heads: int
    kv: int
    head: int


def trunk_of(config: Json, *, rope_dim: int, zero_centred: bool = False) -> Trunk:
    return Trunk(
        vocab=take(config, "vocab_size", int),
        width=take(config, "hidden_size", int),
        eps=take(config, "rms_norm_eps", float, 1e-6),
        rope_dim=rope_dim,
        rope_theta=rope_theta(config),
        tied=take(config, "tie_word_embeddings", bool, False),
        std=take(config, "initializer_range", float, 0.02),
        zero_centred=zero_centred,
    )


def heads_of(config: Json, default_head: int | None = None) -> Heads:
    heads, kv = take(config, "num_attention_heads", int), take(config, "num_key_value_heads", int)
    divides("num_key_value_heads", kv, "num_attention_heads", heads)
    return Heads(heads, kv, take(config, "head_dim", int, default_head))


def build(config: Json, at: str, head: str) -> Decoder:
    refuse(config, PLAIN)
    heads = heads_of(config, default_head=128)
    trunk = trunk_of(config, rope_dim=heads.head)
    ffn = take(config, "intermediate_size", int)
    num_layers = take(config, "num_hidden_layers", int)
    return Decoder(trunk, at, [lambda at: Layer(trunk, heads, MLP(trunk, ffn, at + "mlp."), at)] * num_layers, head)


class Layer(nn.Module):
    def __init__(self, trunk: Trunk, heads: Heads, mlp: nn.Module, at: str) -> None:
        super().__init__()
        self.norm = Norm(trunk, at + "input_layernorm.weight")
        self.attn = Attention(trunk, heads, at + "self_attn.")
        self.mlp_norm = Norm(trunk, at + "post_attention_layernorm.weight")
        self.mlp = mlp

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        x_TD = x_TD + self.attn(self.norm(x_TD), rope, docs)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Attention(nn.Module):
    def __init__(self, trunk: Trunk, shape: Heads, at: str, *, gated: bool = False) -> None:
        super().__init__()
        D, H, G, K = trunk.width, shape.heads, shape.kv, shape.head
        init = Init("normal", trunk.std)
        self.gated, self.head = gated, K
        # The gate of a head lies beside its query in the file: [q | gate] per head.
        self.q = weight({"heads": H, "head": K * (1 + gated)}, {"embed": D}, key=at + "q_proj.weight", init=init)
        self.k = weight({"kv": G, "head": K}, {"embed": D}, key=at + "k_proj.weight", init=init)
        self.v = weight({"kv": G, "head": K}, {"embed": D}, key=at + "v_proj.weight", init=init)
        self.o = weight({"embed": D}, {"heads": H, "head": K}, key=at + "o_proj.weight", init=init)
        self.q_norm = Norm(trunk, at + "q_norm.weight", K, "head")
        self.k_norm = Norm(trunk, at + "k_norm.weight", K, "head")
        self.heads, self.kv = Span("heads", H), Span("kv", G)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        x_TD = self.enter(x_TD)
        q_THK, *gate = F.linear(x_TD, self.q).unflatten(1, (len(self.heads), -1)).split(self.head, -1)
        k_TGK, v_TGK = self.kv_heads(x_TD, self.k), self.kv_heads(x_TD, self.v)
        q_THK, k_TGK = ops.rotate(self.q_norm(q_THK), *rope), ops.rotate(self.k_norm(k_TGK), *rope)
        o_THK = ops.attention(q_THK, self.shared(k_TGK), self.shared(v_TGK), docs)
        if self.gated:
            o_THK = o_THK * gate[0].sigmoid()
        return self.leave(F.linear(o_THK.flatten(1), self.o))

    def kv_heads(self, x_TD: Tensor, kv: Tensor) -> Tensor:
        """The kv heads that this rank's query heads use. Where kv heads are fewer than ranks, the stored matrix holds
        them all: only those in use are computed, and the gradients of all ranks sum to the whole one."""
        first, last = self.used()
        w = kv.view(len(self.kv), self.head, -1)[first - self.kv.start : last - self.kv.start]
        return F.linear(x_TD, w.flatten(0, 1)).unflatten(1, (-1, self.head))

    def used(self) -> tuple[int, int]:
        serves = self.heads.size // self.kv.size
        return self.heads.start // serves, (self.heads.stop - 1) // serves + 1

    def shared(self, x_TGK: Tensor) -> Tensor:
        """kv heads such that each serves the same number of this rank's query heads: as they are, nearly always."""
        serves, first = self.heads.size // self.kv.size, self.used()[0]
        of_query = [h // serves - first for h in range(self.heads.start, self.heads.stop)]
        num = x_TGK.shape[1]
        even = len(of_query) % num == 0 and of_query == [i * num // len(of_query) for i in range(len(of_query))]
        return x_TGK if even else x_TGK[:, of_query]


class MLP(nn.Module):
    """SwiGLU, its hidden units split by tp. `gate_up` is `[2, F, D]`: both halves are cut alike."""

    def __init__(self, trunk: Trunk, ffn: int, at: str) -> None:
        super().__init__()
        D, init = trunk.width, Init("normal", trunk.std)
        self.gate_up = weight({"half": 2, "ffn": ffn}, {"embed": D}, layouts=[halves(at, ffn, D)], init=init)
        self.down = weight({"embed": D}, {"ffn": ffn}, key=at + "down_proj.weight", init=init)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = F.linear(self.enter(x_TD), self.gate_up).chunk(2, -1)
        return self.leave(F.linear(ops.swiglu(gate_TF, up_TF), self.down))


def halves(at: str, ffn: int, width: int) -> Layout:
    """`gate_proj` and `up_proj` of the file, one after the other in ours."""
    blocks = [
        Block(Box((i, 0, 0), (i + 1, ffn, width)), at + name, (ffn, width), Box.whole((ffn, width)))
        for i, name in enumerate(("gate_proj.weight", "up_proj.weight"))
    ]
    return Layout("halves", tuple(blocks))
