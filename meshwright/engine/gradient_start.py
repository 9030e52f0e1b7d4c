"""How far backward reaches: what it sends in the part in which gradients begin.

Behind that part a gradient passes every door. Within it only what is computed from a trained parameter has a gradient,
and what runs again may end early. Autograd alone knows both. So the part runs forward and backward on the meta device,
where nothing is computed, and its collectives are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..axes import Axes
from ..memory.meta_model import FakeMesh, MetaKernels, forward, meta_copy
from ..mesh.collectives import OPS
from ..models import Decoder
from ..sharding import ShardingSpec, Stage, begins_in
from ..watch import waits_at

_TOKENS = 64  # of a rank: more than a convolution or a chunk of the delta rule asks of its neighbours


def begun_backward(
    spec: ShardingSpec, axes: Axes, rank: int, compute: torch.dtype, trained: Collection[str]
) -> dict[str, Counter[str]]:
    """Return how often backward sends something at each place, such as "layers.3.mixer.enter, backward", by the part in
    which gradients begin in a stage of this rank. Needs the model on the meta device, as it is before it is placed."""
    if axes.tp * axes.cp * axes.ep == 1:
        return {}
    paper, found = FakeMesh(axes, rank), dict[str, Counter[str]]()
    for stage in spec.stages(axes, rank):
        part = begins_in(stage, spec, axes, trained, pictures=False)
        if part:
            alone = _alone(spec, stage, part, paper, compute)
            for name, parameter in alone.named_parameters():
                parameter.requires_grad_(name in trained)
            found[part] = _sent(alone, axes, compute)
    return found


def _alone(spec: ShardingSpec, stage: Stage, part: str, paper: FakeMesh, compute: torch.dtype) -> Decoder:
    """Return a part of a stage on the meta device, which is given tokens and looks up none."""
    numbers = [] if part == "head" else [part.partition(".")[2]]
    module = stage.module.part(numbers, first=False, last=part == "head")
    whole = Stage(stage.number, module, stage.units)
    return meta_copy(spec, whole, paper, compute, spec.recipe.memory, [*map(int, numbers)])


def _sent(sketch: Decoder, axes: Axes, compute: torch.dtype) -> Counter[str]:
    """Count what backward sends, given tokens without a gradient."""
    x_TD = torch.empty(_TOKENS, sketch.shape.width, dtype=compute, device="meta")
    counted = _Counted()
    with counted:
        out = forward(sketch, axes, _TOKENS * axes.cp * axes.tp, x_TD)
        counted.places.clear()
        torch.autograd.backward(out, torch.empty_like(out))
    return counted.places


class _Counted(MetaKernels):
    """Counts the collectives that run within it, by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in OPS and func is not torch.ops._c10d_functional.wait_tensor.default:
            self.places[waits_at().removeprefix(" at ")] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)
