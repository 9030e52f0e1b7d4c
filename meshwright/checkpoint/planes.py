"""A checkpoint has planes: the weights as their source has them, and beside them what training needs more.

Every plane spells its values as the weights are spelled: the same keys, shapes and files, in a folder and a dtype of
its own. So one algorithm writes and reads them all, and any reader of safetensors can look at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layout import Table
from ..weights import DTYPES, NAMES, KeyMap, chosen, widest

WEIGHTS, MASTER, FIRST, SECOND = "weights", "master", "exp_avg", "exp_avg_sq"
Dtypes = Mapping[str, torch.dtype]  # by parameter, of the whole model


@dataclass(frozen=True)
class Plane:
    name: str
    keymap: KeyMap

    @property
    def folder(self) -> str:
        return "" if self.name == WEIGHTS else self.name


def planes_of(table: Table, keymap: KeyMap, stored: Dtypes, moments: Dtypes) -> list[Plane]:
    """`stored`: in which dtype each parameter is kept; `moments`: those of the optimizer, of what is trained."""
    rounded = {name: dtype for name, dtype in stored.items() if _rounds(keymap, _keys(table, keymap, name), dtype)}
    others = {MASTER: rounded, FIRST: moments, SECOND: moments}
    made = (Plane(name, _beside(name, table, keymap, dtypes)) for name, dtypes in others.items() if dtypes)
    return [Plane(WEIGHTS, keymap), *made]


def _rounds(keymap: KeyMap, keys: Sequence[str], dtype: torch.dtype) -> bool:
    """Whether the files cannot hold all that is stored of a parameter."""
    in_files = [DTYPES[keymap.keys[key].dtype] for key in keys]
    return any(torch.promote_types(kind, dtype) != kind for kind in in_files)


def _keys(table: Table, keymap: KeyMap, param: str) -> list[str]:
    """Those that hold a parameter; not those that hold it once more."""
    return list(dict.fromkeys(block.key for block in chosen(table[param], keymap.choice).blocks))


def _beside(folder: str, table: Table, keymap: KeyMap, dtypes: Dtypes) -> KeyMap:
    """The keys of some parameters, in files of a folder of their own."""
    of_key: dict[str, list[torch.dtype]] = {}
    for param, dtype in dtypes.items():
        for key in _keys(table, keymap, param):
            of_key.setdefault(key, []).append(dtype)
    kept = [key for key in keymap.keys.values() if key.name in of_key]
    keys = {k.name: replace(k, dtype=NAMES[widest(of_key[k.name])], file=f"{folder}/{k.file}") for k in kept}
    return KeyMap(keymap.choice, keys)


def with_zeros(
    values: Mapping[str, Tensor], plane: Plane, table: Table, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Also of parameters that have no value for a plane, but a part of its keys: every byte of a file is written."""
    out = dict(values)
    for name, tensor in stored.items():
        if name not in values and not plane.keymap.keys.keys().isdisjoint(_keys(table, plane.keymap, name)):
            out[name] = tensor.new_zeros(()).expand(tensor.shape)
    return out
