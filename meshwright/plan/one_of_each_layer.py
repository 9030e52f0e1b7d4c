"""A first price of a mesh, in about a millisecond: the bill of a model with one layer of each kind, times their number.

It puts the meshes of a search in order. The best are then reckoned in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.step_bill import engine_bill
from ..recipe import MemoryOptions, Pipeline
from ..sharding import Charge, Work, costs_of_stages, part_of, transfer_name
from .devices import Cluster
from .step_time import AGAIN, Estimate, flops_of, host_seconds, seconds_of, waits_of

_BUBBLE = {"1f1b": 1.0, "zero-bubble": 1 / 3, "v": 1 / 3}  # of the waiting of 1F1B with as many stages


@dataclass(frozen=True, eq=False)
class Thin:
    """`num`: how many layers of the model are like each layer of the thin one, by its number."""

    whole: Blueprint
    blueprint: Blueprint
    num: Mapping[int, int]
    _places: dict[int, tuple[float, float]] = field(default_factory=dict)
    _by_options: dict[MemoryOptions, Blueprint] = field(default_factory=dict)

    @cached_property
    def dense(self) -> int:
        """Elements outside of experts."""
        return sum(param.numel for param in self.whole.table) - self.experts

    @cached_property
    def experts(self) -> int:
        return sum(param.numel for param in self.whole.table if "expert" in param.dims)

    def with_memory(self, memory: MemoryOptions) -> Blueprint:
        """Return the thin model with these options and without a pipeline. Each is made once: it remembers its
        units."""
        if memory not in self._by_options:
            self._by_options[memory] = self.blueprint.with_options(pipeline=Pipeline(), memory=memory)
        return self._by_options[memory]

    def places(self, pp: int) -> tuple[float, float]:
        """What the dearest place on pp costs, and an average one."""
        if pp not in self._places:
            line = self.whole.spec.line(pp)
            costs = costs_of_stages(self.whole.table, self.whole.module, line)
            found = [sum(costs[stage] for stage in line.stages_of(place)) for place in range(pp)]
            self._places[pp] = max(found), sum(found) / pp
        return self._places[pp]

    def operations(self, tokens: int) -> float:
        return self._flops.of(tokens, tokens**2)

    @cached_property
    def _flops(self) -> Any:
        return flops_of(self.whole, self.whole.table.params.keys())


def thin(blueprint: Blueprint) -> Thin:
    table, module = blueprint.table, blueprint.module
    kinds: dict[int, list[object]] = {}
    for param in table:
        if param.layer is not None:
            name = param.name.removeprefix(f"layers.{param.layer}.")
            kinds.setdefault(param.layer, []).append((name, *param.dims.items(), param.name in blueprint.spec.fp8))
    alike = Counter(map(tuple, kinds.values()))
    first = {tuple(kinds[layer]): layer for layer in reversed(kinds)}
    num = {layer: alike[kind] for kind, layer in sorted(first.items(), key=lambda item: item[1])}
    params = {param.name: param for param in table if param.layer is None or param.layer in num}
    part = module.part(list(num), first=True, last=True)
    spec = replace(
        blueprint.spec, table=replace(table, params=params), module=part, fp8=blueprint.spec.fp8 & params.keys()
    )
    return Thin(blueprint, replace(blueprint, spec=spec, module=part), num)


def least_bytes(model: Thin, axes: Axes, moment_bytes: float) -> float:
    """No mesh stores less on the rank that stores most: parameters and gradients in float32, and both moments."""
    return (model.dense + model.experts) / axes.world * axes.replicate * (8 + 2 * moment_bytes)


def held(memory: MemoryOptions) -> MemoryOptions:
    """As a pipeline that holds gathers and sums: once a step."""
    return replace(memory, gather_once=True, sum_once=True, narrow_grads=False, offload=False)


def held_bytes(model: Thin, axes: Axes) -> float:
    """What such a pipeline keeps at least, of all that is stored in shards: values in bfloat16, sums in float32."""
    dense = model.dense / axes.tp if axes.replicate * axes.fsdp * axes.cp > 1 else 0.0
    experts = model.experts / axes.ep if axes.replicate * axes.size_of("efsdp") > 1 else 0.0
    return (dense + experts) / axes.pp * (2 + 4)


def first_price(model: Thin, axes: Axes, work: Work, memory: MemoryOptions, cluster: Cluster) -> Estimate:
    """Of a step, as `estimate` would have it. The doors of the model must be marked for these options."""
    blueprint = model.with_memory(memory)
    charges = engine_bill(blueprint, replace(axes, pp=1), 0, work, "previous")
    units = {u.name or "root" for stage in blueprint.spec.stages(replace(axes, pp=1), 0) for u in stage.units}
    layers = model.whole.table.num_layers
    share = -(-layers // axes.pp) / layers

    def times(charge: Charge) -> float:
        name = part_of(charge.what)
        return model.num[int(name.split(".")[1])] * share if name.startswith("layers.") else 1.0

    whole = [replace(charge, count=charge.count * times(charge)) for charge in charges]  # type: ignore[arg-type]
    again = AGAIN if memory.recompute == "full" else 1.0
    waits = [c for c in whole if c.what not in units] + _transfers(model, axes, work)
    operations = again * model.operations(work.tokens) * work.num_batches / (axes.cp * axes.tp * axes.pp)
    return Estimate(
        products=operations / cluster.products,
        waits=tuple(waits_of(waits, axes, cluster)),
        gathers=sum(seconds_of(c, axes, cluster) for c in whole if c.what in units),
        host=host_seconds(model.whole, work, memory) / axes.pp,
        bubble_share=_bubble(model, axes.pp, work.num_batches),
    )


def _transfers(model: Thin, axes: Axes, work: Work) -> list[Charge]:
    if axes.pp == 1:
        return []
    num_bytes = work.tokens // (axes.cp * axes.tp) * model.whole.module.shape.width * work.compute_bytes
    return [Charge(transfer_name("there", 1), "send", ("pp",), num_bytes, 2 * work.num_batches)]


def _bubble(model: Thin, pp: int, num_batches: int) -> float:
    """Of 1F1B the first and the last micro-batch alone leave ranks without work; so do stages of unequal cost."""
    if pp == 1:
        return 0.0
    most, average = model.places(pp)
    pipeline = model.whole.recipe.pipeline
    ahead = (pp - 1) * _BUBBLE[pipeline.schedule] / pipeline.stages
    return 1 - num_batches * average / ((num_batches + ahead) * most)
