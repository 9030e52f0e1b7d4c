"""What ranks that share the experts of a layer send each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..mesh.collectives import Exchange, Travel, exchange
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

    def begin(self, x: Tensor, received: list[int], sent: list[int], what: str = "") -> Callable[[], Tensor]:
        """The same, which is awaited by a call of what this returns."""
        travel = Travel(received, sent, self.name, self.at + what)
        begun = travel.begin(x)
        return lambda: travel.end(begun)

    def counts(self, counts_RC: Tensor) -> Tensor:
        """A row of numbers from each rank, for one to each."""
        each = [1] * self.size
        with waiting_at(self.at, "the counts"):
            return exchange(counts_RC, each, each, self.name)
