"""Deferred weight gradients, the W half of a zero-bubble backward (arXiv 2401.10241).

The backward of a matmul y = x W^T has two independent halves: dx = dy W, for which the previous pipeline stage waits,
and dW = dy^T x, for which only the optimizer waits. A zero-bubble schedule runs dx first and puts dW where the rank
would be idle.

dW needs x and dy but never W. So a job holds these two, and FSDP may free the gathered weight in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .fp8_storage import Weight

Jobs = list[Callable[[], None]]
# Global and not thread-local: autograd runs the backward of a GPU in its own thread.
_jobs: Jobs | None = None


@contextmanager
def deferring_weight_grads(jobs: Jobs) -> Iterator[None]:
    """Defer weight gradients: backward appends jobs to `jobs` that compute them when called.

    Forward must run inside too, because it must keep the weights' autograd identity for the jobs.
    """
    global _jobs  # noqa: PLW0603 - backward is called by torch, which hands nothing on
    previous, _jobs = _jobs, jobs
    try:
        yield
    finally:
        _jobs = previous


def is_deferring() -> bool:
    """Return whether weight gradients are being deferred."""
    return _jobs is not None


def deferred(weights: Sequence[Weight], gradients: Callable[[], Sequence[Tensor | None]]) -> bool:
    """Defer the gradients of these weights if deferring is on; return whether it is.

    `weights` must be the very tensors that forward received. Tensors from `ctx.saved_tensors` may be copies made by
    activation checkpointing, whose graph leads to no parameter.
    """
    if _jobs is None:
        return False

    def job() -> None:
        with torch.no_grad():
            pairs = zip(weights, gradients(), strict=True)
            wanted = [(w, grad) for w, grad in pairs if isinstance(w, Tensor) and w.requires_grad]
        # `backward` and not `.grad +=`: it runs the graph from the weight to its parameter (casts, FSDP's unsharded
        # views) and triggers the hooks that reduce-scatter the gradient.
        torch.autograd.backward([w for w, _ in wanted], [grad for _, grad in wanted])

    _jobs.append(job)
    return True
