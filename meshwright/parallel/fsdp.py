"""Storage in shards: FSDP2 over this rank's pieces, sums instead of averages, float32 parameters left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..mesh import Mesh


def shard(
    model: nn.Module,
    units: Iterable[nn.Module],
    expert_units: Iterable[nn.Module],
    exact: set[nn.Parameter],
    mesh: Mesh,
    compute: torch.dtype,
    reduce: torch.dtype,
    *,
    reshard: bool = True,
) -> None:
    """Experts over the expert mesh, then the units around them, then the root, over the dense mesh."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for unit in expert_units:
        fully_shard(unit, mesh=mesh.expert, mp_policy=policy, reshard_after_forward=reshard)
    for unit in units:
        fully_shard(unit, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=reshard, ignored_params=exact)
    fully_shard(model, mesh=mesh.dense, mp_policy=policy, reshard_after_forward=False, ignored_params=exact)
    for unit in wrapped(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot scale inside the sum; we never want it to


def wrapped(model: nn.Module) -> list[FSDPModule]:
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def expect_last(model: nn.Module, last: bool) -> None:
    """Replicas are summed once a step, after the last micro-batch."""
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
