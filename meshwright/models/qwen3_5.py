"""Qwen3.5, dense, text: three Gated DeltaNet layers (arXiv 2412.06464) to one gated attention layer.

Also: zero-centred norms, and RoPE on a quarter of each head. Delta nets keep a state of fixed size, so their cost is
linear in the length; the attention layers recall exactly. Shapes as in ops/delta.py: G key heads, R value heads a key
head, K and V their dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import DELTA, ENTER, LEAVE, Declared, Door, Init, Join, Span, Swap, segments, weight
from .decoder import Decoder, Layer, Rope, Shape
from .hf_config import Json, divides, listed, refuse, take
from .linear import ALL, Linear, WideLinear, joined
from .qwen3 import MLP, PLAIN, Attention, heads_of, shape_of
from .rope_config import rotary_of

LINEAR, FULL = "linear_attention", "full_attention"
Mixer = Callable[[str], nn.Module]  # key prefix of the layer -> mixer


@dataclass(frozen=True)
class DeltaShape:
    """The shape of a Gated DeltaNet."""

    keys: int  # key heads; each serves `ratio` value heads
    ratio: int
    key: int  # dim of a key head
    value: int  # dim of a value head
    kernel: int  # taps of the convolution
    gate: str = "silu"  # the activation of the output norm's gate


def build(config: Json, at: str, head: str) -> Decoder:
    """Build a Qwen3.5 model from its config."""
    shape, mixers = backbone(config)
    ffn = take(config, "intermediate_size", int)

    def layer(mixer: Mixer, at: str) -> nn.Module:
        return Layer(shape, mixer(at), MLP(shape, ffn, at + "mlp."), at)

    return Decoder(shape, at, [partial(layer, mixer) for mixer in mixers], head)


def backbone(config: Json, delta_net: type[DeltaNet] | None = None) -> tuple[Shape, list[Mixer]]:
    """Return what dense and MoE models share: the shape, and a factory for the mixer of each layer."""
    net = delta_net or DeltaNet
    refuse(config, PLAIN)
    heads, delta = heads_of(config, default_head=256, gated=True), delta_of(config)
    # A quarter of each head rotates; the rest carries no position (partial RoPE).
    shape = shape_of(config, rotary_of(config, heads.head, partial=0.25), zero_centred=True)
    make: dict[str, Mixer] = {
        LINEAR: lambda at: net(shape, delta, at + "linear_attn."),
        FULL: lambda at: Attention(shape, heads, at + "self_attn."),
    }
    return shape, [make[kind] for kind in layer_types(config)]


def layer_types(config: Json, known: Sequence[str] = (LINEAR, FULL)) -> list[str]:
    """Return the kind of mixer of each layer. `known`: those that the family has."""
    num_layers = take(config, "num_hidden_layers", int)
    interval = take(config, "full_attention_interval", int, 4)
    kinds = listed(config, "layer_types", str) or [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {*known}:
        choices = " or ".join(map(repr, known))
        raise ConfigError(f"config.json: layer_types {kinds} must be {num_layers} of {choices}")
    return list(kinds)


def delta_of(config: Json) -> DeltaShape:
    """Read the shape of the delta net."""
    keys, values = take(config, "linear_num_key_heads", int), take(config, "linear_num_value_heads", int)
    return DeltaShape(
        keys=keys,
        ratio=divides("linear_num_key_heads", keys, "linear_num_value_heads", values),
        key=take(config, "linear_key_head_dim", int),
        value=take(config, "linear_value_head_dim", int),
        kernel=take(config, "linear_conv_kernel_dim", int, 4),
    )


def float32_weight(rows: dict[str, int], key: str, init: Init) -> Declared:
    """Declare a parameter that enters float32 arithmetic: it is never rounded to the compute dtype.

    A_log and dt_bias act through exp and softplus, and decays multiply up over thousands of tokens: rounding A_log to
    bfloat16 changes how far the state remembers.
    """
    return weight(rows, key=key, float32=True, decay=False, init=init)


class Conv(nn.Module):
    """A causal depthwise convolution, for the key heads `own` of those that this rank stores."""

    def __init__(self, shape: Shape, delta: DeltaShape, cuts: tuple[int, ...], key: str) -> None:
        super().__init__()
        G, chan, W = delta.keys, sum(cuts), delta.kernel
        self.chan = chan
        # Channels are grouped by key head as in DeltaNet; files have all q channels, then all k, then all v.
        spelled = segments(key, (G, chan, W), cuts, (G * chan, 1, W))
        self.weight = weight({"key": G, "chan": chan}, {"tap": W}, layouts=[spelled], init=Init("normal", shape.std))

    def forward(self, x_TGC: Tensor, own: slice, docs: ops.Documents, halo: ops.Parts) -> Tensor:
        weight_CW = self.weight.unflatten(0, (-1, self.chan))[own].flatten(0, 1)
        return ops.causal_conv(x_TGC.flatten(1), weight_CW, docs, halo).view_as(x_TGC)


class Gates(nn.Module):
    """The gates of a value head: how much of its state it keeps, and how strongly it writes, for each token."""

    def __init__(self, delta: DeltaShape, at: str) -> None:
        super().__init__()
        self.ratio = delta.ratio
        self.A_log = float32_weight({"key": delta.keys, "ratio": delta.ratio}, at + "A_log", Init("log_uniform", 16.0))
        self.dt_bias = float32_weight({"key": delta.keys, "ratio": delta.ratio}, at + "dt_bias", Init("ones"))

    def forward(self, a_TGR: Tensor, b_TGR: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        A_log, dt_bias = (x.view(-1, self.ratio)[own] for x in (self.A_log, self.dt_bias))
        return ops.gates(a_TGR, b_TGR, A_log, dt_bias)


class GatedNorm(nn.Module):
    """RMSNorm of each value head, times the activation of its gate."""

    def __init__(self, eps: float, delta: DeltaShape, key: str) -> None:
        super().__init__()
        self.eps, self.activation = eps, delta.gate
        self.weight = float32_weight({"value_head": delta.value}, key, Init("ones"))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return ops.gated_rms_norm(x, gate, self.weight, self.eps, self.activation)


class DeltaNet(nn.Module):
    """Gated DeltaNet. All dims are grouped by key head, so that a rank's share of heads is a plain cut of dim 0.

    The file's `[all Q | all K | all V]` becomes `[key head, q | k | its values]`. Under cp `swap` exchanges tokens for
    heads; if some cp ranks do not swap, `halo` brings the last tokens before this part for the convolution, and
    `states` the state transitions of the parts.
    """

    def __init__(self, shape: Shape, delta: DeltaShape, at: str) -> None:
        super().__init__()
        D, G, R, V = shape.width, delta.keys, delta.ratio, delta.value
        cuts = (delta.key, delta.key, R * V)  # q, k and the values of one key head
        chan = sum(cuts)
        self.delta, self.cuts = delta, cuts
        self.declare_projections(shape, at)
        self.gates = Gates(delta, at)
        self.norm = GatedNorm(shape.eps, delta, at + "norm.weight")
        self.out = Linear({"embed": D}, {"key": G, "value": R * V}, shape.std, key=at + "out_proj")
        self.keys = Span("key", G)
        self.swap = Swap(self.keys, [(chan, 1), (R, 1), (R, 1)], R * V, DELTA)
        self.halo = Join(self.swap, chan, rows=delta.kernel - 1)
        # A part's state transition [A | b] of each value head, K x (K + V), in float32: it multiplies up over all
        # parts.
        self.states = Join(self.swap, R * delta.key * (delta.key + V), rows=1, floats=True)
        self.enter, self.leave = Door(ENTER, D), Door(LEAVE, D)

    def declare_projections(self, shape: Shape, at: str) -> None:
        """Declare the matrices that make q, k, v, the norm's gate z, and the gates a and b of the state.

        The convolution is declared among them, because the gradient norm is summed in the order of declarations.
        """
        D, G, R, V = shape.width, self.delta.keys, self.delta.ratio, self.delta.value
        chan = sum(self.cuts)
        spelled = segments(at + "in_proj_qkv.weight", (G, chan, D), self.cuts, (G * chan, D))
        qkv = Linear({"key": G, "chan": chan}, {"embed": D}, shape.std, layouts=[spelled])
        self.qkv = qkv.of_matrices(chan=self.cuts)
        self.conv = Conv(shape, self.delta, self.cuts, at + "conv1d.weight")
        self.z = Linear({"key": G, "value": R * V}, {"embed": D}, shape.std, key=at + "in_proj_z")
        # a and b control decay and write strength of whole heads, so they are never quantised.
        self.a = WideLinear({"key": G, "ratio": R}, {"embed": D}, shape.std, key=at + "in_proj_a")
        self.b = WideLinear({"key": G, "ratio": R}, {"embed": D}, shape.std, key=at + "in_proj_b")

    def project(self, x_TD: Tensor) -> Sequence[Tensor]:
        """Return q, k and v together, z, a and b, each `[token, key head, ...]`."""
        # One GEMM for all four projections; those of a and b alone are too narrow for a GPU.
        outputs = joined(x_TD, (self.qkv, ALL), (self.z, ALL), (self.a, ALL), (self.b, ALL))
        return [x_TC.unflatten(1, (len(self.keys), -1)) for x_TC in outputs]

    def forward(self, x_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        x_TD, (G, R, V) = self.enter(x_TD), (len(self.keys), self.delta.ratio, self.delta.value)
        qkv_TGC, z_TGC, a_TGR, b_TGR = self.project(x_TD)
        qkv_TGC, a_TGR, b_TGR = self.swap(qkv_TGC, a_TGR, b_TGR)
        own = slice(self.swap.own_heads.start - self.keys.start, self.swap.own_heads.stop - self.keys.start)
        q_TGK, k_TGK, v_TGC = self.conv(qkv_TGC, own, docs, self.halo).split(self.cuts, -1)
        gates = self.gates(a_TGR, b_TGR, own)
        o_TGRV = ops.delta_rule(q_TGK, k_TGK, v_TGC.unflatten(2, (R, V)), gates, docs, self.states)
        o_TGC = self.swap.back(o_TGRV.flatten(2))  # back to own tokens, where the norm's gate z is
        y_TGRV = self.norm(o_TGC.unflatten(2, (R, V)), z_TGC.reshape(-1, G, R, V))
        return self.leave(self.out(y_TGRV.flatten(1)))
