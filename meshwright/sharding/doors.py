"""Doors as data: where an activation goes to other ranks, and by which collective. On one process a door does nothing.

`parallel` arms the doors of its axis. The bill reads the same objects, and oracle K1 holds both against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from torch import Tensor, nn

from ..ops import Rows
from .vision_balance import Cost


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
# the whole stream of a data rank, which each of its ranks has -> the tokens of my cp rank: nothing is sent
SHARE = Kind("share", "cp", "", "")


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


Coming = Callable[[], Rows]  # rows on their way: a call waits for them
ToExperts = Callable[[Tensor, Tensor, Tensor], Coming]


class Dispatch:
    """The door of a mixture of experts: tokens, with the weights and numbers of their experts -> rows of this rank's
    experts, and the way back to a sum for each token. Rows are on their way when it returns, so that something else can
    be computed until they are asked for. `alone`: where all experts are here.

    Seven all-to-alls when armed: the counts, weights, rows there and back, and the three of backward. Three more when
    `again`, which needs no way back. Where a token goes once to each rank that has some of its experts, what these are
    goes beside the rows: one more each time.
    """

    def __init__(self, num_experts: int, width: int, top_k: int, alone: Callable[..., Rows]) -> None:
        self.num_experts, self.width, self.top_k, self.alone = num_experts, width, top_k, alone
        self.again = False
        self.armed: ToExperts | None = None

    def __call__(self, x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> Coming:
        return (self.armed or self.here)(x_TD, weight_Tk, expert_Tk)

    def here(self, x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> Coming:
        rows = self.alone(x_TD, weight_Tk, expert_Tk)
        return lambda: rows


class Insert:
    """The door of a tower: rows of the frames that this rank runs -> rows for its own tokens, from all ranks of its
    data rank (cp and tp). Both sides know how many. `width`: elements of a row. `cost`: of a frame, by which frames are
    shared out.

    One all-to-all when armed, and one the other way in backward.
    """

    def __init__(self, width: int, cost: Cost) -> None:
        self.width, self.cost = width, cost
        self.armed: Callable[[Tensor, list[int], list[int]], Tensor] | None = None

    def __call__(self, rows_ND: Tensor, sent: list[int], got: list[int]) -> Tensor:
        return rows_ND if self.armed is None else self.armed(rows_ND, sent, got)


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


ATTENTION, DELTA = "attention", "delta"  # the mixers, as `mw.ContextParallel` names them


@dataclass(frozen=True)
class Deal:
    """How the heads `start..stop` of a tp rank are dealt out to `parts` neighbours on cp: evenly, in their order."""

    start: int
    stop: int
    parts: int = 1

    def heads(self, part: int) -> range:
        num = (self.stop - self.start) // self.parts
        return range(self.start + part * num, self.start + (part + 1) * num)

    def serving(self, serves: int) -> list[list[int]]:
        """For each rank the heads that serve its own, of which each serves so many neighbours.

        All get equally many, so that all pieces of an exchange are of one size: the last one is repeated for it.
        """
        wanted = [sorted({head // serves for head in self.heads(part)}) for part in range(self.parts)]
        most = max(map(len, wanted))
        return [heads + heads[-1:] * (most - len(heads)) for heads in wanted]


Tensors = tuple[Tensor, ...]


class Swap:
    """The door of a mixer under cp: all heads of this rank's tokens -> this rank's share of the heads, of the tokens
    of all neighbours on cp that swap.

    `heads` are dealt out. `there`: of each tensor that goes, the elements of one of its heads, and how many of `heads`
    that one serves (a kv head serves several). `width`: elements of a head that come back. What goes is `[T, n, ...]`
    with the heads of the tp rank, what arrives has those that this rank needs. One all-to-all each way when armed, and
    one each way in backward; both of forward once more when `again`.
    """

    def __init__(self, heads: Span, there: Sequence[tuple[int, int]], width: int, mixer: str = ATTENTION) -> None:
        self.heads, self.there, self.width, self.mixer = heads, tuple(there), width, mixer
        self.again = False
        self.parts, self.part = 1, 0  # neighbours that swap, and which of them this is
        self.groups, self.group = 1, 0  # of such neighbours: each has a part of the stream
        self.armed: tuple[Callable[[Tensors], Tensors], Callable[[Tensor], Tensor]] | None = None

    def __call__(self, *xs_TnC: Tensor) -> Tensors:
        return xs_TnC if self.armed is None else self.armed[0](xs_TnC)

    def back(self, y_TnC: Tensor) -> Tensor:
        return y_TnC if self.armed is None else self.armed[1](y_TnC)

    @property
    def deal(self) -> Deal:
        return Deal(self.heads.start, self.heads.stop, self.parts)

    @property
    def mine(self) -> range:
        """The heads on which this rank works, counted over the whole model."""
        return self.deal.heads(self.part)

    def widths(self, deal: Deal) -> tuple[int, int]:
        """Elements a token that one rank gets, and that it gives back."""
        got = sum(len(deal.serving(serves)[0]) * width for width, serves in self.there)
        return got, len(deal.heads(0)) * self.width


class Join:
    """The door of a mixer to the other parts of the stream: rows of this part -> rows of all parts, in their order.

    A part is what neighbours that swap have between them. Each rank asks those that work on the same heads elsewhere.
    `width`: elements of a head in a row, which serves `serves` of the swap's heads. `rows`: of a part pass so many; by
    default all its tokens. `floats`: as of a door. One all-gather when armed, one reduce-scatter in backward; the
    all-gather once more when `again`.
    """

    def __init__(
        self, swap: Swap, width: int, *, serves: int = 1, rows: int | None = None, floats: bool = False
    ) -> None:
        self.swap, self.width, self.serves, self.rows, self.floats = swap, width, serves, rows, floats
        self.again = False
        self.armed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.armed is None else self.armed(x)

    @property
    def parts(self) -> int:
        return self.swap.groups

    @property
    def part(self) -> int:
        return self.swap.group

    def elements(self, deal: Deal, num_tokens: int) -> int:
        """That a part of so many tokens brings."""
        rows = num_tokens if self.rows is None else min(self.rows, num_tokens)
        return rows * len(deal.serving(self.serves)[0]) * self.width


def is_run(numbers: Sequence[int]) -> bool:
    """Whether each is the next of the one before."""
    return all(after == before + 1 for before, after in pairwise(numbers))


Kept = TypeVar("Kept", Door, Dispatch, Insert, Span, Swap, Join)


def find(model: nn.Module, kept: type[Kept]) -> Iterator[tuple[str, Kept]]:
    """Every door (or dispatch, or span) of a model with its name, in the order of the modules."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, kept):
                yield f"{prefix}.{name}".lstrip("."), value
