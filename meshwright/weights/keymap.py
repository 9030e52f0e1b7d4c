"""The key map: how the files of a model spell it. It is recorded when a model is loaded, and used to export it."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError
from ..ops.part_sizes import part_size
from ..sharding import Block, Param, Table
from .quant_formats import BLOCK, PAYLOAD, Scale, also_plain, config_of
from .reader import Choice, carried_keys, chosen
from .safetensors_header import DTYPES, NAMES, TRAINABLE, num_bytes
from .source import Source

_MAX_FILE_BYTES = part_size(__name__, "_MAX_FILE_BYTES", 5_000_000_000, small=60_011)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


class Key(NamedTuple):  # a model has 37,000 of them, in four planes
    """One tensor of an export."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Head:
    """How a file begins, where each of its keys does, and how long it is."""

    data: bytes
    starts: Mapping[str, int]
    file_bytes: int


@dataclass(frozen=True)
class KeyMap:
    """Layout choice, dtype and file of every key."""

    choice: Choice
    keys: Mapping[str, Key]  # in the order of files and of their bytes
    carried: frozenset[str] = frozenset()  # keys that are not trained, and kept byte for byte
    fresh: frozenset[str] = frozenset()  # parameters that the source lacks: they are drawn
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by file
    source: Source | None = None  # the files; new weights have none
    scales: Mapping[str, Scale] = field(default_factory=dict)  # of keys that are written as 8-bit numbers
    quantization: Mapping[str, Any] = field(default_factory=dict)  # what `config.json` is to tell of them
    used: torch.dtype = torch.float32  # what products see of a weight, of which 8-bit numbers are made

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(k.file for k in self.keys.values()))

    @functools.cached_property
    def heads(self) -> dict[str, Head]:
        """By file. Those of 37,000 keys take a good part of a second, and are asked for more than once."""
        by_file: dict[str, list[Key]] = {}
        for key in self.keys.values():
            by_file.setdefault(key.file, []).append(key)
        return {file: head_of(keys, self.metadata.get(file, {})) for file, keys in by_file.items()}

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Where the bytes of every key begin in its file."""
        return {key: start for head in self.heads.values() for key, start in head.starts.items()}

    def file_dtype(self, param: Param) -> torch.dtype:
        """The narrowest dtype that holds all that the files say of a parameter: several keys may differ. A number times
        its scale needs float32."""
        keys, scaled = chosen(param, self.choice).keys, self.source.scales if self.source else ()
        return widest(
            torch.float32 if key in scaled else DTYPES[self.keys[key].dtype] for key in keys if key in self.keys
        )

    def stays_quantised(self, param: Param) -> bool:
        """Whether it can be kept as its files have it, in 8 bits: whole rows of matrices that are not turned."""
        source, blocks = self.source, chosen(param, self.choice).blocks
        if source is None or not param.low or param.matrix[1] == 1:
            return False
        scales = [source.scales.get(block.key) for block in blocks]
        kept = all(scale is not None and not scale.form for scale in scales)
        return kept and not any(block.turned or block.theirs.shape[-1] != param.matrix[1] for block in blocks)

    def only_read(self, param: Param) -> tuple[str, str] | None:
        """A key of a parameter in a format that is only read, and the format: it cannot be trained."""
        scales = self.source.scales if self.source is not None else {}
        found = [(key, scales[key].form) for key in chosen(param, self.choice).keys if key in scales]
        return next((each for each in found if each[1]), None)

    def recast(self, dtype: torch.dtype, exact: Container[str] = ()) -> KeyMap:
        """The same, with another dtype for every key that is trained. It must not round the keys in `exact`."""
        name = NAMES.get(dtype)
        if name not in TRAINABLE:
            choices = ", ".join(str(DTYPES[n]) for n in TRAINABLE)
            raise ConfigError(f"dtype={dtype!r} cannot hold weights; choose from {choices}")

        def named(key: Key) -> str:
            if key.name in self.carried and not (self.source and key.name in self.source.scales):
                return key.dtype
            return NAMES[torch.promote_types(DTYPES[key.dtype], dtype)] if key.name in exact else name

        keys = {k.name: k._replace(dtype=named(k)) for k in self.keys.values()}
        return replace(self, keys=keys)

    def as_source(self) -> KeyMap:
        """The same in the dtypes of the source, with its scales."""
        if self.source is None or not self.source.scales:
            return self
        scales = {key: scale for key, scale in self.source.scales.items() if key in self.keys}
        wanted = {*self.keys, *(beside for scale in scales.values() for beside in scale.beside)}
        wanted -= {key for key, scale in scales.items() if scale.packed}
        keys = {name: key for name, key in keys_of(self.source).items() if name in wanted}
        keys |= {name: self.keys[name] for name in self.keys if name in wanted and name not in keys}
        place = {file: number for number, file in enumerate(self.source.files)}
        ordered = sorted(keys.values(), key=lambda key: place[key.file])
        kept = [key for key, scale in scales.items() if scale.form or key in self.carried]
        carried = {*self.carried, *kept, *(beside for key in kept for beside in scales[key].beside)} & keys.keys()
        told = also_plain(self.source.quantization, _modules(key for key in ordered if key.name in self.fresh_keys))
        return replace(
            self, keys={key.name: key for key in ordered}, carried=frozenset(carried), scales=scales, quantization=told
        )

    @property
    def fresh_keys(self) -> set[str]:
        """Those that the source lacks."""
        return set(self.keys) - set(self.source.entries if self.source else ())

    def in_fp8(self, table: Table, left_out: Iterable[str] = ()) -> KeyMap:
        """The same with matrices in 8 bits, as Qwen writes them: of products, if blocks divide their sides, and those
        of all others of the same module, since readers join them. `left_out`: parameters that stay as they are."""
        made_of = blocks_by_key(table, self.choice)
        low = [key for key, parts in made_of.items() if key in self.keys and all(param.low for param, _ in parts)]
        ragged = {_parent(key) for key in low if any(size % BLOCK[0] for size in self.keys[key].shape[-2:])}
        apart = set(left_out)
        ragged |= {_parent(key) for key in low if any(param.name in apart for param, _ in made_of[key])}
        scales = {key: Scale(key + "_scale_inv", BLOCK) for key in low if _parent(key) not in ragged}
        keys: dict[str, Key] = {}
        for name, key in self.keys.items():
            keys[name] = key._replace(dtype=PAYLOAD) if name in scales else key
            if name in scales:
                keys[scales[name].key] = Key(scales[name].key, "F32", scales[name].grid(key.shape), key.file)
        plain = ["lm_head", *_modules(key for key in self.keys.values() if key.name not in scales)]
        return replace(self, keys=keys, scales=scales, quantization=config_of(list(dict.fromkeys(plain))))

    def without(self, name: str) -> KeyMap:
        """The same, less one key: header, index and their sizes follow."""
        keys = {k.name: k for k in self.keys.values() if k.name != name}
        return replace(self, keys=keys, carried=self.carried - {name})


def _parent(key: str) -> str:
    """The module of which a key's own is a part: attention, an MLP, the experts."""
    return key.removesuffix(".weight").rpartition(".")[0]


def _modules(keys: Iterable[Key]) -> list[str]:
    """The modules of matrices. Experts are one module."""
    matrices = [key.name for key in keys if len(key.shape) > 1]
    names = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    experts = [f"{name.split('.experts.')[0]}.experts" for name in matrices if ".experts." in name]
    return list(dict.fromkeys([*names, *experts]))


def keys_of(source: Source) -> dict[str, Key]:
    return {e.key: Key(e.key, e.dtype, e.shape, e.file) for e in source.entries.values()}


def _values_of(source: Source, dtype: torch.dtype) -> dict[str, Key]:
    """Its keys. Matrices that have scales are in `dtype`, without them."""
    beside = {key for scale in source.scales.values() for key in scale.beside}
    keys = {name: key for name, key in keys_of(source).items() if name not in beside}
    return {name: key._replace(dtype=NAMES[dtype]) if name in source.scales else key for name, key in keys.items()}


def of_source(table: Table, source: Source, choice: Choice, fresh: Sequence[str], dtype: torch.dtype) -> KeyMap:
    """As the source has it; in `dtype` where that is numbers and scales. Parameters that it lacks (a new value head) go
    beside its last key."""
    keys = _values_of(source, dtype)
    carried = [key for key in carried_keys(table, source, choice) if key in keys]
    last = list(keys.values())[-1]
    for name in fresh:
        for key, shape in chosen(table[name], choice).keys.items():
            keys[key] = Key(key, last.dtype if last.dtype in ("F32", "F16", "BF16") else "F32", shape, last.file)
    place = {file: number for number, file in enumerate(source.files)}
    ordered = sorted(keys.values(), key=lambda k: place[k.file])
    by_name = {k.name: k for k in ordered}
    return KeyMap(choice, by_name, frozenset(carried), frozenset(fresh), source.metadata, source)


def of_table(table: Table, dtype: torch.dtype, choice: Choice | None = None) -> KeyMap:
    """For new weights: in `dtype`, except float32 parameters; in the layouts of `choice`, or each group's first."""
    choice = {**{group: names[0] for group, names in table.groups.items() if group}, **(choice or {})}
    shapes = [(k, s, p) for p in table for k, s in chosen(p, choice).keys.items()]
    unique = {k: (s, "F32" if p.float32 else NAMES[dtype]) for k, s, p in shapes}
    sizes = {k: prod(s) * DTYPES[d].itemsize for k, (s, d) in unique.items()}
    files = _spread(sizes)
    return KeyMap(
        choice,
        {k: Key(k, d, s, files[k]) for k, (s, d) in unique.items()},
        metadata={file: {"format": "pt"} for file in files.values()},
    )


def _spread(sizes: Mapping[str, int]) -> dict[str, str]:
    """One file, or files of at most 5 GB with the usual names."""
    numbers, filled, number = {}, 0, 0
    for key, size in sizes.items():
        if filled and filled + size > _MAX_FILE_BYTES:
            filled, number = 0, number + 1
        numbers[key], filled = number, filled + size
    if number == 0:
        return dict.fromkeys(sizes, "model.safetensors")
    return {k: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for k, n in numbers.items()}


def blocks_by_key(table: Table, choice: Choice) -> dict[str, list[tuple[Param, Block]]]:
    """What every key is made of."""
    out: dict[str, list[tuple[Param, Block]]] = {}
    for param in table:
        layout = chosen(param, choice)
        for block in (*layout.blocks, *layout.copies):
            out.setdefault(block.key, []).append((param, block))
    return out


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def head_of(keys: Iterable[Key], metadata: Mapping[str, str]) -> Head:
    """A safetensors header whose tensors lie in the order of `keys`, without a gap."""
    fields, starts, at = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else [], dict[str, int](), 0
    for key in keys:  # as json.dumps would write a dict, which takes three times as long to make: keys are many
        end, shape = at + key.num_bytes, ",".join(map(str, key.shape))
        fields.append(f'{_json(key.name)}:{{"dtype":"{key.dtype}","shape":[{shape}],"data_offsets":[{at},{end}]}}')
        starts[key.name], at = at, end
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text
    return Head(data, {name: len(data) + start for name, start in starts.items()}, len(data) + at)
