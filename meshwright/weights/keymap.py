"""The key map: keys, dtypes, layouts and files of a model's parameters. It is recorded at load, and used for export.

Export follows what was read, not the model class. Qwen checkpoints of one architecture differ: experts per expert or
fused, tied heads stored or not (torchtune#2669), float32 `A_log` next to bfloat16 matrices (ms-swift#9412), MTP experts
fused in one family and separate in the next (NeMo-Automodel#2595). Inference engines expect the key names of the hub
(verl#6896).
"""

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
from ..ops.codings import Coding
from ..ops.part_sizes import part_size
from ..sharding import Block, Param, Table
from .quant_formats import BLOCK, PAYLOAD, Scale, also_plain, as_in_file, config_of
from .reader import Choice, carried_keys, chosen
from .safetensors_header import DTYPES, NAMES, TRAINABLE, num_bytes
from .source import Source

ADAPTERS = "adapters.safetensors"  # a separate file: readers of the base expect no adapter keys
_MAX_FILE_BYTES = part_size(__name__, "_MAX_FILE_BYTES", 5_000_000_000, small=60_011)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that all of these promote to."""
    return functools.reduce(torch.promote_types, dtypes)


class Key(NamedTuple):
    """One tensor of an export. A tuple, because Qwen3-235B has 37,000 keys, in four state sets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor in a file."""
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file, the offset of each tensor, and the size of the file."""

    header_bytes: bytes
    starts: Mapping[str, int]
    file_bytes: int


@dataclass(frozen=True)
class KeyMap:
    """The layout choice, and the dtype and file of every key.

    Example: for experts that the source has as one tensor, `choice["experts"] == "fused"`, and `keys` has
    `...experts.gate_up_proj [E, 2F, D]`; for a source with a key for each expert and projection the same parameters
    have E x 3 keys. The model and its shards are the same in both cases.
    """

    choice: Choice
    keys: Mapping[str, Key]  # in the order of files, and of bytes within a file
    carried: frozenset[str] = frozenset()  # keys that the model lacks (MTP): copied byte for byte
    fresh: frozenset[str] = frozenset()  # parameters that the source lacks (a value head): initialised
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by file
    source: Source | None = None  # None for new weights
    scales: Mapping[str, Scale] = field(default_factory=dict)  # of keys that are written in FP8
    quantization: Mapping[str, Any] = field(default_factory=dict)  # quantization_config of the export
    used: torch.dtype = torch.float32  # the dtype of weights in matmuls, from which they are quantised

    @property
    def files(self) -> list[str]:
        """Return the file names in order."""
        return list(dict.fromkeys(k.file for k in self.keys.values()))

    @functools.cached_property
    def headers(self) -> dict[str, FileHeader]:
        """Return the header of each file. Cached, because 37,000 keys take a large part of a second."""
        by_file: dict[str, list[Key]] = {}
        for key in self.keys.values():
            by_file.setdefault(key.file, []).append(key)
        return {file: file_header(keys, self.metadata.get(file, {})) for file, keys in by_file.items()}

    @functools.cached_property
    def starts(self) -> dict[str, int]:
        """Return the offset of each key's bytes in its file."""
        return {key: start for header in self.headers.values() for key, start in header.starts.items()}

    def file_dtype(self, param: Param) -> torch.dtype:
        """Return the narrowest dtype that holds a parameter's values in the files. A code times its scale needs
        float32.

        Parameters are sent between ranks in this dtype, and compared with the stored dtype to decide whether an export
        or a state set would round.
        """
        keys, scaled = chosen(param, self.choice).keys, self.source.scales if self.source else ()
        return widest(
            torch.float32 if key in scaled else DTYPES[self.keys[key].dtype] for key in keys if key in self.keys
        )

    def coding(self, param: Param) -> Coding | None:
        """Return the coding in which a frozen parameter stays as in its files: whole rows of matrices in 8 or 4 bits
        that are not transposed. None if its values are stored.
        """
        source, blocks = self.source, chosen(param, self.choice).blocks
        # `low`: a matmul uses the parameter, so it can stay in codes. Embeddings are looked up and norms are vectors.
        if source is None or not param.low or param.matrix[1] == 1:
            return None
        scales = [source.scales.get(block.key) for block in blocks]
        codings = {scale.coding if scale is not None else None for scale in scales}
        if len(codings) > 1 or any(block.turned or block.source.shape[-1] != param.matrix[1] for block in blocks):
            return None
        return codings.pop()

    def only_read(self, param: Param) -> tuple[str, str] | None:
        """Return a key of a parameter in a read-only format (4 bits, MX), and the format; None if the parameter can be
        trained."""
        scales = self.source.scales if self.source is not None else {}
        read_only = [(key, scales[key].form) for key in chosen(param, self.choice).keys if key in scales]
        return next((each for each in read_only if each[1]), None)

    def recast(self, dtype: torch.dtype, exact: Container[str] = ()) -> KeyMap:
        """Return the key map with another dtype for trained keys. Keys in `exact` (float32 parameters) are widened,
        never rounded.

        Exact keys are promoted, not replaced: `dtype=bfloat16` leaves float32 `A_log` in float32, `dtype=float64`
        widens it.
        """
        # `dtype=` of an export promises a reader this dtype. Two kinds of keys are exempt: carried keys, which keep the
        # source's bytes, and float32 parameters (`A_log`, router bias), which only ever get wider.
        name = NAMES.get(dtype)
        if name not in TRAINABLE:
            choices = ", ".join(str(DTYPES[n]) for n in TRAINABLE)
            raise ConfigError(f"dtype={dtype!r} is not a dtype of weights; choose from {choices}")

        def named(key: Key) -> str:
            if key.name in self.carried and not (self.source and key.name in self.source.scales):
                return key.dtype
            return NAMES[torch.promote_types(DTYPES[key.dtype], dtype)] if key.name in exact else name

        keys = {k.name: k._replace(dtype=named(k)) for k in self.keys.values()}
        return replace(self, keys=keys)

    def as_source(self) -> KeyMap:
        """Return the key map in the dtypes of the source, FP8 scales included."""
        if self.source is None or not self.source.scales:
            return self
        # Restore quantised keys with their scales, in the order of the source's files. Packed 4-bit matrices have no
        # key of their own there, only their codes.
        scales = {key: scale for key, scale in self.source.scales.items() if key in self.keys}
        key_names = {*self.keys, *(companion for scale in scales.values() for companion in scale.companion_keys)}
        key_names -= {key for key, scale in scales.items() if scale.packed}
        entries = (as_in_file(entry) for entry in self.source.entries.values() if entry.key in key_names)
        keys = {e.key: Key(e.key, e.dtype, e.shape, e.file) for e in entries}
        keys |= {name: self.keys[name] for name in self.keys if name in key_names and name not in keys}
        file_order = {file: number for number, file in enumerate([*self.source.files, ADAPTERS])}
        ordered = sorted(keys.values(), key=lambda key: file_order[key.file])
        # Read-only formats and untrained matrices are copied with everything that belongs to them.
        copied = [key for key, scale in scales.items() if scale.form or key in self.carried]
        carried = {
            *self.carried,
            *copied,
            *(each for key in copied for each in scales[key].companion_keys),
        } & keys.keys()
        fresh = _modules(key for key in ordered if key.name in self.fresh_keys)
        quantization = also_plain(self.source.quantization, fresh)
        ordered_keys = {key.name: key for key in ordered}
        return replace(self, keys=ordered_keys, carried=frozenset(carried), scales=scales, quantization=quantization)

    @property
    def fresh_keys(self) -> set[str]:
        """Return the keys that the source lacks."""
        return set(self.keys) - set(self.source.entries if self.source else ())

    def in_fp8(self, table: Table, left_out: Iterable[str] = ()) -> KeyMap:
        """Return the key map with weights in block-quantised FP8, as Qwen publishes them.

        A matrix is quantised if a matmul uses it and 128 divides its sides, and if the same is true of all matrices of
        its module: inference engines fuse q, k and v (gate and up) and need one format for them. `left_out`: parameters
        that stay in their dtype.
        """
        made_of, excluded = blocks_by_key(table, self.choice), set(left_out)
        fp8_keys = [key for key, parts in made_of.items() if key in self.keys and all(param.low for param, _ in parts)]
        plain = {_parent(key) for key in fp8_keys if any(size % BLOCK[0] for size in self.keys[key].shape[-2:])}
        plain |= {_parent(key) for key in fp8_keys if any(param.name in excluded for param, _ in made_of[key])}
        scales = {key: Scale(key + "_scale_inv", BLOCK) for key in fp8_keys if _parent(key) not in plain}
        keys: dict[str, Key] = {}
        for name, key in self.keys.items():
            keys[name] = key._replace(dtype=PAYLOAD) if name in scales else key
            if name in scales:
                keys[scales[name].key] = Key(scales[name].key, "F32", scales[name].grid(key.shape), key.file)
        not_converted = ["lm_head", *_modules(key for key in self.keys.values() if key.name not in scales)]
        return replace(self, keys=keys, scales=scales, quantization=config_of(list(dict.fromkeys(not_converted))))

    def of_adapters(self) -> KeyMap:
        """Return the key map of only the adapters."""
        keys = {k.name: k for k in self.keys.values() if k.file == ADAPTERS}
        return replace(self, keys=keys, carried=frozenset(), scales={}, quantization={})

    def of_base(self) -> KeyMap:
        """Return the key map of everything except adapters."""
        if all(key.file != ADAPTERS for key in self.keys.values()):
            return self
        return replace(self, keys={k.name: k for k in self.keys.values() if k.file != ADAPTERS})

    def without(self, name: str) -> KeyMap:
        """Return the key map without one key."""
        keys = {k.name: k for k in self.keys.values() if k.name != name}
        return replace(self, keys=keys, carried=self.carried - {name})


def _parent(key: str) -> str:
    """Return the module whose matrices are fused by readers: attention, an MLP, the experts."""
    return key.removesuffix(".weight").rpartition(".")[0]


def _modules(keys: Iterable[Key]) -> list[str]:
    """Return the modules of matrices, for `modules_to_not_convert`. All experts of a layer are one module."""
    matrices = [key.name for key in keys if len(key.shape) > 1]
    names = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    experts = [f"{name.split('.experts.')[0]}.experts" for name in matrices if ".experts." in name]
    return list(dict.fromkeys([*names, *experts]))


def keys_of(source: Source) -> dict[str, Key]:
    """Return the keys of a source as it has them."""
    return {e.key: Key(e.key, e.dtype, e.shape, e.file) for e in source.entries.values()}


def _value_keys(source: Source, dtype: torch.dtype) -> dict[str, Key]:
    """Return the keys of a source after dequantising: without scales, with matrices in `dtype`."""
    companions = {key for scale in source.scales.values() for key in scale.companion_keys}
    keys = {name: key for name, key in keys_of(source).items() if name not in companions}
    return {name: key._replace(dtype=NAMES[dtype]) if name in source.scales else key for name, key in keys.items()}


def of_source(table: Table, source: Source, choice: Choice, fresh: Sequence[str], dtype: torch.dtype) -> KeyMap:
    """Return the key map of a loaded model: that of the source, with `dtype` for quantised keys. New parameters go to
    the file of the last key."""
    keys = _value_keys(source, dtype)
    carried = [key for key in carried_keys(table, source, choice) if key in keys]
    # A fresh value head gets the dtype of the last tensor of the files, usually bfloat16, unless that tensor is
    # quantised or integer.
    last_key = list(keys.values())[-1]
    last_dtype = last_key.dtype if last_key.dtype in ("F32", "F16", "BF16") else "F32"
    for name in fresh:
        dtype_and_file = ("F32", ADAPTERS) if table[name].adapter else (last_dtype, last_key.file)
        for key, shape in chosen(table[name], choice).keys.items():
            keys[key] = Key(key, dtype_and_file[0], shape, dtype_and_file[1])
    file_order = {file: number for number, file in enumerate([*source.files, ADAPTERS])}
    ordered = sorted(keys.values(), key=lambda k: file_order[k.file])
    by_name = {k.name: k for k in ordered}
    metadata = {**source.metadata, ADAPTERS: {"format": "pt"}}
    return KeyMap(choice, by_name, frozenset(carried), frozenset(fresh), metadata, source)


def of_table(table: Table, dtype: torch.dtype, choice: Choice | None = None) -> KeyMap:
    """Return the key map of new weights: in `dtype` except for float32 parameters, in the layouts of `choice` or else
    the first layout of each group.
    """
    choice = {**{group: names[0] for group, names in table.groups.items() if group}, **(choice or {})}
    # Several parameters may share a key (q, k, v of a fused tensor); each key is counted once.
    shapes = [(k, s, p) for p in table for k, s in chosen(p, choice).keys.items()]
    unique = {k: (s, "F32" if p.float32 or p.adapter else NAMES[dtype]) for k, s, p in shapes}
    adapters = {k for k, _, p in shapes if p.adapter}
    sizes = {k: prod(s) * DTYPES[d].itemsize for k, (s, d) in unique.items() if k not in adapters}
    files = {**_assign_files(sizes), **dict.fromkeys(adapters, ADAPTERS)}
    return KeyMap(
        choice,
        {k: Key(k, d, s, files[k]) for k, (s, d) in unique.items()},
        metadata={file: {"format": "pt"} for file in files.values()},
    )


def _assign_files(sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the file of each key: one file, or files of at most 5 GB under the usual names."""
    file_numbers, file_bytes, number = {}, 0, 0
    for key, size in sizes.items():
        if file_bytes and file_bytes + size > _MAX_FILE_BYTES:
            file_bytes, number = 0, number + 1
        file_numbers[key], file_bytes = number, file_bytes + size
    if number == 0:
        # The names that `save_pretrained` uses, so that every reader of Hugging Face directories finds the files.
        return dict.fromkeys(sizes, "model.safetensors")
    return {k: f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for k, n in file_numbers.items()}


def blocks_by_key(table: Table, choice: Choice) -> dict[str, list[tuple[Param, Block]]]:
    """Return the parameters and blocks that each key is made of.

    One key may be made of several parameters (a fused qkv), and one parameter may be in several keys (experts, a copy
    of a tied head).
    """
    out: dict[str, list[tuple[Param, Block]]] = {}
    for param in table:
        layout = chosen(param, choice)
        for block in (*layout.blocks, *layout.copies):
            out.setdefault(block.key, []).append((param, block))
    return out


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def file_header(keys: Iterable[Key], metadata: Mapping[str, str]) -> FileHeader:
    """Return a safetensors header with tensors in the order of `keys`, without gaps.

    Headers are padded with spaces to a multiple of 8, so that tensors of 8-byte elements are aligned in the file, as
    the format asks.
    """
    fields, starts, at = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else [], dict[str, int](), 0
    # The text that json.dumps would write. Formatting it directly takes a third of the time, for 37,000 keys.
    for key in keys:
        end, shape = at + key.num_bytes, ",".join(map(str, key.shape))
        fields.append(f'{_json(key.name)}:{{"dtype":"{key.dtype}","shape":[{shape}],"data_offsets":[{at},{end}]}}')
        starts[key.name], at = at, end
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text
    return FileHeader(data, {name: len(data) + start for name, start in starts.items()}, len(data) + at)
