"""Sharded data parallelism (FSDP2, ZeRO-3) over this rank's tp and ep shards.

FSDP2 is torch's `fully_shard` (PyTorch FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054): parameters, gradients and
optimizer state are stored in shards; a unit is all-gathered before its forward and backward, and its gradient
reduce-scattered after it. Three things differ from plain FSDP2:

- Gradients are summed, not averaged. The loss is divided by the token count of the whole step before backward, so a sum
  is the exact gradient of the global mean. An average would give equal weight to ranks with unequal numbers of targets
  (torchtitan#2206), and expert parameters, whose FSDP mesh is smaller, would need another factor (pytorch#160285).
- Some float32 parameters (`A_log`, `dt_bias`, router bias) stay out of FSDP, which casts a whole unit to one dtype:
  rounding `A_log` to bfloat16 compounds over the sequence (NeMo-Automodel#2484).
- Prefetch in backward follows the declared order of units (`prefetch_in_order`).

Experts have an FSDP mesh of their own. FSDP assumes that all ranks of a mesh hold the same parameter. If they hold
different experts, rank 0's experts are broadcast to all of them without an error (transformers#45662).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # the bases for set_custom_*

from ..axes import Axes
from ..mesh import Mesh
from ..mesh.local_collectives import all_gather_into, reduce_scatter_into, serves
from ..sharding import MTP, TOWER, ShardingSpec, Stage, Unit, in_order, part_of, passed


@dataclass(frozen=True)
class ShardOptions:
    """Options of FSDP units: the dtype of all-gathers, CPU offload, and whether gradients are reduced in that dtype
    too."""

    compute: torch.dtype
    offload: bool
    narrow: bool


def shard(model: nn.Module, units: Iterable[Unit], exact: set[nn.Parameter], mesh: Mesh, options: ShardOptions) -> None:
    """Wrap the units with `fully_shard` in the order given (inner ones first, the root last), experts over the expert
    mesh.

    A unit on one rank is not wrapped: FSDP would copy every parameter and gradient for nothing, and ops cast their
    inputs themselves. If any unit is wrapped, the root is too; otherwise FSDP takes each unit for a root.

    With `offload`, wrapped parameters are in host memory. Ignored ones (`exact`, and units on one rank) are on the
    device.

    Layers, and an untied embedding and head, are units of their own. With both in the root unit, one reduce-scatter
    buffer of an untied 248k vocabulary has 9.5 GiB (NeMo-Automodel#3708).
    """
    compute, offload = options.compute, options.offload
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device != mesh.host) if offload else OffloadPolicy()
    # Reduced in at least float32: bfloat16 has 8 significant bits, and every addition over ranks would round to them.
    reduce = torch.promote_types(compute, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    ignored = set(exact)
    wrapped = False
    for unit in units:
        module, fsdp_mesh = model.get_submodule(unit.name), mesh.expert if unit.expert else mesh.dense
        if fsdp_mesh.size() == 1 and not offload:
            ignored.update(model.get_parameter(name) for name in unit.params)
            if module is not model or not wrapped:
                continue
        wrapped = True
        sharded = fully_shard(
            module, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=unit.again, ignored_params=ignored,
            offload_policy=offload_policy,
        )  # fmt: skip
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a plain SUM, not a pre-scaled one, which gloo lacks
        if serves(fsdp_mesh.get_group(-1)):
            sharded.set_custom_all_gather(GatheredOnHost())
            sharded.set_custom_reduce_scatter(SummedOnHost())
        if options.narrow:
            sharded.set_custom_reduce_scatter(SentNarrow(compute))


class _Allocates:
    """Allocate communication buffers as FSDP's defaults do."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatheredOnHost(_Allocates, AllGather):
    """All-gather between processes of one machine by `mesh.local_collectives`, faster than gloo's.

    It is synchronous even if `async_op` is set. FSDP waits for the returned work, and None means that there is nothing
    to wait for.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather_into(output_tensor, input_tensor, group)


class SummedOnHost(_Allocates, ReduceScatter):
    """Reduce-scatter by `mesh.local_collectives`. Synchronous too: FSDP reuses its input as soon as it returns."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "as `shard` asks"
        reduce_scatter_into(output_tensor, input_tensor, group)


class SentNarrow(_Allocates, ReduceScatter):
    """Reduce-scatter that sends bfloat16 and adds in float32: an all-to-all, then a local sum.

    A reduce-scatter adds in the dtype that it sends, so float32 sums cost twice the bytes. Sending each rank its shards
    unreduced costs the same number of elements, `(n-1)/n` of the gradient, and rounds nothing: matmuls made these
    values in bfloat16. (ZeRO++ quantises gradients by the same all-to-all, arXiv:2306.10209.)
    """

    def __init__(self, narrow: torch.dtype) -> None:
        self.narrow = narrow

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, "as `shard` asks"
        assert not async_op, "FSDP waits on its own stream"
        sent = input_tensor.to(self.narrow)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        rows = received.view(group.size(), -1)
        if not received.is_cpu:
            torch.sum(rows, 0, dtype=output_tensor.dtype, out=output_tensor)
            return
        output_tensor.copy_(rows[0])
        for row in rows[1:]:  # torch.sum on a CPU first converts its whole input; this converts one row at a time
            output_tensor += row


def pad_shards(module: nn.Module) -> None:
    """Make FSDP pad its shards now instead of in the first forward.

    Padding replaces the stored tensor by a copy, which would lose what is attached to the object: FP8 hooks, and the
    version counter by which writes are noticed.
    """
    for submodule in module.modules():
        group = submodule._get_fsdp_state()._fsdp_param_group if isinstance(submodule, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            parameter.reset_sharded_param()


def prefetch_in_order(stage: Stage, spec: ShardingSpec, axes: Axes, trained: Collection[str]) -> None:
    """Let the backward of each unit prefetch (all-gather) the unit that backward reaches next, and no other.

    By default FSDP prefetches in the reverse order of the forwards it has seen. With pipeline stages those are forwards
    of several micro-batches, so it would gather a unit again that was just freed. It would also gather frozen units
    that backward never reaches.

    An MTP head is left out. FSDP's hook on the language head runs for each of its outputs, the last time when backward
    has left the MTP head: it would gather a unit again that was just freed.
    """
    text_units, vision_units = (
        passed(stage, spec, axes, trained, with_images=with_images) for with_images in (False, True)
    )
    always_run = text_units | {part for part in vision_units if part.startswith(TOWER)}
    # Keyed by whether a unit is in the vision tower, which does not run in every micro-batch: neither side may prefetch
    # from the other.
    previous: dict[bool, FSDPModule] = {}
    for unit in in_order(stage.units):
        module, in_tower = stage.module.get_submodule(unit.name), unit.name.startswith(TOWER)
        if isinstance(module, FSDPModule):
            if unit.name.startswith(MTP):
                module.set_modules_to_backward_prefetch([module])
                continue
            module.set_modules_to_backward_prefetch([previous.get(in_tower, module)])
            if part_of(unit.name) in always_run:
                previous[in_tower] = module


class Sends(Protocol):
    """Counts of how often a model is all-gathered and its gradients are reduced in a step of several micro-batches."""

    @property
    def gathers_once(self) -> bool: ...
    @property
    def sums_once(self) -> bool: ...


def before_backward(part: nn.Module, model: Sends, *, last: bool, late: bool) -> None:
    """Set FSDP's flags for the backward of one micro-batch (gradient accumulation).

    The all-reduce over replicas (HSDP) runs once a step, after the last micro-batch. So does the reduce-scatter with
    `sum_once`, and with `gather_once` parameters stay gathered until then (ZeRO-2). `late`: weight gradients are
    deferred beyond the last backward (zero bubble), so `sum_late` reduces them.
    """
    if isinstance(part, FSDPModule):
        done = last and not late
        part.set_requires_all_reduce(last)
        if model.sums_once:
            part.set_requires_gradient_sync(done)
            part.set_is_last_backward(done)
        if model.gathers_once:
            part.set_reshard_after_backward(done)


def sum_replicas(tower: nn.Module | None, *, now: bool) -> None:
    """Set whether the vision tower's gradients are all-reduced over replicas in this backward.

    The tower runs in some micro-batches only. If the all-reduce were tied to the last micro-batch and that one had no
    image, it would never run, and replicas would drift apart without an error.
    """
    for module in [] if tower is None else tower.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(now)


def sum_late(part: nn.Module, *, last: bool) -> None:
    """Reduce weight gradients that were computed outside of any backward (zero bubble, arXiv:2401.10241).

    FSDP reduces in hooks of backward. So its post-backward is called by hand: it adds these gradients to the unreduced
    ones, and reduces after the last micro-batch. torch has no public API for it; torch.distributed.pipelining does the
    same.
    """
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
    """Free gathered parameters after a forward without backward, or a failed one, and forget the recorded forward
    order.

    Otherwise the next forward would compute with gathered weights from before the optimizer step, and the next backward
    would prefetch in a stale order.
    """
    for part in parts:
        if isinstance(part, FSDPModule) and _has_run(part):
            _reset(part)


def _has_run(part: FSDPModule) -> bool:
    """Return whether FSDP has run: it determines its root module lazily in the first forward, and cannot be reset
    before."""
    return part._get_fsdp_state()._is_root is not None


def _reset(part: FSDPModule) -> None:
    """Reshard everything and clear FSDP's record of the iteration. `reset_iter_state` is public since torch 2.13."""
    if hasattr(FSDPModule, "reset_iter_state"):
        part.reset_iter_state()
        return
    assert isinstance(part, nn.Module)
    for module in part.modules():  # torch before 2.13 keeps the recorded order: one superfluous all-gather
        if isinstance(module, FSDPModule):
            module.reshard()
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._partial_reduce_output = None  # partial sums of the failed step
