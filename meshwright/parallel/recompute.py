"""How a layer runs: what it keeps for backward, what backward makes again, and whether it is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention.varlen  # its operation is known from then on
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..mesh.collectives import OPS
from ..models import Decoder, Layer, TowerBlock
from ..recipe import MemoryOptions
from ..sharding import Dispatch, Door, Join, Swap, find
from .replay import Context, saved_by_running_again
from .selective_recompute import Kept

_aten = torch.ops.aten

_COSTLY = [  # "selective" keeps products, attention, and what came from other ranks
    *OPS,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm_v2.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def arm(model: Decoder, memory: MemoryOptions) -> None:
    """Let each layer run as asked for, and mark its doors for the bill."""
    mark(model, memory)
    if memory.recompute == "none" and not memory.compiled:
        return
    for layer in model.layers.values():
        if not isinstance(layer, Layer):
            raise ConfigError(f"{type(layer).__name__} is no models.decoder.Layer; recompute= and compiled= need one")
        if memory.compiled:
            layer.run = torch.compile(layer.run, dynamic=False)
        if memory.recompute != "none":
            layer.run = _recomputed(layer.run, memory)
    for block in model.tower.blocks.values() if model.tower is not None and memory.recompute != "none" else ():
        assert isinstance(block, TowerBlock)  # which has no doors, and is not compiled: each batch has other patches
        block.run = _recomputed(block.run, memory)


def disarm(model: Decoder) -> None:
    """Let each layer run as it was made."""
    for part in model.modules():
        if isinstance(part, Layer | TowerBlock):
            part.run = part.block


def _recomputed(run: Callable[..., Tensor], memory: MemoryOptions) -> Callable[..., Tensor]:
    return functools.partial(_checkpointed, run, _COSTLY if memory.recompute == "selective" else [])


def mark(model: Decoder, memory: MemoryOptions) -> None:
    """Note which doors backward passes again, for the bill. A plan tries several options on one model in turn."""
    for layer in model.layers.values():
        _mark(layer, full=memory.recompute == "full")


def _mark(layer: nn.Module, *, full: bool) -> None:
    """Backward passes all doors of the layer again but the last: it needs nothing behind that one, and stops there."""
    doors: list[Door | Dispatch] = [d for _, d in find(layer, Door)]
    doors += [d for _, d in find(layer, Dispatch)]  # the experts are last, but backward needs their rows
    for door in doors:
        door.again = full and (door is not doors[-1] or isinstance(door, Dispatch))
    for _, swap in find(layer, Swap):  # no mixer is last
        swap.again = full
    for _, join in find(layer, Join):
        join.again = full


def _checkpointed(run: Callable[..., Tensor], ops_kept: list[Any], *args: Any) -> Tensor:
    """A token is routed once, whatever is made again. What a layer reports to `Balance` twice is the same."""
    if not torch.is_grad_enabled():
        return run(*args)
    choices = ops.Choices()
    if not ops_kept:
        with choices.made(), saved_by_running_again(run, args, choices.taken):
            return run(*args)
    kept = Kept(ops_kept, OPS)  # torch then looks at each operation in Python: that takes as long as the operations do
    again = functools.partial(_both, kept.taken, choices.taken)
    with kept.made(), choices.made(), saved_by_running_again(run, args, again, kept.saved):
        return run(*args)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer(), inner():
        yield
