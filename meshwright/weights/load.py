"""From a source straight into pieces: choose the layouts, check every key, then read the bytes this rank owns."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from ..errors import BrokenFile, LoadError, MismatchedKey, MissingKey, UnknownKey
from ..layout import Block, Box, Layout, Param, Piece, Table, interval
from .source import DTYPES, TRAINABLE, Entry, Source

Choice = Mapping[str, str]  # group -> layout name
_STAGED_ELEMENTS = 4 << 20  # a read goes through a buffer of this many elements at most


def chosen(param: Param, choice: Choice) -> Layout:
    """The layout of a parameter under a choice."""
    if len(param.layouts) == 1:
        return param.layouts[0]
    return next(layout for layout in param.layouts if layout.name == choice[param.group])


def choose(table: Table, source: Source) -> dict[str, str]:
    """Exactly one layout of each group matches the headers; shapes are never looked at to decide."""
    choice = {}
    for group, names in table.groups.items():
        if not group:
            continue
        members = [p for p in table if p.group == group]
        spelled = {name: [k for p in members for k in chosen(p, {group: name}).keys] for name in names}
        whole = [name for name in names if all(k in source.entries for k in spelled[name])]
        whole = [n for n in whole if not any(set(spelled[n]) < set(spelled[m]) for m in whole)]  # the fuller one
        if len(whole) > 1:
            raise LoadError(
                f"the source holds the {group} in {len(whole)} ways: {', '.join(whole)}; remove all but one"
            )
        if not whole:
            raise MissingKey(_nearest(group, spelled, source))
        choice[group] = whole[0]
    return choice


def _nearest(group: str, spelled: Mapping[str, list[str]], source: Source) -> str:
    lacking = {name: [k for k in keys if k not in source.entries] for name, keys in spelled.items()}
    name = min(lacking, key=lambda n: len(lacking[n]) / max(1, len(spelled[n])))
    return (
        f"{source.directory} holds the {group} in none of the layouts {', '.join(spelled)}; nearest is {name!r}, "
        f"which lacks {len(lacking[name])} of {len(spelled[name])} keys, first {lacking[name][0]}"
    )


def carried_keys(table: Table, source: Source, choice: Choice) -> list[str]:
    """Keys that are kept and not trained. Every other key must be one of ours: neither more nor fewer."""
    ours = {k for p in table for k in chosen(p, choice).keys}
    rest = [k for k in source.entries if k not in ours]
    unknown = [k for k in rest if not any(fnmatch.fnmatchcase(k, pattern) for pattern in table.carried)]
    if unknown:
        raise UnknownKey(
            f"{source.entries[unknown[0]].file} holds {unknown[0]}, which no parameter of the model is made of "
            f"({len(unknown)} such keys); is config.json of another model?"
        )
    return rest


def check_keys(table: Table, source: Source, choice: Choice, fresh: Iterable[str] = ()) -> None:
    """Every key of ours is there, in its shape, in a trainable dtype. `fresh`: parameters not in the source."""
    for param in table:
        if param.name in set(fresh):
            continue
        for key, shape in chosen(param, choice).keys.items():
            entry = source.entries.get(key)
            if entry is None:
                raise MissingKey(f"{source.directory} has no {key}, of which {param.name} {param.shape} is made")
            if entry.shape != shape:
                raise MismatchedKey(f"{entry.file}: {key} is {entry.shape}, but {param.name} needs {shape}")
            if entry.dtype not in TRAINABLE:
                raise MismatchedKey(
                    f"{entry.file}: {key} is {entry.dtype}; {param.name} needs {' or '.join(TRAINABLE)}"
                )


@dataclass
class Reader:
    """Reads boxes of source tensors, and counts the bytes."""

    source: Source
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def fill(self, param: Param, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Every stored element of a piece, from the blocks that its boxes meet."""
        for box, view in piece.views(stored):
            for block in layout.blocks:
                common = block.ours.meet(box)
                if common is not None:
                    self._copy(block, common, view[common.within(box).slices])

    def check_copies(self, param: Param, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Keys that hold a parameter once more must hold the same (a tied head stored twice)."""
        again = torch.empty_like(stored)
        for copy in layout.copies:
            for box, view in piece.views(again):
                self._copy(copy, box, view)
            if not torch.equal(again, stored):
                raise LoadError(
                    f"{copy.key} and {layout.blocks[0].key} differ, but config.json ties them "
                    "(tie_word_embeddings); set it to false or store one of them"
                )

    def _copy(self, block: Block, common: Box, into: Tensor) -> None:
        entry = self.source.entries[block.key]
        for lo in range(0, common.size, _STAGED_ELEMENTS):
            for part in interval(common, lo, min(lo + _STAGED_ELEMENTS, common.size)):
                into[part.within(common).slices].copy_(self.read(entry, block, part))

    def read(self, entry: Entry, block: Block, part: Box) -> Tensor:
        """A box of ours, in the dtype of the source."""
        dtype = DTYPES[entry.dtype]
        out = torch.empty(part.shape, dtype=dtype)
        whole = block.view(torch.empty(entry.shape, device="meta"))
        wanted = whole[part.within(block.ours).slices]
        raw = out.view(-1).view(torch.uint8).numpy().data
        at = 0
        for offset, length in runs(wanted.shape, wanted.stride(), int(wanted.storage_offset())):
            num = length * dtype.itemsize
            self._pread(entry, raw[at : at + num], entry.start + offset * dtype.itemsize)
            at += num
        return out

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> None:
        if entry.file not in self._open:
            self._open[entry.file] = os.open(self.source.directory / entry.file, os.O_RDONLY)
        fd = self._open[entry.file]
        while into:
            num = os.preadv(fd, [into], offset)
            if num == 0:
                raise BrokenFile(f"{entry.file} ended at byte {offset} inside {entry.key}; it shrank while it was read")
            self.num_bytes += num
            into, offset = into[num:], offset + num


def runs(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a strided view in row-major order, as (offset, length) in elements."""
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == length):
        outer -= 1
        length *= shape[outer]
    if prod(shape) == 0:
        return
    for index in product(*(range(n) for n in shape[:outer])):
        yield start + sum(i * s for i, s in zip(index, strides, strict=False)), length
