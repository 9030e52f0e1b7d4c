"""Storage in shards: FSDP2 over this rank's pieces, sums instead of averages, float32 parameters left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # what `set_custom_...` takes

from ..axes import Axes
from ..mesh import Mesh
from ..mesh.local_collectives import all_gather_into, reduce_scatter_into, serves
from ..sharding import TOWER, ShardingSpec, Stage, Unit, in_order, part_of, passed


@dataclass(frozen=True)
class Ways:
    """In which dtype units are gathered; whether they lie on the host; whether their gradients are sent as narrow."""

    compute: torch.dtype
    offload: bool
    narrow: bool


def shard(model: nn.Module, units: Iterable[Unit], exact: set[nn.Parameter], mesh: Mesh, ways: Ways) -> None:
    """Wrap the units in their order (inner ones first, the root last), experts over the expert mesh.

    A unit that lies on one rank is not wrapped: FSDP would copy every parameter and gradient for nothing, and the ops
    cast what they are given. If any unit is wrapped, the root is too: else FSDP takes each unit for a root.
    With `offload`, what is wrapped lies in host memory. What is left out (`exact` and such units) is on the device.
    """
    compute, offload = ways.compute, ways.offload
    home = CPUOffloadPolicy(pin_memory=mesh.device != mesh.host) if offload else OffloadPolicy()
    reduce = torch.promote_types(compute, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    left_out = set(exact)
    wrapped = False
    for unit in units:
        module, grid = model.get_submodule(unit.name), mesh.expert if unit.expert else mesh.dense
        if grid.size() == 1 and not offload:
            left_out.update(model.get_parameter(name) for name in unit.params)
            if module is not model or not wrapped:
                continue
        wrapped = True
        sharded = fully_shard(
            module, mesh=grid, mp_policy=policy, reshard_after_forward=unit.again, ignored_params=left_out,
            offload_policy=home,
        )  # fmt: skip
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale inside the sum; we never want it to
        if serves(grid.get_group(-1), mesh.device, mesh.node):
            sharded.set_custom_all_gather(GatheredOnHost())
            sharded.set_custom_reduce_scatter(SummedOnHost())
        if ways.narrow:
            sharded.set_custom_reduce_scatter(SentNarrow(compute))


class _Allocates:
    """As FSDP itself does."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatheredOnHost(_Allocates, AllGather):
    """It is over when it returns, whatever `async_op` asks: FSDP waits for what is given back, and that is nothing."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather_into(output_tensor, input_tensor, group)


class SummedOnHost(_Allocates, ReduceScatter):
    """FSDP takes the summands for done with when it returns."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "as `shard` asks"
        reduce_scatter_into(output_tensor, input_tensor, group)


class SentNarrow(_Allocates, ReduceScatter):
    """Each rank sends the others their shards in the dtype in which products made them, and widens what it adds up.

    A reduce-scatter sends what it adds up, so it would have to send it wide.
    """

    def __init__(self, narrow: torch.dtype) -> None:
        self.narrow = narrow

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "as `shard` asks"
        assert not async_op, "FSDP waits on a stream of its own"
        sent = input_tensor.to(self.narrow)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        rows = got.view(group.size(), -1)
        if not got.is_cpu:
            torch.sum(rows, 0, dtype=output_tensor.dtype, out=output_tensor)
            return
        output_tensor.copy_(rows[0])
        for row in rows[1:]:  # on the host torch would widen all of them for a sum, and here one after the other
            output_tensor += row


def pad_shards(module: nn.Module) -> None:
    """FSDP pads what a rank stores in the first forward, in a copy, which would lack what hangs on a tensor: hooks, or
    a count of the times that it was written into. So it does that now."""
    for part in module.modules():
        group = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            parameter.reset_sharded_param()


def prefetch_in_order(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str]) -> None:
    """Backward gathers the next unit that it comes to beside the work of each, and no other.

    By itself FSDP takes the order of the forwards it has seen. In a pipeline these are of several micro-batches, and it
    would gather a unit again that was just freed. It would also gather what is frozen, though backward ends before it.
    """
    words, pictures = (passed(stage, spec, axes, trained, pictures=seen) for seen in (False, True))
    always = words | {part for part in pictures if part.startswith(TOWER)}
    nearest: dict[bool, FSDPModule] = {}  # in the text, and in the tower, which does not always run
    for unit in in_order(stage.units):
        module, in_tower = stage.module.get_submodule(unit.name), unit.name.startswith(TOWER)
        if isinstance(module, FSDPModule):
            module.set_modules_to_backward_prefetch([nearest.get(in_tower, module)])
            if part_of(unit.name) in always:
                nearest[in_tower] = module


class Sends(Protocol):
    """How often a model is gathered and its gradients are summed."""

    @property
    def gathers_once(self) -> bool: ...
    @property
    def sums_once(self) -> bool: ...


def before_backward(part: nn.Module, model: Sends, *, last: bool, late: bool) -> None:
    """Replicas are summed once a step, after the last micro-batch. So is all else, and what is gathered stays until
    then, if the model says so. `late`: gradients of weights come after the last backward, so `sum_late` sums."""
    if isinstance(part, FSDPModule):
        done = last and not late
        part.set_requires_all_reduce(last)
        if model.sums_once:
            part.set_requires_gradient_sync(done)
            part.set_is_last_backward(done)
        if model.gathers_once:
            part.set_reshard_after_backward(done)


def sum_replicas(tower: nn.Module | None, *, now: bool) -> None:
    """A tower runs in some micro-batches alone. If it was told to sum over replicas in one that it sits out, nobody
    would, and its gradient would be lost without a word."""
    for module in [] if tower is None else tower.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(now)


def sum_late(part: nn.Module, *, last: bool) -> None:
    """After gradients of weights that came outside of any backward: add them to those that wait, as wide as these, and
    sum them all after the last ones. torch has no public name for it, and its own pipelines do the same."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(last)
        part.set_reshard_after_backward(last)
        part.set_is_last_backward(last)
        state = part._get_fsdp_state()
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        if last:
            state._root_post_backward_final_callback()


def reset_after_forward(parts: Sequence[nn.Module]) -> None:
    """After a forward without backward, or a failed one: free what is still gathered, and forget the order of forward.

    Otherwise the next forward would not see the next update, and the next backward would prefetch by the wrong order.
    """
    for part in parts:
        if isinstance(part, FSDPModule) and _has_run(part):
            _reset(part)


def _has_run(part: FSDPModule) -> bool:
    """FSDP finds out which module is the root in the first forward. It cannot be reset before."""
    return part._get_fsdp_state()._is_root is not None


def _reset(part: FSDPModule) -> None:
    if hasattr(FSDPModule, "reset_iter_state"):
        part.reset_iter_state()
        return
    assert isinstance(part, nn.Module)
    for module in part.modules():  # torch before 2.13: the order stays, which costs one gathering too many
        if isinstance(module, FSDPModule):
            module.reshard()
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._partial_reduce_output = None  # what micro-batches of a failed step have summed so far
