"""Copies from the host to a device that do not wait for what the device has queued."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy `x` to the device, in stream order and without waiting for the device.

    A copy from pageable memory waits until the device has finished everything queued before it; one from pinned memory
    does not, and torch's caching host allocator keeps that memory until it was read. A tensor that the caller has
    pinned is copied first: he may write to it again at once.
    """
    if x.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return x.to(device)
    staged = x.clone() if x.is_pinned() else x.contiguous()  # pin_memory keeps strides: expanded rows would stay one
    return staged.pin_memory().to(device, non_blocking=True)
