"""The least memory of a mesh, in microseconds: a search leaves out what cannot fit before it costs a mesh in full."""

from __future__ import annotations

from functools import cache, cached_property

from ..axes import Axes
from ..blueprint import Blueprint
from ..memory.meta_model import FakeMesh
from ..memory.simulate import StepWork, activations
from ..recipe import MemoryOptions
from .figures import COMPUTE


class Least:
    """`tokens`: of a micro-batch. `state_bytes`: of all optimizer state of an element.

    Parameters, gradients and optimizer state are shared by all ranks but the replicas. What layers keep for backward is
    shared by tp and cp at best: it is counted once for each way to recompute, with experts on several ranks or on each.
    """

    def __init__(self, blueprint: Blueprint, tokens: int, state_bytes: float) -> None:
        self.blueprint, self.tokens, self.state_bytes = blueprint, tokens, state_bytes
        self._kept = cache(self._keeps)

    @cached_property
    def _experts(self) -> int:
        return sum(param.numel for param in self.blueprint.table if "expert" in param.dims)

    @cached_property
    def _dense(self) -> int:
        """Elements outside of experts."""
        return sum(param.numel for param in self.blueprint.table) - self._experts

    def num_bytes(self, axes: Axes, num_batches: int, memory: MemoryOptions, *, holds: bool) -> float:
        """No mesh takes less of the device of the rank that stores most. `holds`: its pipeline holds gathers and sums.

        The first micro-batch of a step finds no gradients; once it has gone back, all of them are there.
        """
        elements = 0.0 if memory.offload else self.elements(axes)
        under_way, gradients = min(axes.pp, num_batches), 4 * elements
        moments = [self._passing(axes, memory, under_way), gradients + self._passing(axes, memory, under_way - 1)]
        if num_batches > under_way:
            moments.append(gradients + self._passing(axes, memory, under_way))
        held = self._held(axes) if holds else 0.0
        return (4 + self.state_bytes) * elements + held + max(moments)

    def elements(self, axes: Axes) -> float:
        """Return how many elements the rank that stores most has of the model, at least."""
        return (self._dense + self._experts) / axes.world * axes.replicate

    def _held(self, axes: Axes) -> float:
        """Return what a pipeline that holds keeps, of all stored in shards: values in bfloat16, sums in float32."""
        dense = self._dense / axes.tp if axes.replicate * axes.fsdp * axes.cp > 1 else 0.0
        experts = self._experts / axes.ep if axes.replicate * axes.size_of("efsdp") > 1 else 0.0
        return (dense + experts) / axes.pp * (2 + 4)

    def _passing(self, axes: Axes, memory: MemoryOptions, under_way: int) -> float:
        """Return what the first rank of pp keeps of the micro-batches under way, while backward recomputes a layer."""
        if not under_way:
            return 0.0
        kept, whole = (self._kept(kind, axes.ep > 1) for kind in (memory.recompute, "none"))
        again = (whole - kept) / self.blueprint.table.num_layers
        return (kept * self._share(axes.pp) * under_way + again) / (axes.cp * axes.tp)

    def _share(self, pp: int) -> float:
        """Return the share of the layers that the first rank of pp holds."""
        line = self.blueprint.spec.line(pp)
        return sum(len(line.layers_of(stage)) for stage in line.stages_of(0)) / self.blueprint.table.num_layers

    def _keeps(self, recompute: str, shares_experts: bool) -> int:
        """Bytes that all layers keep for backward of a micro-batch, on the fewest ranks that share out everything."""
        num_experts = self.blueprint.balance.num_experts
        ep = next(num for num in range(2, num_experts + 1) if num_experts % num == 0) if shares_experts else 1
        paper = FakeMesh(Axes(fsdp=max(2, ep), ep=ep), 0)
        (stage,) = self.blueprint.spec.stages(paper.axes, 0)
        work = StepWork(self.tokens, compute=COMPUTE, memory=MemoryOptions(recompute))
        return activations(self.blueprint.spec, stage, paper, work).kept
