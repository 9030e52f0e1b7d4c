"""What a checkpoint holds, said before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..axes import Axes
from ..layout import ShardingSpec, written
from ..weights import Export, Key, KeyMap, Values
from .planes import WEIGHTS, Plane, with_zeros

RANDOM, _STATES = "random", "states.safetensors"
RANDOM_FILE = f"{RANDOM}/{_STATES}"

Group = tuple[Values, list[Plane]]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when another one is whole: the `last` ones, and those of `every` so many steps."""

    last: int | None = None
    every: int | None = None


@dataclass(frozen=True)
class Content:
    """`values`: by plane, this rank's pieces. `random`: the states of this rank's generators.

    `export` says what lies beside the weights; its place is the folder of checkpoints.
    """

    step: int
    spec: ShardingSpec
    planes: Sequence[Plane]
    values: Mapping[str, Values]
    export: Export
    trainer: Mapping[str, Any]
    random: Mapping[str, bytes]
    about: Mapping[str, Any]
    keep: Keep = Keep()

    @property
    def folder(self) -> Path:
        return self.export.directory

    def all_planes(self, axes: Axes) -> list[Plane]:
        """Also the states of generators: a row for each rank."""
        lengths = {name: len(state) for name, state in self.random.items()}
        return [*self.planes, random_plane(lengths, axes.world)]

    def num_bytes(self, axes: Axes) -> int:
        heads = [head for plane in self.all_planes(axes) for head in plane.keymap.heads.values()]
        return sum(head.file_bytes for head in heads)

    def by_values(self) -> Iterator[Group]:
        """Values with all planes that they go to: a weight travels once, and is written as weight and as master."""
        of: dict[int, list[Plane]] = {}
        for plane in self.planes:
            of.setdefault(id(self.values[plane.name]), []).append(plane)
        for planes in of.values():
            stored = self.values[planes[0].name]
            yield with_zeros(stored, planes[0], self.spec.table, self.values[WEIGHTS]), planes

    def num_elements(self, axes: Axes, rank: int) -> int:
        """How many elements a rank writes, of every value once."""
        mine = {param.name: written(param, self.spec.rules, axes, rank).numel for param in self.spec.table}
        return sum(mine[name] for values, _ in self.by_values() for name in values)


def random_plane(lengths: Mapping[str, int], num_ranks: int) -> Plane:
    """Of states with so many bytes."""
    return Plane(RANDOM, KeyMap({}, {name: Key(name, "U8", (num_ranks, n), _STATES) for name, n in lengths.items()}))
