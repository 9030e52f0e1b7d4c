"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts in place of all or most MLPs.

128 experts, 8 a token, no shared expert, softmax routing with renormalised weights in the published models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import Block, Box, Dispatch, Init, Layout, weight
from .decoder import Decoder, Layer, Shape
from .hf_config import Json, listed, refuse, refuse_endless, take
from .linear import Quantisable
from .lora import ExpertAdapter
from .qwen3 import PLAIN, Attention, dense, depth_of, heads_of, shape_of
from .rope_config import THETA, rotary_of
from .router_balance import Balance


@dataclass(frozen=True)
class Routing:
    """The shape of a mixture of experts and how it routes."""

    experts: int
    top_k: int
    ffn: int
    renormalise: bool
    turned: bool = False  # whether files may have the matrices of experts transposed


def build(config: Json, at: str, head: str) -> Decoder:
    """Build a Qwen3-MoE model from its config."""
    return with_experts(config, at, head, renormalise=take(config, "norm_topk_prob", bool, False))


def with_experts(
    config: Json, at: str, head: str, *, renormalise: bool, turned: bool = False, theta: float = THETA
) -> Decoder:
    """Build a Qwen3 model in which some or all layers have experts."""
    refuse(config, PLAIN)
    heads = heads_of(config, take(config, "hidden_size", int) // take(config, "num_attention_heads", int))
    shape = shape_of(config, rotary_of(config, heads.head, theta=theta))
    routing = replace(routing_of(config, renormalise=renormalise), turned=turned)
    balance = balance_of(config, routing)
    only_dense, step = set(listed(config, "mlp_only_layers", int)), take(config, "decoder_sparse_step", int, 1)

    # Some layers may stay dense: those listed, and all but every decoder_sparse_step-th.
    def layer(index: int, at: str) -> nn.Module:
        if index in only_dense or (index + 1) % step:
            return dense(shape, heads, config, at)
        mixer = Attention(shape, heads, at + "self_attn.")
        return Layer(shape, mixer, MoE(shape, routing, balance, at + "mlp."), at)

    return Decoder(shape, at, [partial(layer, i) for i in range(depth_of(config))], head, balance)


def routing_of(config: Json, *, renormalise: bool) -> Routing:
    """Read the shape of the experts."""
    experts = take(config, "num_experts", int, config.get("num_local_experts"))
    top_k = take(config, "num_experts_per_tok", int)
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_tok={top_k} is more than num_experts={experts}")
    refuse_endless(take(config, "num_hidden_layers", int), experts)
    return Routing(experts, top_k, take(config, "moe_intermediate_size", int), renormalise)


def balance_of(config: Json, routing: Routing) -> Balance:
    """Return the router's balance.

    The aux loss counts only if the config asks for router logits, as in transformers.
    """
    coefficient = take(config, "router_aux_loss_coef", float, 0.001)
    return Balance(
        routing.experts, routing.top_k, coefficient if take(config, "output_router_logits", bool, False) else 0.0
    )


class MoE(nn.Module):
    """A router on this rank's own tokens, and experts that are reached through one door.

    Each expert is whole on its ep rank (GShard, arXiv 2006.16668): tokens travel over ep and weights do not, since a
    layer's experts are far larger than its activations.
    """

    def __init__(self, shape: Shape, routing: Routing, balance: Balance, at: str) -> None:
        super().__init__()
        self.routing, self.balance, self.layer = routing, balance, balance.join()
        # Not a Linear: routing must not change with a quantisation, and its rows are not cut by any axis.
        self.router = weight(
            {"router": routing.experts}, {"embed": shape.width}, key=at + "gate.weight",
            init=Init("normal", shape.std), matrices={},
        )  # fmt: skip
        self.experts = Experts(shape, routing, at + "experts.")

    @ops.uncompiled  # numbers of rows depend on the data, and the balance and doors on which layer this is
    def forward(self, x_TD: Tensor) -> Tensor:
        logits_TE = ops.linear(x_TD, self.router)
        given_Tk = self.balance.given(self.layer)
        weight_Tk, expert_Tk = ops.route(logits_TE, self.routing.top_k, self.routing.renormalise, given_Tk)
        weight_Tk = self.balance.watch(self.layer, weight_Tk, logits_TE, expert_Tk)
        return self.experts(x_TD, weight_Tk, expert_Tk, partial(self.shared_output, x_TD))

    def shared_output(self, x_TD: Tensor) -> Tensor | None:
        """Return the output that a token gets in addition to its experts'. It is computed while rows are in flight."""
        return None


class Experts(Quantisable):
    """The experts of a layer: a separate FSDP unit, because its parameters live on the expert mesh."""

    def __init__(self, shape: Shape, routing: Routing, at: str) -> None:
        super().__init__()
        E, D, F_ = routing.experts, shape.width, routing.ffn
        init = Init("normal", shape.std)
        # Files have one key per matrix and expert, or one for all experts (transformers 5). Both layouts are declared;
        # the headers of the source choose.
        pairs = [per_expert(at, E, F_, D, ("gate_proj", "up_proj")), fused(at + "gate_up_proj", (E, 2, F_, D))]
        downs = [per_expert(at, E, D, F_, ("down_proj",)), fused(at + "down_proj", (E, 1, D, F_))]
        if routing.turned:
            pairs, downs = [pairs[1], turned(pairs[1])], [downs[1], turned(downs[1])]
        rows, width = {"expert": E, "half": 2, "expert_ffn": F_}, {"embed": D}
        each = {"expert": (1,) * E}
        self.gate_up = weight(
            rows, width, layouts=pairs, group="experts", init=init, low=True, matrices={**each, "half": (1, 1)}
        )
        self.down = weight(
            {"expert": E, **width}, {"expert_ffn": F_}, layouts=downs, group="experts", init=init, low=True,
            matrices=each,
        )  # fmt: skip
        self.dispatch = Dispatch(E, D, routing.top_k, partial(ops.by_expert, num_experts=E))
        self.at = at.removesuffix(".")  # their module in the files
        self.gate_up_lora: ExpertAdapter | None = None
        self.down_lora: ExpertAdapter | None = None

    def forward(
        self, x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor, shared: Callable[[], Tensor | None]
    ) -> Tensor:
        pending = self.dispatch(x_TD, weight_Tk, expert_Tk)
        shared_TD, rows = shared(), pending()
        del pending  # it references the rows as received
        matrices = self.as_operand("gate_up", self.gate_up), self.as_operand("down", self.down)
        # A rank stores rows of [E R, D]; E is what it has of the experts.
        gate_up_ERD, down_EDF = (w.unflatten(0, (len(rows.counts_E), -1)) for w in matrices)
        fp8 = self._fp8_by_expert("gate_up", len(rows.counts_E)), self._fp8_by_expert("down", len(rows.counts_E))
        adapters = (self.gate_up_lora, self.down_lora)
        lora = [None if each is None else each.factors(len(rows.counts_E)) for each in adapters]
        y_TD = rows.back(ops.experts(rows, gate_up_ERD, down_EDF, fp8=fp8, lora=(lora[0], lora[1])))
        return y_TD if shared_TD is None else shared_TD + y_TD

    def _fp8_by_expert(self, name: str, num_experts: int) -> ops.Fp8:
        """Return `fp8` of a parameter, with its blocks by expert."""
        blocks = self.blocks.get(name)
        return self.fp8(name) if blocks is None else (blocks.stacked(num_experts),)


def per_expert(at: str, experts: int, rows: int, cols: int, names: tuple[str, ...]) -> Layout:
    """Return the layout with one key per matrix, such as `experts.3.up_proj.weight`."""
    shape, whole, blocks = (rows, cols), Box.whole((rows, cols)), []
    for (e, i), ours in _boxes(experts, len(names), shape).items():
        blocks.append(Block(ours, f"{at}{e}.{names[i]}.weight", shape, whole))
    return Layout("per-expert", tuple(blocks))


@functools.cache  # the same for all layers
def _boxes(experts: int, halves: int, shape: tuple[int, int]) -> dict[tuple[int, int], Box]:
    """Return the box of each matrix of each expert in ours."""
    numbers = [(e, i) for e in range(experts) for i in range(halves)]
    if halves == 1:
        return {(e, i): Box((e, 0, 0), (e + 1, *shape)) for e, i in numbers}
    return {(e, i): Box((e, i, 0, 0), (e + 1, i + 1, *shape)) for e, i in numbers}


def fused(key: str, shape: tuple[int, int, int, int]) -> Layout:
    """Return the layout with one key for all experts: `[E, 2F, D]` as `[gate; up]`, or `[E, D, F]`."""
    experts, half, rows, cols = shape
    ours = shape if half > 1 else (experts, rows, cols)
    file_shape = (experts, half * rows, cols)
    return Layout("fused", (Block(Box.whole(ours), key, file_shape, Box.whole(file_shape)),))


def turned(fused: Layout) -> Layout:
    """Return a fused layout with rows and columns of each matrix exchanged: `[E, D, 2F]`, `[E, F, D]`."""
    (block,) = fused.blocks
    experts, rows, cols = block.shape
    file_shape = (experts, cols, rows)
    return Layout("turned", (Block(block.ours, block.key, file_shape, Box.whole(file_shape), turned=True),))
