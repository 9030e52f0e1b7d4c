"""Activation checkpointing (recompute) and `torch.compile` of layers.

`recompute="full"` keeps the `[T, D]` input of a layer and runs the layer again in backward (arXiv:1604.06174): a third
more FLOPs. `"selective"` keeps the results of matmuls, attention and collectives and recomputes what is cheap and
large, as Megatron-LM does for attention scores (arXiv:2205.05198).

The router's choice is always kept, in both modes. A recomputed top-k may break ties differently from the first one (a
matmul of another batch shape rounds differently). Expert counts then differ between forward and backward: a crash at
best (NeMo-Automodel#2635, torchtitan#1117), wrong gradients at worst.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn
from torch import Tensor, nn

from .. import ops
from ..errors import ConfigError
from ..mesh.collectives import OPS, keep_traceable
from ..models import Decoder, Layer, TowerBlock
from ..recipe import MemoryOptions
from ..sharding import Dispatch, Door, Halo, Join, Swap, find_doors
from .compiled import CompiledLayer
from .replay import Context, recompute_saved_tensors
from .selective_recompute import SavedResults

_aten = torch.ops.aten

# Operations whose results recompute="selective" keeps: matmuls, attention and collectives. They take nearly all the
# time of a layer; what is replayed (norms, rotary embedding, gates, activations) takes nearly all of its memory.
_COSTLY = [
    *OPS,
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    torch.ops.meshwright_ops.grouped_mm.default,  # of ops/experts.py
    _aten._scaled_mm_v2.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
]


def arm(model: Decoder, memory: MemoryOptions) -> None:
    """Let each layer run as the options say, and mark its doors for the bill."""
    mark(model, memory)
    if memory.recompute == "none" and not memory.compiled:
        return
    if memory.compiled:
        keep_traceable()
    for layer in model.every_layer:
        if not isinstance(layer, Layer):
            raise ConfigError(
                f"recompute= and compiled= work on subclasses of models.decoder.Layer, and {type(layer).__name__} is "
                "not one; derive it from Layer, or leave these options out"
            )
        if memory.compiled:
            layer.run = CompiledLayer(layer.run)
        if memory.recompute != "none":
            layer.run = _recomputed(layer.run, memory)
    for block in model.tower.blocks.values() if model.tower is not None and memory.recompute != "none" else ():
        # It has no doors to mark, and is not compiled: the number of patches changes with every batch.
        assert isinstance(block, TowerBlock)
        block.run = _recomputed(block.run, memory)


def disarm(model: Decoder) -> None:
    """Undo `arm`: let each layer run plainly again."""
    for part in model.modules():
        if isinstance(part, Layer | TowerBlock):
            part.run = part.block


def _recomputed(run: Callable[..., Tensor], memory: MemoryOptions) -> Callable[..., Tensor]:
    """Bind `run` to checkpointing in the mode of the options."""
    return functools.partial(_checkpointed, run, _COSTLY if memory.recompute == "selective" else [])


def mark(model: Decoder, memory: MemoryOptions) -> None:
    """Mark the doors that backward passes again, so that the bill counts their collectives. `plan` tries several
    options on one model, so marks are overwritten."""
    for layer in model.every_layer:
        _mark(layer, full=memory.recompute == "full", to_end=isinstance(layer, Layer) and layer.needs_output)


def _mark(layer: nn.Module, *, full: bool, to_end: bool) -> None:
    """Mark the doors of one layer. A replay stops at the last saved tensor, so it passes the last door only where
    backward needs the output of the last part (`to_end`).

    A door that is passed again pays again: under tp and full recomputation a dense layer (two pairs of doors) makes 6
    all-gathers and 5 reduce-scatters instead of 4 and 4.
    """
    doors: list[Door | Dispatch] = [d for _, d in find_doors(layer, Door)]
    dispatches = [d for _, d in find_doors(layer, Dispatch)]
    doors += dispatches
    for door in doors:  # experts are passed again even when last: backward needs their input
        door.again = full and (to_end or door is not doors[-1] or isinstance(door, Dispatch))
    for dispatch in dispatches:
        dispatch.back_again = full and to_end
    for _, swap in find_doors(layer, Swap):  # a mixer is never the last part of a layer
        swap.again = full
    for _, join in find_doors(layer, Join):
        join.again = full
    for _, halo in find_doors(layer, Halo):
        halo.again = full


def _checkpointed(run: Callable[..., Tensor], ops_kept: list[Any], *args: Any) -> Tensor:
    """Run a layer under checkpointing, and keep the routing of its first run.

    The layer reports its expert load to `Balance` in both runs. The report assigns and does not add: a counter would
    count twice (torchtitan#1593).
    """
    if not torch.is_grad_enabled():
        return run(*args)
    choices = ops.Choices()
    if not ops_kept:
        with choices.made(), recompute_saved_tensors(run, args, choices.taken):
            return run(*args)
    # A TorchDispatchMode: each operation passes through Python, which takes the host as long as the operation itself.
    saved = SavedResults(ops_kept, OPS)
    again = functools.partial(_both, saved.replay, choices.taken)
    with saved.record(), choices.made(), recompute_saved_tensors(run, args, again, saved.mark_saved):
        return run(*args)


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    """Enter both contexts."""
    with outer(), inner():
        yield
