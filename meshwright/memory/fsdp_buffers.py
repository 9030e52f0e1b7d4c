"""What FSDP holds while a stage works: units that it has gathered, and gradients on their way to their shards.

It is told by the same hooks as FSDP, on a sketch in which nothing is gathered: so here it is only counted.
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
from ..recipe import MemoryOptions
from ..sharding import (
    GATHERED,
    GRADIENTS,
    ON_THEIR_WAY,
    ShardingSpec,
    Unit,
    gathered_bytes,
    gathered_low,
    in_order,
    narrow_bytes,
    padded,
)

Add = Callable[[str, int], None]


def in_shards(
    spec: ShardingSpec, units: Sequence[Unit], axes: Axes, coords: Mapping[str, int], compute: torch.dtype,
    memory: MemoryOptions,
) -> dict[Unit, tuple[int, int]]:  # fmt: skip
    """Those of these units that FSDP stores in shards, without what it leaves out, as forward is done with them. Of
    each the bytes when it is gathered, and of its gradients when they are summed."""
    stored = torch.promote_types(compute, torch.float32).itemsize
    low, found = gathered_low(spec, spec.table.params, wide=memory.gathers_wide), dict[Unit, tuple[int, int]]()
    for unit in in_order(units):
        if memory.offload or prod(axes.sizes(("replicate", *unit.shard))) > 1:
            parts = prod(axes.sizes(unit.shard))
            numbers = low if parts > 1 else frozenset()
            exact = replace(unit, params=tuple(name for name in unit.params if not spec.table[name].float32))
            gathered = gathered_bytes(exact, spec, axes, coords, compute.itemsize, numbers)
            summed = stored + narrow_bytes(spec, axes, exact, compute.itemsize, stored)
            found[exact] = gathered * parts, padded(exact, spec, axes, coords) * parts * summed
    return found


class Shards:
    """Of the units of a stage that are stored in shards. `add` counts bytes of a kind, fewer where they are freed.

    A unit comes in one piece (`_come`), from which its parameters are copied to where they lie (`_here`). In forward
    FSDP leaves the piece (`_left`) until the next unit has come; also in what backward runs again.
    """

    def __init__(
        self, sketch: nn.Module, units: Mapping[Unit, tuple[int, int]], grads: Mapping[str, int], add: Add
    ) -> None:
        """`units`: with the bytes of each when it is gathered, and of its gradients when they are sent. `grads`: the
        bytes of the gradient of each parameter, as this rank stores it."""
        self._sketch, self._units, self._grad_bytes, self._add = sketch, units, grads, add
        self._order = [*units]
        self._come, self._left, self._here = set[Unit](), set[Unit](), set[Unit]()
        self._back = set[Unit]()  # those to which backward has come
        self._grads: dict[Unit, list[Tensor]] = {}
        self._sent: Unit | None = None

    def watch(self) -> None:
        """Gradients are counted as they are stored, so nothing holds them here."""
        others = dict(self._sketch.named_parameters())
        for unit in self._units:
            module = self._sketch.get_submodule(unit.name)
            module.register_forward_pre_hook(lambda *_, unit=unit: self._begin(unit))
            module.register_forward_hook(lambda _, __, made, unit=unit: self._end(unit, made))
            learning = [others.pop(name) for name in unit.params]
            learning = [parameter for parameter in learning if parameter.requires_grad]
            for parameter in learning:
                parameter.register_post_accumulate_grad_hook(partial(self._learned, unit, len(learning)))
        for name, parameter in others.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._store, name))

    def forward_ends(self) -> None:
        for unit in [*self._left]:
            self._gone(self._left, unit)

    def _gone(self, where: set[Unit], unit: Unit) -> None:
        if unit in where:
            where.remove(unit)
            self._add(GATHERED, -self._units[unit][0])

    def _there(self, where: set[Unit], unit: Unit) -> None:
        if unit not in where:
            where.add(unit)
            self._add(GATHERED, self._units[unit][0])

    def _begin(self, unit: Unit) -> None:
        if unit in self._here:
            return
        self._there(self._come, unit)
        self.forward_ends()
        self._there(self._here, unit)
        self._come.remove(unit)
        self._left.add(unit)

    def _end(self, unit: Unit, made: Tensor | tuple[Tensor, ...]) -> None:
        if unit.again and unit not in self._back:
            self._gone(self._here, unit)
        for y in (each for each in tree_leaves(made) if each.requires_grad):
            y.register_hook(lambda _: self._turn(unit))

    def _turn(self, unit: Unit) -> None:
        """Backward comes to it, and FSDP asks for the next one beside its work (`fsdp.prefetch_in_order`)."""
        if unit in self._back:
            return
        self._back.add(unit)
        if unit not in self._here:
            self._there(self._come, unit)
            self._there(self._here, unit)
            self._gone(self._come, unit)
        for before in self._order[: self._order.index(unit)][-1:]:
            if before not in self._here:
                self._there(self._come, before)

    def _learned(self, unit: Unit, num: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._grads.setdefault(unit, []).append(parameter.grad)
        parameter.grad = None
        if len(self._grads[unit]) == num:
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        """All gradients of a unit at once, as wide as they are summed. They wait until the next ones are sent."""
        self._gone(self._here, unit)
        self._forget_sent()
        self._sent = unit
        self._add(ON_THEIR_WAY, self._units[unit][1])
        del self._grads[unit]
        self._add(GRADIENTS, sum(self._grad_bytes.get(name, 0) for name in unit.params))

    def _forget_sent(self) -> None:
        if self._sent is not None:
            self._add(ON_THEIR_WAY, -self._units[self._sent][1])
            self._sent = None

    def _store(self, name: str, parameter: Tensor) -> None:
        parameter.grad = None
        self._add(GRADIENTS, self._grad_bytes.get(name, 0))
