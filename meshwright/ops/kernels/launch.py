"""Launch Triton kernels on the device of their tensors, and only as their trials have compiled them.

Triton compiles a kernel once for addresses and numbers that are multiples of 16, once for all others, and once more for
the number 1. A trial of one variant says nothing about another. So a kernel gets tensors laid out as in its trial;
sizes that select a variant are in the key of the gate, and all others are marked `do_not_specialize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16  # bytes of an address, elements of a distance


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel. Triton takes the current device, which user code may have changed since the forward."""
    devices = {arg.device for arg in args if isinstance(arg, Tensor)}
    if len(devices) != 1:
        raise ValueError(f"the tensors of kernel {kernel.__name__} are on {len(devices)} devices: {devices}")
    with torch.accelerator.device_index(devices.pop().index):
        kernel[grid](*args, **options)


def is_dense(x: Tensor) -> bool:
    """Return whether x is contiguous, at an aligned address."""
    return x.is_contiguous() and x.data_ptr() % _ALIGNED == 0


def dense(x: Tensor) -> Tensor:
    """Return x if it is dense, else a copy that is."""
    return x if is_dense(x) else x.clone(memory_format=torch.contiguous_format)


def dense_rows(x: Tensor) -> Tensor:
    """Return x if its rows are dense, else a dense copy.

    If the width and the stride of rows are multiples of 16 elements, the compiled variant is that of dense rows.
    """
    if not len(x):
        return x
    distance, width = x.stride(0), x[0].numel()
    regular = distance == width or distance % _ALIGNED == width % _ALIGNED == 0
    is_tried = regular and x[0].is_contiguous() and x.data_ptr() % _ALIGNED == 0
    return x if is_tried else x.clone(memory_format=torch.contiguous_format)
