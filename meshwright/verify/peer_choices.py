"""Make transformers choose experts and key blocks reproducibly: the first of equal scores, or recorded choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def first_of_equals() -> Iterator[None]:
    """Make top-k take the first of equal numbers.

    Scores of an indexer are sums of relu, so several are often 0, and torch takes any of them. Our indexer takes the
    first, on every device and mesh.
    """
    with _indices_from(_first):
        yield


@contextmanager
def recorded(made: list[Tensor]) -> Iterator[None]:
    """Append the indices of every top k to `made`."""

    def keep(x: Tensor, k: int, dim: int) -> Tensor:
        made.append(_first(x, k, dim))
        return made[-1]

    with _indices_from(keep):
        yield


@contextmanager
def taken(made: list[Tensor]) -> Iterator[None]:
    """Take the indices of `made`, in order, whatever the numbers are."""
    after = iter(made)
    with _indices_from(lambda *_: next(after)):
        yield


def _first(x: Tensor, k: int, dim: int) -> Tensor:
    return x.detach().sort(dim=dim, descending=True, stable=True).indices.narrow(dim, 0, k)


@contextmanager
def _indices_from(choose: Callable[[Tensor, int, int], Tensor]) -> Iterator[None]:
    """Replace the top k of torch, as a function and as a method."""
    function, method = torch.topk, Tensor.topk

    def topk(x: Tensor, k: int, dim: int = -1) -> Any:
        indices = choose(x, k, dim)
        return torch.return_types.topk((x.gather(dim, indices), indices))

    torch.topk = Tensor.topk = topk  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.topk, Tensor.topk = function, method  # type: ignore[method-assign]
