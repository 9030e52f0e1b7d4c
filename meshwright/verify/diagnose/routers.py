"""What routers say and choose in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...engine import Model

Routed = dict[int, tuple[Tensor, Tensor, Tensor]]  # by layer of experts: weight_Tk, logits_TE, expert_Tk


@contextmanager
def watched_routers(model: Model) -> Iterator[Routed]:
    seen: Routed = {}
    balance = model.blueprint.balance
    real = balance.watch

    def watch(layer: int, weight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor) -> Tensor:
        seen[layer] = (weight_Tk.detach(), logits_TE.detach(), expert_Tk)
        return real(layer, weight_Tk, logits_TE, expert_Tk)

    balance.watch = watch  # type: ignore[method-assign] # of this one object, and only for a forward
    try:
        yield seen
    finally:
        del balance.watch  # the method of the class is back
