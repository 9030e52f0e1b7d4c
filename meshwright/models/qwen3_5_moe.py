"""Qwen3.5-MoE, text: the mixers of Qwen3.5; in every layer routed experts, and one shared expert behind a gate."""

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
    """Build a Qwen3.5-MoE model from its config."""
    shape, mixers = backbone(config)
    routing = routing_of(config, renormalise=True)
    balance, shared = balance_of(config, routing), take(config, "shared_expert_intermediate_size", int)

    def layer(mixer: Mixer, at: str) -> nn.Module:
        return Layer(shape, mixer(at), SharedMoE(shape, routing, balance, shared, at + "mlp."), at)

    return Decoder(shape, at, [partial(layer, mixer) for mixer in mixers], head, balance)


class SharedMoE(MoE):
    """Routed experts, and one shared expert that every token uses through a sigmoid gate.

    The shared expert works on this rank's own tokens and is not split by tp: it is small, and overlaps with the
    exchange of rows. Its gradient is therefore a partial sum over all ranks.
    """

    def __init__(self, shape: Shape, routing: Routing, balance: Balance, ffn: int, at: str) -> None:
        super().__init__(shape, routing, balance, at)
        self.shared = SwiGLU(shape, ffn, at + "shared_expert.", "shared_ffn")
        init, key = Init("normal", shape.std), at + "shared_expert_gate.weight"
        self.shared_gate = weight({"gate": 1}, {"embed": shape.width}, key=key, init=init)

    def shared_output(self, x_TD: Tensor) -> Tensor:
        """Compute the shared expert."""
        return ops.linear(x_TD, self.shared_gate).sigmoid() * self.shared(x_TD)
