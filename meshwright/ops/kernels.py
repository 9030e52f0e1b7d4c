"""Kernels of other packages. None is trusted: for each device, dtype and head size it must first agree with ours.

A kernel that is not installed, refuses its input or gives other numbers is not used, which is said once: ours are
slower, and hold more memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ..log import logger
from .documents import Documents, documents
from .meta_kernels import kind_of

Op = Callable[..., Tensor]
Realism = Callable[[list[Tensor]], list[Tensor]]
SLOW = ("cpu", "meta")  # devices for which there are no such kernels
NARROW = (torch.bfloat16, torch.float16)  # what such kernels are made for
TOLERANCE = 2e-2  # of a norm; both sides round to bf16 here and there
_LENGTHS = (1, 2, 67, 130)  # of the documents that a kernel is tried on

_WAY_OUT = "flash-linear-attention comes with pip install 'meshwright[gpu]'"

_agreed: dict[object, bool] = {}

Plain = TypeVar("Plain", bound=Callable[..., object])


def uncompiled(op: Plain) -> Plain:
    """Left out of `torch.compile`: what it does depends on the data, and would be compiled anew for every batch."""
    made: Plain = torch.compiler.disable(op)
    return made


def fastest(
    kernel: Op, plain: Op, inputs: Sequence[Tensor], real: Realism = list, lengths: Sequence[int] = _LENGTHS,
    planned: Op | None = None,
) -> Op:  # fmt: skip
    """`kernel` where it agrees with `plain` on inputs like these, `plain` elsewhere. Both take `(*inputs, docs)`, and
    so does what stands for the kernel on the meta device.

    `real` turns random normal numbers, of documents of these `lengths`, into such as the op is given. The first call
    for a device, dtype and head size tries both, and waits for the device. Only bfloat16 and float16: such kernels
    multiply float32 in TF32, which is a thousand times coarser.
    """
    if kind_of(inputs[0].device) in SLOW or inputs[0].dtype not in NARROW:
        return plain
    if inputs[0].device.type == "meta":
        return planned or plain
    key = (kernel, inputs[0].device.type, *((x.dtype, x.shape[1:]) for x in inputs))
    if key not in _agreed:
        _agreed[key] = apart(lambda: agrees(kernel, plain, inputs, real, lengths), inputs[0].device)
    return kernel if _agreed[key] else plain


@functools.cache
def takes(kernel: Op, argument: str) -> bool:
    """Whether this version of a kernel knows an argument."""
    return argument in inspect.signature(kernel).parameters


def apart(trial: Callable[[], bool], device: torch.device) -> bool:
    """In a thread of its own: a layer that is to be recomputed hooks what its thread saves, and a trial is no part of
    the layer."""

    def run() -> bool:
        if device.type not in SLOW and torch.accelerator.is_available():
            torch.accelerator.set_device_index(device)
        return trial()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def agrees(
    kernel: Op, plain: Op, inputs: Sequence[Tensor], real: Realism = list, lengths: Sequence[int] = _LENGTHS
) -> bool:
    """Output and every gradient, on small random inputs of the dtypes and head sizes of `inputs`."""
    name, docs = kernel.__name__.strip("_"), documents(lengths, inputs[0].device)
    sample = [x.detach().requires_grad_() for x in real([_noise(x, docs, seed) for seed, x in enumerate(inputs)])]
    try:
        found = _differentiate(kernel, sample, docs)
    except ImportError as error:
        logger.warning("kernel %s is not there (%s); ours is used, which is slower. %s", name, error, _WAY_OUT)
        return False
    except Exception as error:  # noqa: BLE001 - whatever a foreign kernel raises, ours works
        logger.warning("kernel %s refuses %s (%s); ours is used, which is slower", name, inputs[0].dtype, error)
        return False
    wanted = _differentiate(plain, sample, docs)
    worst = max(_distance(a, b) for a, b in zip(found, wanted, strict=True))
    if not worst <= TOLERANCE:  # NaN too
        logger.warning("kernel %s is off by %.1e of the norm on %s; ours is used", name, worst, inputs[0].device)
    return worst <= TOLERANCE


def _noise(like: Tensor, docs: Documents, seed: int) -> Tensor:
    noise = torch.randn(docs.bounds[-1], *like.shape[1:], generator=torch.Generator().manual_seed(seed))
    return noise.to(like.device, like.dtype)


def _differentiate(op: Op, inputs: Sequence[Tensor], docs: Documents) -> list[Tensor]:
    with torch.enable_grad():
        y = op(*inputs, docs)
        weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        return [y.detach(), *torch.autograd.grad((y.float() * weights).sum(), list(inputs))]


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)).item()
