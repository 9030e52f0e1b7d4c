"""Are the weights that a rank holds those of its source? Each rank compares its own, box by box, and sends none.

The source is read by another reader than the one that loading uses: safetensors' own, which maps files into memory. So
a mistake in ours cannot hide, and a tensor costs memory only where it is looked at.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..engine import Model
from ..errors import LoadError, StateError
from ..log import Advance, progress
from ..ops.part_sizes import part_size
from ..recipe import matching
from ..sharding import Block, Box
from ..weights import Source, chosen
from .results import Finding

_SLAB_ELEMENTS = part_size(__name__, "_SLAB_ELEMENTS", 1 << 20, small=1001)  # compared at once
# looked at before the mapping of a file is given back
_MAPPED_BYTES = part_size(__name__, "_MAPPED_BYTES", 64 << 20, small=10_007)
_MOST = 100  # differences that a rank tells the others in full
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class Difference:
    """A box of a parameter that a rank does not hold as a key of the source has it."""

    name: str  # of the parameter
    key: str
    box: str  # of the parameter
    rank: int
    num_wrong: int
    num_elements: int
    misplaced: bool  # the right values stand there, in the wrong places
    checksums: tuple[int, int]  # crc32 of the first bytes that differ, here and in the source

    def __str__(self) -> str:
        moved = ": the right values in the wrong places" if self.misplaced else ""
        here, source = self.checksums
        return (
            f"{self.num_wrong} of {self.num_elements} elements differ{moved} of {self.key} in {self.box} on rank "
            f"{self.rank} (crc32 {here:08x} here, {source:08x} in the source)"
        )


@dataclass(frozen=True)
class WeightCheck:
    """What all ranks found, the same on every one."""

    differences: tuple[Difference, ...]  # of each rank the first 100
    num_differences: int
    num_elements: int  # compared, on all ranks together: copies count each time
    skipped: tuple[str, ...]  # parameters that the source does not hold: they were drawn

    @property
    def ok(self) -> bool:
        return self.num_differences == 0


def check_weights(model: Model, only: str | Sequence[str] = "**") -> WeightCheck:
    """Compare what each rank holds with the source, bit for bit. All ranks call it and learn the same.

    `only`: patterns of the parameters to look at, those that nothing should have changed.
    """
    names, rank = _chosen_names(model, [only] if isinstance(only, str) else list(only)), model.mesh.rank
    skipped = [name for name in names if name in model.keymap.fresh]
    total = sum(model.pieces[name].numel for name in names if name not in skipped)
    found: list[Difference] = []
    failure = None
    try:
        with progress("check weights", total, "elements", enabled=rank == 0) as advance:
            found.extend(weight_differences(model, names, advance))
    except LoadError as error:
        failure = f"rank {rank}: {error}"
    told = _everywhere(model, (found[:_MOST], len(found), total, failure))
    failures = [f for _, _, _, f in told if f is not None]
    if failures:
        raise LoadError("; ".join(failures[:3]))
    return WeightCheck(
        tuple(d for some, _, _, _ in told for d in some), sum(n for _, n, _, _ in told),
        sum(n for _, _, n, _ in told), tuple(skipped),
    )  # fmt: skip


def _chosen_names(model: Model, patterns: Sequence[str]) -> list[str]:
    if model.keymap.source is None:
        raise StateError("the model was made by mw.init: there are no files to compare its weights with")
    chosen_ones = {*matching(patterns, model.table.params, "only")}
    return [name for name in model.pieces if name in chosen_ones]


def _everywhere(model: Model, mine: Any) -> list[Any]:
    told: list[Any] = [None] * model.mesh.axes.world
    dist.all_gather_object(told, mine)
    return told


def weight_differences(model: Model, names: Sequence[str], advance: Advance | None = None) -> Iterator[Difference]:
    """Of what this rank holds of `names`. Keys that hold a parameter once more are compared too."""
    assert model.keymap.source is not None
    files, stored = _Mapped(model.keymap.source), model.values()
    for name in names:
        if name in model.keymap.fresh:
            continue
        layout, piece = chosen(model.table[name], model.keymap.choice), model.pieces[name]
        views = list(stored.views(piece))
        found = [c for block in layout.blocks for c in _compared(block, views, files)]
        again = [c for block in layout.copies for c in _compared(block, views, files)]
        for comparisons in (found, again):
            moved = sum(c.excess for c in comparisons) % 2**64 == 0  # from one box to another
            yield from (c.difference(name, model.mesh.rank, moved) for c in comparisons)
        if advance is not None:
            advance(piece.numel)


def _compared(block: Block, views: Sequence[tuple[Box, Any]], files: _Mapped) -> Iterator[_Comparison]:
    """Of the boxes of a piece that meet a block, those that differ."""
    for box, view in views:
        common = block.ours.meet(box)
        if common is None:
            continue
        found = _Comparison(block.key, common)
        for slab in _slabs(common):
            theirs = block.view(files.tensor(block.key, slab.size))[slab.within(block.ours).slices]
            found.add(view[slab.within(box).slices], theirs)
        if found.num_wrong:
            yield found


def _slabs(box: Box) -> Iterator[Box]:
    """The box in halves of halves, until they are small."""
    if box.size <= _SLAB_ELEMENTS:
        yield box
        return
    dim = next(d for d, size in enumerate(box.shape) if size > 1)
    middle = (box.start[dim] + box.stop[dim]) // 2
    yield from _slabs(Box(box.start, (*box.stop[:dim], middle, *box.stop[dim + 1 :])))
    yield from _slabs(Box((*box.start[:dim], middle, *box.start[dim + 1 :]), box.stop))


class _Comparison:
    """Of one box, slab by slab. The sum of hashes of the elements does not depend on their order."""

    def __init__(self, key: str, box: Box) -> None:
        self.key, self.box, self.num_wrong, self.excess = key, box, 0, 0
        self.checksums = (0, 0)

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        """The source's values are cast as loading casts them, where ours lie."""
        ours_bits, their_bits = (_bits(t.contiguous()) for t in (ours, theirs.to(ours.device).to(ours.dtype)))
        if torch.equal(ours_bits, their_bits):
            return
        if not self.num_wrong:
            self.checksums = (checksum_of(ours_bits), checksum_of(their_bits))
        self.num_wrong += int((ours_bits != their_bits).sum())
        self.excess += _unordered(ours_bits) - _unordered(their_bits)

    def difference(self, name: str, rank: int, moved: bool) -> Difference:
        moved = moved or self.excess % 2**64 == 0
        return Difference(name, self.key, str(self.box), rank, self.num_wrong, self.box.size, moved, self.checksums)


def scaled(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the values of numbers with scales: whole, block by block, and not as loading does it."""
    wide, (rows, columns) = scales.float(), numbers.shape[-2:]
    if scales.dtype == torch.uint8:  # powers of two
        wide = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    wide = wide.view(*numbers.shape[:-2], -1, -(-columns // min(block[1], columns)))
    wide = wide.repeat_interleave(min(block[0], rows), -2).repeat_interleave(min(block[1], columns), -1)
    return numbers.float() * wide[..., :rows, :columns]


def _four_bits(packed: Tensor) -> Tensor:
    """A sign, two bits of an exponent and one of a mantissa, spelled out; the first number is in the low bits."""
    codes = torch.stack([packed.int() % 16, packed.int() // 16], -1).flatten(-2)
    exponent, half = codes % 8 // 2, codes % 2
    sizes = torch.where(exponent == 0, half * 0.5, torch.ldexp(1 + half * 0.5, exponent - 1))
    return torch.where(codes >= 8, -sizes, sizes)


def _bits(tensor: Tensor) -> Tensor:
    """NaN is NaN, and 0 is not -0."""
    return tensor.view(_BITS[tensor.itemsize])


def checksum_of(bits: Tensor) -> int:
    return zlib.crc32(bits.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _unordered(bits: Tensor) -> int:
    hashed = bits.long() * _ODD
    hashed = (hashed ^ (hashed >> 29)) * _ODD
    return int((hashed ^ (hashed >> 32)).sum())


class _Mapped:
    """Tensors of a source as views of mapped files. What was looked at stays in memory until its file is closed, so it
    is opened anew from time to time."""

    def __init__(self, source: Source) -> None:
        self.source, self.num_bytes = source, 0
        self.files: dict[str, Any] = {}
        self._last = "", torch.empty(0)  # that had scales, multiplied out

    def tensor(self, key: str, num_elements: int) -> Tensor:
        """Of which `num_elements` will be looked at."""
        if key == self._last[0]:
            return self._last[1]
        scale = self.source.scales.get(key)
        if scale is None:
            return self._of_file(key, num_elements)
        numbers = self._of_file(scale.packed or key, num_elements)
        numbers = _four_bits(numbers) if scale.packed else numbers
        scales = self._of_file(scale.key, num_elements)
        if scale.divisor:
            scales = scales.float() / self._of_file(scale.divisor, 1).float()
        self._last = key, scaled(numbers, scales, scale.block)
        return self._last[1]

    def _of_file(self, key: str, num_elements: int) -> Tensor:
        entry = self.source.entries[key]
        try:
            if self.num_bytes > _MAPPED_BYTES:
                self.files, self.num_bytes = {}, 0
            if entry.file not in self.files:
                self.files[entry.file] = safe_open(self.source.directory / entry.file, "pt")
                self.source.check_unchanged([entry.file])
            found: Tensor = self.files[entry.file].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{key} cannot be read again from {self.source.directory / entry.file}: {error}") from error
        if tuple(found.shape) != entry.shape:
            raise LoadError(
                f"{self.source.directory / entry.file} has changed since it was loaded: {key} is {tuple(found.shape)}, "
                f"it was {entry.shape}; put the old file back"
            )
        self.num_bytes += num_elements * found.itemsize
        return found


_SHA256 = re.compile(r"[0-9a-f]{64}")
OUTLANDISH = 1e4  # no weight of a published model is as large; one flipped bit of an exponent makes 1e38 of it

_COMMON = 1e-4  # of the largest weight: where half of all are larger than that, no single one is damaged
_LOOKED_AT = 100_000  # elements of a tensor, to know what is usual


def strange_weights(model: Model) -> Iterator[Finding]:
    """What this rank holds and no model does."""
    for name, tensor in model.values().items():
        yield from strange_in(name, tensor, model.mesh.rank)


def strange_in(name: str, tensor: Tensor, rank: int) -> Iterator[Finding]:
    """Name the values of one tensor that no published model holds."""
    if not tensor.numel():
        return
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
            guess = "all of it is as large: its scales are taken otherwise, or lack a factor such as a global scale"
        yield Finding("W1", name, what, guess)


def _usual(tensor: Tensor) -> float:
    """Return the median size of its elements, or of some of them. One damaged element would change a mean."""
    flat = tensor.reshape(-1)
    return float(flat[:: max(1, len(flat) // _LOOKED_AT)].double().abs().median())


def published_sums(directory: Path, files: Sequence[str]) -> dict[str, str]:
    """The sha256 of each file that the hub's cache knows, by its blobs or by what it noted of a download."""
    found = {}
    for file in files:
        blob = (directory / file).resolve().name
        noted = directory / ".cache" / "huggingface" / "download" / f"{file}.metadata"
        words = [blob, *(noted.read_text().split() if noted.is_file() else ())]
        known = next((word for word in words if _SHA256.fullmatch(word)), None)
        if known:
            found[file] = known
    return found


def damaged_files(directory: Path, sums: Mapping[str, str]) -> Iterator[Finding]:
    for file, due in sums.items():
        with (directory / file).open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != due:
            what = f"its sha256 is {found}, the hub has {due}: fetch the file again"
            yield Finding("W1", file, what, "it was damaged on its way, or changed since")
