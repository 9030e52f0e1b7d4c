"""Read a checkpoint into the pieces of any mesh, and check every byte of it on the way.

A run that lies in what a rank reads is checked as it is read; of a run that is read in part, the rest is read too. What
no rank needs (weights that are rounded masters, tensors that are not trained, small files) is shared out and checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BrokenCheckpointError, BrokenFile, CheckpointError, LoadError, failure_in
from ..log import logger
from ..mesh import Mesh
from ..sharding import ShardingSpec, Table
from ..weights import (
    TRAINER,
    Checks,
    Choice,
    Extent,
    Extents,
    KeyMap,
    Source,
    Values,
    check_same,
    chosen,
    fill,
    keys_of,
    open_source,
    opened,
    plan_reads,
    read_header,
    read_json,
)
from .content import MASTER, RANDOM, RANDOM_FILE, WEIGHTS
from .folder import find, is_checkpoint, newest_whole
from .manifest import Manifest, check_files, check_name, check_sizes, read_manifest, read_parts


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk: its manifest, what was written, and its planes as sources."""

    directory: Path
    manifest: Manifest
    extents: Extents
    planes: Mapping[str, Source]
    trainer: Mapping[str, Any]

    @property
    def parameters(self) -> Source:
        """Masters where there are some, weights otherwise."""
        weights, masters = self.planes[WEIGHTS], self.planes.get(MASTER)
        if masters is None:
            return weights
        return replace(
            weights, entries={**weights.entries, **masters.entries}, stamps={**weights.stamps, **masters.stamps}
        )

    def random_rows(self, mesh: Mesh) -> dict[str, Tensor]:
        """The states of this rank's generators. Nothing, where another number of ranks was saved."""
        entries, _, _ = read_header(self.directory / RANDOM_FILE)
        with opened(self.directory / RANDOM_FILE) as file:
            if any(entry.shape[0] != mesh.axes.world for entry in entries):
                return {}
            size = {entry.key: entry.shape[1] for entry in entries}
            rows = {e.key: file.bytes_at(e.start + mesh.rank * size[e.key], size[e.key]) for e in entries}
        return {name: torch.frombuffer(bytearray(row), dtype=torch.uint8) for name, row in rows.items()}


def open_checkpoint(directory: Path) -> Checkpoint:
    """Its manifest, headers and small files, which are checked. No tensor is read."""
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest)
        extents = read_parts(directory, manifest)
        check_name(directory, manifest)
        _check_small(directory, extents.of_file)
        by_file = extents.sorted()
        planes = {name: _plane(directory, folder, by_file) for name, folder in manifest.planes.items()}
        return Checkpoint(directory, manifest, extents, planes, read_json(directory / TRAINER))
    except BrokenFile as error:
        raise BrokenCheckpointError(f"{broken(directory)}: {error}") from error
    except LoadError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def open_newest(directory: Path, damaged: list[Path]) -> Checkpoint:
    """A checkpoint, or of a folder the newest one that can be opened. What is not as it was saved joins `damaged`."""
    while True:
        path = find(directory, but=damaged)
        try:
            return open_checkpoint(path)
        except BrokenCheckpointError as error:
            pass_over(directory, path, error, damaged)


def pass_over(directory: Path, path: Path, error: BrokenCheckpointError, damaged: list[Path]) -> None:
    """Let an older checkpoint of the folder `directory` take the place of a damaged one. Raise where the user gave this
    very checkpoint."""
    if path.parent != directory:
        raise error
    logger.warning("%s is damaged and stays as it is; trying an older checkpoint: %s", path, error)
    damaged.append(path)


def extents_of_model(directory: Path) -> Mapping[str, Sequence[Extent]]:
    """Return the checksums of a checkpoint's weights, for each file; nothing for a plain model directory.

    Headers and small files are compared here. Nothing of masters and moments is asked for: they may have been removed.
    """
    if not is_checkpoint(directory):
        return {}
    try:
        manifest = read_manifest(directory)
        others = {f"{folder}/" for folder in (*manifest.planes.values(), RANDOM) if folder}
        of_model = {name: size for name, size in manifest.files.items() if not name.startswith(tuple(others))}
        check_sizes(directory, of_model)
        extents = read_parts(directory, manifest).sorted()
        check_name(directory, manifest)
        _check_small(directory, {name: extents.get(name, []) for name in of_model})
    except BrokenFile as error:
        raise BrokenFile(f"{broken(directory)}: {error}") from error
    return {name: extents[name] for name in of_model}


def _check_small(directory: Path, extents: Mapping[str, Sequence[Extent]]) -> None:
    """What is parsed is checked first: headers, and all that is no tensor."""
    checks = Checks(directory, {})
    for file, found in extents.items():
        with opened(directory / file) as source:
            for extent in found:
                if extent.start == 0 or not file.endswith(".safetensors"):
                    checks.check(file, extent, source.bytes_at(extent.start, extent.stop - extent.start))


def _plane(directory: Path, folder: str, extents: Mapping[str, Sequence[Extent]]) -> Source:
    """Its files are named as in the directory of the checkpoint."""
    source = replace(open_source(directory / folder), extents=extents)
    if not folder:
        return source
    entries = {key: entry._replace(file=f"{folder}/{entry.file}") for key, entry in source.entries.items()}
    stamps = {f"{folder}/{file}": stamp for file, stamp in source.stamps.items()}
    return Source(directory, entries, stamps=stamps, extents=extents)


@dataclass(frozen=True)
class RestoreTarget:
    """What this rank fills from a source, by parameter. `names`: what some rank fills from it, or compares. `same`:
    what must be there already, because it is frozen and takes no other values."""

    source: Source
    pieces: Mapping[str, Tensor]
    names: frozenset[str]
    same: Values = field(default_factory=lambda: Values({}))


def check_frozen(
    checkpoint: Checkpoint, spec: ShardingSpec, choice: Choice, wanted: Sequence[RestoreTarget], mesh: Mesh
) -> None:
    """Before anything is replaced: what takes no other values is the same in the checkpoint. All ranks call it."""

    def compare() -> None:
        for each in wanted:
            keymap = KeyMap(choice, keys_of(each.source), source=each.source)
            alone = range(mesh.rank, mesh.rank + 1)
            reads = plan_reads(spec, mesh.axes, alone, keymap, each.same)
            check_same(each.same, mesh.rank, list(reads), each.source)

    failure = failure_in(compare, CheckpointError, f"{checkpoint.directory} cannot be resumed")
    raise_together(failure, f"the comparison with {checkpoint.directory}", mesh)


def restore(
    checkpoint: Checkpoint, spec: ShardingSpec, choice: Choice, wanted: Sequence[RestoreTarget], mesh: Mesh
) -> None:
    """Fill this rank's pieces, and check every byte of the checkpoint. All ranks call it; if one fails, all raise.

    `choice`: the layouts of the checkpoint.
    """

    def read() -> None:
        for each in wanted:
            keymap = KeyMap(choice, keys_of(each.source), source=each.source)
            alone = range(mesh.rank, mesh.rank + 1)
            reads = plan_reads(spec, mesh.axes, alone, keymap, each.pieces)
            fill(each.pieces, mesh, list(reads), alone, each.source)
        for file, extent in list(_unread(checkpoint, _filled(wanted, spec.table, choice)))[
            mesh.rank :: mesh.axes.world
        ]:
            verify_extent(checkpoint, file, extent)

    failure = failure_in(read, CheckpointError, broken(checkpoint.directory))
    raise_together(failure, f"the reading of {checkpoint.directory}", mesh)


def raise_together(failure: BaseException | None, at: str, mesh: Mesh) -> None:
    """If a rank failed, all raise the same kind of error, so that all of them take an older checkpoint or none does.
    Only bytes that are not as they were saved are a reason to: a rank without memory would fail again."""
    damage = None
    if failure is not None and isinstance(failure.__cause__, BrokenFile | BrokenCheckpointError):
        failure, damage = None, BrokenCheckpointError(str(failure))
    mesh.all_or_none(failure, at, CheckpointError)
    mesh.all_or_none(damage, at, BrokenCheckpointError)


def broken(directory: Path) -> str:
    older = newest_whole(directory.parent, but=directory)
    hint = f"{older} has all its files: take that" if older else "there is no other one beside it"
    return f"{directory} is broken ({hint})"


def _filled(wanted: Sequence[RestoreTarget], table: Table, choice: Choice) -> set[tuple[str, int]]:
    """The keys whose every byte some rank reads, by file and first byte: the same on all ranks, which share out the
    rest."""
    filled = set()
    for each in wanted:
        lacking = {key for param in table if param.name not in each.names for key in chosen(param, choice).keys}
        keys = {block.key for name in each.names for block in chosen(table[name], choice).blocks} - lacking
        filled |= {(each.source.entries[key].file, each.source.entries[key].start) for key in keys}
    return filled


def _unread(checkpoint: Checkpoint, filled: Container[tuple[str, int]]) -> Iterator[tuple[str, Extent]]:
    """The runs of all other keys, of headers and of small files."""
    entries = [entry for source in checkpoint.planes.values() for entry in source.entries.values()]
    starts: dict[str, list[int]] = {}
    for entry in sorted(entries, key=lambda e: e.start):
        starts.setdefault(entry.file, []).append(entry.start)
    for file, extents in checkpoint.extents.of_file.items():
        for extent in extents:
            at = bisect_right(starts.get(file, []), extent.start)
            if not at or (file, starts[file][at - 1]) not in filled:
                yield file, extent


def verify_extent(checkpoint: Checkpoint, file: str, extent: Extent) -> None:
    entries = (entry for source in checkpoint.planes.values() for entry in source.entries.values())
    with opened(checkpoint.directory / file) as found:
        data = found.bytes_at(extent.start, extent.stop - extent.start)
    if not extent.matches(data):
        key = next((e.key for e in entries if e.file == file and e.start <= extent.start < e.stop), "")
        Checks(checkpoint.directory, {}).check(file, extent, data, key)
