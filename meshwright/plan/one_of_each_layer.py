"""A first price of a mesh, in about a millisecond: the bill of a model with one layer of each kind, times their number.

It puts the meshes of a search in order. The best are then reckoned in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..axes import Axes
from ..blueprint import Blueprint
from ..engine.step_bill import engine_bill
from ..recipe import MemoryOptions, Pipeline
from ..sharding import Charge, Work, costs_of_stages, part_of, transfer_name
from .devices import Cluster
from .step_time import Estimate, Flops, StepCost, flops_of, fsdp_units

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
    def flops(self) -> Flops:
        return flops_of(self.whole, self.whole.table.params.keys())

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


def held(memory: MemoryOptions) -> MemoryOptions:
    """As a pipeline that holds gathers and sums: once a step."""
    return replace(memory, gather_once=True, sum_once=True, narrow_grads=False, offload=False)


def first_price(model: Thin, axes: Axes, work: Work, memory: MemoryOptions, cluster: Cluster) -> Estimate:
    """Estimate a step from the charges of one layer of each kind, which must be marked for these options."""
    blueprint, of_a_stage = model.with_memory(memory), replace(axes, pp=1)
    layers = model.whole.table.num_layers
    share = -(-layers // axes.pp) / layers

    def times(charge: Charge) -> float:
        name = part_of(charge.what)
        return model.num[int(name.split(".")[1])] * share if name.startswith("layers.") else 1.0

    charges = engine_bill(blueprint, of_a_stage, 0, work, "previous")
    whole = [replace(charge, count=charge.count * times(charge)) for charge in charges]  # type: ignore[arg-type]
    whole += _transfers(model, axes, work)
    bubble = _bubble(model, axes.pp, work.num_batches)
    step = StepCost(model.whole, axes, work, memory, cluster, model.flops)
    return step.estimate(whole, fsdp_units(blueprint, of_a_stage, 0), bubble)


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
