"""Multi-token prediction (MTP, arXiv 2404.19737 and 2412.19437): a head that predicts the token after next.

One more decoder layer gets the trunk's hidden state of token t and the embedding of token t + 1, and scores token t + 2
with the model's own vocabulary matrix. Inference engines use it as the draft model of speculative decoding.

Qwen's head reads the trunk after the final norm; DeepSeek's and GLM's read before it. The wrong choice raises no error
and only lowers the acceptance of drafts (llama.cpp#24025, LightLLM#1402). Qwen4-Exp's head reads the residual streams
before the final mixer.

Everything works on this rank's own tokens, so nothing but the layer itself has doors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..sharding import Declared, Init, weight
from .decoder import Decoder, LanguageHead, Norm, Rope, Shape
from .hf_config import Json, take
from .linear import WideLinear

PREFIX = "mtp."  # of the keys, at the top level in all families
# The MTP layer has full attention, and experts if any layer has them, whatever the layers of the trunk are.
_ONE_LAYER = {
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1,
    "ple_layer_ids": [],
}  # fmt: skip


class MtpHead(nn.Module):
    """The MTP head of Qwen3-Next, 3.5 and 3.6.

    `detached`: its loss trains this head alone. Its input and the vocabulary matrix are then detached, so the gradients
    of the trunk are those of a run without it, bit for bit.
    """

    reads_streams = False  # whether it sees the trunk before the final norm
    hidden_norm: Norm | Declared

    def __init__(self, shape: Shape, one_layer: Decoder, *, detached: bool) -> None:
        super().__init__()
        assert one_layer.head is not None, "a whole model has one"
        self.detached, self.balance = detached, one_layer.balance
        self.embed_norm = Norm(shape, f"{PREFIX}pre_fc_norm_embedding.weight")
        self.declare_inputs(shape)
        self.layer = one_layer.layers["0"]
        self.norm = one_layer.head.norm

    def declare_inputs(self, shape: Shape) -> None:
        """Declare the norm of the hidden state, and the projection of both inputs."""
        self.hidden_norm = Norm(shape, f"{PREFIX}pre_fc_norm_hidden.weight")
        cols = {"input": 2, "embed": shape.width}  # the embedding first
        fc = WideLinear({"out": shape.width}, cols, shape.std, key=f"{PREFIX}fc")
        self.fc = fc.of_matrices(input=(1, 1))

    def join(self, hidden_TC: Tensor, next_TD: Tensor) -> Tensor:
        """Return the input of the layer."""
        assert isinstance(self.hidden_norm, Norm)
        return self.fc(torch.cat([self.embed_norm(next_TD), self.hidden_norm(hidden_TC)], -1))

    def forward(self, hidden_TC: Tensor, next_TD: Tensor, rope: Rope, docs: ops.Documents) -> Tensor:
        """Return the state that the vocabulary scores. `next_TD`: the embedding of each token's successor.

        RoPE sees the position of t, as in vLLM; transformers gives it that of t + 1. Attention depends on differences
        of positions only.
        """
        return self.norm(self.layer(self.join(hidden_TC, next_TD), rope, docs))


class StreamMtpHead(MtpHead):
    """The MTP head of Qwen4-Exp: one norm over all residual streams, and a projection that all of them share."""

    reads_streams = True

    def declare_inputs(self, shape: Shape) -> None:
        """Declare the norm over all streams, and a projection for each input."""
        D, init, self.streams = shape.width, Init("zeros"), shape.streams
        self.eps, wide = shape.eps, {"stream": shape.streams, "embed": D}
        self.hidden_norm = weight(wide, key=f"{PREFIX}pre_fc_norm_hidden.weight", decay=False, init=init)
        self.fc_hidden = WideLinear({"out": D}, {"embed": D}, shape.std, key=f"{PREFIX}fc_hidden")
        self.fc_embedding = WideLinear({"out": D}, {"embed": D}, shape.std, key=f"{PREFIX}fc_embedding")

    def join(self, hidden_TC: Tensor, next_TD: Tensor) -> Tensor:
        """Return the residual streams that the layer sees."""
        assert isinstance(self.hidden_norm, Tensor)
        normed_TC = ops.rms_norm(hidden_TC, self.hidden_norm, self.eps, zero_centred=True)
        streams_TnD = self.fc_hidden(normed_TC.unflatten(-1, (self.streams, -1)))
        return (streams_TnD + self.fc_embedding(self.embed_norm(next_TD))[:, None]).flatten(1)


def give_mtp(
    model: Decoder, build: Callable[[Json, str, str], Decoder], config: Json, *, mode: str, weight: float, new: bool
) -> None:
    """Attach the MTP head that a config describes. `new`: the source has none, so it is drawn.

    `weight`: the coefficient of its loss, and so of the aux loss of its router. That router has a `Balance` of its own:
    sharing the trunk's would change the trunk's gradients (by up to a fifth in a tiny model).
    """
    assert isinstance(model.head, LanguageHead), "other heads were refused"
    one_layer = build({**config, **_ONE_LAYER}, PREFIX, "none")
    one_layer.balance.coefficient *= weight
    kind = StreamMtpHead if model.shape.streams > 1 else MtpHead
    model.head.mtp = kind(model.shape, one_layer, detached=mode == "head")
    for parameter in model.head.mtp.parameters():
        assert isinstance(parameter, Declared)
        # Files may lay out its experts differently from the trunk's (AReaL#1403), so their layout is chosen separately.
        group = f"{PREFIX}{parameter.param.group}" if parameter.param.group else ""
        parameter.param = replace(parameter.param, group=group, optional=new, layer=None)  # so it is on the last stage


def check_mtp(config: Json, field: str, *, head: str, tower: bool, mode: str) -> None:
    """Refuse to train the MTP head where Meshwright does not know how. `field`: what the config calls its layers."""
    asked = f"mtp={mode!r}"
    if not field:
        raise ConfigError(f"{asked}, but model_type={config.get('model_type')!r} has no MTP head; leave it out")
    if head != "lm":
        raise ConfigError(f"{asked} predicts tokens, and head={head!r} does not; leave it out")
    if tower:
        raise ConfigError(
            f"{asked} with tower=True: where an image follows, the next embedding is a feature of the image, which is "
            'not built; train on text (tower=False), or give mtp="carried"'
        )
    if take(config, "mtp_use_dedicated_embeddings", bool, False):
        raise ConfigError(
            f'config.json: mtp_use_dedicated_embeddings is true, which {asked} does not know; give mtp="carried"'
        )
    if take(config, field, int, 1) > 1:
        raise ConfigError(
            f"config.json: {field}={config[field]}, and {asked} trains one layer, which engines use for every draft "
            'token; give mtp="carried"'
        )


def with_mtp_layers(config: Mapping[str, Any], field: str, num: int) -> dict[str, Any]:
    """Return a config that says how many MTP layers its files have, in the group where the family says it.

    Readers trust it: vLLM refuses files without the layers that it promises, and others leave them out (unsloth#11042).
    """
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return {**config, "text_config": {**inner, field: num}}
    return {**config, field: num}
