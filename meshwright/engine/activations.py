"""What a step holds beside parameters and their gradients: activations, and whatever an operation needs for a moment.

It is found by running. A sketch of each stage makes forward and backward on the meta device, where nothing is computed,
and each tensor is counted from when it is made until it is freed. So it is right for any family, dtype and mesh without
a formula that somebody must keep right. Layers of one kind hold the same, so one of each kind runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import ops
from ..axes import Axes
from ..layout import Action, ShardingSpec, Stage, program_of
from ..layout.schedule import BACKWARD, FORWARD, WEIGHT
from ..models import Decoder
from ..models.decoder import Embedding
from ..parallel import Savings
from ..parallel.sketch import Paper, sketched


@dataclass(frozen=True)
class Passing:
    """What passes through a model in a step. `tokens`: of a micro-batch of a data rank. `kind`: of the devices."""

    tokens: int
    num_batches: int = 1
    compute: torch.dtype = torch.bfloat16
    savings: Savings = Savings()
    kind: str = "cuda"


@dataclass(frozen=True)
class Activations:
    """Of a micro-batch in a stage, in bytes."""

    kept: int  # from its forward to its backward
    forward: int  # the most while forward runs
    backward: int  # the most while backward runs, what was kept among it


def _same(x: Tensor) -> Tensor:
    """torch's own makes another tensor on the meta device, where elsewhere it gives back what it waited for."""
    return x.detach()


def _grouped(a: Tensor, b: Tensor, offs: Tensor, **_: object) -> Tensor:
    """torch refuses float32 on the meta device, which it multiplies elsewhere."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(offs), len(a), b.shape[1])
    return a.new_empty(shape)


_MADE: dict[Any, Any] = {
    torch.ops.aten._grouped_mm.default: _grouped,
    torch.ops._c10d_functional.wait_tensor.default: _same,
}


class Live(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is on, from when they are made until they are freed."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = _MADE.get(func, func)(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(memory, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def most_since(self) -> int:
        """The most since the last time that this was asked."""
        most, self.most = self.most, self.now
        return most


def activations(spec: ShardingSpec, stage: Stage, paper: Paper, work: Passing) -> Activations:
    """Of a stage of a rank."""
    kinds = _kinds(spec, stage)
    sketch = sketched(spec, stage, paper, work.compute, work.savings, [same[-1] for same in kinds])
    trial = _Trial(sketch, paper.axes, work.compute, [len(same) - 1 for same in kinds])
    with ops.planned_for(work.kind):
        return trial.run(work.tokens)


def _kinds(spec: ShardingSpec, stage: Stage) -> list[list[int]]:
    """Layers by what is in them. They stand in the order of their last ones, which are those that run."""
    found: dict[object, list[int]] = {}
    for number, layer in stage.module.layers.items():
        at = f"layers.{number}."
        kind = [(name, p.shape, p.requires_grad, at + name in spec.fp8) for name, p in layer.named_parameters()]
        found.setdefault(tuple(kind), []).append(int(number))
    return sorted(found.values(), key=lambda same: same[-1])


def most_held(spec: ShardingSpec, axes: Axes, rank: int, work: Passing) -> int:
    """The most that the micro-batches of a step hold together on a rank, in the order in which its stages work."""
    paper, stages = Paper(axes, rank), spec.stages(axes, rank)
    of_stage = {stage.number: activations(spec, stage, paper, work) for stage in stages}
    program = program_of(spec.line(axes.pp), spec.pipeline.schedule, work.num_batches, 0)[paper.coords["pp"]]
    held = most = 0
    for action in (action for action in program if isinstance(action, Action)):
        here = of_stage[action.stage]
        if action.kind == FORWARD:
            most, held = max(most, held + here.forward), held + here.kept
        elif action.kind == WEIGHT:
            held -= here.kept
        else:  # what gradients of weights still need is taken to be all of it
            most = max(most, held - here.kept + here.backward)
            held -= here.kept if action.kind == BACKWARD else 0
    return most


class _Trial:
    """Forward and backward of a sketch, in which others of each kind of layers are left out. They are taken to be
    before those in it, and hold all the time what each of their kind keeps."""

    def __init__(self, sketch: Decoder, axes: Axes, compute: torch.dtype, left_out: Sequence[int]) -> None:
        self.sketch, self.axes, self.compute, self.left_out = sketch, axes, compute, left_out
        self.live = Live([*sketch.parameters()])
        self.at: list[int] = []  # what there was when each layer began, and behind the last

    def run(self, num_tokens: int) -> Activations:
        self._watch()
        with self.live:
            start = self._forward(num_tokens)
            kept, forward = self.live.now, self.live.most_since()
            torch.autograd.backward(start, torch.empty_like(start))
            del start
            backward = self.live.most_since()
        each = [after - before for before, after in pairwise(self.at)]
        others = sum(num * size for num, size in zip(self.left_out, each, strict=True))
        return Activations(kept + others, forward + others, backward + others)

    def _watch(self) -> None:
        head = [] if self.sketch.head is None else [self.sketch.head]
        for module in (*self.sketch.layers.values(), *head):
            module.register_forward_pre_hook(lambda *_: self.at.append(self.live.now))
        for parameter in self.sketch.parameters():
            if parameter.requires_grad:  # where gradients lie is counted elsewhere
                parameter.register_post_accumulate_grad_hook(_forget)

    def _forward(self, num_tokens: int) -> Tensor:
        """What backward starts from."""
        sketch, own = self.sketch, num_tokens // (self.axes.cp * self.axes.tp)
        tokens_T = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
        x_TD = None
        if not isinstance(sketch.embed, Embedding):
            x_TD = torch.empty(own, sketch.shape.width, dtype=self.compute, device="meta", requires_grad=True)
        sketch.balance.begin(torch.ones(own, dtype=torch.bool, device="meta"))
        sketch.balance.slope_E = torch.zeros(sketch.balance.num_experts, device="meta")
        scores = sketch(tokens_T, tokens_T, ops.documents([num_tokens], "meta"), sketch.scores[0], x_TD)
        if sketch.head is None:
            self.at.append(self.live.now)
            (out,) = scores
            return out
        return scores[0].sum()


def _forget(parameter: Tensor) -> None:
    parameter.grad = None
