"""Mesh axes as arithmetic, without process groups: sizes, coordinates of a rank, groups of ranks along axes.

Six axes: pp (pipeline), replicate (HSDP), fsdp, cp (context), tp (tensor), ep (experts). Ranks are numbered with tp
innermost, so that its frequent collectives stay within a node. Experts use a second view of the same ranks, in which ep
x efsdp replaces fsdp x cp x tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

from torch import Tensor

from .errors import MeshError

DENSE = ("pp", "replicate", "fsdp", "cp", "tp")  # outer to inner
EXPERT = ("pp", "replicate", "efsdp", "ep")  # the same ranks, as axes for experts
REPLICA = ("pp", "fsdp", "cp", "tp")  # all but replicate: the ranks that together hold a model
TOKENS = ("replicate", "fsdp", "cp", "tp")  # the ranks that divide the tokens of a micro-batch
STAGE = ("fsdp", "cp", "tp")  # the ranks of a replica that together hold a pipeline stage
DATA_RANK = ("cp", "tp")  # the ranks that share a stream of tokens, in the order of their parts
ENDS = "ends"  # the first and the last pipeline stage: they share a tied embedding

Ranks = TypeVar("Ranks", int, Tensor)


@dataclass(frozen=True)
class Sum:
    """The declaration of an all-reduce over ranks: `Mesh.all_reduce_` runs it, and the bill of a step charges for
    it."""

    name: str  # shown in the error when a rank is lost in it
    axes: tuple[str, ...]
    num_bytes: int = 0


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh axes. `efsdp` is derived: `efsdp * ep == fsdp * cp * tp`."""

    pp: int = 1
    replicate: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if type(size) is not int or size < 1:
                raise MeshError(f"{name}={size!r} is not a size; give an integer of 1 or more")
        inner = self.fsdp * self.cp * self.tp
        if inner % self.ep:
            choices = ", ".join(str(n) for n in range(1, inner + 1) if inner % n == 0)
            raise MeshError(f"ep={self.ep} does not divide fsdp*cp*tp={inner}; choose ep from {choices}")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        efsdp = self.fsdp * self.cp * self.tp // self.ep
        halves = [
            (self.halves(n, axis), (size // n, n))
            for axis, size in (("cp", self.cp), ("ep", self.ep))
            for n in range(1, size + 1)
            if size % n == 0
        ]
        return {
            **{half: size for names, sizes in halves for half, size in zip(names, sizes, strict=True)},
            "pp": self.pp, "replicate": self.replicate, "fsdp": self.fsdp, "cp": self.cp, "tp": self.tp,
            "ep": self.ep, "efsdp": efsdp, ENDS: min(self.pp, 2),
        }  # fmt: skip

    def halves(self, neighbours: int, axis: str = "cp") -> tuple[str, str]:
        """Split an axis in two: the index of a group of `neighbours` consecutive ranks, and the index within the group.

        Their names (`cp//4`, `cp%4`) say how the coordinates are computed.
        """
        outer, inner = f"{axis}//{neighbours}", f"{axis}%{neighbours}"
        size = self.ep if axis == "ep" else self.cp
        return outer if neighbours > 1 else axis, inner if neighbours < size else axis

    def size_of(self, axis: str) -> int:
        """Return the size of an axis of either view, or of a half of an axis."""
        return self._sizes[axis]

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes of several axes."""
        return tuple(self.size_of(a) for a in axes)

    @cached_property
    def world(self) -> int:
        """Return the number of ranks."""
        return prod(self.sizes(DENSE))

    @property
    def num_data_ranks(self) -> int:
        """Return the data-parallel size: the number of different streams of tokens that the ranks read."""
        return self.replicate * self.fsdp

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` on all axes, those of the dense and of the expert view."""
        self._check(rank)
        at = {**_unravel(rank, DENSE, self.sizes(DENSE)), **_unravel(rank, EXPERT, self.sizes(EXPERT))}
        return {**at, ENDS: int(0 < at["pp"] == self.pp - 1)}

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise MeshError(f"rank {rank} is not one of the {self.world} ranks of {self}")

    def data_rank(self, rank: Ranks) -> Ranks:
        """Return the data stream that a rank reads; `rank` may be a tensor of ranks.

        Ranks that differ only in cp, tp or pp read the same stream.
        """
        return rank // (self.cp * self.tp) % self.num_data_ranks

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` at most on `axes` (all of one view), in order."""
        self._check(rank)
        ranks = [rank]
        for axis, stride in self.strides(axes).items():
            coord = rank // stride % self.size_of("pp" if axis == ENDS else axis)
            coords = self._ends_seen_from(coord) if axis == ENDS else range(self.size_of(axis))
            ranks = [r + (i - coord) * stride for r in ranks for i in coords]
        return tuple(sorted(ranks))

    def _ends_seen_from(self, stage: int) -> tuple[int, ...]:
        """Return the stages that share a tied embedding with `stage`: both ends share it, and a stage between them does
        not.
        """
        ends = tuple(dict.fromkeys((0, self.pp - 1)))
        return ends if stage in ends else (stage,)

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return every group of ranks over `axes`, in the order of their first ranks: the same list on all ranks."""
        others = tuple(a for a in self._view(axes) if a not in axes)
        firsts = self.group(0, others)  # the ranks at 0 on all of `axes`
        if ENDS in axes:  # ranks of the last stage start no group: they belong to those of the first stage
            firsts = tuple(rank for rank in firsts if not self.coords(rank)[ENDS])
        return [self.group(rank, axes) for rank in firsts]

    def strides(self, axes: tuple[str, ...]) -> dict[str, int]:
        """Return the distance in rank numbers between neighbours on each of `axes`."""
        view = self._view(axes)
        sizes = self.sizes(view)
        strides = {a: prod(sizes[i + 1 :]) for i, a in enumerate(view)}
        return {a: strides["pp" if a == ENDS else a] for a in axes}

    def _view(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the view that contains all of `axes`."""
        match = next((view for view in self._views if set(axes) <= {*view, ENDS}), None)
        if match is None:
            raise MeshError(f"{axes} are not axes of one view; they are {DENSE}, or for experts {EXPERT}")
        return match

    @cached_property
    def _views(self) -> list[tuple[str, ...]]:
        """Return lists of axes whose coordinates identify each rank: the dense and the expert view, and both with cp or
        ep split in two.
        """
        views = [DENSE, EXPERT]
        for view, axis, size in ((DENSE, "cp", self.cp), (EXPERT, "ep", self.ep)):
            at, halves = view.index(axis), [self.halves(n, axis) for n in range(2, size) if size % n == 0]
            views += [(*view[:at], *both, *view[at + 1 :]) for both in halves]
        return views

    def __str__(self) -> str:
        named = [f"{a}={self.size_of(a)}" for a in (*DENSE, "ep") if self.size_of(a) > 1]
        return " ".join(named) or "one process"


def _unravel(rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Return the coordinates of a rank, in row-major order: the last axis changes fastest."""
    out = {}
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        rank, out[name] = divmod(rank, size)
    return out
