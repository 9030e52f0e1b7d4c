"""From a source straight into pieces: choose the layouts, check every key, then read the bytes this rank stores."""

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
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Layout, Param, Piece, Table, interval
from .checksums import Checks
from .quant_formats import BYTES, NUMBERS, PACKED, Places, dequantise, scales_to_float, unpacked
from .safetensors_header import DTYPES, TRAINABLE, Entry
from .source import Source

Choice = Mapping[str, str]  # group -> layout name
# a read goes through a buffer of this many elements at most
_STAGED_ELEMENTS = part_size(__name__, "_STAGED_ELEMENTS", 1 << 20, small=1001)
# Where tp cuts columns, a rank wants a strip of every row. Above this length a strip is read alone; shorter ones are
# read with all that lies between them, since a file system serves one long read faster than a thousand short ones.
_SHORT_BYTES = part_size(__name__, "_SHORT_BYTES", 64 << 10, small=61)
_SPAN_BYTES = part_size(__name__, "_SPAN_BYTES", 8 << 20, small=601)  # of strips that are read together


def chosen(param: Param, choice: Choice) -> Layout:
    """The layout of a parameter under a choice."""
    if len(param.layouts) == 1:
        return param.layouts[0]
    return next(layout for layout in param.layouts if layout.name == choice[param.group])


def choose(table: Table, source: Source) -> dict[str, str]:
    """Exactly one layout of each group matches the headers. Shapes decide only between layouts of the same keys: of all
    keys of the group together, since one of them may be square."""
    choice = {}
    for group, names in table.groups.items():
        if not group:
            continue
        members = [p for p in table if p.group == group]
        spelled = {name: [k for p in members for k in chosen(p, {group: name}).keys] for name in names}
        whole = [name for name in names if all(k in source.entries for k in spelled[name])]
        whole = [n for n in whole if not any(set(spelled[n]) < set(spelled[m]) for m in whole)]  # the fuller one
        if len(whole) > 1 and len({frozenset(spelled[name]) for name in whole}) == 1:
            whole = [name for name in whole if _fits(members, {group: name}, source)] or whole[:1]
        if len(whole) > 1:
            raise LoadError(
                f"the source holds the {group} in {len(whole)} ways: {', '.join(whole)}; remove all but one"
            )
        if not whole:
            raise MissingKey(_nearest(group, spelled, source))
        choice[group] = whole[0]
    return choice


def _fits(members: Iterable[Param], choice: Choice, source: Source) -> bool:
    keys = [each for param in members for each in chosen(param, choice).keys.items()]
    return all(source.entries[key].shape == shape for key, shape in keys)


def _nearest(group: str, spelled: Mapping[str, list[str]], source: Source) -> str:
    lacking = {name: [k for k in keys if k not in source.entries] for name, keys in spelled.items()}
    name = min(lacking, key=lambda n: len(lacking[n]) / max(1, len(spelled[n])))
    return (
        f"{source.directory} holds the {group} in none of the layouts {', '.join(spelled)}; nearest is {name!r}, "
        f"which lacks {len(lacking[name])} of {len(spelled[name])} keys, first {lacking[name][0]}; "
        "fetch the files that hold them, or correct config.json"
    )


def carried_keys(table: Table, source: Source, choice: Choice) -> list[str]:
    """Keys that are kept and not trained. Every other key must be one of ours: neither more nor fewer."""
    ours = {k for p in table for k in chosen(p, choice).keys}
    ours |= {beside for key in ours if key in source.scales for beside in source.scales[key].beside}
    rest = [k for k in source.entries if k not in ours]
    known = {beside for scale in source.scales.values() for beside in scale.beside}
    unknown = [
        k for k in rest if k not in known and not any(fnmatch.fnmatchcase(k, pattern) for pattern in table.carried)
    ]
    if unknown:
        raise UnknownKey(
            f"{source.entries[unknown[0]].file} holds {unknown[0]}, which no parameter of the model is made of "
            f"({len(unknown)} such keys); is config.json of another model?"
        )
    return rest


def check_keys(table: Table, source: Source, choice: Choice, fresh: Iterable[str], stored: torch.dtype) -> None:
    """Every key of ours is there, in its shape, in a dtype that is stored without rounding.

    `fresh`: parameters not in the source. `stored`: the dtype in which parameters are kept.
    """
    for param in table:
        if param.name in set(fresh):
            continue
        for key, shape in chosen(param, choice).keys.items():
            entry = source.entries.get(key)
            if entry is None:
                raise MissingKey(
                    f"{source.directory} has no {key}, of which {param.name} {param.shape} is made; fetch the file "
                    "that holds it, or correct config.json"
                )
            if entry.shape != shape:
                raise MismatchedKey(
                    f"{entry.file}: {key} is {entry.shape}, but {param.name} needs {shape} "
                    f"({', '.join(f'{dim}={size}' for dim, size in param.dims.items())}); correct config.json, or "
                    "fetch the file of this model"
                )
            if entry.dtype not in TRAINABLE and key not in source.scales:
                raise MismatchedKey(
                    f"{entry.file}: {key} is {entry.dtype}; {param.name} needs {' or '.join(TRAINABLE)}; "
                    "fetch the unquantised model, or convert the file"
                )
            if entry.dtype == "F64" and stored != torch.float64:
                raise MismatchedKey(
                    f"{entry.file}: {key} is F64 and would be rounded to {stored}; "
                    "load it with dtype=torch.float64, or convert the file"
                )


@dataclass
class Reader:
    """Reads boxes of source tensors through one small buffer, and counts the bytes.

    No threads: converting and first touching the memory takes most of the time, and the ranks of a node do that side
    by side.
    """

    source: Source
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._open: dict[str, int] = {}
        self._checks = Checks(self.source.directory, self.source.extents)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scales = "", range(0), torch.empty(0, device="cpu")  # of the rows of blocks that were read last
        self._divisors: dict[str, Tensor] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)

    def fill(self, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Every stored element of a piece, from the blocks that its boxes meet: values, or numbers in 8 bits."""
        for box, view in piece.views(stored):
            for block in layout.blocks:
                common = block.ours.meet(box)
                if common is not None:
                    self._fill_box(block, common, view[common.within(box).slices])

    def _fill_box(self, block: Block, common: Box, ours: Tensor) -> None:
        """Straight into its memory where it lies in the file as it lies there; else through the buffer."""
        entry = self.source.entries[block.key]
        wanted = _view(block, entry, common)
        if ours.dtype == BYTES and block.key in self.source.scales:
            ours = ours.view(NUMBERS)
        if DTYPES.get(entry.dtype) == ours.dtype and wanted.is_contiguous() and ours.is_contiguous() and ours.is_cpu:
            into = ours.view(-1).view(torch.uint8)
            self._read_into(entry, into, int(wanted.storage_offset()) * ours.element_size())
            return
        for into, found in self._staged(block, common, ours):
            into.copy_(found)

    def check_copies(self, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Keys that hold a parameter once more must hold the same (a tied head stored twice)."""
        first = self._kind(layout.blocks[0].key)
        for copy in (copy for copy in layout.copies if copy.key in self.source.entries):
            both = (first, self._kind(copy.key))
            narrow = min(both, key=lambda dtype: dtype.itemsize)  # a trained one is rounded to it in one of the two
            for box, view in piece.views(stored):
                if not all(torch.equal(a.to(b.device, narrow), b.to(narrow)) for a, b in self._staged(copy, box, view)):
                    raise LoadError(
                        f"{copy.key} and {layout.blocks[0].key} differ, but config.json ties them "
                        "(tie_word_embeddings); set it to false or store one of them"
                    )

    def _kind(self, key: str) -> torch.dtype:
        """Of the values of a key."""
        return torch.float32 if key in self.source.scales else DTYPES[self.source.entries[key].dtype]

    def _staged(self, block: Block, common: Box, ours: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Part by part: ours, and what the source has for it until the next part is read."""
        entry = self.source.entries[block.key]
        strips = _Strips.of(_view(block, entry, common))
        num = common.size // common.shape[0] if block.turned else strips.at_a_time(_dtype(entry).itemsize)
        for lo in range(0, common.size, num):
            for part in interval(common, lo, min(lo + num, common.size)):
                read = self._raw if ours.dtype == NUMBERS else self.read
                yield ours[part.within(common).slices], read(entry, block, part)

    def read(self, entry: Entry, block: Block, part: Box) -> Tensor:
        """A box of ours, in the dtype of the source; in float32, where it has scales. It may lie in the buffer, so it
        stands until the next read."""
        if entry.key not in self.source.scales:
            return self._raw(entry, block, part)
        places, scales = self.scales_of(block, part)
        return dequantise(self._raw(entry, block, part), places.take(scales))

    def scales_of(self, block: Block, part: Box) -> tuple[Places, Tensor]:
        """Which scale each element of a box of ours has, and these scales."""
        entry = self.source.entries[block.key]
        places = Places.of(_view(block, entry, part), entry.shape, self.source.scales[block.key])
        rows = places.rows_of_blocks
        return places.below(rows.start), self._some(block.key, rows)

    def scales(self, key: str) -> Tensor:
        """Those of a matrix, in float32, by blocks."""
        grid = self.source.scales[key].grid(self.source.entries[key].shape)
        return self._some(key, range(prod(grid[:-1]))).view(grid)

    def as_it_is(self, key: str) -> Tensor:
        """A whole tensor of a file."""
        entry = self.source.entries[key]
        return self._flat(entry, 0, prod(entry.shape)).view(entry.shape)

    def _some(self, key: str, rows: range) -> Tensor:
        """Its scales in some rows of blocks: a rank reads none of which it has no element."""
        last, read, found = self._scales
        if last != key or not (read.start <= rows.start and rows.stop <= read.stop):
            scale, read = self.source.scales[key], rows
            entry, width = self.source.entries[scale.key], scale.grid(self.source.entries[key].shape)[-1]
            found = scales_to_float(self._flat(entry, rows.start * width, len(rows) * width).view(-1, width))
            if scale.divisor:
                found = found / self._divisor(scale.divisor)
            self._scales = key, read, found
        return found[rows.start - read.start : rows.stop - read.start]

    def _divisor(self, key: str) -> Tensor:
        if key not in self._divisors:
            self._divisors[key] = self._flat(self.source.entries[key], 0, 1)
        return self._divisors[key]

    def _flat(self, entry: Entry, first: int, num: int) -> Tensor:
        """Some elements as they lie in the file, in memory of their own."""
        out = torch.empty(num, dtype=DTYPES[entry.dtype], device="cpu")
        self._read_into(entry, out.view(torch.uint8), first * out.itemsize)
        return out

    def _raw(self, entry: Entry, block: Block, part: Box) -> Tensor:
        dtype, wanted = _dtype(entry), _view(block, entry, part)
        strips = _Strips.of(wanted)
        if entry.dtype == PACKED:
            return self._unpacked(entry, wanted, strips, block.turned or strips.together(dtype.itemsize))
        if block.turned or strips.together(dtype.itemsize):  # a matrix at a time is turned in memory
            self._read_into(entry, self._room(strips.span * dtype.itemsize), strips.first * dtype.itemsize)
            return self._buffer[: strips.span * dtype.itemsize].view(dtype).as_strided(wanted.shape, wanted.stride(), 0)
        out, at = self._room(part.size * dtype.itemsize), 0
        for offset, length in contiguous(wanted.shape, wanted.stride(), strips.first):
            num = length * dtype.itemsize
            self._read_into(entry, out[at : at + num], offset * dtype.itemsize)
            at += num
        return out.view(dtype).view(part.shape)

    def _unpacked(self, entry: Entry, wanted: Tensor, strips: _Strips, together: bool) -> Tensor:
        """Numbers of 4 bits as such of 8 bits."""
        if together:
            return self._nibbles(entry, strips.first, strips.span).as_strided(wanted.shape, wanted.stride())
        extents = contiguous(wanted.shape, wanted.stride(), strips.first)
        parts = [self._nibbles(entry, first, num).view(torch.uint8) for first, num in extents]
        return torch.cat(parts).view(NUMBERS).view(wanted.shape)

    def _nibbles(self, entry: Entry, first: int, num: int) -> Tensor:
        """It may begin and end within a byte."""
        into = self._room((first + num + 1) // 2 - first // 2)
        self._read_into(entry, into, first // 2)
        return unpacked(into)[first % 2 :][:num]

    def _room(self, num_bytes: int) -> Tensor:
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._buffer[:num_bytes]

    def _read_into(self, entry: Entry, buffer: Tensor, offset: int) -> None:
        self._pread(entry, buffer.numpy().data, entry.start + offset)

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> None:
        path = self.source.directory / entry.file
        try:
            if entry.file not in self._open:
                self._open[entry.file] = self.source.open(entry.file).fd
            if entry.file in self.source.extents:
                self._fetch_checked(entry, into, offset)
            else:
                self._fetch(entry, into, offset)
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read inside {entry.key}: {error.strerror}; check its disk") from error

    def _fetch(self, entry: Entry, into: memoryview, offset: int) -> None:
        while into:
            num = os.preadv(self._open[entry.file], [into], offset)
            if num == 0:
                path = self.source.directory / entry.file
                raise BrokenFile(f"{path} ended at byte {offset} inside {entry.key}; it shrank: fetch it again")
            self.num_bytes += num
            into, offset = into[num:], offset + num

    def _fetch_checked(self, entry: Entry, into: memoryview, offset: int) -> None:
        """Run by run: each is checked while it is in the cache. What is wanted of a run in part is read and checked
        whole, once."""
        for start, stop, extent in self._checks.split(entry.file, offset, offset + len(into)):
            part = into[start - offset : stop - offset]
            self._fetch(entry, part, start)
            if not self._checks.is_checked(entry.file, extent):
                if len(part) < extent.stop - extent.start:
                    part = memoryview(bytearray(extent.stop - extent.start))
                    self._fetch(entry, part, extent.start)
                self._checks.check(entry.file, extent, part, entry.key)


def _dtype(entry: Entry) -> torch.dtype:
    """In which its elements are read."""
    return NUMBERS if entry.dtype == PACKED else DTYPES[entry.dtype]


def _view(block: Block, entry: Entry, part: Box) -> Tensor:
    """Where a box of ours lies in the source: strides, and no memory."""
    return block.view(torch.empty(entry.shape, device="meta"))[part.within(block.ours).slices]


@dataclass(frozen=True)
class _Strips:
    """A view of a source tensor as strips of `length` elements that lie within `span` from its `first` on."""

    num: int
    length: int
    first: int
    span: int

    @staticmethod
    def of(view: Tensor) -> _Strips:
        length = next((n for _, n in contiguous(view.shape, view.stride(), 0)), 0)
        span = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
        num = view.numel() // length if length else 0
        return _Strips(num, length, int(view.storage_offset()), span if num else 0)

    def together(self, itemsize: int) -> bool:
        """Whether one read of all that lies between them is better than one for each."""
        return self.num > 1 and self.length * itemsize < _SHORT_BYTES and self.span * itemsize <= 2 * _SPAN_BYTES

    def at_a_time(self, itemsize: int) -> int:
        """How many elements to read: whole strips, if they are read together."""
        if self.num <= 1 or self.length * itemsize >= _SHORT_BYTES:
            return _STAGED_ELEMENTS
        apart = self.span // self.num  # from one to the next
        return max(1, _SPAN_BYTES // (apart * itemsize)) * self.length


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a strided view in row-major order, as (offset, length) in elements."""
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == length):
        outer -= 1
        length *= shape[outer]
    if prod(shape) == 0:
        return
    for index in product(*(range(n) for n in shape[:outer])):
        yield start + sum(i * s for i, s in zip(index, strides, strict=False)), length
