"""Find the peak memory of a training step by running it on the meta device: activations, gradients, temporary buffers.

A meta copy of each stage runs forward and backward. Every storage is counted from its allocation until it is freed, as
torch's own trackers do (`torch.distributed._tools.fsdp2_mem_tracker`). Closed formulas of activation memory
(arXiv:2205.05198, equation 1) hold for one architecture and go stale with each kernel. The simulation needs no formula
for a new model family.

Layers of one kind hold equal amounts of memory. So three layers of each kind run, and represent the rest.

In the first backward of a step, gradients appear while activations are freed. From the second micro-batch on, all
gradients exist before backward starts. The simulation computes both peaks, and reports the larger.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import ops
from ..axes import Axes
from ..models import Decoder
from ..models.decoder import Embedding
from ..ops.codings import Coding
from ..recipe import MemoryOptions
from ..sharding import (
    GATHERED,
    GRADIENTS,
    IN_FLIGHT,
    Action,
    ShardingSpec,
    Stage,
    passed,
    piece,
    program_of,
    trained_from,
)
from ..sharding.schedules import BACKWARD, FORWARD, WEIGHT
from .fsdp_buffers import FsdpBuffers, sharded_units
from .meta_model import FakeMesh, MetaKernels, Seen, forward, meta_copy

ACTIVATIONS = "activations"
# How many layers of each kind run. In backward, FSDP reduces the gradients of one layer while it gathers another. So
# the peak inside a layer depends on its two neighbours.
_RUN = 3


@dataclass(frozen=True)
class StepWork:
    """The work of a step on one data rank.

    `tokens`: in one micro-batch. `num_batches`: micro-batches. `compute`: the compute dtype. `kind`: the device type.
    `frozen`: the dtype in which each frozen parameter is stored, or its coding in 8 or 4 bits.
    """

    tokens: int
    num_batches: int = 1
    compute: torch.dtype = torch.bfloat16
    memory: MemoryOptions = MemoryOptions()
    kind: str = "gpu"
    frozen: Mapping[str, torch.dtype | Coding] = field(default_factory=dict)

    @property
    def seen(self) -> Seen:
        """Return the forms in which a forward sees parameters."""
        return Seen(self.compute, self.memory, self.frozen)


@dataclass(frozen=True)
class Peak:
    """The bytes in use at one moment.

    `total` includes activations. `parts` lists the bytes of everything else by kind: gradients and FSDP's buffers.
    """

    total: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)

    def plus(self, more: int) -> Peak:
        """Add bytes that other stages or micro-batches hold."""
        return replace(self, total=self.total + more)

    def with_gathered(self, least: int, others: int) -> Peak:
        """Raise this stage's gathered bytes to `least` if they are fewer, and add the `others` of other stages."""
        now = self.parts.get(GATHERED, 0)
        gathered = max(now, least) + others
        return Peak(self.total - now + gathered, {**self.parts, GATHERED: gathered})

    def with_grads(self, others: int) -> Peak:
        """Add gradients of other stages or of earlier micro-batches."""
        return Peak(self.total + others, {**self.parts, GRADIENTS: self.parts.get(GRADIENTS, 0) + others})


@dataclass(frozen=True)
class Activations:
    """The memory of one micro-batch in a stage."""

    kept: int  # bytes kept from forward to backward, without gathered parameters
    forward: Peak  # while forward runs
    backward: Peak  # while backward runs, including `kept`, without gradients
    first: Peak  # while the first backward of a step runs, with the gradients made so far
    stays: int = 0  # bytes of gathered parameters that are not freed after forward
    grads: int = 0  # bytes of all gradients


class Live(MetaKernels):
    """A dispatch mode that counts live bytes: each new storage from its allocation until it is garbage-collected.

    The key is the storage, not the tensor, because views share memory.
    """

    def __init__(self, existing: Sequence[Tensor]) -> None:
        super().__init__()
        self.now, self.most, self.first = 0, Peak(), Peak()
        self.parts: Counter[str] = Counter()  # live bytes that no meta tensor represents: FSDP's buffers and gradients
        self.skipped_freed = 0  # bytes that skipped layers have freed
        # Parameters exist before the run. `memory.budget` counts them as stored bytes.
        self._seen = {t.untyped_storage()._cdata for t in existing}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, _types, args, kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, memory: torch.UntypedStorage) -> None:
        """Count a storage once, and register its release."""
        key, size = memory._cdata, memory.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self._add(size)
            # The finalizer runs when the last tensor of the storage dies, in CPython immediately: exactly when the
            # caching allocator of a GPU gets the block back.
            weakref.finalize(memory, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        """Subtract a storage that was garbage-collected."""
        self._seen.discard(key)
        self.now -= size

    def add(self, what: str, num_bytes: int) -> None:
        """Count bytes of a kind that no tensor of the meta copy represents. A negative number frees them."""
        self.parts[what] += num_bytes
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        """Count bytes, and update both peaks: `most` excludes gradients, `first` includes them."""
        self.now += num_bytes
        grad_bytes = self.parts[GRADIENTS]
        if self.now - grad_bytes > self.most.total:
            self.most = Peak(self.now - grad_bytes, {**self.parts, GRADIENTS: 0})
        if self.now - self.skipped_freed > self.first.total:
            self.first = Peak(self.now - self.skipped_freed, dict(self.parts))

    @property
    def passing(self) -> int:
        """Return the bytes of live tensors only."""
        return self.now - self.parts.total()

    def pop_peak(self) -> Peak:
        """Return the peak since the last call, and reset it."""
        most, self.most = self.most, Peak()
        self._add(0)
        return most


def activations(spec: ShardingSpec, stage: Stage, mesh: FakeMesh, work: StepWork) -> Activations:
    """Simulate one micro-batch in a stage of a rank."""
    kinds = _kinds(spec, stage, _units_with_grad(spec, stage, mesh.axes), work.frozen)
    return _activations(spec, stage, mesh, work, kinds)


def _activations(
    spec: ShardingSpec, stage: Stage, mesh: FakeMesh, work: StepWork, kinds: Mapping[object, list[int]]
) -> Activations:
    """Simulate a stage whose layers are already grouped by kind."""
    numbers = sorted(number for same in kinds.values() for number in same[-_RUN:])
    model = meta_copy(spec, stage, mesh, work.seen, numbers)
    units = sharded_units(spec, stage.units, mesh.axes, mesh.coords, work.seen)
    names = {name for name, _ in model.named_modules()}
    grads = _grads(spec, stage, mesh, work)
    skipped = {number: same[-1] for same in kinds.values() for number in same[:-_RUN]}
    trial = _Trial(model, mesh.axes, work.compute, skipped, grads, carried=stage.number > _first(spec, mesh.axes))
    buffers = FsdpBuffers(
        model, {unit: sizes for unit, sizes in units.items() if unit.name in names}, grads, trial.live.add
    )
    stay_gathered = {unit.name: num for unit, (num, _) in units.items() if not unit.again}
    with ops.planned_for(work.kind):
        result = trial.run(work.tokens, buffers, sum(num for name, num in stay_gathered.items() if name not in names))
    return replace(result, stays=sum(stay_gathered.values()), grads=sum(grads.values()))


def _grads(spec: ShardingSpec, stage: Stage, mesh: FakeMesh, work: StepWork) -> dict[str, int]:
    """Return the bytes of each parameter's gradient on this rank's device.

    With offload FSDP moves gradients to the host. Gradients of float32 parameters stay, because FSDP ignores these.
    """
    width = torch.promote_types(work.compute, torch.float32).itemsize
    trained = {name for name, parameter in stage.module.named_parameters() if parameter.requires_grad}
    params = [spec.table[name] for unit in stage.units for name in unit.params if name in trained]
    offload = work.memory.offload
    return {
        param.name: width * piece(param, spec.rules, mesh.axes, mesh.coords).numel
        for param in params
        if not (param.in_fsdp and offload)
    }


def _trained(spec: ShardingSpec) -> list[str]:
    return [name for name, parameter in spec.module.named_parameters() if parameter.requires_grad]


def _first(spec: ShardingSpec, axes: Axes) -> int:
    """Return the first stage that runs a backward."""
    return trained_from(spec.table, spec.line(axes.pp), _trained(spec))


def _units_with_grad(spec: ShardingSpec, stage: Stage, axes: Axes) -> set[str]:
    """Return the parts of a stage that a gradient passes through."""
    return passed(stage, spec, axes, _trained(spec), with_images=False)


def _kinds(
    spec: ShardingSpec, stage: Stage, has_grad: Collection[str], frozen: Mapping[str, torch.dtype | Coding]
) -> dict[object, list[int]]:
    """Group layers that hold equal memory: by parameters, precision, and whether a gradient passes through them."""
    kinds: dict[object, list[int]] = {}
    for number, layer in stage.module.layers.items():
        at = f"layers.{number}."
        kind = [
            (name, p.shape, p.requires_grad, at + name in spec.fp8, frozen.get(at + name))
            for name, p in layer.named_parameters()
        ]
        kinds.setdefault((f"layers.{number}" in has_grad, *kind), []).append(int(number))
    return kinds


def _cache_key(stage: Stage, kinds: Mapping[object, list[int]], *, carried: bool) -> object:
    """Return a key that is equal for stages that hold equal memory.

    Such stages have the same kinds of layers in the same order. They also agree on whether they have an embedding, a
    head, and a stage before them that needs a gradient.
    """
    ends = (type(stage.module.embed), type(stage.module.head), carried, tuple(unit.again for unit in stage.units))
    first = int(next(iter(stage.module.layers), 0))
    return ends, tuple((kind, tuple(number - first for number in same)) for kind, same in kinds.items())


ActivationCache = dict[object, Activations]


def most_held(
    spec: ShardingSpec, axes: Axes, rank: int, work: StepWork, cache: ActivationCache | None = None
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of each kind at the peak of a step on a rank.

    The stages of the rank follow the schedule's actions, as in a real step. So the number of micro-batches whose
    activations a stage keeps follows from the order of actions; for 1F1B it is at most `pp - stage`. The ranks of a
    mesh share `cache`, because interior stages are equal.

    Example, 1F1B with pp=2 and 4 micro-batches: stage 0 runs F0 F1 B0 F2 B1 F3 B2 B3 and holds two micro-batches at its
    peak; stage 1 runs F0 B0 F1 B1 ... and holds one.
    """
    mesh, first, cache = FakeMesh(axes, rank), _first(spec, axes), {} if cache is None else cache
    by_stage = dict[int, Activations]()
    for stage in spec.stages(axes, rank):
        kinds = _kinds(spec, stage, _units_with_grad(spec, stage, axes), work.frozen)
        key = _cache_key(stage, kinds, carried=stage.number > first)
        if key not in cache:
            cache[key] = _activations(spec, stage, mesh, work, kinds)
        by_stage[stage.number] = cache[key]
    program = program_of(spec.line(axes.pp), spec.recipe.pipeline.schedule, work.num_batches, first)[mesh.coords["pp"]]
    held_bytes, grads, peak = 0, dict[int, int](), Peak()

    for action in (action for action in program if isinstance(action, Action)):
        stage_activations = by_stage[action.stage]
        if action.kind == FORWARD:
            kept = stage_activations.kept if action.stage >= first else 0  # without a backward nothing is kept
            now_held, held_bytes = stage_activations.forward.plus(held_bytes), held_bytes + kept
        elif action.kind == WEIGHT:
            held_bytes -= stage_activations.kept
            continue
        else:  # deferred weight gradients are assumed to keep all activations until they run
            is_first = action.kind == BACKWARD and action.stage not in grads
            now_held = (stage_activations.first if is_first else stage_activations.backward).plus(
                held_bytes - stage_activations.kept
            )
            held_bytes -= stage_activations.kept if action.kind == BACKWARD else 0
            grads |= {} if is_first else {action.stage: stage_activations.grads}
        other_stages = sum(each.stays for number, each in by_stage.items() if number != action.stage)
        least = stage_activations.stays if spec.gathers_once(axes.pp) else 0
        now_held = now_held.with_gathered(least, other_stages).with_grads(sum(grads.values()))
        peak = max(peak, now_held, key=lambda each: each.total)
        grads |= {action.stage: stage_activations.grads} if action.kind == BACKWARD else {}
    parts = {GRADIENTS: 0, GATHERED: 0, IN_FLIGHT: 0, **peak.parts}
    return {**parts, ACTIVATIONS: peak.total - sum(parts.values())}


class _Trial:
    """One forward and backward of a meta copy from which layers are skipped.

    `skipped` maps each skipped layer to a layer of its kind that runs. All skipped layers are assumed to come before
    all layers that run. `grads`: bytes of each parameter's gradient.
    """

    def __init__(
        self, model: Decoder, axes: Axes, compute: torch.dtype, skipped: Mapping[int, int], grads: Mapping[str, int],
        *, carried: bool,
    ) -> None:  # fmt: skip
        self.model, self.axes, self.compute, self.skipped, self.grads = model, axes, compute, skipped, grads
        self.carried = carried  # whether the previous stage needs a gradient
        self.live = Live([*model.parameters()])
        self.layer_bytes: list[int] = []  # live bytes at the start of each layer, and after the last
        self.kept = 0  # bytes that skipped layers keep for backward
        # Position -> (bytes that skipped layers free, bytes of their gradients), applied when backward reaches it.
        self.at_layer: dict[int, tuple[int, int]] = {}

    def run(self, num_tokens: int, buffers: FsdpBuffers, stay: int) -> Activations:
        """Run forward and backward. `stay`: bytes of skipped layers that stay gathered."""
        self._watch()
        buffers.watch()
        with self.live:
            self.live.add(GATHERED, stay)
            start = self._forward(num_tokens)
            buffers.free_old_flat()
            kept, forward_peak = self.live.passing, self.live.pop_peak()
            self._account_for_skipped()
            if start.requires_grad:
                torch.autograd.backward(start, torch.empty_like(start))
            del start
            tower_grads = (
                sum(self.grads.values()) - self.live.parts[GRADIENTS]
            )  # the vision tower is not in the meta copy
            self.live.add(GRADIENTS, tower_grads)
            backward = self.live.pop_peak()
        forward_peak, backward, first = (each.plus(self.kept) for each in (forward_peak, backward, self.live.first))
        return Activations(kept + self.kept, forward_peak, backward, first)

    def _account_for_skipped(self) -> None:
        """Place the frees and the gradients of skipped layers in the first backward.

        In the first backward a layer frees its activations and gets its gradients. How many skipped layers have done so
        before a given layer runs is unknown. So the worst split is used. It places as many skipped layers before the
        layers that run as make gradients minus freed activations largest, and the rest after.
        """
        # A difference can be negative: RoPE tables are freed after the last layer.
        kept = (max(0, after - before) for before, after in pairwise(self.layer_bytes))
        kept_by = dict(zip(self.model.layers, kept, strict=True))
        most = freed = grads_made = 0
        before, total = (0, 0), (0, 0)
        for _, representative in sorted(self.skipped.items(), reverse=True):
            freed += kept_by[str(representative)]
            grads_made += sum(num for name, num in self.grads.items() if name.startswith(f"layers.{representative}."))
            total = freed, grads_made
            most, before = (grads_made - freed, total) if grads_made - freed > most else (most, before)
        self.kept = freed
        self.at_layer = {len(self.layer_bytes) - 1: before, 0: (total[0] - before[0], total[1] - before[1])}

    def _on_backward(self, number: int) -> None:
        """Apply the frees and gradients of skipped layers when backward reaches a position."""
        freed, grads_made = self.at_layer.get(number, (0, 0))
        self.live.skipped_freed += freed
        self.live.add(GRADIENTS, grads_made)

    def _watch(self) -> None:
        """Hook the start of each layer and of the head."""
        head = [] if self.model.head is None else [self.model.head]
        for module in (*self.model.layers.values(), *head):
            module.register_forward_pre_hook(lambda _, given: self._on_layer(given[0]))

    def _on_layer(self, x_TD: Tensor) -> None:
        """Record the live bytes where a layer begins."""
        number = len(self.layer_bytes)
        self.layer_bytes.append(self.live.passing)
        if x_TD.requires_grad:
            x_TD.register_hook(lambda _: self._on_backward(number))

    def _forward(self, num_tokens: int) -> Tensor:
        """Run forward, and return the tensor that backward starts from."""
        model, own = self.model, num_tokens // (self.axes.cp * self.axes.tp)
        x_TD = None
        if not isinstance(model.embed, Embedding):
            x_TD = torch.empty(
                own, model.shape.stream_width, dtype=self.compute, device="meta", requires_grad=self.carried
            )
        out = forward(model, self.axes, num_tokens, x_TD)
        if model.head is None:
            self._on_layer(out)
            return out
        return out.sum()
