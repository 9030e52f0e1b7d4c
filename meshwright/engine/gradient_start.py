"""Count, on the meta device, the collectives of backward in the layer where gradients begin (frozen first layers).

If the first layers are frozen, backward ends in the part (a layer or the head) with the first trained parameter. After
that part a gradient passes every door, so the declarations give the bill. Inside it only tensors computed from a
trained parameter have a gradient, and recomputation may stop early. Only autograd knows both. So this module runs the
part forward and backward on the meta device, where nothing is computed, and counts its collectives (decision 0009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ..axes import Axes
from ..memory.meta_model import FakeMesh, MetaKernels, Seen, forward, meta_copy
from ..mesh.collectives import OPS
from ..models import Decoder
from ..sharding import ShardingSpec, Stage, begins_in
from ..watch import waits_at

_TOKENS = 64  # per rank: more than a convolution or a chunk of the delta rule needs from its neighbours


def begun_backward(
    spec: ShardingSpec, axes: Axes, rank: int, compute: torch.dtype, trained: Collection[str]
) -> dict[str, Counter[str]]:
    """Count the collectives of backward in each part where gradients begin in a stage of this rank.

    Return counts by part, and then by place, such as "layers.3.mixer.enter, backward". It needs the model on the meta
    device, before it is placed.
    """
    if axes.tp * axes.cp * axes.ep == 1:  # no doors: FSDP's own collectives do not depend on where gradients begin
        return {}
    fake_mesh, counts = FakeMesh(axes, rank), dict[str, Counter[str]]()
    for stage in spec.stages(axes, rank):
        part = begins_in(stage, spec, axes, trained, with_images=False)
        if part:
            copy = _copy_of_part(spec, stage, part, fake_mesh, compute)
            for name, parameter in copy.named_parameters():
                parameter.requires_grad_(name in trained)
            counts[part] = _count_backward(copy, axes, compute)
    return counts


def _copy_of_part(spec: ShardingSpec, stage: Stage, part: str, fake_mesh: FakeMesh, compute: torch.dtype) -> Decoder:
    """Return a meta copy of one part of a stage. It gets activations instead of tokens, so it has no embedding."""
    numbers = [] if part == "head" else [part.partition(".")[2]]
    module = stage.module.part(numbers, first=False, last=part == "head")
    whole = Stage(stage.number, module, stage.units)
    return meta_copy(spec, whole, fake_mesh, Seen(compute, spec.recipe.memory), [*map(int, numbers)])


def _count_backward(part: Decoder, axes: Axes, compute: torch.dtype) -> Counter[str]:
    """Count the collectives of backward, for an input that has no gradient."""
    x_TD = torch.empty(_TOKENS, part.shape.stream_width, dtype=compute, device="meta")
    counter = _CollectiveCounter()
    with counter:
        out = forward(part, axes, _TOKENS * axes.cp * axes.tp, x_TD)
        counter.places.clear()  # of forward
        torch.autograd.backward(out, torch.empty_like(out))
    return counter.places


class _CollectiveCounter(MetaKernels):
    """A dispatch mode that counts collectives by the place that issues them."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in OPS and func is not torch.ops._c10d_functional.wait_tensor.default:
            self.places[waits_at().removeprefix(" at ")] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)
