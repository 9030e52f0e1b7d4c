"""Qwen3.5, dense, text: three gated delta nets to one gated attention; zero-centred norms, partial RoPE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..layout import ENTER, LEAVE, Declared, Door, Init, segments, weight
from .config import Json, divides, listed, refuse, rope_field, take
from .decoder import Decoder, Layer, Rope, Trunk
from .qwen3 import MLP, PLAIN, Attention, heads_of, trunk_of

LINEAR, FULL = "linear_attention", "full_attention"
Mixer = Callable[[str], nn.Module]  # key prefix of the layer -> mixer


@dataclass(frozen=True)
class DeltaShape:
    keys: int  # key heads; each serves `ratio` value heads
    ratio: int
    key: int
    value: int
    taps: int


def build(config: Json, at: str, head: str) -> Decoder:
    trunk, mixers = backbone(config)
    ffn = take(config, "intermediate_size", int)

    def layer(mixer: Mixer, at: str) -> nn.Module:
        return Layer(trunk, mixer(at), MLP(trunk, ffn, at + "mlp."), at)

    return Decoder(trunk, at, [partial(layer, mixer) for mixer in mixers], head)


def backbone(config: Json) -> tuple[Trunk, list[Mixer]]:
    """What the dense and the MoE models share: the trunk, and how to make the mixer of each layer."""
    refuse(config, PLAIN)
    heads, delta = heads_of(config, default_head=256, gated=True), delta_of(config)
    rotated = rope_field(config, "partial_rotary_factor", 0.25)
    if not 0 < rotated <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor={rotated}; it must be above 0 and at most 1")
    trunk = trunk_of(config, rope_dim=int(heads.head * rotated), zero_centred=True)
    make: dict[str, Mixer] = {
        LINEAR: lambda at: DeltaNet(trunk, delta, at + "linear_attn."),
        FULL: lambda at: Attention(trunk, heads, at + "self_attn."),
    }
    return trunk, [make[kind] for kind in layer_types(config)]


def layer_types(config: Json) -> list[str]:
    num_layers = take(config, "num_hidden_layers", int)
    every = take(config, "full_attention_interval", int, 4)
    kinds = listed(config, "layer_types", str) or [LINEAR if (i + 1) % every else FULL for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise ConfigError(f"config.json: layer_types {kinds} must be {num_layers} of {LINEAR!r} or {FULL!r}")
    return list(kinds)


def delta_of(config: Json) -> DeltaShape:
    keys, values = take(config, "linear_num_key_heads", int), take(config, "linear_num_value_heads", int)
    return DeltaShape(
        keys=keys,
        ratio=divides("linear_num_key_heads", keys, "linear_num_value_heads", values),
        key=take(config, "linear_key_head_dim", int),
        value=take(config, "linear_value_head_dim", int),
        taps=take(config, "linear_conv_kernel_dim", int, 4),
    )


def exact(rows: dict[str, int], key: str, init: Init) -> Declared:
    return weight(rows, key=key, float32=True, decay=False, init=init)


class DeltaNet(nn.Module):
    """The gated delta net. Everything is by key head, so that a rank's share of heads is a plain cut of dim 0:
    the file's `[all Q | all K | all V]` becomes `[key head, q | k | its values]`."""

    def __init__(self, trunk: Trunk, shape: DeltaShape, at: str) -> None:
        super().__init__()
        D, G, R, W = trunk.width, shape.keys, shape.ratio, shape.taps
        self.shape, self.eps = shape, trunk.eps
        cuts = (shape.key, shape.key, R * shape.value)  # of one key head: q, k, values
        chan, init = sum(cuts), Init("normal", trunk.std)
        fused, conv = at + "in_proj_qkv.weight", at + "conv1d.weight"
        self.qkv = weight(
            {"key": G, "chan": chan},
            {"embed": D},
            layouts=[segments(fused, (G, chan, D), cuts, (G * chan, D))],
            init=init,
        )
        self.conv = weight(
            {"key": G, "chan": chan},
            {"tap": W},
            layouts=[segments(conv, (G, chan, W), cuts, (G * chan, 1, W))],
            init=init,
        )
        self.z = weight({"key": G, "value": R * shape.value}, {"embed": D}, key=at + "in_proj_z.weight", init=init)
        self.a = weight({"key": G, "ratio": R}, {"embed": D}, key=at + "in_proj_a.weight", init=init)
        self.b = weight({"key": G, "ratio": R}, {"embed": D}, key=at + "in_proj_b.weight", init=init)
        # These enter float32 arithmetic and are never rounded.
        self.A_log = exact({"key": G, "ratio": R}, at + "A_log", Init("log_uniform", 16.0))
        self.dt_bias = exact({"key": G, "ratio": R}, at + "dt_bias", Init("ones"))
        self.norm = exact({"value_head": shape.value}, at + "norm.weight", Init("ones"))
        self.out = weight({"embed": D}, {"key": G, "value": R * shape.value}, key=at + "out_proj.weight", init=init)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        s = self.shape
        qkv_TC, z_TC, *ab_TC = ops.linears(self.enter(x_TD), (self.qkv, self.z, self.a, self.b))
        qkv_TC = ops.causal_conv(qkv_TC, self.conv, docs)
        q_TGK, k_TGK, v_TGC = qkv_TC.unflatten(1, (-1, 2 * s.key + s.ratio * s.value)).split(
            (s.key, s.key, s.ratio * s.value), -1
        )
        a_TGR, b_TGR = (y_TC.unflatten(1, (-1, s.ratio)) for y_TC in ab_TC)
        g_TGR, beta_TGR = ops.gates(a_TGR, b_TGR, self.A_log.view(-1, s.ratio), self.dt_bias.view(-1, s.ratio))
        o_TGRV = ops.delta_rule(q_TGK, k_TGK, v_TGC.unflatten(2, (s.ratio, s.value)), g_TGR, beta_TGR, docs)
        y_TGRV = ops.gated_rms_norm(o_TGRV, z_TC.view(o_TGRV.shape), self.norm, self.eps)
        return self.leave(ops.linear(y_TGRV.flatten(1), self.out))
