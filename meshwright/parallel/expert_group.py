"""What ranks that share the experts of a layer send each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..mesh.collectives import Exchange, exchange
from ..watch import waiting_at


@dataclass(frozen=True)
class Group:
    """The ranks that share the experts of a layer. `at`: the door, for errors."""

    name: str
    size: int
    num_experts: int
    at: str

    @property
    def num_here(self) -> int:
        return self.num_experts // self.size

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str = "") -> Tensor:
        out: Tensor = Exchange.apply(x, received, sent, self.name, self.at + what)  # torch leaves apply untyped
        return out

    def counts(self, counts_RC: Tensor) -> Tensor:
        """A row of numbers from each rank, for one to each."""
        each = [1] * self.size
        with waiting_at(self.at, "the counts"):
            return exchange(counts_RC, each, each, self.name)
