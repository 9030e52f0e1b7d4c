"""Document boundaries of a packed stream: cu_seqlens, positions, and where RoPE sees each token.

Attention, convolution, delta rule and RoPE take boundaries from one object. With two sources (a mask for one, position
ids for another) they could disagree, and packed documents would leak into each other without any error.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from .host_memory import to_device


@dataclass(frozen=True, eq=False)  # eq would ask tensors for one truth value
class Documents:
    """Documents laid end to end.

    `bounds`: the host's copy, 0, ..., T, strictly increasing. `cu_seqlens`: the same on the device (int32), padded at
    the end with T to a fixed length, so that its shape does not vary from batch to batch. `positions_T` (int64):
    restarts from 0 in each document. `turns_T3`: the time, height and width at which RoPE sees each token if documents
    have images (M-RoPE, arXiv 2409.12191); None: all three are the position. `tokens_T`: the tokens, for layers that
    read them; `Decoder.forward` adds them.
    """

    bounds: tuple[int, ...]
    cu_seqlens: Tensor
    positions_T: Tensor
    turns_T3: Tensor | None = None
    tokens_T: Tensor | None = None

    @cached_property
    def exact_cu_seqlens(self) -> Tensor:
        """Return the bounds on the device, in int64 and not padded.

        It is always the same tensor, since kernels cache by identity.
        """
        return self.cu_seqlens[: len(self.bounds)].long()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each document."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def reaching(self, first: int, stop: int) -> tuple[int, Documents]:
        """Cut out the documents with tokens in `first..stop`, as a stream that ends at `stop`. Return its start, and
        the documents.

        The first document keeps its tokens before `first`, because its queries see them.
        """
        at, last = bisect_right(self.bounds, first) - 1, bisect_left(self.bounds, stop)
        start = self.bounds[at]
        bounds = tuple(min(bound, stop) - start for bound in self.bounds[at : last + 1])
        cu_seqlens = self.cu_seqlens[at : last + 1].clamp(max=stop) - start
        return start, Documents(bounds, cu_seqlens, self.positions_T[start:stop])


class Parts(Protocol):
    """A stream cut into equal parts, one per rank; this one has the number `part`.

    Calling it all-gathers rows of all parts.
    """

    @property
    def parts(self) -> int: ...

    @property
    def part(self) -> int: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class _Whole:
    """The trivial cut: one part, and gathering is the identity."""

    parts: int = 1
    part: int = 0

    def __call__(self, x: Tensor, /) -> Tensor:
        return x


WHOLE = _Whole()


def documents(lengths: Sequence[int], device: torch.device | str, padded: int | None = None) -> Documents:
    """Lay out documents of these lengths, in this order. `padded`: the fixed length of `cu_seqlens`."""
    counts = [int(length) for length in lengths]
    for i, length in enumerate(counts):
        if length < 1:
            raise ValueError(f"document {i} has length {length}; every document needs at least one token")
    bounds = tuple(accumulate(counts, initial=0))
    size = len(bounds) if padded is None else padded
    if size < len(bounds):
        raise ValueError(
            f"padded={size} cannot hold the {len(bounds)} bounds of {len(counts)} documents; "
            f"give padded >= {len(bounds)}"
        )
    total = bounds[-1]
    starts_T = torch.repeat_interleave(
        torch.tensor(bounds[:-1], dtype=torch.int64, device="cpu"),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
    )
    cu_seqlens = torch.tensor(bounds + (total,) * (size - len(bounds)), dtype=torch.int32, device="cpu")
    positions_T = torch.arange(total, device="cpu") - starts_T
    return Documents(bounds, to_device(cu_seqlens, device), to_device(positions_T, device))


def has_next(docs: Documents) -> Tensor:
    """Return a mask of the tokens that are not the last one of their document."""
    starts_T = docs.positions_T == 0
    return ~torch.cat([starts_T[1:], starts_T[:1]])


def next_in_document(x_T: Tensor, docs: Documents, fill: int) -> Tensor:
    """Return for each token the value of the next token of its document; `fill` at the last one."""
    return x_T.roll(-1).where(has_next(docs), fill)


def check_tokens(docs: Documents, **streams: Tensor) -> None:
    """Refuse a stream whose first dim is not the T of its documents, a slip that broadcasting could hide.

    T is taken from the positions and not from `bounds`: `torch.compile` would specialise on the tuple and compile a
    graph for every number of documents.
    """
    num_tokens = docs.positions_T.shape[0]
    for name, x in streams.items():
        if x.shape[0] != num_tokens:
            raise ValueError(f"{name} has {x.shape[0]} tokens but its documents have {num_tokens}")


def part_of(docs: Documents, parts: Parts, **streams: Tensor) -> Tensor:
    """Return the positions of a part's tokens, after checking that each stream has the length of a part."""
    num_tokens = docs.positions_T.shape[0] // parts.parts
    for name, x in streams.items():
        if x.shape[0] != num_tokens:
            of_part = f" in each of {parts.parts} parts" if parts.parts > 1 else ""
            raise ValueError(f"{name} has {x.shape[0]} tokens but its documents have {num_tokens}{of_part}")
    return docs.positions_T[parts.part * num_tokens : (parts.part + 1) * num_tokens]
