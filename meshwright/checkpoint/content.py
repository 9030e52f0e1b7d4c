"""What a checkpoint holds, said before anything is written."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..axes import Axes
from ..optim import SCALES
from ..sharding import ShardingSpec, Table, written
from ..weights import DTYPES, NAMES, Export, Key, KeyMap, Values, chosen, widest

PARAMETERS = WEIGHTS, MASTER = "weights", "master"  # all other planes are optimizer state, each named as it is
Dtypes = Mapping[str, torch.dtype]  # by parameter, of the whole model


@dataclass(frozen=True)
class Plane:
    name: str
    keymap: KeyMap

    @property
    def folder(self) -> str:
        return "" if self.name == WEIGHTS else self.name


def planes_of(table: Table, keymap: KeyMap, stored: Dtypes, state: Mapping[str, Dtypes]) -> list[Plane]:
    """Return the planes of a checkpoint. `stored`: in which dtype each parameter is kept. `state`: by state name, the
    dtypes of optimizer state, of what is trained. Where it is in 8 bits, `state` and `table` have the scales too."""
    keys = {name: _keys(table, keymap, name) for name in table.params}
    rounded = {name: dtype for name, dtype in stored.items() if _rounds(keymap, keys[name], dtype)}
    planes, others = [Plane(WEIGHTS, keymap)], {MASTER: rounded, **state}
    made: dict[object, KeyMap] = {}  # 37,000 keys: planes that are alike share them, and their headers
    for name, dtypes in others.items():
        if dtypes:
            alike = frozenset(dtypes.items())
            if alike not in made:
                made[alike] = _and_scales(_spelled_as(keymap, keys, dtypes), table, dtypes)
            planes.append(Plane(name, made[alike]))
    return planes


def _rounds(keymap: KeyMap, keys: Sequence[str], dtype: torch.dtype) -> bool:
    """Whether the files cannot hold all that is stored of a parameter."""
    in_files = {DTYPES[kind] for kind in {keymap.keys[key].dtype for key in keys}}
    return any(torch.promote_types(kind, dtype) != kind for kind in in_files)


def _keys(table: Table, keymap: KeyMap, param: str) -> list[str]:
    """Those that hold a parameter; not those that hold it once more."""
    return list(dict.fromkeys(block.key for block in chosen(table[param], keymap.choice).blocks))


def _spelled_as(keymap: KeyMap, keys_of: Mapping[str, Sequence[str]], dtypes: Dtypes) -> KeyMap:
    """The keys of some parameters, in other dtypes."""
    of_key: dict[str, set[torch.dtype]] = {}
    for param, dtype in dtypes.items():
        for key in keys_of[param]:
            of_key.setdefault(key, set()).add(dtype)
    with _uncollected():
        kept = [(key, of_key[key.name]) for key in keymap.keys.values() if key.name in of_key]
        keys = {key.name: Key(key.name, NAMES[widest(kinds)], key.shape, key.file) for key, kinds in kept}
    return KeyMap(keymap.choice, keys)


def _and_scales(keymap: KeyMap, table: Table, dtypes: Dtypes) -> KeyMap:
    """Scales lie in the file of their matrix, behind all that the weights have there."""
    keys = dict(keymap.keys)
    for name in dtypes:
        if name + SCALES in dtypes:
            [block], file = table[name + SCALES].layouts[0].blocks, keys[_keys(table, keymap, name)[0]].file
            keys[block.key] = Key(block.key, NAMES[dtypes[name + SCALES]], block.shape, file)
    return replace(keymap, keys=keys)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Of 100,000 new keys none is garbage: the collector would walk through all that lives again and again, which took
    three times as long as making them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def with_zeros(values: Values, plane: Plane, table: Table, stored: Values) -> Values:
    """Also of parameters that have no value for a plane, but a part of its keys: every byte of a file is written."""
    zeros, keys = dict[str, Tensor](), plane.keymap.keys
    for name, tensor in stored.stored.items():
        shared = [] if name in values else [key for key in _keys(table, plane.keymap, name) if key in keys]
        if shared:
            zeros[name] = tensor.new_zeros((), dtype=DTYPES[keys[shared[0]].dtype]).expand(tensor.shape)
    return values.beside(zeros)


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
