"""The gate of Meshwright's own elementwise kernels: compare each with its formula on its device.

`fastest` is the gate of kernels that compute on documents. These kernels work on rows, blocks or elements. A kernel
must pass one trial per process for each kind of input; otherwise it is not used, and a warning says so once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ...log import logger
from . import SLOW, in_own_thread

Results = Sequence[Tensor]
Trial = Callable[[], tuple[Results, Results]]

_passed: dict[Hashable, bool] = {}


def agrees(kernel: str, kind: Hashable, device: torch.device, trial: Trial, most: float) -> bool:
    """Return whether a kernel may run on a device: whether both results of `trial` agree there, compared once per kind.

    `trial` returns what the kernel computes and what its formula does. `most` bounds how far each tensor may be off,
    relative to its norm; 0.0 demands equal bits. `kind`: the properties of the input that the kernel is compiled for,
    apart from those that `launch` ensures. Waits for the device. It may be called in a backward, so `trial` runs no
    autograd.

    A layer under torch.compile keeps the formula, which the compiler fuses.
    """
    if device.type in SLOW or torch.compiler.is_compiling():
        return False
    key = (kernel, device, kind)
    if key not in _passed:
        _passed[key] = in_own_thread(lambda: _compare(kernel, trial, most), device)
    return _passed[key]


def _compare(kernel: str, trial: Trial, most: float) -> bool:
    try:
        with torch.no_grad():
            worst = max(distance(*pair) for pair in zip(*trial(), strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises, the formula works
        logger.warning("kernel %s does not run (%.300s); its formula runs instead, which is slower", kernel, error)
        return False
    if not worst <= most:  # NaN too
        logger.warning("kernel %s is off by %.1e of the norm; its formula runs instead, which is slower", kernel, worst)
    return worst <= most


def distance(result: Tensor, expected: Tensor) -> float:
    """Return |result - expected| / |expected|: 0.0 for equal bits, infinite where they differ in their values that are
    not finite."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float("inf")
    if torch.equal(_bits(result), _bits(expected)):
        return 0.0
    a, b = result.double(), expected.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite], b[finite]
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item(), 5e-324)  # of -0.0 and 0.0 the bits differ


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
