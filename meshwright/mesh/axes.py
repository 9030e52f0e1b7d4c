"""The land as arithmetic: six axes, the coordinates of a rank on them, and who shares them. No process group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import MeshError

DENSE = ("pp", "replicate", "fsdp", "cp", "tp")  # outer to inner
EXPERT = ("pp", "replicate", "efsdp", "ep")  # the same ranks, seen by the experts


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
        for name in (*DENSE, "ep"):
            size = self.size_of(name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"{name}={size!r} is not a size; give an integer of 1 or more")
        inner = self.fsdp * self.cp * self.tp
        if inner % self.ep:
            choices = ", ".join(str(n) for n in range(1, inner + 1) if inner % n == 0)
            raise MeshError(f"ep={self.ep} does not divide fsdp*cp*tp={inner}; choose ep from {choices}")

    def size_of(self, axis: str) -> int:
        return {
            "pp": self.pp,
            "replicate": self.replicate,
            "fsdp": self.fsdp,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
            "efsdp": self.fsdp * self.cp * self.tp // self.ep if self.ep else 0,
        }[axis]

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.size_of(a) for a in axes)

    @cached_property
    def world(self) -> int:
        return prod(self.sizes(DENSE))

    @property
    def num_data_ranks(self) -> int:
        return self.replicate * self.fsdp

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on all axes, those of the dense and of the expert view."""
        return {**_unravel(rank, DENSE, self.sizes(DENSE)), **_unravel(rank, EXPERT, self.sizes(EXPERT))}

    def data_rank(self, rank: int) -> int:
        """Ranks that differ only in cp, tp, pp read the same stream."""
        at = self.coords(rank)
        return at["replicate"] * self.fsdp + at["fsdp"]

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` at most on `axes` (all of one view), in order."""
        view = EXPERT if {"ep", "efsdp"} & set(axes) else DENSE
        mine = self.coords(rank)
        fixed = [a for a in view if a not in axes]
        return tuple(r for r in range(self.world) if all(self.coords(r)[a] == mine[a] for a in fixed))

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Every group of ranks over `axes`, in the order of their first ranks: the same list on all ranks."""
        return sorted({self.group(rank, axes) for rank in range(self.world)})

    def __str__(self) -> str:
        named = [f"{a}={self.size_of(a)}" for a in (*DENSE, "ep") if self.size_of(a) > 1]
        return " ".join(named) or "one process"


def _unravel(rank: int, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    out = {}
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        rank, out[name] = divmod(rank, size)
    return out
