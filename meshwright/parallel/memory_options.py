"""What a run does to need less memory, or less time."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..sharding import LATE, Pipeline, Traffic

KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class Savings:
    """The numbers stay the same, but for rounding.

    `recompute`: what backward makes again instead of keeping it. "selective": norms, rotations, gates and the delta
    rule, but no linear product, attention or collective. "full": whole layers. A layer then keeps the `[T, D]` that
    enters it and the choice of experts. It costs a third more products, and the doors of forward twice.
    `reshard`: free gathered parameters after forward and gather them again for backward. False saves that all-gather
    and keeps the whole model in the compute dtype.
    `gather_once`, `sum_once`: where a step has several micro-batches, FSDP gathers parameters, or sums gradients, once
    and not for each of them. The first keeps the whole model in the compute dtype, the second its gradients as wide as
    they are summed.
    `narrow_grads`: gradients go to their shards in the dtype in which products made them and are summed there in
    float32, where FSDP widens them first. It rounds nothing, and takes half of the bytes in bfloat16. Where a pipeline
    adds gradients up until the end of a step, they are sent once, and wide.
    `token_once`: under expert parallelism a token goes once to each rank that has some of its experts, which makes the
    copies and returns their weighted sum. Fewer rows are sent the fewer ranks there are for the experts of a token. A
    number: so many neighbours on ep are a node. A token goes once to each node that has some of its experts, and from
    there once to each of its ranks. The host then waits for the device twice a layer, and recompute="selective" keeps
    also what came to the node.
    `offload`: parameters, gradients and both moments lie in host memory, where AdamW runs; a unit comes to the device
    when it is gathered. Float32 parameters (`A_log`, ...), which are small, stay on the device; with `replicate`, so
    do gradients until the last micro-batch, after which replicas are summed.
    `compiled`: `torch.compile` for every layer, except attention, delta rule and experts (a shared one too), because
    their shapes change with the data. It saves time in norms, gates and rotations. It costs seconds to minutes in the
    first step, and again for every other number of tokens: pack to one `length`. After a few lengths torch gives up,
    with a warning.
    """

    recompute: str = "none"
    reshard: bool = True
    offload: bool = False
    compiled: bool = False
    gather_once: bool = False
    sum_once: bool = False
    narrow_grads: bool = False
    token_once: bool | int = False

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.reshard, self.gather_once, self.sum_once, self.narrow_grads, self.token_once)

    def __post_init__(self) -> None:
        if type(self.token_once) is not bool and (type(self.token_once) is not int or self.token_once < 1):
            raise ConfigError(
                f"token_once={self.token_once!r} is no number of ranks; give True, or how many ranks a node has"
            )
        if self.recompute not in KINDS:
            raise ConfigError(f"recompute={self.recompute!r} is unknown; choose from {', '.join(KINDS)}")
        once = "gather_once" if self.gather_once else "sum_once" if self.sum_once else ""
        if self.offload and once:
            raise ConfigError(
                f"offload=True takes parameters and gradients off the device, where {once}=True keeps those of the "
                "whole model; choose one of them"
            )
        if self.sum_once and self.narrow_grads:
            raise ConfigError(
                "sum_once=True adds gradients up in float32 before it sends them, and narrow_grads=True sends them as "
                "narrow as products are; choose one of them"
            )
        if self.compiled and self.recompute == "selective":
            raise ConfigError(
                'recompute="selective" chooses among the operations of a layer, which compiled=True fuses; '
                'choose recompute="full" or "none", or compiled=False'
            )


def gathers_wide(savings: Savings) -> bool:
    """Whether FSDP gathers values of what products take in 8 bits. It does from host memory, since the hooks that make
    numbers are lost in the copy on the device; and for compiled layers, whose graphs would be split by numbers."""
    return savings.offload or savings.compiled


def check_late(pipeline: Pipeline, savings: Savings) -> None:
    """What does not go with a schedule that leaves gradients of weights for later."""
    if pipeline.schedule not in LATE:
        return
    if savings.compiled:
        raise ConfigError(
            f"schedule={pipeline.schedule!r} cuts backward in two, and a compiled layer has one that cannot be cut; "
            "choose schedule='1f1b' or compiled=False"
        )
    if pipeline.hold is False:
        raise ConfigError(
            f"schedule={pipeline.schedule!r} with hold=False: gradients that come late would be summed for each "
            "micro-batch alone; leave hold out, or choose schedule='1f1b'"
        )
