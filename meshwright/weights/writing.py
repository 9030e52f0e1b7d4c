"""Rows of parameters into the files of a Hugging Face directory, each where its key has them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError
from ..layout import Block, Box, Piece, as_it_lies, interval
from ..ops.part_sizes import part_size
from .header import DTYPES
from .keymap import Key, KeyMap
from .load import chosen, contiguous
from .runs import Runs
from .scales import Places, as_used, numbers_of

_STAGED_ELEMENTS = part_size(__name__, "_STAGED_ELEMENTS", 1 << 20, small=1001)  # converted at a time


class Files:
    """All files of a key map, which are there in their whole size. Every rank writes parts of them.

    They lie in `root` or in a folder of it, `inside`. `runs` gets what is written here, if it is wanted. `scales`: with
    which values are made 8-bit numbers, by the key of these.
    """

    def __init__(
        self, root: Path, keymap: KeyMap, runs: Runs | None = None, inside: str = "", *,
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.root, self.keymap, self.runs, self.inside, self.scales = root, keymap, runs, inside, scales or {}
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
                ours = numbers_of(as_used(ours.to("cpu"), self.keymap.used), places.take(self.scales[block.key]))
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
        if self.runs is not None:
            self.runs.add(os.path.join(self.inside, key.file), start, data)

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


def make_files(root: Path, keymap: KeyMap, runs: Runs | None = None, inside: str = "") -> None:
    """Every file with its header, in its whole size."""
    for file, head in keymap.heads.items():
        path = root / inside / file
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as out:
            out.write(head.data)
            out.truncate(head.file_bytes)
        if runs is not None:
            runs.add(os.path.join(inside, file), 0, head.data)
