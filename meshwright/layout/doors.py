"""Doors as data: where an activation goes to other ranks, and by which collective. On one process a door does nothing.

`parallel` arms the doors of its axis. The bill reads the same objects, and oracle K1 holds both against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn


@dataclass(frozen=True)
class Kind:
    """What a door does in forward and in backward, as the collectives that run."""

    name: str
    axis: str
    forward: str
    backward: str


ENTER = Kind("enter", "tp", "all_gather", "reduce_scatter")  # own tokens -> all tokens of the tp group
LEAVE = Kind("leave", "tp", "reduce_scatter", "all_gather")  # partial sums of all tokens -> own tokens
# all tokens over my slice of the vocabulary -> own tokens over all slices
MEET = Kind("meet", "tp", "all_to_all", "all_to_all")


class Door:
    """A named door. `width`: elements a token that pass; `floats`: they are at least float32, whatever the rest."""

    def __init__(self, kind: Kind, width: int, *, floats: bool = False) -> None:
        self.kind, self.width, self.floats = kind, width, floats
        self.again = False  # passed once more when backward recomputes
        self.armed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.armed is None else self.armed(x)

    def __repr__(self) -> str:
        return f"Door({self.kind.name}, width={self.width}, {'armed' if self.armed else 'identity'})"


Back = Callable[[Tensor], Tensor]


class Dispatch:
    """The door of a mixture of experts: rows sorted by expert -> rows of this rank's experts, and the way back.

    Five all-to-alls when armed: the counts, rows there and back, and the two of backward. Three more when `again`.
    """

    def __init__(self, num_experts: int, width: int, top_k: int) -> None:
        self.num_experts, self.width, self.top_k = num_experts, width, top_k
        self.again = False
        self.armed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Back]] | None = None

    def __call__(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Back]:
        if self.armed is None:
            return x_ND, counts_E, lambda y_ND: y_ND
        return self.armed(x_ND, counts_E)


@dataclass
class Span:
    """This rank's range of a dim, for code that must know which heads or rows it has. All of it on one process."""

    dim: str
    size: int
    start: int = 0
    stop: int = -1

    def __post_init__(self) -> None:
        self.stop = self.size if self.stop < 0 else self.stop

    def __len__(self) -> int:
        return self.stop - self.start


Kept = TypeVar("Kept", Door, Dispatch, Span)


def find(model: nn.Module, kept: type[Kept]) -> Iterator[tuple[str, Kept]]:
    """Every door (or dispatch, or span) of a model with its name, in the order of the modules."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, kept):
                yield f"{prefix}.{name}".lstrip("."), value
