"""Qwen3, dense: pre-norm blocks, grouped-query attention with normed heads, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..layout import ENTER, LEAVE, Block, Box, Declared, Door, Init, Layout, Span, weight
from .config import Json, divides, labels_of, listed, refuse, rope_field, take
from .decoder import Decoder, Layer, Norm, Rope, Trunk

PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,), "attention_dropout": (0,),
    "is_causal": (True,),
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """Grouped-query attention: its shape, and what a family adds or leaves out."""

    heads: int
    kv: int
    head: int
    normed: bool = True  # queries and keys, over each head
    bias: bool = False  # of q, k and v
    gated: bool = False  # the output, by a gate beside each query


def trunk_of(config: Json, *, rope_dim: int, zero_centred: bool = False) -> Trunk:
    if rope_dim % 2 or rope_dim < 2:
        raise ConfigError(f"config.json: {rope_dim} dims of each head would be rotated; it must be an even number")
    return Trunk(
        vocab=take(config, "vocab_size", int),
        width=take(config, "hidden_size", int),
        eps=take(config, "rms_norm_eps", float, 1e-6),
        rope_dim=rope_dim,
        rope_theta=rope_field(config, "rope_theta", 10000.0),
        tied=take(config, "tie_word_embeddings", bool, False),
        std=take(config, "initializer_range", float, 0.02),
        labels=labels_of(config),
        zero_centred=zero_centred,
    )


def heads_of(config: Json, default_head: int, *, normed: bool = True, bias: bool = False, gated: bool = False) -> Heads:
    heads = take(config, "num_attention_heads", int)
    kv = take(config, "num_key_value_heads", int)  # transformers' defaults differ from family to family
    divides("num_key_value_heads", kv, "num_attention_heads", heads)
    return Heads(heads, kv, take(config, "head_dim", int, default_head), normed, bias, gated)


def depth_of(config: Json) -> int:
    """The number of layers, all of full attention."""
    num_layers, kinds = take(config, "num_hidden_layers", int), listed(config, "layer_types", str)
    if set(kinds) - {"full_attention"} or len(kinds) not in (0, num_layers):
        raise ConfigError(f"config.json: layer_types {kinds} must be {num_layers} of 'full_attention', or absent")
    return num_layers


def build(config: Json, at: str, head: str) -> Decoder:
    refuse(config, PLAIN)
    heads = heads_of(config, default_head=128)
    trunk = trunk_of(config, rope_dim=heads.head)
    return Decoder(trunk, at, [lambda at: dense(trunk, heads, config, at)] * depth_of(config), head)


def dense(trunk: Trunk, heads: Heads, config: Json, at: str) -> Layer:
    """A layer of attention and an MLP."""
    mlp = MLP(trunk, take(config, "intermediate_size", int), at + "mlp.")
    return Layer(trunk, Attention(trunk, heads, at + "self_attn."), mlp, at)


class Attention(nn.Module):
    def __init__(self, trunk: Trunk, shape: Heads, at: str) -> None:
        super().__init__()
        D, H, G, K = trunk.width, shape.heads, shape.kv, shape.head
        self.shape = shape
        queries = K * (1 + shape.gated)  # the gate of a head lies beside its query in the file: [q | gate] per head
        self.q, self.q_bias = projection({"heads": H, "head": queries}, trunk, at + "q_proj", bias=shape.bias)
        self.k, self.k_bias = projection({"kv": G, "head": K}, trunk, at + "k_proj", bias=shape.bias)
        self.v, self.v_bias = projection({"kv": G, "head": K}, trunk, at + "v_proj", bias=shape.bias)
        init = Init("normal", trunk.std)
        self.o = weight({"embed": D}, {"heads": H, "head": K}, key=at + "o_proj.weight", init=init)
        self.q_norm = Norm(trunk, at + "q_norm.weight", K, "head") if shape.normed else nn.Identity()
        self.k_norm = Norm(trunk, at + "k_norm.weight", K, "head") if shape.normed else nn.Identity()
        self.heads, self.kv = Span("heads", H), Span("kv", G)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        K, kv = self.shape.head, self.kv_rows()
        q, k, v = self.q_bias, self.k_bias, self.v_bias
        biases = None if q is None or k is None or v is None else (q, k[kv], v[kv])
        q_TC, *kv_TC = ops.linears(self.enter(x_TD), (self.q, self.k[kv], self.v[kv]), biases)
        q_THK, *gate = q_TC.unflatten(1, (len(self.heads), -1)).split(K, -1)
        k_TGK, v_TGK = (y_TC.unflatten(1, (-1, K)) for y_TC in kv_TC)
        q_THK, k_TGK = ops.rotate(self.q_norm(q_THK), *rope), ops.rotate(self.k_norm(k_TGK), *rope)
        o_THK = ops.attention(q_THK, self.shared(k_TGK), self.shared(v_TGK), docs)
        if self.shape.gated:
            o_THK = o_THK * gate[0].sigmoid()
        return self.leave(ops.linear(o_THK.flatten(1), self.o))

    def kv_rows(self) -> slice:
        """Of k and v, those of the kv heads that this rank's query heads use. Where kv heads are fewer than ranks, the
        stored matrix holds them all: only those in use are computed, and the gradients of all ranks sum to the whole.
        """
        first, last = (at - self.kv.start for at in self.used())
        return slice(first * self.shape.head, last * self.shape.head)

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


def projection(rows: dict[str, int], trunk: Trunk, key: str, *, bias: bool) -> tuple[Declared, Declared | None]:
    """A weight from the width of a token to `rows`, and its bias where the family has one."""
    made = weight(rows, {"embed": trunk.width}, key=key + ".weight", init=Init("normal", trunk.std))
    return made, weight(rows, key=key + ".bias", decay=False, init=Init("zeros")) if bias else None


class SwiGLU(nn.Module):
    """`down(silu(gate x) * up x)`. `gate_up` is `[2, F, D]`, so that a cut of F cuts both halves alike."""

    def __init__(self, trunk: Trunk, ffn: int, at: str, dim: str) -> None:
        super().__init__()
        D, init = trunk.width, Init("normal", trunk.std)
        self.gate_up = weight({"half": 2, dim: ffn}, {"embed": D}, layouts=[halves(at, ffn, D)], init=init)
        self.down = weight({"embed": D}, {dim: ffn}, key=at + "down_proj.weight", init=init)

    def forward(self, x_TD: Tensor) -> Tensor:
        return ops.linear(ops.swiglu(ops.linear(x_TD, self.gate_up)), self.down)


class MLP(SwiGLU):
    """SwiGLU with its hidden units split by tp."""

    def __init__(self, trunk: Trunk, ffn: int, at: str) -> None:
        super().__init__(trunk, ffn, at, "ffn")
        self.enter, self.leave = Door(ENTER, trunk.width), Door(LEAVE, trunk.width)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.leave(super().forward(self.enter(x_TD)))


def halves(at: str, ffn: int, width: int) -> Layout:
    """`gate_proj` and `up_proj` of the file, one after the other in ours."""
    blocks = [
        Block(Box((i, 0, 0), (i + 1, ffn, width)), at + name, (ffn, width), Box.whole((ffn, width)))
        for i, name in enumerate(("gate_proj.weight", "up_proj.weight"))
    ]
    return Layout("halves", tuple(blocks))
