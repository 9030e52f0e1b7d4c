"""Read a checkpoint into this rank's shards: choose layouts, check every key, then read just the bytes that are stored.

The reader is strict by design. A missing, unexpected or mismatched key is an error, never a warning with reinitialised
weights: such runs train on random experts (transformers#43201), a random head (NeMo-Automodel#3632) or skip every
parameter (prime-rl#2640), with a plausible loss. A layout is never decided from one shape, since a square matrix fits
either way (transformers#47031).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import prod

import torch
from torch import Tensor

from ..errors import BrokenFile, LoadError, MismatchedKey, MissingKey, UnknownKey
from ..ops.codings import Coding, divisor_for_amax
from ..ops.host_memory import bytes_of
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Layout, Param, Piece, Table, interval
from .bitsandbytes import unnested
from .checksums import Checks
from .quant_formats import (
    BYTES,
    FP8,
    ONE_BLOCK,
    PACKED,
    Places,
    Scale,
    as_in_file,
    dequantise,
    scales_to_float,
    unpacked,
)
from .safetensors_header import DTYPES, TRAINABLE, Entry
from .source import Source

Choice = Mapping[str, str]  # group -> layout name
# Elements of a read that needs conversion: it goes through a buffer of at most this size.
_STAGED_ELEMENTS = part_size(__name__, "_STAGED_ELEMENTS", 1 << 20, small=1001)
# Where tp cuts columns, a rank needs a strip of every row. A long strip is read alone. Short strips are read together
# with the bytes between them: one read of 8 MB is faster than a thousand of 4 KB, even if most of it is dropped.
_SHORT_BYTES = part_size(__name__, "_SHORT_BYTES", 64 << 10, small=61)
_SPAN_BYTES = part_size(__name__, "_SPAN_BYTES", 8 << 20, small=601)  # the span of such a read


def chosen(param: Param, choice: Choice) -> Layout:
    """Return the layout of a parameter under a choice."""
    if len(param.layouts) == 1:
        return param.layouts[0]
    return next(layout for layout in param.layouts if layout.name == choice[param.group])


def choose(table: Table, source: Source) -> dict[str, str]:
    """Return the one layout of each group (experts, head) that matches the headers.

    Keys decide first. Shapes decide only between layouts of the same keys, and over all keys of the group at once,
    because a single one may be square.

    Example: Qwen3-MoE checkpoints have experts per expert (`experts.0.gate_proj`) or fused (`experts.gate_up_proj`);
    both are declared for the same parameters, and the keys of the file select one.
    """
    choice: dict[str, str] = {}
    for group, names in table.groups.items():
        # Parameters without a group have one layout, so there is nothing to choose.
        if not group:
            continue
        members = [p for p in table if p.group == group]
        keys_by_layout = {name: [k for p in members for k in chosen(p, {group: name}).keys] for name in names}
        if all(p.optional for p in members) and not any(k in source.entries for k in chain(*keys_by_layout.values())):
            choice[group] = choice.get(group.rpartition(".")[2], names[0])  # new: the layout of this group in the trunk
            continue
        candidates = [name for name in names if all(k in source.entries for k in keys_by_layout[name])]
        # If the keys of one layout are a part of another's, the larger set explains more of the file.
        keys_of = {name: set(keys_by_layout[name]) for name in candidates}
        candidates = [n for n in candidates if not any(keys_of[n] < keys_of[m] for m in candidates)]
        if len(candidates) > 1 and len({frozenset(keys_of[name]) for name in candidates}) == 1:
            fitting = [name for name in candidates if _shapes_match(members, {group: name}, source)]
            candidates = fitting or candidates[:1]
        if len(candidates) > 1:
            layouts = f"{len(candidates)} layouts ({', '.join(candidates)})"
            raise LoadError(f"the source holds the {group} in {layouts}; remove all but one of them")
        if not candidates:
            raise MissingKey(_nearest(group, keys_by_layout, source))
        choice[group] = candidates[0]
    return choice


def _shapes_match(members: Iterable[Param], choice: Choice, source: Source) -> bool:
    """Return whether all keys of some parameters have the shapes of a layout."""
    keys = [each for param in members for each in chosen(param, choice).keys.items()]
    return all(source.entries[key].shape == shape for key, shape in keys)


def _nearest(group: str, keys_by_layout: Mapping[str, list[str]], source: Source) -> str:
    """Return the error text for a group without a matching layout: the nearest layout, and what it lacks."""
    missing = {name: [k for k in keys if k not in source.entries] for name, keys in keys_by_layout.items()}
    name = min(missing, key=lambda n: len(missing[n]) / max(1, len(keys_by_layout[n])))
    return (
        f"{source.directory} holds the {group} in none of the layouts {', '.join(keys_by_layout)}; nearest is "
        f"{name!r}, which lacks {len(missing[name])} of {len(keys_by_layout[name])} keys, first {missing[name][0]}; "
        "fetch the files that hold them, or correct config.json"
    )


def carried_keys(table: Table, source: Source, choice: Choice) -> list[str]:
    """Return keys that are carried through untrained. Any other key that no parameter uses is an error."""
    own_keys = {k for p in table for k in chosen(p, choice).keys}
    own_keys |= {
        companion for key in own_keys if key in source.scales for companion in source.scales[key].companion_keys
    }
    # Scales of a quantised tensor that is itself carried are carried with it. Everything else must match a pattern that
    # the model family declares (`mtp.*` of Qwen3.5), so a typo in a key map cannot hide as "carried".
    others = [k for k in source.entries if k not in own_keys]
    companions = {companion for scale in source.scales.values() for companion in scale.companion_keys}
    unknown = [
        k
        for k in others
        if k not in companions and not any(fnmatch.fnmatchcase(k, pattern) for pattern in table.carried)
    ]
    if unknown:
        raise UnknownKey(
            f"{source.entries[unknown[0]].file} holds {unknown[0]}, which no parameter of the model uses "
            f"({len(unknown)} such keys); check that config.json belongs to this model"
        )
    return others


def check_keys(table: Table, source: Source, choice: Choice, fresh: Iterable[str], stored: torch.dtype) -> None:
    """Check that every key is there, with its shape, in a dtype that can be stored without rounding.

    `fresh`: parameters that the source lacks. `stored`: the dtype in which parameters are stored.

    The check needs only headers, before memory is allocated. On a 235B model it takes a second, and finds every
    mismatch that would otherwise appear after minutes of loading.
    """
    for param in table:
        if param.name in set(fresh):
            continue
        for key, shape in chosen(param, choice).keys.items():
            entry = source.entries.get(key)
            if entry is None:
                head = ', or load a model without its head with head="none"' if param.name == "head.weight" else ""
                raise MissingKey(
                    f"{source.directory} has no {key}, which {param.name} {param.shape} is read from; fetch the file "
                    f"that holds it, or correct config.json{head}"
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
            # Loading would round F64 silently, and an export would then not reproduce the source.
            if entry.dtype == "F64" and stored != torch.float64:
                raise MismatchedKey(
                    f"{entry.file}: {key} is F64 and would be rounded to {stored}; "
                    "load it with dtype=torch.float64, or convert the file"
                )


@dataclass
class Reader:
    """Reads boxes of source tensors through one small buffer, and counts bytes.

    It is single-threaded: conversion and the first touch of memory take most of the time, and the ranks of a node
    already do these in parallel.

    A box of a parameter becomes a strided view of the source tensor (`_view`): offset, shape, strides. Contiguous
    ranges of that view are byte ranges of the file. Slices of tp, row ranges of FSDP, transposed experts and parts of
    fused tensors are all this one case.
    """

    source: Source
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._fds: dict[str, int] = {}
        self._checks = Checks(self.source.directory, self.source.extents)
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        # Cache the last scales: parts of a matrix come in order.
        self._last_scales = "", range(0), torch.empty(0, device="cpu")  # in the dtype of the files
        self._divisors: dict[str, Tensor] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def fill(self, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Fill the stored tensor of a piece from the blocks that its boxes overlap: values, or FP8 codes."""
        for box, view in piece.views(stored):
            for block in layout.blocks:
                common = block.ours.meet(box)
                if common is not None:
                    self._fill_box(block, common, view[common.within(box).slices])

    def _fill_box(self, block: Block, common: Box, target: Tensor) -> None:
        """Read directly into the stored memory if dtype and order are those of the file, else through the buffer."""
        entry = self.source.entries[block.key]
        source_view = _view(block, entry, common)
        if target.dtype == BYTES and block.key in self.source.scales:
            target = target.view(FP8)
        if (
            # The fast path for most weights: pread directly into the parameter's memory, without a copy or a buffer.
            DTYPES.get(entry.dtype) == target.dtype
            and source_view.is_contiguous()
            and target.is_contiguous()
            and target.is_cpu
        ):
            into = target.view(-1).view(torch.uint8)
            self._read_into(entry, into, int(source_view.storage_offset()) * target.element_size())
            return
        for into, values in self._staged(block, common, target):
            into.copy_(values)

    def check_copies(self, layout: Layout, piece: Piece, stored: Tensor) -> None:
        """Check that keys which hold a parameter a second time (a tied head that is stored twice) hold the same values.

        A config may tie embedding and head while the file has two different tensors (accelerate#3870). Taking either
        would be a guess.
        """
        first = self._value_dtype(layout.blocks[0].key)
        for copy in (copy for copy in layout.copies if copy.key in self.source.entries):
            both = (first, self._value_dtype(copy.key))
            # Compared in the narrower dtype: an export of a trained model rounds one of the two more than the other.
            narrow = min(both, key=lambda dtype: dtype.itemsize)
            for box, view in piece.views(stored):
                if not all(torch.equal(a.to(b.device, narrow), b.to(narrow)) for a, b in self._staged(copy, box, view)):
                    raise LoadError(
                        f"{copy.key} and {layout.blocks[0].key} differ, but config.json ties them "
                        "(tie_word_embeddings); set it to false or store one of them"
                    )

    def _value_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a key's values."""
        return torch.float32 if key in self.source.scales else DTYPES[self.source.entries[key].dtype]

    def _staged(self, block: Block, common: Box, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the target with the source's elements for them. The second tensor is valid until the next
        part.

        Parts are bounded, so a rank needs only a few MB on top of its parameters, even for an embedding of a billion
        elements.
        """
        entry = self.source.entries[block.key]
        strips = _Strips.of(_view(block, entry, common))
        # A transposed block is read one matrix at a time (`[out, in]` of one expert), because its columns are strided
        # rows.
        num = common.size // common.shape[0] if block.turned else strips.at_a_time(_dtype(entry).itemsize)
        for lo in range(0, common.size, num):
            for part in interval(common, lo, min(lo + num, common.size)):
                read = self._raw if target.dtype == FP8 else self.read
                yield target[part.within(common).slices], read(entry, block, part)

    def read(self, entry: Entry, block: Block, part: Box) -> Tensor:
        """Return a box of a parameter in the dtype of the source, dequantised if it has scales. Valid until the next
        read."""
        if entry.key not in self.source.scales:
            return self._raw(entry, block, part)
        places, scales = self.scales_of(block, part)
        return dequantise(self.codes(block, part), places.take(scales), self.source.scales[entry.key].coding)

    def codes(self, block: Block, part: Box) -> Tensor:
        """Return the codes of a box, one per byte. Valid until the next read."""
        return self._raw(self.source.entries[block.key], block, part)

    def scales_of(self, block: Block, part: Box) -> tuple[Places, Tensor]:
        """Return the indices of the scales of a box, and the scales that they index."""
        entry = self.source.entries[block.key]
        places = Places.of(_view(block, entry, part), entry.shape, self.source.scales[block.key])
        rows = places.rows_of_blocks
        return places.below(rows.start), self._scales_of_rows(block.key, rows)

    def stored_scales_of(self, block: Block, part: Box) -> Tensor:
        """Return the scale of each element of a box, in the dtype of the file."""
        entry = self.source.entries[block.key]
        places = Places.of(_view(block, entry, part), entry.shape, self.source.scales[block.key])
        rows = places.rows_of_blocks
        return places.below(rows.start).take(self._stored_rows(block.key, rows))

    def divisors_of(self, block: Block, part: Box, coding: Coding) -> tuple[Places, Tensor]:
        """Return for each row of a box the number of its matrix, and the divisor of the 4-bit scales of each matrix,
        `[matrices, 1]`."""
        entry = self.source.entries[block.key]
        places = Places.of(_view(block, entry, part), entry.shape, Scale("", ONE_BLOCK))
        matrices = places.rows_of_blocks
        divisors = [self._divisor_of(entry, number, coding) for number in matrices]
        return places.below(matrices.start), torch.stack(divisors).view(-1, 1)

    def _divisor_of(self, entry: Entry, number: int, coding: Coding) -> Tensor:
        """Return the divisor of the scales of a matrix: that of its file, or computed from all of its values."""
        scale, known = self.source.scales.get(entry.key), self.source.divisors
        if scale is not None and scale.divisor:
            return self._divisor(scale.divisor)[0]
        if not coding.divided:
            return torch.ones((), dtype=torch.float32, device="cpu")
        if (entry.key, number) not in known:
            size = prod(entry.shape[-2:])
            parts = range(number * size, (number + 1) * size, _STAGED_ELEMENTS)
            amax = [self._flat(entry, lo, min(_STAGED_ELEMENTS, parts.stop - lo)).abs().amax() for lo in parts]
            known[entry.key, number] = divisor_for_amax(torch.stack(amax).amax().to(torch.float32))
        return known[entry.key, number]

    def scales(self, key: str) -> Tensor:
        """Return all scales of a matrix in float32."""
        grid = self.source.scales[key].grid(self.source.entries[key].shape)
        return self._scales_of_rows(key, range(prod(grid[:-1]))).view(grid)

    def as_it_is(self, key: str) -> Tensor:
        """Return a whole tensor of a file in its own dtype."""
        entry = as_in_file(self.source.entries[key])
        return self._flat(entry, 0, prod(entry.shape)).view(entry.shape)

    def _scales_of_rows(self, key: str, rows: range) -> Tensor:
        """Return the scales of some block rows in float32."""
        scales, divisor = scales_to_float(self._stored_rows(key, rows)), self.source.scales[key].divisor
        return scales / self._divisor(divisor) if divisor else scales

    def _stored_rows(self, key: str, rows: range) -> Tensor:
        """Return the scales of some block rows. A rank does not read scales of blocks in which it has no element."""
        last_key, read_rows, scales = self._last_scales
        if last_key != key or not (read_rows.start <= rows.start and rows.stop <= read_rows.stop):
            scale, read_rows = self.source.scales[key], rows
            entry, width = self.source.entries[scale.key], scale.grid(self.source.entries[key].shape)[-1]
            scales = self._flat(entry, rows.start * width, len(rows) * width).view(-1, width)
            if scale.nested:
                scales = unnested(scales, rows.start * width, *map(self.as_it_is, scale.nested)) + scale.offset
            self._last_scales = key, read_rows, scales
        return scales[rows.start - read_rows.start : rows.stop - read_rows.start]

    def _divisor(self, key: str) -> Tensor:
        """Return a global scale, read once."""
        if key not in self._divisors:
            self._divisors[key] = self._flat(self.source.entries[key], 0, 1)
        return self._divisors[key]

    def _flat(self, entry: Entry, first: int, num: int) -> Tensor:
        """Read consecutive elements of the file into new memory."""
        out = torch.empty(num, dtype=DTYPES[entry.dtype], device="cpu")
        self._read_into(entry, out.view(torch.uint8), first * out.itemsize)
        return out

    def _raw(self, entry: Entry, block: Block, part: Box) -> Tensor:
        """Read a box without dequantising it: as one span, or strip by strip."""
        dtype, source_view = _dtype(entry), _view(block, entry, part)
        strips = _Strips.of(source_view)
        if entry.dtype == PACKED:
            return self._unpacked(entry, source_view, strips, block.turned or strips.together(dtype.itemsize))
        if block.turned or strips.together(dtype.itemsize):  # a transposed matrix is read whole, then transposed
            self._read_into(entry, self._buffer_of(strips.span * dtype.itemsize), strips.first * dtype.itemsize)
            return (
                self._buffer[: strips.span * dtype.itemsize]
                .view(dtype)
                .as_strided(source_view.shape, source_view.stride(), 0)
            )
        out, at = self._buffer_of(part.size * dtype.itemsize), 0
        for offset, length in contiguous(source_view.shape, source_view.stride(), strips.first):
            num = length * dtype.itemsize
            self._read_into(entry, out[at : at + num], offset * dtype.itemsize)
            at += num
        return out.view(dtype).view(part.shape)

    def _unpacked(self, entry: Entry, source_view: Tensor, strips: _Strips, together: bool) -> Tensor:
        """Read a box of 4-bit codes, one per byte."""
        if together:
            return self._read_packed(entry, strips.first, strips.span).as_strided(
                source_view.shape, source_view.stride()
            )
        extents = contiguous(source_view.shape, source_view.stride(), strips.first)
        return torch.cat([self._read_packed(entry, first, num) for first, num in extents]).view(source_view.shape)

    def _read_packed(self, entry: Entry, first: int, num: int) -> Tensor:
        """Read 4-bit codes; the first and the last may share a byte with a neighbour."""
        into = self._buffer_of((first + num + 1) // 2 - first // 2)
        self._read_into(entry, into, first // 2)
        coding = self.source.scales[entry.key].coding
        high_first = coding is not None and coding.high_first
        return unpacked(into, high_first=high_first)[first % 2 :][:num]

    def _buffer_of(self, num_bytes: int) -> Tensor:
        """Return the buffer, grown if it is too small."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._buffer[:num_bytes]

    def _read_into(self, entry: Entry, buffer: Tensor, offset: int) -> None:
        """Read bytes at an offset within a tensor."""
        self._pread(entry, bytes_of(buffer), entry.start + offset)

    def _pread(self, entry: Entry, into: memoryview, offset: int) -> None:
        """Read bytes at an offset of a file, opening it (in the version whose header was read) on first use."""
        path = self.source.directory / entry.file
        try:
            if entry.file not in self._fds:
                self._fds[entry.file] = self.source.open(entry.file).fd
            if entry.file in self.source.extents:
                self._fetch_checked(entry, into, offset)
            else:
                self._fetch(entry, into, offset)
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read inside {entry.key}: {error.strerror}; check its disk") from error

    def _fetch(self, entry: Entry, into: memoryview, offset: int) -> None:
        """Read until the buffer is full; pread may return less."""
        # os.preadv may return fewer bytes than requested, on network file systems and for reads over 2 GiB.
        while into:
            num = os.preadv(self._fds[entry.file], [into], offset)
            if num == 0:
                path = self.source.directory / entry.file
                raise BrokenFile(f"{path} ended at byte {offset} inside {entry.key}; it shrank: fetch it again")
            self.num_bytes += num
            into, offset = into[num:], offset + num

    def _fetch_checked(self, entry: Entry, into: memoryview, offset: int) -> None:
        """Read extent by extent, and verify each while it is in the cache. An extent that is needed only in part is
        still read whole, once."""
        for start, stop, extent in self._checks.split(entry.file, offset, offset + len(into)):
            part = into[start - offset : stop - offset]
            self._fetch(entry, part, start)
            if not self._checks.is_checked(entry.file, extent):
                # A checksum covers whole extents. The wanted part is already in place; the extent is read again into a
                # scratch buffer, once, since `is_checked` remembers it.
                if len(part) < extent.stop - extent.start:
                    part = memoryview(bytearray(extent.stop - extent.start))
                    self._fetch(entry, part, extent.start)
                self._checks.check(entry.file, extent, part, entry.key)


def _dtype(entry: Entry) -> torch.dtype:
    """Return the dtype in which elements of an entry are read: 4-bit codes take one byte each."""
    return BYTES if entry.dtype == PACKED else DTYPES[entry.dtype]


def _view(block: Block, entry: Entry, part: Box) -> Tensor:
    """Return a box of a parameter as a view of the source tensor: strides without memory (meta device)."""
    return block.view(torch.empty(entry.shape, device="meta"))[part.within(block.ours).slices]


@dataclass(frozen=True)
class _Strips:
    """A view of a source tensor as `num` strips of `length` contiguous elements within `span` elements from `first` on.

    Example: columns 0 to 512 of a `[4096, 2048]` bfloat16 matrix are 4096 strips of 1 KB with a stride of 4 KB. Reading
    2048 rows whole (8 MB) and dropping three quarters is faster than 2048 reads of 1 KB.
    """

    num: int
    length: int
    first: int
    span: int

    @staticmethod
    def of(view: Tensor) -> _Strips:
        # All strips of a rectangular view have the same length, so the first one is enough.
        length = next((n for _, n in contiguous(view.shape, view.stride(), 0)), 0)
        span = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
        num = view.numel() // length if length else 0
        return _Strips(num, length, int(view.storage_offset()), span if num else 0)

    def together(self, itemsize: int) -> bool:
        """Return whether one read of the whole span is better than a read per strip."""
        return self.num > 1 and self.length * itemsize < _SHORT_BYTES and self.span * itemsize <= 2 * _SPAN_BYTES

    def at_a_time(self, itemsize: int) -> int:
        """Return the number of elements to read at a time: whole strips if they are read together."""
        if self.num <= 1 or self.length * itemsize >= _SHORT_BYTES:
            return _STAGED_ELEMENTS
        stride = self.span // self.num  # from one strip to the next
        return max(1, _SPAN_BYTES // (stride * itemsize)) * self.length


def contiguous(shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Iterator[tuple[int, int]]:
    """Yield the contiguous ranges of a strided view in row-major order, as (offset, length) in elements.

    Example: shape (3, 4) with strides (10, 1) from 5 yields (5, 4), (15, 4), (25, 4); with strides (4, 1) it yields (5,
    12).
    """
    length, outer = 1, len(shape)
    # Merge inner dims as long as they are dense: their product is the length of a contiguous range.
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == length):
        outer -= 1
        length *= shape[outer]
    if prod(shape) == 0:
        return
    for index in product(*(range(n) for n in shape[:outer])):
        yield start + sum(i * s for i, s in zip(index, strides, strict=False)), length
