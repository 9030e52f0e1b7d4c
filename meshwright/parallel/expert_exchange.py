"""All-to-alls between the ranks that share the experts of a layer."""

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
    """The process group and the hop (declared sizes and names) of one all-to-all of expert parallelism."""

    name: str
    hop: Hop

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        """All-to-all of rows with known sizes. Backward is the all-to-all with sizes swapped."""
        out: Tensor = AllToAll.apply(x, received, sent, self.name, self.hop.at + what)  # torch leaves apply untyped
        return out

    def begin(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Callable[[], Tensor]:
        """Start an all-to-all and return a function that waits for its result.

        It is not asynchronous for a tensor without gradient inside of a recomputed layer: nothing would be saved for
        backward after it, so the replay would stop before the wait and leave a collective pending.
        """
        if torch.is_grad_enabled() and not x.requires_grad:
            out = self.exchange(x, received, sent, what)
            return lambda: out
        transfer = AsyncAllToAll(received, sent, self.name, self.hop.at + what)
        handle = transfer.begin(x)
        return lambda: transfer.end(handle)

    def exchange_ints(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        """All-to-all of integers, which have no gradient."""
        with waiting_at(self.hop.at + what, "forward"):
            return all_to_all(x, received, sent, self.name)

    def counts(self, counts_RC: Tensor) -> Tensor:
        """Exchange counts: row r of `counts_RC` goes to rank r, and one row comes from each."""
        each = [1] * self.hop.size
        return self.exchange_ints(counts_RC, each, each, COUNTS)
