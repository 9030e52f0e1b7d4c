"""Plan whole-matrix updates (Muon): which rank computes each matrix, and what ranks exchange. Pure arithmetic.

An optimizer such as Muon (arXiv 2502.16982) updates whole matrices, and ranks store rows (decision 0002). So each
matrix has one owner among the ranks that store some of it. An all-to-all of a bucket of matrices brings the other parts
to the owners, and a second one brings the results back. One rank computes a matrix in one call, so its bits do not
depend on the mesh.

All ranks of a stage compute the same plan, which the bill charges for and `optim/whole_matrices.py` executes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product, zip_longest
from math import prod

from ..axes import STAGE, Axes
from ..errors import LayoutError
from ..ops.part_sizes import part_size
from .boxes import Box
from .params import Param
from .rules import Rules, piece

# Elements of the matrices of one all-to-all, for each rank of the group.
_BUCKET = part_size(__name__, "_BUCKET", 1 << 24, small=2001)


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter. `parts`: boxes of the parameter that tile it, each with the ranks that store it."""

    name: str
    box: Box
    rows: int
    cols: int
    parts: tuple[tuple[Box, tuple[int, ...]], ...]

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Return a number proportional to the FLOPs of a Newton-Schulz iteration."""
        short, long = sorted((self.rows, self.cols))
        return short * short * (2 * long + short)


@dataclass(frozen=True)
class MatrixPart:
    """A part of a matrix that goes from one rank to another. `at`: the index of the matrix in the plan."""

    rank: int  # the other one
    at: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """One all-to-all, as this rank takes part in it: what it sends and receives, in the order of its buffers."""

    sends: tuple[MatrixPart, ...]
    receives: tuple[MatrixPart, ...]

    @property
    def num_received(self) -> int:
        """Return the elements that this rank receives."""
        return sum(each.box.size for each in self.receives)


@dataclass(frozen=True)
class Bucket:
    """Matrices that are exchanged together. `own`: the indices of those that this rank computes."""

    own: tuple[int, ...]
    to_owners: Exchange
    to_holders: Exchange


def boxes_of_matrices(param: Param, by_head: bool = False) -> Iterator[Box]:
    """Yield the boxes of a parameter that are a matrix each. `by_head`: also split queries, keys and values into heads,
    those of a delta net by key head."""
    if param.matrices is None:
        return
    of_heads = ("heads", "kv", *(["key"] if "chan" in param.rows else []))
    heads = {dim: (1,) * param.rows[dim] for dim in of_heads if by_head and dim in param.rows}
    cuts = {**param.matrices, **heads}
    for dim, sizes in cuts.items():
        if sum(sizes) != param.dims.get(dim):
            raise LayoutError(
                f"{param.name} is declared as matrices of {dim}={sizes}, but {dim} is {param.dims.get(dim)}; the sizes "
                "must add up to the dim"
            )
    ranges = [pairwise((0, *accumulate(cuts.get(dim, (size,))))) for dim, size in param.dims.items()]
    for each in product(*ranges):
        yield Box(tuple(start for start, _ in each), tuple(stop for _, stop in each))


class MatrixPlan:
    """The matrices of some parameters of a stage, their owners, and the exchanges of one rank.

    `params` must be the same on all ranks of the stage, in the same order.
    """

    def __init__(self, params: Sequence[Param], rules: Rules, axes: Axes, rank: int, *, by_head: bool = False) -> None:
        self.rank, self.group = rank, axes.group(rank, STAGE)
        self.matrices: list[Matrix] = []
        same_kind: dict[object, list[Matrix]] = {}  # layers of one kind have equal boxes
        for param in params:
            matrices = None if param.matrices is None else tuple(param.matrices.items())  # {}: one matrix; None: none
            kind = (tuple(param.rows.items()), tuple(param.cols.items()), matrices, param.in_fsdp)
            if kind not in same_kind:
                same_kind[kind] = list(_held(param, rules, axes, self.group, by_head))
            self.matrices += [
                Matrix(param.name, each.box, each.rows, each.cols, each.parts) for each in same_kind[kind]
            ]
        self.owner = _owners(self.matrices)

    @cached_property
    def own(self) -> list[int]:
        """Return the indices of the matrices that this rank computes."""
        return [at for at, owner in enumerate(self.owner) if owner == self.rank]

    @cached_property
    def resident(self) -> list[int]:
        """Return the indices of the matrices that this rank alone stores."""
        return [at for at in self.own if not self._travels(at)]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Return the matrices that are exchanged, in buckets. All ranks have the same number of buckets."""
        return [self._bucket(some) for some in self._in_buckets]

    @cached_property
    def _in_buckets(self) -> list[list[int]]:
        """Divide the matrices that are exchanged into buckets of about `_BUCKET` elements per rank.

        A bucket is computed while the next one travels, so each should keep all owners busy. It is made of waves: the
        costliest matrix of each owner, then the second costliest of each.
        """
        of_owner: defaultdict[int, list[int]] = defaultdict(list)
        for at in sorted(filter(self._travels, range(len(self.matrices))), key=lambda at: -self.matrices[at].cost):
            of_owner[self.owner[at]].append(at)
        buckets, numel, most = list[list[int]](), 0, _BUCKET * len(self.group)
        for wave in zip_longest(*(of_owner[owner] for owner in sorted(of_owner))):
            some = [at for at in wave if at is not None]
            more = sum(self.matrices[at].numel for at in some)
            if not buckets or numel + more > most:
                buckets.append([])
                numel = 0
            buckets[-1] += some
            numel += more
        return buckets

    @property
    def critical_cost(self) -> int:
        """Return the cost for which a step waits: the busiest owner of each bucket, and of what is resident."""
        resident = [at for at in range(len(self.matrices)) if not self._travels(at)]
        return sum(self._most_work(some) for some in (resident, *self._in_buckets))

    def _most_work(self, some: Sequence[int]) -> int:
        work = Counter[int]()
        for at in some:
            work[self.owner[at]] += self.matrices[at].cost
        return max(work.values(), default=0)

    def _travels(self, at: int) -> bool:
        return any(ranks != (self.owner[at],) for _, ranks in self.matrices[at].parts)

    def _bucket(self, some: Sequence[int]) -> Bucket:
        there, back = _Lists(), _Lists()
        for at in some:
            owner = self.owner[at]
            for box, ranks in self.matrices[at].parts:
                # Copies are equal: one of them is sent, unless the owner has one. All of them are updated.
                if owner not in ranks:
                    there.add(self.rank, ranks[0], owner, at, box)
                for rank in ranks:
                    back.add(self.rank, owner, rank, at, box)
        own = tuple(at for at in some if self.owner[at] == self.rank)
        return Bucket(own, there.exchange(self.group), back.exchange(self.group))


class _Lists:
    """The parts that a rank sends to, and receives from, each other rank."""

    def __init__(self) -> None:
        self.sends: defaultdict[int, list[MatrixPart]] = defaultdict(list)
        self.receives: defaultdict[int, list[MatrixPart]] = defaultdict(list)

    def add(self, rank: int, source: int, target: int, at: int, box: Box) -> None:
        """Add a transfer, if `rank` takes part in it and it leaves its source."""
        if source != target and rank == source:
            self.sends[target].append(MatrixPart(target, at, box))
        if source != target and rank == target:
            self.receives[source].append(MatrixPart(source, at, box))

    def exchange(self, group: Sequence[int]) -> Exchange:
        sides = (tuple(each for rank in group for each in side[rank]) for side in (self.sends, self.receives))
        return Exchange(*sides)


def _held(param: Param, rules: Rules, axes: Axes, group: Sequence[int], by_head: bool) -> Iterator[Matrix]:
    """Yield the matrices of a parameter, with the ranks of a group that store their parts."""
    holders: defaultdict[Box, list[int]] = defaultdict(list)
    for rank in group:
        for box in piece(param, rules, axes, axes.coords(rank)).boxes:
            holders[box].append(rank)
    num_rows = len(param.rows)
    for box in boxes_of_matrices(param, by_head):
        met = ((box.meet(held), tuple(ranks)) for held, ranks in holders.items())
        parts = tuple((part, ranks) for part, ranks in met if part is not None)
        if sum(part.size for part, _ in parts) != box.size:
            raise LayoutError(f"the ranks {list(group)} do not store the matrix {box} of {param.name} once")
        yield Matrix(param.name, box, prod(box.shape[:num_rows]), prod(box.shape[num_rows:]), parts)


def _owners(matrices: Sequence[Matrix]) -> list[int]:
    """Return the rank that computes each matrix: costly matrices first, each to the candidate with the least work, then
    to the rank that stores most of it, then to the lowest rank. Nothing else may decide: all ranks must find the same
    owner."""
    work, owner = defaultdict[int, int](int), [0] * len(matrices)
    for at in sorted(range(len(matrices)), key=lambda at: (-matrices[at].cost, at)):
        stored = defaultdict[int, int](int)
        for part, ranks in matrices[at].parts:
            for rank in ranks:
                stored[rank] += part.size
        owner[at] = min(stored, key=lambda rank: (work[rank], -stored[rank], rank))
        work[owner[at]] += matrices[at].cost
    return owner


def exchanged(plan: MatrixPlan) -> Mapping[str, list[int]]:
    """Return the elements that this rank receives in each all-to-all of an update, by its name."""
    return {
        TO_OWNERS: [bucket.to_owners.num_received for bucket in plan.buckets],
        TO_HOLDERS: [bucket.to_holders.num_received for bucket in plan.buckets],
    }


TO_OWNERS, TO_HOLDERS = "matrices to their owners", "updates of matrices to their ranks"
