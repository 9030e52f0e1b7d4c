"""Qwen4-Exp (Qwen3.8-Flash-Next): delta nets and sparse attention between four gated residual streams, with experts in
every layer and a table of n-grams at one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import Init, weight
from .decoder import Decoder, Layer, Rope, Shape
from .hf_config import Json, listed, refuse, take
from .ngram_embedding import NgramEmbedding
from .qwen3 import PLAIN, heads_of, shape_of
from .qwen3_5 import FULL, LINEAR, DeltaNet, Mixer, delta_of, layer_types
from .qwen3_5_moe import SharedMoE
from .qwen3_moe import balance_of, routing_of
from .rope_config import rope_fields, rotary_of, sections_of
from .sparse_attention import SparseAttention, index_of

_SPARSE = (FULL, "indexed_attention")  # published files say the first, those that transformers writes the second
_SECTIONS = (11, 11, 10)  # M-RoPE's frequencies of time, height and width where the config does not say them


def build(config: Json, at: str, head: str) -> Decoder:
    """Build a Qwen4-Exp model from its config."""
    refuse(config, {**PLAIN, "output_gate_type": ("silu", "sigmoid")})
    rank, tables = take(config, "hc_lowrank", int, 320), _layers_with_table(config)
    shape, mixers = _backbone(config)
    routing = routing_of(config, renormalise=take(config, "norm_topk_prob", bool, True))
    balance, shared = balance_of(config, routing), take(config, "shared_expert_intermediate_size", int)

    def layer(index: int, mixer: Mixer, at: str) -> nn.Module:
        grams = NgramEmbedding(shape, config, tables.index(index), at + "ple.") if index in tables else None
        make_mlp = partial(SharedMoE, shape, routing, balance, shared, at + "mlp.")
        return StreamLayer(shape, rank, grams, mixer, make_mlp, at)

    layers = [partial(layer, index, mixer) for index, mixer in enumerate(mixers)]
    return Decoder(shape, at, layers, head, balance, lambda at: LastMixer(shape, rank, at + "hyper_connection_mixer."))


def _backbone(config: Json) -> tuple[Shape, list[Mixer]]:
    """Return the shape, and a factory for the mixer of each layer."""
    heads = heads_of(config, default_head=256, gated=True)
    delta = replace(delta_of(config), gate=take(config, "output_gate_type", str, "silu"))
    rotary = rotary_of(config, heads.head, partial=1.0)  # where the field is absent, all dims rotate
    streams, reads = take(config, "hc_count", int, 4), bool(_layers_with_table(config))
    shape = replace(shape_of(config, rotary, zero_centred=True), streams=streams, reads_tokens=reads)
    if shape.streams == 1:
        raise ConfigError("config.json: hc_count=1; residual streams are at least 2")
    kinds = layer_types(config, (LINEAR, *_SPARSE))
    has_sections = sum(_SECTIONS) == rotary.dim // 2 or rope_fields(config).get("mrope_section")
    sections = sections_of(config, rotary.dim // 2, _SECTIONS) if has_sections else None
    index = index_of(config, rotary, sections) if set(kinds) & {*_SPARSE} else None

    def mixer(kind: str, at: str) -> nn.Module:
        if kind == LINEAR:
            return DeltaNet(shape, delta, at + "linear_attn.")
        assert index is not None, "a layer of this kind needs it"
        return SparseAttention(shape, heads, index, at + "self_attn.")

    return shape, [partial(mixer, kind) for kind in kinds]


def _layers_with_table(config: Json) -> list[int]:
    """Return the layers that have a table of n-grams, counted from 0; the config counts from 1."""
    numbers, kinds = listed(config, "ple_layer_ids", int), layer_types(config, (LINEAR, *_SPARSE))
    if len({*numbers}) < len(numbers) or not all(1 <= n <= len(kinds) and kinds[n - 1] == LINEAR for n in numbers):
        raise ConfigError(
            f"config.json: ple_layer_ids={numbers} must name different layers with {LINEAR!r}, counted from 1"
        )
    return [number - 1 for number in sorted(numbers)]


class StreamMixer(nn.Module):
    """Reads residual streams: a gated mean of them for a block, and how much of its output each stream gets.

    It works on own tokens and is not split by tp, so its gradients are partial sums, as those of norms are.
    """

    def __init__(self, shape: Shape, rank: int, at: str, *, last: bool = False) -> None:
        super().__init__()
        self.streams, self.eps = shape.streams, shape.eps
        wide, init = {"stream": shape.streams, "embed": shape.width}, Init("normal", shape.std)
        self.norm = weight(wide, key=at + "hc_norm.weight", decay=False, init=Init("zeros"))
        self.down = weight({"rank": rank}, wide, key=at + "input_mix_weight_down.weight", init=init, matrices={})
        self.up = weight(wide, {"rank": rank}, key=at + "input_mix_weight_up.weight", init=init, matrices={})
        rows = {"injected": shape.streams}  # at the end of the model nothing is added any more
        self.inject = None if last else weight(rows, wide, key=at + "block_inject_weight.weight", init=init)

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a block sees, and how much of its output goes to each stream."""
        mixer = ops.StreamGates(self.norm, self.down, self.up, self.inject)
        return ops.read_streams(x_TC, mixer, self.streams, self.eps)


class LastMixer(StreamMixer):
    """Reads the head's input; nothing is added to the streams any more."""

    def __init__(self, shape: Shape, rank: int, at: str) -> None:
        super().__init__(shape, rank, at, last=True)

    def forward(self, x_TC: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x_TC)[0]


class StreamLayer(Layer):
    """A layer between residual streams: n-grams if it has a table, then a mixer, then experts."""

    needs_output = True  # the gradient of the gates with which streams get the output

    def __init__(
        self, shape: Shape, rank: int, grams: NgramEmbedding | None, mixer: Mixer,
        make_mlp: Callable[[], nn.Module], at: str,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.grams = grams
        self.read = StreamMixer(shape, rank, at + "attn_hyper_connection.")
        self.mixer = mixer(at)
        self.mlp_read = StreamMixer(shape, rank, at + "mlp_hyper_connection.")
        self.mlp = make_mlp()
        self.run: Callable[..., Tensor] = self.block

    def forward(self, x_TC: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        # Outside of what is recomputed: backward would ask for the rows again, and wait for the all-to-alls.
        e_TE = None if self.grams is None else self.grams.rows(docs, x_TC.dtype)
        return self.run(x_TC, rope, docs, e_TE)

    def block(self, x_TC: Tensor, rope: Rope, docs: ops.Documents, e_TE: Tensor | None = None) -> Tensor:
        """Run the layer itself, without checkpointing or compilation."""
        if self.grams is not None:
            assert e_TE is not None, "the layer looks them up"
            x_TC = x_TC + self.grams(x_TC, e_TE, docs)
        u_TD, inject_Tn = self.read(x_TC)
        x_TC = _write(x_TC, self.mixer(u_TD, rope, docs), inject_Tn)
        u_TD, inject_Tn = self.mlp_read(x_TC)
        return _write(x_TC, self.mlp(u_TD), inject_Tn)


def _write(x_TC: Tensor, out_TD: Tensor, inject_Tn: Tensor | None) -> Tensor:
    assert inject_Tn is not None, "only the last mixer of a model has none"
    return ops.write_streams(x_TC, out_TD, inject_Tn)
