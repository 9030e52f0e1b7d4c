"""Estimate a step on a mesh in about a millisecond: the bill of one layer of each kind, times the number of layers.

A search orders its meshes by this estimate, and costs only the fastest in full.
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

# The bubble of each schedule, as a share of that of 1F1B with the same stages: split backwards leave about a third of
# it (arXiv:2401.10241).
_BUBBLE = {"1f1b": 1.0, "zero-bubble": 1 / 3, "v": 1 / 3}


@dataclass(frozen=True, eq=False)
class OneOfEachLayer:
    """A model reduced to one layer of each kind. `num`: the number of layers of the whole model that each one
    represents."""

    whole: Blueprint
    blueprint: Blueprint
    num: Mapping[int, int]
    _places: dict[int, tuple[float, float]] = field(default_factory=dict)
    _by_options: dict[MemoryOptions, Blueprint] = field(default_factory=dict)

    @cached_property
    def flops(self) -> Flops:
        """Return the operations of the whole model."""
        return flops_of(self.whole, self.whole.table.params.keys())

    def with_memory(self, memory: MemoryOptions) -> Blueprint:
        """Return the reduced model with these options and without a pipeline. Each blueprint is made once, since it
        caches its FSDP units."""
        if memory not in self._by_options:
            self._by_options[memory] = self.blueprint.with_options(pipeline=Pipeline(), memory=memory)
        return self._by_options[memory]

    def places(self, pp: int) -> tuple[float, float]:
        """Return the cost of the most expensive coordinate on pp, and of an average one."""
        if pp not in self._places:
            line = self.whole.spec.line(pp)
            costs = costs_of_stages(self.whole.table, self.whole.module, line)
            totals = [sum(costs[stage] for stage in line.stages_of(place)) for place in range(pp)]
            self._places[pp] = max(totals), sum(totals) / pp
        return self._places[pp]


def one_of_each_layer(blueprint: Blueprint) -> OneOfEachLayer:
    """Keep the first layer of each kind. Layers are of one kind if their parameters agree in name, dims and FP8."""
    table, module = blueprint.table, blueprint.module
    kinds: dict[int, list[object]] = {}
    for param in table:
        if param.layer is not None:
            name = param.name.removeprefix(f"layers.{param.layer}.")
            kinds.setdefault(param.layer, []).append((name, *param.dims.items(), param.name in blueprint.spec.fp8))
    counts = Counter(map(tuple, kinds.values()))
    first = {tuple(kinds[layer]): layer for layer in reversed(kinds)}
    num = {layer: counts[kind] for kind, layer in sorted(first.items(), key=lambda item: item[1])}
    params = {param.name: param for param in table if param.layer is None or param.layer in num}
    part = module.part(list(num), first=True, last=True)
    spec = replace(
        blueprint.spec, table=replace(table, params=params), module=part, fp8=blueprint.spec.fp8 & params.keys()
    )
    return OneOfEachLayer(blueprint, replace(blueprint, spec=spec, module=part), num)


def hold_options(memory: MemoryOptions) -> MemoryOptions:
    """Return options that gather parameters and reduce gradients once per step, like a pipeline with `hold`.

    `MemoryOptions` refuses these two together with `narrow_grads` and `offload`.
    """
    return replace(memory, gather_once=True, sum_once=True, narrow_grads=False, offload=False)


def quick_estimate(model: OneOfEachLayer, axes: Axes, work: Work, memory: MemoryOptions, cluster: Cluster) -> Estimate:
    """Estimate the time of a step from the charges of one layer of each kind.

    The reduced model must be marked for these options (`parallel.mark`): its doors tell the bill which of them
    recompute passes again.
    """
    # The bill of one pipeline stage, as if the mesh had no pp; layers then count by their share on a coordinate of pp.
    blueprint, of_a_stage = model.with_memory(memory), replace(axes, pp=1)
    layers = model.whole.table.num_layers
    share = -(-layers // axes.pp) / layers

    def times(charge: Charge) -> float:
        """Return how many layers a charge represents; 1 for embedding, head and step-wide collectives."""
        name = part_of(charge.what)
        return model.num[int(name.split(".")[1])] * share if name.startswith("layers.") else 1.0

    charges = engine_bill(blueprint, of_a_stage, 0, work, "previous")
    whole = [replace(charge, count=charge.count * times(charge)) for charge in charges]  # type: ignore[arg-type]
    whole += _transfers(model, axes, work)
    bubble = _bubble(model, axes.pp, work.num_batches)
    step = StepCost(model.whole, axes, work, memory, cluster, model.flops)
    return step.estimate(whole, fsdp_units(blueprint, of_a_stage, 0), bubble)


def _transfers(model: OneOfEachLayer, axes: Axes, work: Work) -> list[Charge]:
    """Return the activations that a rank sends to the next stage, and the gradients that it sends back."""
    if axes.pp == 1:
        return []
    num_bytes = work.tokens // (axes.cp * axes.tp) * model.whole.module.shape.stream_width * work.compute_bytes
    return [Charge(transfer_name("there", 1), "send", ("pp",), num_bytes, 2 * work.num_batches)]


def _bubble(model: OneOfEachLayer, pp: int, num_batches: int) -> float:
    """Return the share of a step in which an average rank waits.

    With pp stages a step takes as long as m + pp - 1 micro-batches (arXiv:2104.04473), less with several stages per
    rank or split backwards. The most expensive coordinate sets the pace, so with uneven stages all other coordinates
    wait too.
    """
    if pp == 1:
        return 0.0
    most, average = model.places(pp)
    pipeline = model.whole.recipe.pipeline
    ahead = (pp - 1) * _BUBBLE[pipeline.schedule] / pipeline.stages
    return 1 - num_batches * average / ((num_batches + ahead) * most)
