"""Qwen3.5-MoE, text: the mixers of Qwen3.5, in every layer experts and one shared expert behind a gate."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from .. import ops
from ..sharding import Init, weight
from .decoder import Decoder, Layer, Shape
from .hf_config import Json, take
from .qwen3 import SwiGLU
from .qwen3_5 import Mixer, backbone
from .qwen3_moe import MoE, Routing, balance_of, routing_of
from .router_balance import Balance


def build(config: Json, at: str, head: str) -> Decoder:
    shape, mixers = backbone(config)
    routing = routing_of(config, renormalise=True)
    balance, shared = balance_of(config, routing), take(config, "shared_expert_intermediate_size", int)

    def layer(mixer: Mixer, at: str) -> nn.Module:
        return Layer(shape, mixer(at), SharedMoE(shape, routing, balance, shared, at + "mlp."), at)

    return Decoder(shape, at, [partial(layer, mixer) for mixer in mixers], head, balance)


class SharedMoE(MoE):
    """Experts, and one more that every token uses by its gate: all on this rank's own tokens, so nothing is split."""

    def __init__(self, shape: Shape, routing: Routing, balance: Balance, ffn: int, at: str) -> None:
        super().__init__(shape, routing, balance, at)
        self.shared = SwiGLU(shape, ffn, at + "shared_expert.", "shared_ffn")
        init, key = Init("normal", shape.std), at + "shared_expert_gate.weight"
        self.shared_gate = weight({"gate": 1}, {"embed": shape.width}, key=key, init=init)

    def beside(self, x_TD: Tensor) -> Tensor:
        return ops.linear(x_TD, self.shared_gate).sigmoid() * self.shared(x_TD)
