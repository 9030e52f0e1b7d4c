"""Doors: declared points where activations change layout over ranks, with their collectives in forward and backward.

A door is data. On one process it is the identity; `parallel` arms the doors of its mesh axis with collectives. The bill
reads the same objects, and oracle K1 checks one against the other. A layer that declares doors is single-device code:
tensor, context and expert parallelism are not written into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..ops import Rows, lookup
from .vision_balance import Cost


@dataclass(frozen=True)
class DoorKind:
    """Name the collectives that a door runs in forward and in backward."""

    name: str
    axis: str
    forward: str
    backward: str


# Megatron's sequence parallelism (arXiv 2205.05198), g and its conjugate: between blocks each rank has its own tokens.
ENTER = DoorKind("enter", "tp", "all_gather", "reduce_scatter")  # own tokens -> all tokens of the tp group
LEAVE = DoorKind("leave", "tp", "reduce_scatter", "all_gather")  # partial sums of all tokens -> own tokens
# all tokens over this rank's slice of the vocabulary -> own tokens over all slices
MEET = DoorKind("meet", "tp", "all_to_all", "all_to_all")
# the whole stream of a data rank, which each of its ranks has -> the tokens of this cp rank: nothing is sent
SHARE = DoorKind("share", "cp", "", "")
# all tokens of the tp group, which each of its ranks has -> own tokens: nothing is sent
OWN = DoorKind("own", "tp", "", "")


class Door:
    """A named door. `width`: elements per token that pass; `floats`: pass at least float32, whatever the compute
    dtype."""

    def __init__(self, kind: DoorKind, width: int, *, floats: bool = False) -> None:
        self.kind, self.width, self.floats = kind, width, floats
        self.again = False  # passed once more when activation checkpointing recomputes
        self.armed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.armed is None else self.armed(x)

    def __repr__(self) -> str:
        return f"Door({self.kind.name}, width={self.width}, {'armed' if self.armed else 'identity'})"


# Rows in flight (an asynchronous all-to-all); calling it waits for them.
PendingRows = Callable[[], Rows]
StartDispatch = Callable[[Tensor, Tensor, Tensor], PendingRows]


class Dispatch:
    """The door of a mixture of experts: tokens -> rows of this rank's experts, and back to a sum for each token.

    It sends tokens with their routing weights and expert indices. It returns while rows are in flight, so that a shared
    expert can be computed in the meantime. `alone`: builds the rows where all experts are on this rank.

    When armed: seven all-to-alls, for counts, weights, rows out and back, and three in backward. With `again`
    (checkpointing) three more, since most recomputed layers need no way back, and four with `back_again`. Where a token
    goes once to each rank that has some of its experts, their indices travel next to the rows: one more each time.
    """

    def __init__(self, num_experts: int, width: int, top_k: int, alone: Callable[..., Rows]) -> None:
        self.num_experts, self.width, self.top_k, self.alone = num_experts, width, top_k, alone
        self.again = self.back_again = False
        self.armed: StartDispatch | None = None

    def __call__(self, x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> PendingRows:
        return (self.armed or self.local)(x_TD, weight_Tk, expert_Tk)

    def local(self, x_TD: Tensor, weight_Tk: Tensor, expert_Tk: Tensor) -> PendingRows:
        rows = self.alone(x_TD, weight_Tk, expert_Tk)
        return lambda: rows


class ScatterVision:
    """The door of a vision tower: rows of the frames that this rank ran -> rows for its own tokens.

    Frames are balanced over the cp and tp ranks of a data rank, so rows come from any of these. Both sides know all
    sizes (vision_balance.py), so no counts are exchanged. `width`: elements of a row. `cost`: the cost of a frame, by
    which frames are balanced. One all-to-all when armed, and one the other way in backward.
    """

    def __init__(self, width: int, cost: Cost) -> None:
        self.width, self.cost = width, cost
        self.armed: Callable[[Tensor, list[int], list[int]], Tensor] | None = None

    def __call__(self, rows_ND: Tensor, sent: list[int], got: list[int]) -> Tensor:
        return rows_ND if self.armed is None else self.armed(rows_ND, sent, got)


@dataclass
class Span:
    """This rank's range of a dim, for code that must know which heads or rows it has. The whole dim on one process."""

    dim: str
    size: int
    start: int = 0
    stop: int = -1

    def __post_init__(self) -> None:
        self.stop = self.size if self.stop < 0 else self.stop

    def __len__(self) -> int:
        return self.stop - self.start


ATTENTION, DELTA = "attention", "delta"  # mixers, by their names in `mw.ContextParallel`
SPARSE = "sparse"  # attention to chosen keys: only keys and values travel, since queries and choices are wider


@dataclass(frozen=True)
class HeadSplit:
    """A split of the heads `start..stop` of a tp rank over `parts` neighbours on cp: evenly, in order."""

    start: int
    stop: int
    parts: int = 1

    def heads(self, part: int) -> range:
        """Return the heads of one part, counted over the whole model."""
        num = (self.stop - self.start) // self.parts
        return range(self.start + part * num, self.start + (part + 1) * num)

    def serving(self, serves: int) -> list[list[int]]:
        """Return for each rank the heads that serve its own, where each serves `serves` consecutive heads (kv heads
        serve several query heads).

        All ranks get the same number, so that all pieces of an exchange have one size: the last head is repeated to
        fill up.
        """
        needed = [sorted({head // serves for head in self.heads(part)}) for part in range(self.parts)]
        most = max(map(len, needed))
        return [heads + heads[-1:] * (most - len(heads)) for heads in needed]


Tensors = tuple[Tensor, ...]


class Swap:
    """The door of a mixer under cp (Ulysses): all heads of own tokens -> a share of the heads, for all tokens of the
    swap.

    `heads` are dealt out. `inputs`: for each tensor that is sent, the elements of one of its heads, and how many of
    `heads` it serves (a kv head serves several). `width`: elements of a head that come back. Tensors go as
    `[T, n, ...]` with the heads of the tp rank, and arrive with the heads that this rank needs. When armed: one
    all-to-all each way, and one each way in backward; both of forward once more with `again`.
    """

    def __init__(self, heads: Span, inputs: Sequence[tuple[int, int]], width: int, mixer: str = ATTENTION) -> None:
        self.heads, self.inputs, self.width, self.mixer = heads, tuple(inputs), width, mixer
        self.again = False
        self.parts, self.part = 1, 0  # how many neighbours swap, and the index of this rank among them
        self.groups, self.group = 1, 0  # groups of such neighbours, each with a contiguous part of the stream
        self.armed: tuple[Callable[[Tensors], Tensors], Callable[[Tensor], Tensor]] | None = None

    def __call__(self, *xs_TnC: Tensor) -> Tensors:
        return xs_TnC if self.armed is None else self.armed[0](xs_TnC)

    def back(self, y_TnC: Tensor) -> Tensor:
        """Return outputs to the ranks of their tokens."""
        return y_TnC if self.armed is None else self.armed[1](y_TnC)

    @property
    def deal(self) -> HeadSplit:
        return HeadSplit(self.heads.start, self.heads.stop, self.parts)

    @property
    def own_heads(self) -> range:
        """Return the heads on which this rank works, counted over the whole model."""
        return self.deal.heads(self.part)

    def widths(self, deal: HeadSplit) -> tuple[int, int]:
        """Return the elements per token that one rank receives, and those that it returns."""
        received = sum(len(deal.serving(serves)[0]) * width for width, serves in self.inputs)
        return received, len(deal.heads(0)) * self.width


class Join:
    """The door of a mixer to the rest of the stream: rows of this part -> rows of all parts, in order.

    A part is the tokens of a group of swapping neighbours. Each rank gathers from those that work on the same heads in
    other groups. `width`: elements of a head in a row; the head serves `serves` of the swap's heads. `rows`: how many
    rows of a part pass, all its tokens by default. `floats`: as for a door. One all-gather when armed, one
    reduce-scatter in backward if what passes has a gradient; the all-gather once more with `again`.
    """

    def __init__(
        self, swap: Swap, width: int, *, serves: int = 1, rows: int | None = None, floats: bool = False,
        has_gradient: bool = True,
    ) -> None:  # fmt: skip
        self.swap, self.width, self.serves, self.rows, self.floats = swap, width, serves, rows, floats
        self.has_gradient = has_gradient
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

    def elements(self, deal: HeadSplit, num_tokens: int) -> int:
        """Count the elements that a part of `num_tokens` tokens contributes."""
        rows = num_tokens if self.rows is None else min(self.rows, num_tokens)
        return rows * len(deal.serving(self.serves)[0]) * self.width


class Halo:
    """The door of a causal convolution on own tokens: the last rows of this rank -> those of all ranks of a data rank.

    Own tokens are a part of the stream under cp and under tp, and a short part needs rows of several before it. When
    armed: one all-gather, one reduce-scatter in backward, and the all-gather once more with `again`. It is an
    `ops.Parts`.
    """

    def __init__(self, width: int, rows: int) -> None:
        self.width, self.rows = width, rows
        self.parts, self.part = 1, 0
        self.again = False
        self.armed: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x_NC: Tensor) -> Tensor:
        return x_NC if self.armed is None else self.armed(x_NC)


class Lookup:
    """The door to a table whose rows are spread over the ranks of a stage: row numbers -> rows.

    `rows`: how many rows each own token looks up, each `width` wide. `table`: the attribute of the same module that
    holds the parameter. When armed: three all-to-alls, for counts, row numbers and rows, and one in backward where the
    table is trained. The layer keeps the rows for backward, so recomputation never passes the door again.
    """

    def __init__(self, rows: int, width: int, table: str = "table") -> None:
        self.rows, self.width, self.table = rows, width, table
        self.armed: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None

    def __call__(self, table_RW: Tensor, row_N: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.armed or look_up)(table_RW, row_N, dtype)

    def parameter(self, name: str) -> str:
        """Return the name of the table's parameter, given that of this door."""
        return f"{name.rpartition('.')[0]}.{self.table}"


def look_up(table_RW: Tensor, row_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Look rows up and cast them."""
    return lookup(table_RW, row_N).to(dtype)


def is_run(numbers: Sequence[int]) -> bool:
    """Return whether the numbers are consecutive."""
    return all(after == before + 1 for before, after in pairwise(numbers))


Kept = TypeVar("Kept", Door, Dispatch, ScatterVision, Span, Swap, Join, Halo, Lookup)


def find_doors(model: nn.Module, kept: type[Kept]) -> Iterator[tuple[str, Kept]]:
    """Yield every door (or span) of one class in a model with its name, in the order of the modules."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, kept):
                yield f"{prefix}.{name}".lstrip("."), value
