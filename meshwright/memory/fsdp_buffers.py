"""Count the bytes that FSDP2 holds while a stage runs: gathered units, and gradients on their way to their shards.

FSDP2's hooks fire on a copy of the model on the meta device, where nothing is gathered; bytes are counted instead.
FSDP's buffers follow its own rules (prefetch, delayed frees, copy-out), so they cannot be read off the model alone.

Timeline of forward over units A, B (each line adds or frees bytes):

  before A     flat buffer of A, copy-out of A
  after A      free copy of A (reshard_after_forward)
  before B     flat buffer of B, free flat buffer of A, copy-out of B
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..axes import Axes
from ..ops.codings import FP8, Coding
from ..sharding import (
    GATHERED,
    GRADIENTS,
    IN_FLIGHT,
    ShardingSpec,
    Unit,
    gathered_bytes,
    gathered_in_fp8,
    in_order,
    narrow_bytes,
    padded,
)
from .meta_model import Seen

Add = Callable[[str, int], None]


def sharded_units(
    spec: ShardingSpec, units: Sequence[Unit], axes: Axes, coords: Mapping[str, int], seen: Seen
) -> dict[Unit, tuple[int, int]]:
    """Return the units that FSDP shards, without ignored parameters. Each comes with its bytes when gathered, and the
    bytes of its gradients when they are reduced."""
    compute, memory = seen.compute, seen.memory
    stored = torch.promote_types(compute, torch.float32).itemsize
    codings = {name: form for name, form in seen.frozen.items() if isinstance(form, Coding)}
    fp8_weights = gathered_in_fp8(spec, spec.table.params, wide=memory.gathers_wide)
    sizes = dict[Unit, tuple[int, int]]()
    for unit in in_order(units):
        # The condition under which `parallel.fsdp.shard` wraps a unit.
        if memory.offload or prod(axes.sizes(("replicate", *unit.shard))) > 1:
            num_shards = prod(axes.sizes(unit.shard))
            coded = {**dict.fromkeys(fp8_weights if num_shards > 1 else (), FP8), **codings}
            exact = replace(unit, params=tuple(name for name in unit.params if spec.table[name].in_fsdp))
            gathered = gathered_bytes(exact, spec, axes, coords, compute.itemsize, coded)
            summed = stored + narrow_bytes(spec, axes, exact, compute.itemsize, stored)
            sizes[exact] = gathered * num_shards, padded(exact, spec, axes, coords) * num_shards * summed
    return sizes


class FsdpBuffers:
    """The FSDP buffers of a stage. `add(kind, bytes)` counts allocations, and frees as negative bytes.

    A unit arrives in one flat buffer (`_flat`), from which its parameters are copied out (`_gathered`). In forward FSDP
    frees the flat buffer only when the next unit has arrived (`_old_flat`), because the copy-out runs on another
    stream. So up to two flat buffers exist in addition to the gathered parameters. The same happens when a layer is
    recomputed.
    """

    def __init__(
        self, model: nn.Module, units: Mapping[Unit, tuple[int, int]], grads: Mapping[str, int], add: Add
    ) -> None:
        """Take `units`, each with its gathered bytes and its reduced gradient bytes, and `grads`, the bytes of each
        parameter's gradient as this rank stores it."""
        self._model, self._units, self._grad_bytes, self._add = model, units, grads, add
        self._order = [*units]
        self._flat, self._old_flat, self._gathered = set[Unit](), set[Unit](), set[Unit]()
        self._reached_by_backward = set[Unit]()  # the units that backward has reached
        self._grads: dict[Unit, list[Tensor]] = {}
        self._sent: Unit | None = None

    def watch(self) -> None:
        """Register the hooks. Real gradients are dropped at once and counted as bytes of their stored shard."""
        others = dict(self._model.named_parameters())
        for unit in self._units:
            module = self._model.get_submodule(unit.name)
            module.register_forward_pre_hook(lambda *_, unit=unit: self._before_forward(unit))
            module.register_forward_hook(lambda _, __, out, unit=unit: self._after_forward(unit, out))
            trained = [others.pop(name) for name in unit.params]
            trained = [parameter for parameter in trained if parameter.requires_grad]
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(partial(self._on_grad, unit, len(trained)))
        for name, parameter in others.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._on_plain_grad, name))

    def free_old_flat(self) -> None:
        """Free the flat buffers that forward still holds; also called at the end of forward."""
        for unit in [*self._old_flat]:
            self._free(self._old_flat, unit)

    def _free(self, buffers: set[Unit], unit: Unit) -> None:
        """Count the free of a unit's buffer, if it exists."""
        if unit in buffers:
            buffers.remove(unit)
            self._add(GATHERED, -self._units[unit][0])

    def _allocate(self, buffers: set[Unit], unit: Unit) -> None:
        """Count the allocation of a unit's buffer, unless it exists."""
        if unit not in buffers:
            buffers.add(unit)
            self._add(GATHERED, self._units[unit][0])

    def _before_forward(self, unit: Unit) -> None:
        """Gather a unit: flat buffer, then copy-out."""
        if unit in self._gathered:
            return
        self._allocate(self._flat, unit)
        self.free_old_flat()
        self._allocate(self._gathered, unit)
        self._flat.remove(unit)
        self._old_flat.add(unit)

    def _after_forward(self, unit: Unit, out: Tensor | tuple[Tensor, ...]) -> None:
        """Reshard after forward, and watch for backward to reach the unit."""
        if unit.again and unit not in self._reached_by_backward:
            self._free(self._gathered, unit)
        # FSDP registers the same hooks: the first gradient of an output means that backward has reached the unit.
        for y in (each for each in tree_leaves(out) if each.requires_grad):
            y.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: Unit) -> None:
        """Gather a unit for backward, and prefetch the one that backward reaches next (`fsdp.prefetch_in_order`)."""
        if unit in self._reached_by_backward:
            return
        self._reached_by_backward.add(unit)
        if unit not in self._gathered:
            self._allocate(self._flat, unit)
            self._allocate(self._gathered, unit)
            self._free(self._flat, unit)
        for previous in self._order[: self._order.index(unit)][-1:]:
            if previous not in self._gathered:
                self._allocate(self._flat, previous)

    def _on_grad(self, unit: Unit, num: int, parameter: Tensor) -> None:
        """Collect a gradient, and reduce when the unit has all of them."""
        assert parameter.grad is not None
        self._grads.setdefault(unit, []).append(parameter.grad)
        parameter.grad = None
        if len(self._grads[unit]) == num:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        """Reduce-scatter the gradients of a unit from one buffer, in the dtype of the reduction. The next one frees the
        buffer."""
        self._free(self._gathered, unit)
        self._free_sent()
        self._sent = unit
        self._add(IN_FLIGHT, self._units[unit][1])
        del self._grads[unit]
        self._add(GRADIENTS, sum(self._grad_bytes.get(name, 0) for name in unit.params))

    def _free_sent(self) -> None:
        """Free the buffer of the previous reduce-scatter."""
        if self._sent is not None:
            self._add(IN_FLIGHT, -self._units[self._sent][1])
            self._sent = None

    def _on_plain_grad(self, name: str, parameter: Tensor) -> None:
        """Count the gradient of a parameter that FSDP ignores."""
        parameter.grad = None
        self._add(GRADIENTS, self._grad_bytes.get(name, 0))
