"""What a run does to need less memory, or less time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """The numbers stay what they are, but for rounding.

    `recompute`: what backward makes again instead of keeping it. "selective": norms, rotations, gates and the delta
    rule, but no linear product, attention or collective. "full": whole layers; kept is the `[T, D]` that enters each,
    and the choice of experts. It costs a third more products, and the doors of forward twice.
    `reshard`: free gathered parameters after forward and gather them again for backward. False saves that all-gather
    and keeps the whole model in the compute dtype.
    `offload`: parameters, gradients and both moments lie in host memory, where AdamW runs; a unit comes to the device
    when it is gathered. Float32 parameters (`A_log`, ...), which are small, stay on the device; with `replicate`, so
    do gradients until the last micro-batch, after which replicas are summed.
    `compiled`: `torch.compile` for every layer, but for attention, delta rule and experts, whose shapes change with
    the data. Saves time in norms, gates and rotations; costs seconds to minutes in the first step, and again for every
    other number of tokens: pack to one `length`. After a few of them torch gives up, with a warning.
    """

    recompute: str = "none"
    reshard: bool = True
    offload: bool = False
    compiled: bool = False
