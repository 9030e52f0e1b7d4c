"""Fill uninitialised memory with NaN, so that an element that no code writes shows, whatever the page held before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..parallel import local

_ALLOCATIONS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Initialise torch's uninitialised tensors with NaN.

    A part of a gradient that is never written is 0 on a fresh page and garbage on a used one, so a small trial may pass
    by luck. Replacing the functions is necessary, because torch's own ways do not fit:
    `torch.utils.deterministic.fill_uninitialized_memory` needs deterministic algorithms, which run other kernels than
    real training, and a `TorchFunctionMode` is not active in backward.
    """
    originals = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATIONS]
    for owner, name, allocate in originals:
        setattr(owner, name, _poisoned(allocate))
    try:
        yield
    finally:
        for owner, name, allocate in originals:
            setattr(owner, name, allocate)


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap an allocation. Integers stay as they are: they have no NaN.

    A DTensor is filled through its shard, and a fake tensor has no memory: dispatching each new shape in either took a
    fifth of the time of a trial with FSDP.
    """

    @functools.wraps(allocate)
    def poisoned(*args: object, **kwargs: object) -> Tensor:
        out = allocate(*args, **kwargs)
        if out.is_floating_point() and not isinstance(out, FakeTensor):
            local(out).detach().fill_(torch.nan)
        return out

    return poisoned
