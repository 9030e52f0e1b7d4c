"""Gradients of weights, left for later: a schedule may let other ranks have the gradient of the input first.

The gradient of a weight needs what came in and what came back, and never the weight. So a job holds these two, and the
weight may be freed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .fp8_storage import Weight

Jobs = list[Callable[[], None]]
_now: Jobs | None = None  # not by thread: on a GPU backward runs in another one


@contextmanager
def weights_late(jobs: Jobs) -> Iterator[None]:
    """Within it, forward is such that backward can wait with weights, and backward does: it adds to `jobs`."""
    global _now  # noqa: PLW0603 - backward is called by torch, which hands nothing on
    before, _now = _now, jobs
    try:
        yield
    finally:
        _now = before


def is_late() -> bool:
    return _now is not None


def left_for_later(weights: Sequence[Weight], gradients: Callable[[], Sequence[Tensor | None]]) -> bool:
    """Whether the gradients of these weights are left for later. `weights` must be the tensors that forward was given:
    a checkpoint hands out others, which lead to no parameter."""
    if _now is None:
        return False

    def job() -> None:
        with torch.no_grad():
            pairs = zip(weights, gradients(), strict=True)
            wanted = [(w, grad) for w, grad in pairs if isinstance(w, Tensor) and w.requires_grad]
        torch.autograd.backward([w for w, _ in wanted], [grad for _, grad in wanted])

    _now.append(job)
    return True
