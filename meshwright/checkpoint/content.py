"""Declare the content of a checkpoint before anything is written: state sets, their keys, dtypes and files.

State is keyed by parameter, never by position in an optimizer's param groups: positions shift when a parameter is
frozen or a stage moves. The set of trained parameters determines the saved state. torch's state exists only after a
first step, so an earlier save was empty without an error (pytorch#140898), and parameters that have had no gradient
lack state on some ranks (verl#7283).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..axes import Axes
from ..ops.garbage import collector_paused
from ..optim import SCALES
from ..sharding import ShardingSpec, Table, rows_to_write
from ..weights import DTYPES, NAMES, Export, Key, KeyMap, Values, chosen, widest

PARAMETERS = WEIGHTS, MASTER = "weights", "master"  # all other state sets are optimizer state under its own names
Dtypes = Mapping[str, torch.dtype]  # by parameter, of the whole model


@dataclass(frozen=True)
class StateSet:
    """One tensor per key of the model (weights, masters, exp_avg or exp_avg_sq), in files of the model's own layout."""

    name: str
    keymap: KeyMap

    @property
    def folder(self) -> str:
        """Return the folder inside the checkpoint; weights are at its top, so that the checkpoint is a model
        directory."""
        return "" if self.name == WEIGHTS else self.name


def planes_of(table: Table, keymap: KeyMap, stored: Dtypes, state: Mapping[str, Dtypes]) -> list[StateSet]:
    """Return the state sets of a checkpoint.

    `stored`: the dtype in which each parameter is stored. `state`: by state name, the dtypes of the optimizer state of
    trained parameters; if it is in 8 bits, `state` and `table` have its scales too.

    Masters are written only where the files would round them: float32 weights are their own masters.
    """
    keys = {name: _keys(table, keymap, name) for name in table.params}
    rounded = {name: dtype for name, dtype in stored.items() if _rounds(keymap, keys[name], dtype)}
    planes, others = [StateSet(WEIGHTS, keymap)], {MASTER: rounded, **state}
    made: dict[object, KeyMap] = {}  # state sets of equal dtypes share 37,000 keys and their headers
    for name, dtypes in others.items():
        if dtypes:
            same_dtypes = frozenset(dtypes.items())
            if same_dtypes not in made:
                made[same_dtypes] = _and_scales(_spelled_as(keymap, keys, dtypes), table, dtypes)
            planes.append(StateSet(name, made[same_dtypes]))
    return planes


def _rounds(keymap: KeyMap, keys: Sequence[str], dtype: torch.dtype) -> bool:
    """Return whether the files' dtype would round the stored values of a parameter."""
    in_files = {DTYPES[kind] for kind in {keymap.keys[key].dtype for key in keys}}
    return any(torch.promote_types(kind, dtype) != kind for kind in in_files)


def _keys(table: Table, keymap: KeyMap, param: str) -> list[str]:
    """Return the keys that hold a parameter, without second copies (a tied head stored twice)."""
    return list(dict.fromkeys(block.key for block in chosen(table[param], keymap.choice).blocks))


def _spelled_as(keymap: KeyMap, keys_of: Mapping[str, Sequence[str]], dtypes: Dtypes) -> KeyMap:
    """Return the key map of some parameters in other dtypes."""
    of_key: dict[str, set[torch.dtype]] = {}
    for param, dtype in dtypes.items():
        for key in keys_of[param]:
            of_key.setdefault(key, set()).add(dtype)
    with collector_paused():  # none of 100,000 new keys is garbage
        kept = [(key, of_key[key.name]) for key in keymap.keys.values() if key.name in of_key]
        keys = {key.name: Key(key.name, NAMES[widest(kinds)], key.shape, key.file) for key, kinds in kept}
    return KeyMap(keymap.choice, keys)


def _and_scales(keymap: KeyMap, table: Table, dtypes: Dtypes) -> KeyMap:
    """Add scales of 8-bit state, after the tensors of the same file."""
    keys = dict(keymap.keys)
    for name in dtypes:
        if name + SCALES in dtypes:
            [block], file = table[name + SCALES].layouts[0].blocks, keys[_keys(table, keymap, name)[0]].file
            keys[block.key] = Key(block.key, NAMES[dtypes[name + SCALES]], block.shape, file)
    return replace(keymap, keys=keys)


def with_zeros(values: Values, plane: StateSet, table: Table, stored: Values) -> Values:
    """Add zeros for parameters without a value that share a key with one: every byte of a file must be written.

    Example: a fused key holds q, k and v, and only q is trained. Its moments exist for q; k and v get zeros in the same
    tensor.
    """
    zeros, keys = dict[str, Tensor](), plane.keymap.keys
    for name, tensor in stored.stored.items():
        shared = [] if name in values else [key for key in _keys(table, plane.keymap, name) if key in keys]
        if shared:
            zeros[name] = tensor.new_zeros((), dtype=DTYPES[keys[shared[0]].dtype]).expand(tensor.shape)
    return values.with_tensors(zeros)


RANDOM, _STATES = "random", "states.safetensors"
RANDOM_FILE = f"{RANDOM}/{_STATES}"

Group = tuple[Values, list[StateSet]]


@dataclass(frozen=True)
class Keep:
    """The checkpoints that stay when a new one is complete: the `last`, and those at multiples of `every` steps."""

    last: int | None = None
    every: int | None = None


@dataclass(frozen=True)
class Content:
    """Everything that one save writes. `values`: this rank's shards by state set. `random`: states of this rank's
    generators.

    `export` describes the files next to the weights; its directory is the folder of checkpoints.
    """

    step: int
    spec: ShardingSpec
    planes: Sequence[StateSet]
    values: Mapping[str, Values]
    export: Export
    trainer: Mapping[str, Any]
    random: Mapping[str, bytes]
    about: Mapping[str, Any]
    keep: Keep = Keep()

    @property
    def folder(self) -> Path:
        """Return the folder of checkpoints."""
        return self.export.directory

    def all_planes(self, axes: Axes) -> list[StateSet]:
        """Return the state sets, with one for generator states: a row for each rank."""
        lengths = {name: len(state) for name, state in self.random.items()}
        return [*self.planes, random_plane(lengths, axes.world)]

    def num_bytes(self, axes: Axes) -> int:
        """Return the size of the checkpoint."""
        heads = [head for plane in self.all_planes(axes) for head in plane.keymap.headers.values()]
        return sum(head.file_bytes for head in heads)

    def by_values(self) -> Iterator[Group]:
        """Yield values with all state sets that they belong to: a weight is exchanged once, and written as weight and
        as master.

        For float32 weights there is no master. For bfloat16 files the float32 values are rounded while the weights are
        written, and written unchanged to `master`.
        """
        of: dict[int, list[StateSet]] = {}
        for plane in self.planes:
            of.setdefault(id(self.values[plane.name]), []).append(plane)
        for planes in of.values():
            stored = self.values[planes[0].name]
            yield with_zeros(stored, planes[0], self.spec.table, self.values[WEIGHTS]), planes

    def num_elements(self, axes: Axes, rank: int) -> int:
        """Return how many elements a rank writes, counting each value once."""
        local_numel = {param.name: rows_to_write(param, self.spec.rules, axes, rank).numel for param in self.spec.table}
        return sum(local_numel[name] for values, _ in self.by_values() for name in values)


def random_plane(lengths: Mapping[str, int], num_ranks: int) -> StateSet:
    """Return the state set of generator states of given lengths."""
    return StateSet(RANDOM, KeyMap({}, {name: Key(name, "U8", (num_ranks, n), _STATES) for name, n in lengths.items()}))
