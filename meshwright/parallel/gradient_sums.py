"""All-reduce the gradients that FSDP does not reduce, once, at the end of a step.

The rule of the whole package: an element's gradient is summed over exactly the ranks that hold that element
(`sharding.axes_left_to_sum`), with no factor. FSDP sums over its shards and replicas. What remains:

- parameters that tp replicates (norms, routers, shared kv heads). Under sequence parallelism (arXiv:2205.05198) each tp
  rank saw other tokens, so each has a part of the gradient. Megatron-LM leaves this to a flag per parameter; forgetting
  it lets norms drift apart between ranks (Megatron-LM#1446, #7452; NeMo-RL#3716).
- float32 parameters, which FSDP does not shard.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .. import ops
from ..axes import Sum
from ..mesh import Mesh


def finish(grads: Iterable[tuple[tuple[str, ...], Tensor]], mesh: Mesh) -> None:
    """All-reduce (SUM) each gradient in place over its axes: one flat buffer for each set of axes.

    Hundreds of norms of a few KB would each pay a full latency. Gradients may be on the host (CPU offload).
    """
    buckets: dict[tuple[str, ...], list[Tensor]] = {}
    for axes, grad in grads:
        live = tuple(a for a in axes if mesh.axes.size_of(a) > 1)
        if live:
            buckets.setdefault(live, []).append(grad)
    for axes, bucket in buckets.items():
        flat = ops.concat([g.flatten().to(mesh.device) for g in bucket])  # no copy if the bucket has one gradient
        mesh.all_reduce_(flat, Sum("the last sums of gradients", axes, flat.nbytes))
        for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
