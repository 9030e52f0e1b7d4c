"""Rows of parameters into the files of a Hugging Face directory, each where its key has them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError
from ..mesh import Mesh
from ..mesh.collectives import exchange
from ..ops.part_sizes import part_size
from ..sharding import Block, Box, Param, Piece, ShardingSpec, across, as_it_lies, interval, piece, place, written
from ..watch import waiting_at
from .checksums import Extents
from .keymap import Key, KeyMap
from .quant_formats import Places, as_used, quantise
from .reader import chosen, contiguous
from .safetensors_header import DTYPES
from .streaming import StoredModel

_STAGED_ELEMENTS = part_size(__name__, "_STAGED_ELEMENTS", 1 << 20, small=1001)  # converted at a time


class Files:
    """All files of a key map, which are there in their whole size. Every rank writes parts of them.

    They lie in `root` or in a folder of it, `inside`. `extents` gets what is written. `scales`: with
    which values are made 8-bit numbers, by the key of these.
    """

    def __init__(
        self, root: Path, keymap: KeyMap, extents: Extents | None = None, inside: str = "", *,
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.root, self.keymap, self.extents, self.inside, self.scales = root, keymap, extents, inside, scales or {}
        self._open: dict[str, int] = {}
        self._start = keymap.starts

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def to_disk(self) -> None:
        """What was written here, and not only to this machine's memory."""
        for file, fd in self._open.items():
            with self._naming(file):
                os.fsync(fd)

    def write(self, piece: Piece, values: Tensor) -> None:
        """What a piece holds, into every key that it is a part of."""
        layout = chosen(piece.param, self.keymap.choice)
        for box, view in piece.views(values):
            for block in (*layout.blocks, *layout.copies):
                common = block.ours.meet(box)
                if common is not None and block.key in self.keymap.keys and block.key not in self.keymap.carried:
                    self._write_box(block, common, view[common.within(box).slices])

    def put(self, name: str, data: bytes | memoryview, offset: int) -> None:
        """Some bytes of a key."""
        self._pwrite(self.keymap.keys[name], data, offset)

    def copy(self, key: Key, parts: Iterable[bytes]) -> None:
        """A key, as it is."""
        at = 0
        for part in parts:
            self._pwrite(key, part, at)
            at += len(part)

    def _write_box(self, block: Block, common: Box, values: Tensor) -> None:
        key = self.keymap.keys[block.key]
        dtype = DTYPES[key.dtype]
        whole = block.view(torch.empty(key.shape, device="meta"))
        for part in staged(block, common):
            wanted, at = whole[part.within(block.ours).slices], 0
            order = as_it_lies(wanted)
            wanted, ours = wanted.permute(order), values[part.within(common).slices].permute(order)
            if block.key in self.keymap.scales:
                places = Places.of(wanted, key.shape, self.keymap.scales[block.key])
                ours = quantise(as_used(ours.to("cpu"), self.keymap.used), places.take(self.scales[block.key]))
            flat = ours.to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy()
            for offset, length in contiguous(wanted.shape, wanted.stride(), int(wanted.storage_offset())):
                size = length * dtype.itemsize
                self._pwrite(key, flat[at : at + size].data, offset * dtype.itemsize)
                at += size

    def _pwrite(self, key: Key, data: bytes | memoryview, offset: int) -> None:
        left, start = memoryview(data), self._start[key.name] + offset
        at, fd = start, self._fd(key.file)
        with self._naming(key.file):
            while left:
                done = os.pwrite(fd, left, at)
                left, at = left[done:], at + done
        _begin_to_disk(fd, start, at - start)
        if self.extents is not None:
            self.extents.add(os.path.join(self.inside, key.file), start, data)

    @contextlib.contextmanager
    def _naming(self, file: str) -> Iterator[None]:
        """A full disk is an error of a descriptor, which does not say of which file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.root / self.inside / file)) from error

    def _fd(self, file: str) -> int:
        if file not in self._open:
            path = self.root / self.inside / file
            try:
                self._open[file] = os.open(path, os.O_WRONLY)
            except FileNotFoundError:
                raise ExportError(
                    f"{path} was made by rank 0 and is not seen here; give a directory on a file system that all "
                    "machines share"
                ) from None
        return self._open[file]


@functools.cache
def _sync_file_range() -> Any:
    """Of Linux; None elsewhere."""
    try:
        return ctypes.CDLL(None, use_errno=True).sync_file_range
    except AttributeError:
        return None


def _begin_to_disk(fd: int, start: int, num_bytes: int) -> None:
    """Let the system begin to write what it holds, and do not wait. It would begin only when the last fsync asks."""
    begin = 2  # SYNC_FILE_RANGE_WRITE
    if (sync := _sync_file_range()) is not None and num_bytes:
        sync(fd, ctypes.c_int64(start), ctypes.c_int64(num_bytes), begin)  # a file system that cannot says so: no harm


def staged(block: Block, box: Box) -> Iterator[Box]:
    """Parts of a box, each of which lies in a few long runs: one matrix at a time, where these are turned."""
    num = box.size // box.shape[0] if block.turned else _STAGED_ELEMENTS
    for lo in range(0, box.size, num):
        yield from interval(box, lo, min(lo + num, box.size))


def make_files(root: Path, keymap: KeyMap, extents: Extents | None = None, inside: str = "") -> None:
    """Every file with its header, in its whole size."""
    for file, header in keymap.headers.items():
        path = root / inside / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as out:
            out.write(header.header_bytes)
            out.truncate(header.file_bytes)
        if extents is not None:
            extents.add(os.path.join(inside, file), 0, header.header_bytes)


_WINDOW_BYTES = part_size(__name__, "_WINDOW_BYTES", 16 << 20, small=2001)  # of rows that a rank gets whole at a time


def whole_rows(stored_model: StoredModel, *, keep: bool = False) -> Iterator[tuple[Piece, Tensor]]:
    """Pieces of whole rows, with what they hold. Over all ranks they tile every parameter once.

    With `keep` they are on the host and the caller's to keep; otherwise they may be live memory. Every rank must run
    through it to the end: ranks of tp exchange rows within it.
    """
    spec, mesh = stored_model.spec, stored_model.mesh
    for param in spec.table:
        if param.name in stored_model.stored:
            stored = stored_model.stored[param.name].detach()
            for rows, values in _rows_of(param, spec, mesh, stored):
                live = keep and values.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
                yield rows, values.to("cpu", copy=live) if keep else values


def _rows_of(param: Param, spec: ShardingSpec, mesh: Mesh, stored: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    axes = across(param, place(param, spec.rules, mesh.axes))
    held = piece(param, spec.rules, mesh.axes, mesh.coords)
    if mesh.size_of(axes) == 1:
        mine = written(param, spec.rules, mesh.axes, mesh.rank)
        yield mine, stored[mine.lo - held.lo : mine.hi - held.lo]
        return
    ranks = mesh.axes.group(mesh.rank, axes)
    strips = [piece(param, spec.rules, mesh.axes, mesh.axes.coords(rank)) for rank in ranks]
    rows = [written(param, spec.rules, mesh.axes, rank) for rank in ranks]
    at_a_time = max(1, _WINDOW_BYTES // (param.matrix[1] * stored.element_size()))
    for done in range(0, max(each.hi - each.lo for each in rows), at_a_time):
        now = [_window(each, done, at_a_time) for each in rows]
        me = ranks.index(mesh.rank)
        sent = torch.cat([stored[each.lo - held.lo : each.hi - held.lo].flatten() for each in now])
        num_rows = now[me].hi - now[me].lo
        outs, ins = [num_rows * s.shape[1] for s in strips], [(w.hi - w.lo) * held.shape[1] for w in now]
        with waiting_at(f"the exchange of rows of {param.name}"):
            got = exchange(sent, outs, ins, mesh.name_of(axes))
        yield now[me], _side_by_side(now[me], strips, got.split(outs))


def _window(rows: Piece, first: int, num: int) -> Piece:
    lo = min(rows.lo + first, rows.hi)
    return replace(rows, lo=lo, hi=min(lo + num, rows.hi))


def _side_by_side(rows: Piece, strips: list[Piece], parts: tuple[Tensor, ...]) -> Tensor:
    """The columns of all strips, in their places."""
    first = len(rows.param.rows)
    num_rows, cols = rows.hi - rows.lo, tuple(rows.param.cols.values())
    whole = parts[0].new_empty((num_rows, *cols))
    for strip, part in zip(strips, parts, strict=True):
        into = whole[(slice(None), *strip.box.slices[first:])]
        into.copy_(part.view(into.shape))
    return whole.view(rows.shape)
