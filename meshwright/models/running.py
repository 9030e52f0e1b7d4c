"""How a layer is run: what of it is kept for backward and what backward makes once more, compiled or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # its operation is known from then on
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..errors import ConfigError
from ..layout import Dispatch, Door, attributes
from ..mesh.collectives import OPS
from .decoder import Decoder, Layer

KINDS = ("none", "selective", "full")
_aten = torch.ops.aten

# Whatever the kind, a token is routed once: a tie that falls the other way in the recomputation would send other
# numbers of rows to the experts. What a layer reports to `Balance` is overwritten with the same.
_ROUTING = [_aten.topk.default]
_COSTLY = [  # what is kept by "selective": products, attention, and all that came over the wire
    *OPS,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def arm_layers(model: Decoder, recompute: str, compiled: bool) -> None:
    """Each layer runs as asked for, and the doors that backward passes once more are marked, for the bill."""
    if recompute not in KINDS:
        raise ConfigError(f"recompute={recompute!r} is unknown; choose from {', '.join(KINDS)}")
    if compiled and recompute == "selective":
        raise ConfigError(
            'recompute="selective" chooses among the operations of a layer, which compiled=True fuses; '
            'choose recompute="full" or "none", or compiled=False'
        )
    if recompute == "none" and not compiled:
        return
    for layer in model.layers:
        if not isinstance(layer, Layer):
            raise ConfigError(f"{type(layer).__name__} is no models.decoder.Layer, which savings of a layer need")
        if compiled:
            layer.run = torch.compile(layer.run, dynamic=False)
        if recompute != "none":
            kept = _ROUTING + (_COSTLY if recompute == "selective" else [])
            layer.run = functools.partial(_checkpointed, layer.run, kept)
        if recompute == "full":
            _mark(layer)


def _mark(layer: Layer) -> None:
    """All doors of the layer but the last: nothing behind it is wanted by backward, and recomputing stops there."""
    doors: list[Door | Dispatch] = [d for _, d in attributes(layer, Door)]
    doors += [d for _, d in attributes(layer, Dispatch)]  # the door of the experts is last, but backward wants its rows
    for door in doors:
        door.again = door is not doors[-1] or isinstance(door, Dispatch)


def _checkpointed(run: Callable[..., Tensor], kept: list[Any], *args: Any) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    out: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return out
