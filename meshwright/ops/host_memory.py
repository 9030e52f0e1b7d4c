"""Copies from the host to a device that do not wait for what the device has queued."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """`x` on the device, in the order of what is queued there.

    A copy from pageable memory waits until all is done that was queued before it. One from pinned memory does not, and
    torch keeps that memory until it was read. What the caller has pinned is copied too: he may write there again.
    """
    if x.device.type != "cpu" or torch.device(device).type in ("cpu", "meta"):
        return x.to(device)
    ours = x.clone() if x.is_pinned() else x.contiguous()  # pinning would keep rows that share memory
    return ours.pin_memory().to(device, non_blocking=True)
