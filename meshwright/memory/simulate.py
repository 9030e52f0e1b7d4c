"""What comes and goes in a step: activations, gradients, and whatever an operation needs for a moment.

It is found by running. A sketch of each stage makes forward and backward on the meta device, where nothing is computed,
and each tensor is counted from when it is made until it is freed. So it is right for any family, dtype and mesh without
a formula that somebody must keep right. Layers of one kind hold the same, so a few of each kind run.

In the first backward of a step gradients come while activations go. So all of both are there at once in a later one.
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
from ..recipe import MemoryOptions
from ..sharding import (
    GATHERED,
    GRADIENTS,
    ON_THEIR_WAY,
    Action,
    ShardingSpec,
    Stage,
    passed,
    piece,
    program_of,
    trained_from,
)
from ..sharding.schedules import BACKWARD, FORWARD, WEIGHT
from .fsdp_buffers import Shards, in_shards
from .meta_model import MetaKernels, Paper, forward, sketched

ACTIVATIONS = "activations"
_RUN = 3  # layers of a kind that run: FSDP still sends gradients of the one, and already gathers the other


@dataclass(frozen=True)
class Passing:
    """What passes through a model in a step. `tokens`: of a micro-batch of a data rank. `kind`: of the devices."""

    tokens: int
    num_batches: int = 1
    compute: torch.dtype = torch.bfloat16
    memory: MemoryOptions = MemoryOptions()
    kind: str = "gpu"


@dataclass(frozen=True)
class Moment:
    """What there is at a moment, in bytes; and how much of it are gradients, or what FSDP has gathered or sends."""

    total: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)

    def beside(self, more: int) -> Moment:
        return replace(self, total=self.total + more)

    def with_gathered(self, least: int, others: int) -> Moment:
        """At least so much is gathered of its own stage, and so much of others."""
        now = self.parts.get(GATHERED, 0)
        gathered = max(now, least) + others
        return Moment(self.total - now + gathered, {**self.parts, GATHERED: gathered})

    def with_grads(self, others: int) -> Moment:
        """Of other stages, or of micro-batches before it."""
        return Moment(self.total + others, {**self.parts, GRADIENTS: self.parts.get(GRADIENTS, 0) + others})


@dataclass(frozen=True)
class Activations:
    """Of a micro-batch in a stage."""

    kept: int  # bytes from its forward to its backward, without what is gathered
    forward: Moment  # the fullest while forward runs
    backward: Moment  # and backward, what was kept among it, without gradients
    first: Moment  # and the first backward, with those gradients that it has made by then
    stays: int = 0  # bytes of what is gathered, and not freed behind forward
    grads: int = 0  # and of all gradients


class Live(MetaKernels):
    """Counts the memory of tensors that are made while it is on, from when they are made until they are freed."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.now, self.most, self.first = 0, Moment(), Moment()
        self.parts: Counter[str] = Counter()  # of what there is now: what is no tensor here
        self.left = 0  # what layers that do not run here have freed
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, _types, args, kwargs)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self._more(size)
            weakref.finalize(memory, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def add(self, what: str, num_bytes: int) -> None:
        """More, or less, of what has no tensor here."""
        self.parts[what] += num_bytes
        self._more(num_bytes)

    def _more(self, num_bytes: int) -> None:
        """`most` is without gradients. They are in `first`."""
        self.now += num_bytes
        learned = self.parts[GRADIENTS]
        if self.now - learned > self.most.total:
            self.most = Moment(self.now - learned, {**self.parts, GRADIENTS: 0})
        if self.now - self.left > self.first.total:
            self.first = Moment(self.now - self.left, dict(self.parts))

    @property
    def passing(self) -> int:
        """What there is now of tensors alone."""
        return self.now - self.parts.total()

    def most_since(self) -> Moment:
        """The fullest moment since the last time that this was asked."""
        most, self.most = self.most, Moment()
        self._more(0)
        return most


def activations(spec: ShardingSpec, stage: Stage, paper: Paper, work: Passing) -> Activations:
    """Of a stage of a rank."""
    return _activations(spec, stage, paper, work, _kinds(spec, stage, _reached(spec, stage, paper.axes)))


def _activations(
    spec: ShardingSpec, stage: Stage, paper: Paper, work: Passing, kinds: Mapping[object, list[int]]
) -> Activations:
    ran = sorted(number for same in kinds.values() for number in same[-_RUN:])
    sketch = sketched(spec, stage, paper, work.compute, work.memory, ran)
    units = in_shards(spec, stage.units, paper.axes, paper.coords, work.compute, work.memory)
    here = {name for name, _ in sketch.named_modules()}
    grads = _grads(spec, stage, paper, work)
    left_out = {number: same[-1] for same in kinds.values() for number in same[:-_RUN]}
    trial = _Trial(sketch, paper.axes, work.compute, left_out, grads, carried=stage.number > _first(spec, paper.axes))
    shards = Shards(sketch, {unit: sizes for unit, sizes in units.items() if unit.name in here}, grads, trial.live.add)
    stay = {unit.name: num for unit, (num, _) in units.items() if not unit.again}
    with ops.planned_for(work.kind):
        found = trial.run(work.tokens, shards, sum(num for name, num in stay.items() if name not in here))
    return replace(found, stays=sum(stay.values()), grads=sum(grads.values()))


def _grads(spec: ShardingSpec, stage: Stage, paper: Paper, work: Passing) -> dict[str, int]:
    """Bytes of each parameter's gradient on the device of this rank."""
    width = torch.promote_types(work.compute, torch.float32).itemsize
    learning = {name for name, parameter in stage.module.named_parameters() if parameter.requires_grad}
    params = [spec.table[name] for unit in stage.units for name in unit.params if name in learning]
    away = work.memory.offload
    return {
        param.name: width * piece(param, spec.rules, paper.axes, paper.coords).numel
        for param in params
        if param.float32 or not away
    }


def _trained(spec: ShardingSpec) -> list[str]:
    return [name for name, parameter in spec.module.named_parameters() if parameter.requires_grad]


def _first(spec: ShardingSpec, axes: Axes) -> int:
    """The first stage that makes a backward."""
    return trained_from(spec.table, spec.line(axes.pp), _trained(spec))


def _reached(spec: ShardingSpec, stage: Stage, axes: Axes) -> set[str]:
    return passed(stage, spec, axes, _trained(spec), pictures=False)


def _kinds(spec: ShardingSpec, stage: Stage, reached: Collection[str]) -> dict[object, list[int]]:
    """Layers by what is in them, and by whether a gradient reaches them: the others keep nothing for backward."""
    found: dict[object, list[int]] = {}
    for number, layer in stage.module.layers.items():
        at = f"layers.{number}."
        kind = [(name, p.shape, p.requires_grad, at + name in spec.fp8) for name, p in layer.named_parameters()]
        found.setdefault((f"layers.{number}" in reached, *kind), []).append(int(number))
    return found


def _like(stage: Stage, kinds: Mapping[object, list[int]], *, carried: bool) -> object:
    """Equal for stages that hold the same: layers of the same kinds in the same order, between the same ends."""
    ends = (type(stage.module.embed), type(stage.module.head), carried, tuple(unit.again for unit in stage.units))
    first = int(next(iter(stage.module.layers), 0))
    return ends, tuple((kind, tuple(number - first for number in same)) for kind, same in kinds.items())


Known = dict[object, Activations]


def most_held(
    spec: ShardingSpec, axes: Axes, rank: int, work: Passing, known: Known | None = None
) -> dict[str, int]:  # fmt: skip
    """The bytes of each kind at the fullest moment of a step on a rank, whose stages work in the order of the
    schedule. Gradients are there from the first backward of their stage on. `known`: of stages of this mesh, to be
    asked and added to."""
    paper, first, known = Paper(axes, rank), _first(spec, axes), {} if known is None else known
    of_stage = dict[int, Activations]()
    for stage in spec.stages(axes, rank):
        kinds = _kinds(spec, stage, _reached(spec, stage, axes))
        like = _like(stage, kinds, carried=stage.number > first)
        if like not in known:
            known[like] = _activations(spec, stage, paper, work, kinds)
        of_stage[stage.number] = known[like]
    program = program_of(spec.line(axes.pp), spec.recipe.pipeline.schedule, work.num_batches, first)[paper.coords["pp"]]
    held, grads, most = 0, dict[int, int](), Moment()
    for action in (action for action in program if isinstance(action, Action)):
        here = of_stage[action.stage]
        if action.kind == FORWARD:
            kept = here.kept if action.stage >= first else 0  # what makes no backward keeps nothing for it
            moment, held = here.forward.beside(held), held + kept
        elif action.kind == WEIGHT:
            held -= here.kept
            continue
        else:  # what gradients of weights still need is taken to be all of it
            is_first = action.kind == BACKWARD and action.stage not in grads
            moment = (here.first if is_first else here.backward).beside(held - here.kept)
            held -= here.kept if action.kind == BACKWARD else 0
            grads |= {} if is_first else {action.stage: here.grads}
        others = sum(each.stays for number, each in of_stage.items() if number != action.stage)
        least = here.stays if spec.gathers_once(axes.pp) else 0
        moment = moment.with_gathered(least, others).with_grads(sum(grads.values()))
        most = max(most, moment, key=lambda each: each.total)
        grads |= {action.stage: here.grads} if action.kind == BACKWARD else {}
    parts = {GRADIENTS: 0, GATHERED: 0, ON_THEIR_WAY: 0, **most.parts}
    return {**parts, ACTIVATIONS: most.total - sum(parts.values())}


class _Trial:
    """Forward and backward of a sketch, in which layers are left out. `left_out`: of each one of its kind that runs,
    which keeps the same. They are taken to be before those that run, and together. `grads`: bytes of the gradient of
    each parameter."""

    def __init__(
        self, sketch: Decoder, axes: Axes, compute: torch.dtype, left_out: Mapping[int, int], grads: Mapping[str, int],
        *, carried: bool,
    ) -> None:  # fmt: skip
        self.sketch, self.axes, self.compute, self.left_out, self.grads = sketch, axes, compute, left_out, grads
        self.carried = carried  # the stage before is given a gradient
        self.live = Live([*sketch.parameters()])
        self.at: list[int] = []  # what there was when each layer began, and behind the last
        self.kept = 0  # by layers that are left out
        self.turns: dict[int, tuple[int, int]] = {}  # what they free and learn, when backward is at a place

    def run(self, num_tokens: int, shards: Shards, stay: int) -> Activations:
        """`stay`: bytes of layers that are left out, which stay gathered."""
        self._watch()
        shards.watch()
        with self.live:
            self.live.add(GATHERED, stay)
            start = self._forward(num_tokens)
            shards.forward_ends()
            kept, ahead = self.live.passing, self.live.most_since()
            self._weigh_others()
            if start.requires_grad:
                torch.autograd.backward(start, torch.empty_like(start))
            del start
            of_tower = sum(self.grads.values()) - self.live.parts[GRADIENTS]  # which does not run
            self.live.add(GRADIENTS, of_tower)
            backward = self.live.most_since()
        ahead, backward, first = (each.beside(self.kept) for each in (ahead, backward, self.live.first))
        return Activations(kept + self.kept, ahead, backward, first)

    def _weigh_others(self) -> None:
        """In the first backward a layer frees what it keeps, and its gradients come. Which of the layers that are left
        out have done so when one that runs does, is not known. So it is looked at beside the most that they ever hold:
        as many of them turn before the layers that run, and the rest behind."""
        kept = (max(0, after - before) for before, after in pairwise(self.at))  # less: tables end with the last layer
        kept_by = dict(zip(self.sketch.layers, kept, strict=True))
        most = freed = learned = 0
        before, whole = (0, 0), (0, 0)
        for _, alike in sorted(self.left_out.items(), reverse=True):
            freed += kept_by[str(alike)]
            learned += sum(num for name, num in self.grads.items() if name.startswith(f"layers.{alike}."))
            whole = freed, learned
            most, before = (learned - freed, whole) if learned - freed > most else (most, before)
        self.kept = freed
        self.turns = {len(self.at) - 1: before, 0: (whole[0] - before[0], whole[1] - before[1])}

    def _comes_back(self, number: int) -> None:
        freed, learned = self.turns.get(number, (0, 0))
        self.live.left += freed
        self.live.add(GRADIENTS, learned)

    def _watch(self) -> None:
        head = [] if self.sketch.head is None else [self.sketch.head]
        for module in (*self.sketch.layers.values(), *head):
            module.register_forward_pre_hook(lambda _, given: self._pass(given[0]))

    def _pass(self, x_TD: Tensor) -> None:
        number = len(self.at)
        self.at.append(self.live.passing)
        if x_TD.requires_grad:
            x_TD.register_hook(lambda _: self._comes_back(number))

    def _forward(self, num_tokens: int) -> Tensor:
        """What backward starts from."""
        sketch, own = self.sketch, num_tokens // (self.axes.cp * self.axes.tp)
        x_TD = None
        if not isinstance(sketch.embed, Embedding):
            x_TD = torch.empty(own, sketch.shape.width, dtype=self.compute, device="meta", requires_grad=self.carried)
        out = forward(sketch, self.axes, num_tokens, x_TD)
        if sketch.head is None:
            self._pass(out)
            return out
        return out.sum()
