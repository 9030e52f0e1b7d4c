"""What ranks that share the experts of a layer send each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mesh.collectives import AllToAll, AsyncAllToAll, all_to_all
from ..sharding import COUNTS, Hop
from ..watch import waiting_at


@dataclass(frozen=True)
class Group:
    """The ranks between which rows go in a hop."""

    name: str
    hop: Hop

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        out: Tensor = AllToAll.apply(x, received, sent, self.name, self.hop.at + what)  # torch leaves apply untyped
        return out

    def begin(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Callable[[], Tensor]:
        """The same, which is awaited by a call of what this returns.

        Where backward may run a layer again, what has no gradient does not go ahead: it may want nothing behind this.
        """
        if torch.is_grad_enabled() and not x.requires_grad:
            here = self.exchange(x, received, sent, what)
            return lambda: here
        travel = AsyncAllToAll(received, sent, self.name, self.hop.at + what)
        begun = travel.begin(x)
        return lambda: travel.end(begun)

    def numbers(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        """The same of whole numbers, which have no gradient."""
        with waiting_at(self.hop.at + what, "forward"):
            return all_to_all(x, received, sent, self.name)

    def counts(self, counts_RC: Tensor) -> Tensor:
        """A row of numbers from each rank, for one to each."""
        each = [1] * self.hop.size
        return self.numbers(counts_RC, each, each, COUNTS)
