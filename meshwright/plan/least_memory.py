"""Compute a lower bound on the memory of a mesh in microseconds, so that a search can drop meshes before simulation.

The bound must never exceed what `Figures` computes in full, or a search would drop meshes that fit. So every
part is divided by as many ranks as could share it at best.
"""

from __future__ import annotations

from functools import cache, cached_property
from math import prod

from ..axes import Axes
from ..blueprint import Blueprint
from ..memory.meta_model import FakeMesh
from ..memory.simulate import StepWork, activations
from ..recipe import MemoryOptions
from ..sharding import Param
from .figures import COMPUTE


class LeastMemory:
    """The least bytes per rank of any mesh. `tokens`: per micro-batch. `state_bytes`: optimizer state per element.

    Parameters, gradients and optimizer state are divided by all ranks except replicas (ZeRO, arXiv:1910.02054).
    Activations are divided by cp and tp at best (sequence parallelism, arXiv:2205.05198). They are simulated once for
    each recompute mode, with experts spread over ranks and without.
    """

    def __init__(self, blueprint: Blueprint, tokens: int, state_bytes: float) -> None:
        self.blueprint, self.tokens, self.state_bytes = blueprint, tokens, state_bytes
        self._kept = cache(self._simulate_kept)

    @cached_property
    def _trained(self) -> list[Param]:
        """Return the trained parameters."""
        names = {*self.blueprint.trained()}
        return [param for param in self.blueprint.table if param.name in names]

    @cached_property
    def _frozen_bytes(self) -> float:
        """Return the bytes of the frozen parameters of all ranks."""
        names = {param.name for param in self._trained}
        codings = self.blueprint.codings(names, Axes())
        dtypes = self.blueprint.stored_dtypes(COMPUTE, names)
        frozen = [param for param in self.blueprint.table if param.name not in names]
        values = [param.numel * dtypes[param.name].itemsize for param in frozen if param.name not in codings]
        return sum(values) + sum(prod(codings[p.name].stored(p.matrix)) for p in frozen if p.name in codings)

    @cached_property
    def _expert_elements(self) -> int:
        """Return the number of elements of all trained experts, which ep spreads over ranks."""
        return sum(param.numel for param in self._trained if "expert" in param.dims)

    @cached_property
    def _dense_elements(self) -> int:
        """Return the number of trained elements outside of experts."""
        return sum(param.numel for param in self._trained) - self._expert_elements

    def num_bytes(self, axes: Axes, num_batches: int, memory: MemoryOptions, *, holds: bool) -> float:
        """Return the least device bytes of the rank that stores most. `holds`: its pipeline keeps parameters gathered
        and gradients unreduced for the whole step."""
        elements = 0.0 if memory.offload else self.elements(axes)
        under_way, gradients = min(axes.pp, num_batches), 4 * elements
        # At the first micro-batch of a step there are no gradients: they appear in its backward. So the peak has two
        # candidates: all micro-batches under way without gradients, or one fewer with all gradients.
        moments = [self._passing(axes, memory, under_way), gradients + self._passing(axes, memory, under_way - 1)]
        if num_batches > under_way:
            moments.append(gradients + self._passing(axes, memory, under_way))
        held = self._held(axes) if holds else 0.0
        frozen = 0.0 if memory.offload else self._frozen_bytes / axes.world * axes.replicate
        return (4 + self.state_bytes) * elements + frozen + held + max(moments)  # 4: float32 masters

    def elements(self, axes: Axes) -> float:
        """Return the least number of trained elements of the rank that stores most."""
        return (self._dense_elements + self._expert_elements) / axes.world * axes.replicate

    def _held(self, axes: Axes) -> float:
        """Return the bytes that `hold` keeps of sharded parameters: values in bfloat16, gradients in float32."""
        # Parameters that no rank shards need no all-gather, so `hold` costs nothing for them.
        dense = self._dense_elements / axes.tp if axes.replicate * axes.fsdp * axes.cp > 1 else 0.0
        experts = self._expert_elements / axes.ep if axes.replicate * axes.size_of("efsdp") > 1 else 0.0
        return (dense + experts) / axes.pp * (2 + 4)

    def _passing(self, axes: Axes, memory: MemoryOptions, under_way: int) -> float:
        """Return the activations of the first rank of pp, while backward recomputes one of its layers.

        With 1F1B the first rank keeps the most micro-batches, since a micro-batch takes longest from there to the last
        rank and back.
        """
        if not under_way:
            return 0.0
        kept, whole = (self._kept(kind, axes.ep > 1) for kind in (memory.recompute, "none"))
        again = (whole - kept) / self.blueprint.table.num_layers
        return (kept * self._share(axes.pp) * under_way + again) / (axes.cp * axes.tp)

    def _share(self, pp: int) -> float:
        """Return the share of the layers that the first rank of pp holds."""
        line = self.blueprint.spec.line(pp)
        return sum(len(line.layers_of(stage)) for stage in line.stages_of(0)) / self.blueprint.table.num_layers

    def _simulate_kept(self, recompute: str, shares_experts: bool) -> int:
        """Simulate the bytes that all layers keep for backward of a micro-batch, on as few ranks as possible."""
        num_experts = self.blueprint.balance.num_experts
        ep = next(num for num in range(2, num_experts + 1) if num_experts % num == 0) if shares_experts else 1
        mesh = FakeMesh(Axes(fsdp=max(2, ep), ep=ep), 0)
        (stage,) = self.blueprint.spec.stages(mesh.axes, 0)
        work = StepWork(self.tokens, compute=COMPUTE, memory=MemoryOptions(recompute))
        return activations(self.blueprint.spec, stage, mesh, work).kept
