"""The last sums of gradients: what FSDP does not sum is summed here, once, at the end of a step.

Each element's gradient is summed over exactly the ranks that hold it. FSDP sums over its shards and replicas. Left are
what tp stores whole (norms, routers, shared kv heads) and the float32 parameters, which nobody stores in shards.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .. import ops
from ..axes import Sum
from ..mesh import Mesh


def finish(grads: Iterable[tuple[tuple[str, ...], Tensor]], mesh: Mesh) -> None:
    """Sum each gradient over its axes, in place, by one flat all-reduce a set of axes. Some may be on the host."""
    buckets: dict[tuple[str, ...], list[Tensor]] = {}
    for axes, grad in grads:
        live = tuple(a for a in axes if mesh.axes.size_of(a) > 1)
        if live:
            buckets.setdefault(live, []).append(grad)
    for axes, bucket in buckets.items():
        flat = ops.concat([g.flatten().to(mesh.device) for g in bucket])  # of a large one alone it is no copy
        mesh.all_reduce_(flat, Sum("the last sums of gradients", axes, flat.nbytes))
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
