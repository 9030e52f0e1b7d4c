"""Inspect a checkpoint without a model or process group: list its content, verify its bytes, compare it with
another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Grid
from rich.text import Text
from torch import Tensor

from ..errors import BrokenFile, CheckpointError, counted
from ..log import progress
from ..ops.part_sizes import part_size
from ..weights import DTYPES, MANIFEST, Entry, Source, opened
from .folder import find
from .restore import Checkpoint, open_checkpoint, verify_extent

_READERS = 4
_PART_BYTES = part_size(__name__, "_PART_BYTES", 32 << 20, small=808)


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints. `largest`: the largest absolute difference of an element."""

    plane: str
    key: str
    why: str
    largest: float | None = None
    num: int = 0  # elements that differ


def opened_at(directory: Path) -> Checkpoint:
    """Open a checkpoint, or the newest of a folder."""
    return open_checkpoint(find(directory))


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a summary of a checkpoint as JSON."""
    manifest, trainer = checkpoint.manifest, checkpoint.trainer
    planes = {}
    for name, source in checkpoint.planes.items():
        entries = source.entries.values()
        planes[name] = {
            "tensors": len(source.entries),
            "bytes": sum(entry.stop - entry.start for entry in entries),
            "dtypes": sorted({entry.dtype for entry in entries}),
            "files": len(source.files),
        }
    return {
        "directory": str(checkpoint.directory),
        **{name: trainer[name] for name in ("step", "tokens", "head", "settings", "state")},
        "trained": len(trainer["trained"]),
        **manifest.about,
        "bytes": sum(manifest.files.values()),
        "ranks": len(manifest.parts),
        "runs": sum(len(extents) for extents in checkpoint.extents.of_file.values()),
        "planes": planes,
        "unlisted_files": unlisted_files(checkpoint),
    }


def unlisted_files(checkpoint: Checkpoint) -> list[str]:
    """Return files in the directory that the manifest does not list.

    These files are harmless, but often a sign of a manual edit.
    """
    listed = {*checkpoint.manifest.files, *checkpoint.manifest.parts, MANIFEST}
    siblings = (path.relative_to(checkpoint.directory) for path in checkpoint.directory.rglob("*") if path.is_file())
    return sorted(str(name) for name in siblings if str(name) not in listed)


def check_bytes(checkpoint: Checkpoint) -> list[str]:
    """Read every byte, and return the extents that fail their checksums.

    Four readers are enough to keep a disk busy, and few enough not to thrash it.
    """
    extents = [(file, extent) for file, group in checkpoint.extents.of_file.items() for extent in group]
    label, total = f"check {checkpoint.directory}", checkpoint.extents.num_bytes
    wrong: list[str] = []
    with progress(label, total, "bytes", enabled=True) as advance, ThreadPoolExecutor(_READERS) as readers:
        for failure, (_, extent) in zip(
            readers.map(lambda each: _failure(checkpoint, *each), extents), extents, strict=True
        ):
            advance(extent.stop - extent.start)
            if failure:
                wrong.append(failure)
    return wrong


def _failure(checkpoint: Checkpoint, file: str, extent: Any) -> str:
    """Return why an extent is damaged, or ""."""
    try:
        verify_extent(checkpoint, file, extent)
    except BrokenFile as error:
        return str(error)
    return ""


def differences(checkpoint: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    """Compare two checkpoints tensor by tensor, in every state set.

    Values are compared as float64, so checkpoints in different dtypes can be compared; a different dtype is a
    difference too.
    """
    for plane in dict.fromkeys((*checkpoint.planes, *other.planes)):
        own_entries, other_entries = (c.planes[plane].entries if plane in c.planes else {} for c in (checkpoint, other))
        for key in dict.fromkeys((*own_entries, *other_entries)):
            if key not in own_entries or key not in other_entries:
                yield Difference(plane, key, f"only in {(checkpoint if key in own_entries else other).directory}")
            elif own_entries[key].shape != other_entries[key].shape:
                yield Difference(plane, key, f"shape {own_entries[key].shape} and {other_entries[key].shape}")
            else:
                yield from _of_values(
                    plane, (checkpoint.planes[plane], own_entries[key]), (other.planes[plane], other_entries[key])
                )


def _of_values(plane: str, *both: tuple[Source, Entry]) -> Iterator[Difference]:
    """Compare the values of a tensor, part by part. NaN equals NaN."""
    (_, first), (_, second) = both
    kinds = f"{first.dtype} and {second.dtype}" if first.dtype != second.dtype else ""
    largest, num = 0.0, 0
    for a, b in zip(_parts(*both[0]), _parts(*both[1]), strict=True):
        distance = (a.double() - b.double()).abs() if a.is_floating_point() else (a != b).double()
        # `distance > 0` would miss NaN: its distance to a number is NaN, which compares false with everything.
        unequal = ~(distance == 0) & ~(a.isnan() & b.isnan())
        num += int(unequal.sum())
        largest = max(largest, float(distance[unequal].nan_to_num(nan=float("inf")).max()) if unequal.any() else 0.0)
    if num or kinds:
        yield Difference(plane, first.key, kinds or "values", largest, num)


def _parts(source: Source, entry: Entry) -> Iterator[Tensor]:
    """Yield a tensor in parts with the same number of elements for every dtype, so that two dtypes can be compared."""
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{entry.key} is {entry.dtype}, which torch has no dtype for; compare its bytes with cmp")
    dtype = DTYPES[entry.dtype]
    # Count elements as if of 8 bytes, so that bfloat16 and float32 versions of a tensor are cut at the same elements.
    step = _PART_BYTES // 8 * dtype.itemsize
    with opened(source.directory / entry.file) as file:
        for at in range(entry.start, entry.stop, step):
            data = bytearray(file.bytes_at(at, min(step, entry.stop - at)))
            yield torch.frombuffer(data, dtype=dtype)


_MOST = 20  # differences that are shown

Wrong = Sequence[str] | None  # None: not checked
Apart = Sequence[Difference] | None


def as_json(checkpoint: Checkpoint, wrong: Wrong, differences_found: Apart) -> dict[str, Any]:
    """Return summary, verification and differences as JSON."""
    info = summary(checkpoint)
    if wrong is not None:
        info["wrong"] = list(wrong)
    if differences_found is not None:
        info["differences"] = [asdict(each) for each in differences_found]
    return info


def print_checkpoint(checkpoint: Checkpoint, wrong: Wrong, apart: Apart) -> None:
    """Print summary, verification and differences."""
    console, info = Console(), summary(checkpoint)
    console.print(Text(f"{checkpoint.directory}", style="bold"), soft_wrap=True)
    lines = {
        "model": f"{info['model']}, {info['parameters']:,} parameters, {counted(info['trained'], 'tensor')} trained",
        "step": f"{info['step']:,}, {info['tokens']:,} tokens",
        "saved": f"{info['date']} on {info['mesh']} by {counted(info['ranks'], 'rank')}",
        "size": f"{decimal(info['bytes'])} in {counted(info['runs'], 'run')}, each with its checksum",
        "settings": ", ".join(f"{name} {value}" for name, value in info["settings"].items()),
        "state": "none" if info["state"] is None else f"{info['state']!r:.200}",
    }
    for name, text in lines.items():
        console.print(Text(f"  {name:9} {text}"), soft_wrap=True)
    console.print(_planes(info))
    for name in info["unlisted_files"]:
        console.print(
            Text(f"  {name} is not part of the checkpoint: the manifest does not list it", style="bold"), soft_wrap=True
        )
    _print_checks(console, wrong, apart)


def _planes(info: dict[str, Any]) -> Grid:
    """Return the table of state sets."""
    grid = Grid(box=box.SIMPLE, show_edge=False)
    for title in ("plane", "tensors", "files", "dtypes", "bytes"):
        grid.add_column(title, justify="right" if title in ("tensors", "files", "bytes") else "left")
    for name, plane in info["planes"].items():
        row = (f"{plane['tensors']:,}", f"{plane['files']:,}", ", ".join(plane["dtypes"]), decimal(plane["bytes"]))
        grid.add_row(name, *row)
    return grid


def _print_checks(console: Console, wrong: Wrong, apart: Apart) -> None:
    """Print verification and differences."""
    if wrong is None:
        console.print(Text("  bytes not read; --verify compares them with their checksums"))
    elif not wrong:
        console.print(Text("  every byte is as it was written", style="bold green"))
    for text in wrong or ():
        console.print(Text(f"  {text}", style="bold red"), soft_wrap=True)
    if apart is not None:
        verdict = f"{counted(len(apart), 'tensor')} differ{'s' * (len(apart) == 1)}" if apart else "no tensor differs"
        console.print(Text(f"  {verdict}", style="bold"))
        for each in apart[:_MOST]:
            by = f", {each.num:,} elements, by up to {each.largest:.3g}" if each.largest is not None else ""
            console.print(Text(f"  {each.plane} {each.key}: {each.why}{by}"), soft_wrap=True)
        if len(apart) > _MOST:
            console.print(Text(f"  and {len(apart) - _MOST:,} more; --json has them all"))
