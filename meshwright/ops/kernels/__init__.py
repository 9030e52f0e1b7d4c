"""Kernels, checked against their formulas before use: our own in Triton, flash-linear-attention's, torch's varlen.

For each device, dtype and head size a kernel must first agree with the formula, in its output and in every gradient. A
kernel that is missing, refuses its input or gives another result is not used, and a warning says so once: the formula
is slower and takes more memory.

Our own kernels are in the other files of this package. Only a GPU needs them, so they are imported when one is chosen
there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ...log import logger
from ..documents import Documents, documents
from ..meta_kernels import kind_of

Op = Callable[..., Tensor]
Prepare = Callable[[list[Tensor]], list[Tensor]]
SLOW = ("cpu", "meta")  # devices without such kernels
NARROW = (torch.bfloat16, torch.float16)  # dtypes that such kernels are made for
TOLERANCE = 2e-2  # of the norm; both sides round intermediate results to bfloat16
_LENGTHS = (1, 2, 67, 130)  # documents of the trial: trivial ones, and two that end inside a tile of 64 or 128

_INSTALL_HINT = "flash-linear-attention comes with pip install 'meshwright[gpu]'"

_agreed: dict[object, bool] = {}

AnyOp = TypeVar("AnyOp", bound=Callable[..., object])


def uncompiled(op: AnyOp) -> AnyOp:
    """Exclude an op with data-dependent shapes from `torch.compile`: each batch would recompile it."""
    disabled: AnyOp = torch.compiler.disable(op)
    return disabled


def fastest(
    kernel: Op, plain: Op, inputs: Sequence[Tensor], prepare: Prepare = list, lengths: Sequence[int] = _LENGTHS,
    planned: Op | None = None,
) -> Op:  # fmt: skip
    """Return `kernel` where it agrees with `plain` on inputs like these, else `plain`.

    Both take `(*inputs, docs)`, and so does `planned`, which stands for the kernel on the meta device. `prepare` turns
    random normal tensors, for documents of these `lengths`, into valid inputs of the op. The first call for a device,
    dtype and head size runs the comparison, and waits for the device. Only bfloat16 and float16 use kernels: in float32
    they would multiply in TF32, which is a thousand times coarser.

    Nothing is tried inside a backward, where a recomputed layer runs: the comparison runs a backward of its own on the
    same device, and autograd has one thread per device, which waits for this call.
    """
    if kind_of(inputs[0].device) in SLOW or inputs[0].dtype not in NARROW:
        return plain
    if inputs[0].device.type == "meta":
        return planned or plain
    key = (kernel, inputs[0].device, *((x.dtype, x.shape[1:]) for x in inputs))
    if key not in _agreed:
        if torch._C._current_graph_task_id() != -1:
            return plain
        _agreed[key] = in_own_thread(lambda: agrees(kernel, plain, inputs, prepare, lengths), inputs[0].device)
    return kernel if _agreed[key] else plain


@functools.cache
def accepts(kernel: Op, argument: str) -> bool:
    """Return whether this version of a kernel has an argument."""
    return argument in inspect.signature(kernel).parameters


def in_own_thread(trial: Callable[[], bool], device: torch.device) -> bool:
    """Run a trial in a new thread.

    Activation checkpointing hooks the tensors that the current thread saves for backward, and those of the trial are
    not part of the layer.
    """

    def run() -> bool:
        if device.type not in SLOW and torch.accelerator.is_available():
            torch.accelerator.set_device_index(device)
        return trial()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def agrees(
    kernel: Op, plain: Op, inputs: Sequence[Tensor], prepare: Prepare = list, lengths: Sequence[int] = _LENGTHS
) -> bool:
    """Compare output and every gradient on small random inputs with the dtypes and head sizes of `inputs`."""
    name, docs = kernel.__name__.strip("_"), documents(lengths, inputs[0].device)
    sample = [x.detach().requires_grad_() for x in prepare([_noise(x, docs, seed) for seed, x in enumerate(inputs)])]
    try:
        results = _differentiate(kernel, sample, docs)
    except ImportError as error:
        logger.warning("kernel %s is not installed (%s); what runs instead is slower. %s", name, error, _INSTALL_HINT)
        return False
    except torch.OutOfMemoryError:  # says nothing about the kernel, and the answer would be cached for good
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, the formula works
        logger.warning("kernel %s refuses %s (%s); what runs instead is slower", name, inputs[0].dtype, error)
        return False
    expected = _differentiate(plain, sample, docs)
    worst = max(_distance(a, b) for a, b in zip(results, expected, strict=True))
    if not worst <= TOLERANCE:  # NaN too
        logger.warning("kernel %s is off by %.1e of the norm on %s; it is not used", name, worst, inputs[0].device)
    return worst <= TOLERANCE


def _noise(like: Tensor, docs: Documents, seed: int) -> Tensor:
    """Draw random numbers like an input, for the documents of the trial."""
    noise = torch.randn(docs.bounds[-1], *like.shape[1:], generator=torch.Generator().manual_seed(seed))
    return noise.to(like.device, like.dtype)


def _differentiate(op: Op, inputs: Sequence[Tensor], docs: Documents) -> list[Tensor]:
    """Run the op and return its output and its gradients for uneven output weights: a plain sum would hide
    permutations.
    """
    with torch.enable_grad():
        y = op(*inputs, docs)
        weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
        return [y.detach(), *torch.autograd.grad((y.float() * weights).sum(), list(inputs))]


def _distance(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |b|."""
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)).item()
