"""Qwen3-Next and Qwen3-Coder-Next: Qwen3.5-MoE with the delta net's projections fused head by head in the files.

Layers may have a plain MLP instead of experts, and the router may leave the weights of the chosen experts as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from .decoder import Decoder, Layer, Shape
from .hf_config import Json, listed, take
from .linear import ALL, Linear, WideLinear, joined
from .qwen3 import MLP
from .qwen3_5 import Conv, DeltaNet, Mixer, backbone
from .qwen3_5_moe import SharedMoE
from .qwen3_moe import balance_of, routing_of


def build(config: Json, at: str, head: str) -> Decoder:
    """Build a Qwen3-Next model from its config."""
    shape, mixers = backbone(config, FusedDeltaNet)
    routing = routing_of(config, renormalise=take(config, "norm_topk_prob", bool, True))
    balance, shared = balance_of(config, routing), take(config, "shared_expert_intermediate_size", int)
    without_experts, step = set(listed(config, "mlp_only_layers", int)), take(config, "decoder_sparse_step", int, 1)

    def layer(index: int, mixer: Mixer, at: str) -> nn.Module:
        if index in without_experts or (index + 1) % step:
            mlp: nn.Module = MLP(shape, take(config, "intermediate_size", int), at + "mlp.")
        else:
            mlp = SharedMoE(shape, routing, balance, shared, at + "mlp.")
        return Layer(shape, mixer(at), mlp, at)

    layers = [partial(layer, index, mixer) for index, mixer in enumerate(mixers)]
    return Decoder(shape, at, layers, head, balance)


class FusedDeltaNet(DeltaNet):
    """A delta net whose files have `[q | k | values | their gates z]` of each key head, one head below the other, and
    `[b | a]` likewise. Both are cut by key heads, so they stay as they are. The convolution is that of Qwen3.5.
    """

    def declare_projections(self, shape: Shape, at: str) -> None:
        """Declare two matrices in the rows of the files, and the convolution."""
        D, G, R = shape.width, self.delta.keys, self.delta.ratio
        chan = sum(self.cuts) + R * self.delta.value
        qkvz = Linear({"key": G, "chan": chan}, {"embed": D}, shape.std, key=at + "in_proj_qkvz")
        self.qkvz = qkvz.of_matrices(chan=(*self.cuts, R * self.delta.value))
        self.conv = Conv(shape, self.delta, self.cuts, at + "conv1d.weight")
        ba = WideLinear({"key": G, "ratio": 2 * R}, {"embed": D}, shape.std, key=at + "in_proj_ba")
        self.ba = ba.of_matrices(ratio=(R, R))

    def project(self, x_TD: Tensor) -> Sequence[Tensor]:
        """Return q, k and v together, z, a and b, each `[token, key head, ...]`."""
        outputs = joined(x_TD, (self.qkvz, ALL), (self.ba, ALL))
        qkvz_TGC, ba_TGC = (x_TC.unflatten(1, (len(self.keys), -1)) for x_TC in outputs)
        qkv_TGC, z_TGC = qkvz_TGC.split([sum(self.cuts), self.delta.ratio * self.delta.value], -1)
        b_TGR, a_TGR = ba_TGC.chunk(2, -1)
        return qkv_TGC, z_TGC, a_TGR, b_TGR
