"""What ranks that share the experts of a layer send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..layout import COUNTS, Hop
from ..mesh.collectives import Exchange, Travel, exchange
from ..watch import waiting_at
from .again import aside, runs_again

Made = TypeVar("Made")


@dataclass(frozen=True)
class Group:
    """The ranks between which rows go in a hop, of a part of the tokens. `ahead`: another is computed behind it."""

    name: str
    hop: Hop
    part: str = ""
    ahead: bool = False

    @property
    def at(self) -> str:
        return self.hop.at + self.part

    def exchange(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        out: Tensor = Exchange.apply(x, received, sent, self.name, self.at + what)  # torch leaves apply untyped
        return out

    def begin(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Callable[[], Tensor]:
        """The same, which is awaited by a call of what this returns.

        Where backward may run a layer again, what has no gradient does not go ahead: it may want nothing behind this.
        """
        if torch.is_grad_enabled() and not x.requires_grad:
            here = self.exchange(x, received, sent, what)
            return lambda: here
        travel = Travel(received, sent, self.name, self.at + what)
        begun = travel.begin(x)
        return lambda: travel.end(begun)

    def numbers(self, x: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
        """The same of whole numbers, which have no gradient."""
        with waiting_at(self.at + what, "forward"):
            return exchange(x, received, sent, self.name)

    def counts(self, counts_RC: Tensor) -> Tensor:
        """A row of numbers from each rank, for one to each. They are of all parts."""
        each = [1] * self.hop.size
        with waiting_at(self.hop.at + COUNTS, "forward"):
            return exchange(counts_RC, each, each, self.name)


@dataclass(frozen=True)
class Part:
    """Tokens that go to their experts together, and the ranks between which they go in each hop."""

    x_TD: Tensor
    weight_Tk: Tensor
    expert_Tk: Tensor
    groups: Sequence[Group]


def sent_back(send: Callable[[], Callable[[], Tensor]], *, ahead: bool) -> Callable[[], Tensor]:
    """Begins a way back. `ahead`: more is computed beside it. If backward runs the layer again, it needs that, and
    nothing of this: so this goes once, and is not kept for it."""
    if not ahead:
        return send()
    if runs_again():
        return lambda: _aside(lambda: send()())  # noqa: PLW0108 - it sends when it is called
    begun = _aside(send)
    return lambda: _aside(begun)


def _aside(act: Callable[[], Made]) -> Made:
    with aside():
        return act()
