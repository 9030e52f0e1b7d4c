"""Check that each rank holds the weights of the source files. Ranks compare their own pieces, and send none.

The files are read by safetensors' reader, which maps them into memory, not by the reader that loading uses. So a bug in
our reader shows, and a tensor takes memory only where it is read.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..axes import DENSE
from ..engine import Model
from ..errors import LoadError, StateError
from ..log import Advance, progress
from ..ops.codings import NF4, divisor_for_amax
from ..ops.part_sizes import part_size
from ..recipe import matching
from ..sharding import Block, Box, Layout, Piece
from ..weights import Source, Values, as_in_file, chosen
from .results import Finding

_SLAB_ELEMENTS = part_size(__name__, "_SLAB_ELEMENTS", 1 << 20, small=1001)  # elements compared at once
# Bytes read before the mapping of a file is closed, which frees its pages.
_MAPPED_BYTES = part_size(__name__, "_MAPPED_BYTES", 64 << 20, small=10_007)
_MOST = 100  # number of differences that a rank reports in full
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x2545F4914F6CDD1D  # an odd factor: multiplying 64-bit integers by it loses no information


@dataclass(frozen=True)
class Difference:
    """A box of a parameter in which a rank's values differ from those of a key of the source.

    `name`, `box`: the parameter and the box. `key`: the key of the source. `num_wrong`: how many of the box's
    `num_elements` differ. `misplaced`: the rank has the right values in the wrong places, as when heads or experts are
    swapped. `checksums`: crc32 of the first slab that differs, on the rank and in the source.
    """

    name: str
    key: str
    box: str
    rank: int
    num_wrong: int
    num_elements: int
    misplaced: bool
    checksums: tuple[int, int]

    def __str__(self) -> str:
        moved = ": the right values in the wrong places" if self.misplaced else ""
        on_rank, source = self.checksums
        return (
            f"{self.num_wrong} of {self.num_elements} elements differ{moved} of {self.key} in {self.box} on rank "
            f"{self.rank} (crc32 {on_rank:08x} on the rank, {source:08x} in the source)"
        )


@dataclass(frozen=True)
class WeightCheck:
    """The result of `check_weights`, over all ranks and the same on every rank.

    `differences`: the first 100 of each rank. `num_differences`: the number of all. `num_elements`: the elements
    compared on all ranks, each copy counted. `skipped`: parameters that the source lacks, which were drawn.
    """

    differences: tuple[Difference, ...]
    num_differences: int
    num_elements: int
    skipped: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.num_differences == 0


def check_weights(model: Model, only: str | Sequence[str] = "**") -> WeightCheck:
    """Compare each rank's weights with the source files, bit for bit. All ranks call it and get the same result.

    `only`: patterns of the parameters to compare, for example those that training should not have changed.
    """
    names, rank = _chosen_names(model, [only] if isinstance(only, str) else list(only)), model.mesh.rank
    skipped = [name for name in names if name in model.keymap.fresh]
    total = sum(model.pieces[name].numel for name in names if name not in skipped)
    differences: list[Difference] = []
    failure = None
    try:
        with progress("check weights", total, "elements", enabled=rank == 0) as advance:
            differences.extend(weight_differences(model, names, advance))
    except LoadError as error:  # raised on all ranks below: a rank that left alone would let the others hang
        failure = f"rank {rank}: {error}"
    gathered = model.mesh.gather_objects((differences[:_MOST], len(differences), total, failure), DENSE)
    failures = [f for _, _, _, f in gathered if f is not None]
    if failures:
        raise LoadError("; ".join(failures[:3]))
    return WeightCheck(
        tuple(d for some, _, _, _ in gathered for d in some), sum(n for _, n, _, _ in gathered),
        sum(n for _, _, n, _ in gathered), tuple(skipped),
    )  # fmt: skip


def _chosen_names(model: Model, patterns: Sequence[str]) -> list[str]:
    """Return the parameters of this rank that match some pattern."""
    if model.keymap.source is None:
        raise StateError("the model was made by mw.init: it has no files to compare its weights with")
    matches = {*matching(patterns, model.table.params, "only")}
    return [name for name in model.pieces if name in matches]


def weight_differences(model: Model, names: Sequence[str], advance: Advance | None = None) -> Iterator[Difference]:
    """Yield the differences of this rank's pieces of `names`.

    Files may hold a parameter under two keys, such as a tied embedding and head. Both are compared.
    """
    assert model.keymap.source is not None
    files, stored = _Mapped(model.keymap.source), model.values()
    for name in names:
        if name in model.keymap.fresh:
            continue
        layout, piece = chosen(model.table[name], model.keymap.choice), model.pieces[name]
        views = list(stored.views(piece))
        if model.blueprint.made is not None and name in model.codings:
            of_blocks = _compared_as_quantised(piece, stored, layout, files)
        else:
            of_blocks = [c for block in layout.blocks for c in _compared(block, views, files)]
        of_copies = [c for block in layout.copies for c in _compared(block, views, files)]
        for comparisons in (of_blocks, of_copies):
            # Values may have moved between boxes while the piece as a whole has the right ones.
            moved = sum(c.excess for c in comparisons) % 2**64 == 0
            yield from (c.difference(name, model.mesh.rank, moved) for c in comparisons)
        if advance is not None:
            advance(piece.numel)


def _compared(block: Block, views: Sequence[tuple[Box, Any]], files: _Mapped) -> Iterator[_Comparison]:
    """Compare the boxes of a piece with a block of the files; yield those that differ."""
    for box, view in views:
        common = block.ours.meet(box)
        if common is None:
            continue
        comparison = _Comparison(block.key, common)
        for slab in _slabs(common):
            source = block.view(files.tensor(block.key, slab.size))[slab.within(block.ours).slices]
            comparison.add(view[slab.within(box).slices], source)
        if comparison.num_wrong:
            yield comparison


def _compared_as_quantised(piece: Piece, stored: Values, layout: Layout, files: _Mapped) -> list[_Comparison]:
    """Compare rows that loading quantised to 4 bits with the values of the files, quantised here; return those that
    differ. Whole rows, because blocks run along them.
    """
    grid, codes = stored.grids[piece.param.name], stored.stored[piece.param.name]
    comparisons, first, step = [], 0, max(1, _SLAB_ELEMENTS // piece.shape[1])
    for lo in range(piece.lo, piece.hi, step):
        part = replace(piece, lo=lo, hi=min(lo + step, piece.hi))
        values, amax = torch.empty(part.shape), torch.empty(part.shape)  # amax: of the matrix of each element
        for box, view, amax_view in zip(part.boxes, *(_views(part, each) for each in (values, amax)), strict=True):
            for block in layout.blocks:
                common = block.ours.meet(box)
                if common is not None:
                    tensor, at = files.tensor(block.key, common.size), common.within(block.ours).slices
                    most = files.amax(block.key).expand(tensor.shape)
                    view[common.within(box).slices] = block.view(tensor)[at]
                    amax_view[common.within(box).slices] = block.view(most)[at]
        rows = slice(first, first + len(values))
        divisors = divisor_for_amax(amax[:, :1]) if grid.coding.divided else torch.ones(len(values), 1)
        expected = grid.coding.decode(grid.coding.encode(values, divisors), part.shape[1], divisors)
        comparison = _Comparison(layout.blocks[0].key, part.boxes[0])
        comparison.add(grid[rows].values(codes[rows], torch.float32), expected)
        comparisons += [comparison] if comparison.num_wrong else []
        first = rows.stop
    return comparisons


def _views(piece: Piece, tensor: Tensor) -> Iterator[Tensor]:
    return (view for _, view in piece.views(tensor))


def _slabs(box: Box) -> Iterator[Box]:
    """Halve a box along its first dim, and its halves, until all are small. So no copy of a large tensor is made."""
    if box.size <= _SLAB_ELEMENTS:
        yield box
        return
    dim = next(d for d, size in enumerate(box.shape) if size > 1)
    middle = (box.start[dim] + box.stop[dim]) // 2
    yield from _slabs(Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :])))
    yield from _slabs(Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop))


class _Comparison:
    """The comparison of one box, slab by slab.

    `excess` is the sum of hashes of the rank's elements minus that of the source's. A sum does not depend on order, so
    0 means that the rank holds the right values in other places.
    """

    def __init__(self, key: str, box: Box) -> None:
        self.key, self.box, self.num_wrong, self.excess = key, box, 0, 0
        self.checksums = (0, 0)

    def add(self, local: Tensor, source: Tensor) -> None:
        """Compare a slab, after casting the source's values as loading does, on the rank's device."""
        local_bits, source_bits = (_bits(t.contiguous()) for t in (local, source.to(local.device).to(local.dtype)))
        if torch.equal(local_bits, source_bits):
            return
        if not self.num_wrong:
            self.checksums = (checksum_of(local_bits), checksum_of(source_bits))
        self.num_wrong += int((local_bits != source_bits).sum())
        self.excess += _unordered(local_bits) - _unordered(source_bits)

    def difference(self, name: str, rank: int, moved: bool) -> Difference:
        """Return the result. `moved`: values moved between boxes; `excess` shows a move within this box."""
        moved = moved or self.excess % 2**64 == 0
        return Difference(name, self.key, str(self.box), rank, self.num_wrong, self.box.size, moved, self.checksums)


def scaled(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise a whole matrix: each code times the scale of its block. It shares no code with loading."""
    wide, (rows, columns) = scales.float(), codes.shape[-2:]
    if scales.dtype == torch.uint8:  # E8M0: the exponent of a power of two, plus 127
        wide = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    wide = wide.view(*codes.shape[:-2], -1, -(-columns // min(block[1], columns)))
    wide = wide.repeat_interleave(min(block[0], rows), -2).repeat_interleave(min(block[1], columns), -1)
    return codes.float() * wide[..., :rows, :columns]


def _four_bits(packed: Tensor) -> Tensor:
    """Unpack and decode E2M1: a sign, two bits of exponent, one of mantissa. The first code is in the low four bits."""
    codes = torch.stack([packed.int() % 16, packed.int() // 16], -1).flatten(-2)
    exponent, half = codes % 8 // 2, codes % 2
    sizes = torch.where(exponent == 0, half * 0.5, torch.ldexp(1 + half * 0.5, exponent - 1))
    return torch.where(codes >= 8, -sizes, sizes)


def _nf4(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpack and decode NF4. The first code is in the high four bits."""
    codes = torch.stack([packed.view(-1).int() // 16, packed.view(-1).int() % 16], -1).view(*shape)
    return torch.tensor(NF4.table)[codes]


def _bits(tensor: Tensor) -> Tensor:
    """View as integers, so that NaN equals itself and 0 differs from -0."""
    return tensor.view(_BITS[tensor.itemsize])


def checksum_of(bits: Tensor) -> int:
    """Return the crc32 of a tensor's bytes, in row-major order."""
    return zlib.crc32(bits.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _unordered(bits: Tensor) -> int:
    """Return a checksum that does not depend on the order of elements: the sum of their hashes."""
    hashed = bits.long() * _ODD
    hashed = (hashed ^ (hashed >> 29)) * _ODD
    return int((hashed ^ (hashed >> 32)).sum())


class _Mapped:
    """Tensors of a source as views of mapped files.

    Pages that were read stay in memory until their file is closed, so files are reopened from time to time.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.num_bytes = source, 0
        self.files: dict[str, Any] = {}
        self._last = "", torch.empty(0)  # the last tensor with scales, dequantised
        self._amax: dict[str, Tensor] = {}

    def tensor(self, key: str, num_elements: int) -> Tensor:
        """Return a tensor, dequantised if the files hold scales for it. `num_elements`: how many will be read."""
        if key == self._last[0]:
            return self._last[1]
        scale = self.source.scales.get(key)
        if scale is None:
            return self._of_file(key, num_elements)
        codes = self._of_file(scale.packed or key, num_elements)
        codes = _four_bits(codes) if scale.packed else codes
        scales = self._of_file(scale.key, num_elements)
        if scale.coding == NF4:
            shape = self.source.entries[key].shape
            codes, scales = _nf4(codes, shape), scales.float()
            if scale.nested:
                absmax, values = (self._of_file(each, num_elements) for each in scale.nested)
                scales = values[scales.long()] * absmax.repeat_interleave(256)[: len(scales)] + scale.offset
            scales = scales.view(shape[0], -1)
        if scale.divisor:
            scales = scales.float() / self._of_file(scale.divisor, 1).float()
        self._last = key, scaled(codes, scales, scale.block)
        return self._last[1]

    def amax(self, key: str) -> Tensor:
        """Return the largest magnitude of each matrix of a tensor, in float32."""
        if key not in self._amax:
            values = self._of_file(key, 0)
            self._amax[key] = values.abs().amax((-2, -1), keepdim=True).float()
        return self._amax[key]

    def _of_file(self, key: str, num_elements: int) -> Tensor:
        """Return a tensor as a view of its mapped file, and refuse a file that changed since the model was loaded."""
        entry = as_in_file(self.source.entries[key])
        try:
            if self.num_bytes > _MAPPED_BYTES:
                self.files, self.num_bytes = {}, 0
            if entry.file not in self.files:
                self.files[entry.file] = safe_open(self.source.directory / entry.file, "pt")
                self.source.check_unchanged([entry.file])
            tensor: Tensor = self.files[entry.file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{key} cannot be read again from {self.source.directory / entry.file}: {error}") from error
        if tuple(tensor.shape) != entry.shape:
            raise LoadError(
                f"{self.source.directory / entry.file} has changed since it was loaded: {key} is "
                f"{tuple(tensor.shape)}, it was {entry.shape}; put the old file back"
            )
        self.num_bytes += num_elements * tensor.itemsize
        return tensor


_SHA256 = re.compile(r"[0-9a-f]{64}")
OUTLANDISH = 1e4  # no weight of a published model is as large; one flipped bit of an exponent makes it 1e38

_COMMON = 1e-4  # of the largest weight: if half of all elements are larger than this, no single one is damaged
_LOOKED_AT = 100_000  # elements of a tensor that are sampled for their usual size


def strange_weights(model: Model) -> Iterator[Finding]:
    """Yield this rank's weights that no published model has.

    The other checks compare with the files, so a file that was damaged before it was loaded passes them.
    """
    for name, tensor in model.values().items():
        yield from strange_in(name, tensor, model.mesh.rank)


def strange_in(name: str, tensor: Tensor, rank: int) -> Iterator[Finding]:
    """Yield the implausible values of one tensor: not finite, or far too large."""
    if not tensor.numel():
        return
    # An exponent of all ones means NaN or infinity, so one flipped bit can produce either.
    num = int((~tensor.isfinite()).sum())
    if num:
        yield Finding("W1", name, f"{num} of {tensor.numel()} elements on rank {rank} are not finite", "a damaged file")
        return
    most = tensor.abs().max().item()
    if most > OUTLANDISH:
        usual = _usual(tensor)
        what = f"a weight of {most:.3g} on rank {rank}, where {usual:.2g} is usual"
        guess = "a damaged file: a flipped bit makes such a number"
        if usual > _COMMON * most:
            guess = "all values are as large: its scales are taken otherwise, or lack a factor such as a global scale"
        yield Finding("W1", name, what, guess)


def _usual(tensor: Tensor) -> float:
    """Return the median magnitude of a sample of elements. A single damaged element would dominate a mean."""
    flat = tensor.reshape(-1)
    return float(flat[:: max(1, len(flat) // _LOOKED_AT)].double().abs().median())


def published_sums(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the published sha256 of each file that the Hugging Face cache has.

    In the hub's cache a file is a link to a blob whose name is its sha256. A download to a local directory notes the
    sha256 in a metadata file instead.
    """
    sums = {}
    for file in files:
        blob = (directory / file).resolve().name
        noted = directory / ".cache" / "huggingface" / "download" / f"{file}.metadata"
        words = [blob, *(noted.read_text().split() if noted.is_file() else ())]
        known = next((word for word in words if _SHA256.fullmatch(word)), None)
        if known:
            sums[file] = known
    return sums


def damaged_files(directory: Path, sums: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the files whose sha256 is not the published one."""
    for file, expected in sums.items():
        with (directory / file).open("rb") as f:
            actual = hashlib.file_digest(f, "sha256").hexdigest()
        if actual != expected:
            what = f"its sha256 is {actual}, the hub has {expected}: fetch the file again"
            yield Finding("W1", file, what, "it was damaged in transfer, or changed since")
