"""Restore a checkpoint onto any mesh (resharding), and verify every byte of it on the way.

Each rank intersects its boxes with the tensors of the files and reads those ranges; the mesh that saved plays no part.
A rank verifies each extent that it reads, and reads an extent whole even if it needs only a part. Bytes that no rank
needs (weights that are rounded masters, untrained tensors, small files) are divided among ranks and verified too:
damage should raise now, not when the file is needed.

Example: saved on fsdp=4, restored on tp=2. A tp rank needs columns 0 to D/2 of `o_proj`: a strip of every row. Rows
were written in four extents, each of which it reads in part, so each is verified whole, once. The other tp rank does
the same for its half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

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
from .folder import CHECKPOINTS, find, is_checkpoint, newest_whole
from .manifest import Manifest, check_files, check_name, check_sizes, read_manifest, read_parts

Made = TypeVar("Made")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: manifest, extents, and its state sets as sources."""

    directory: Path
    manifest: Manifest
    extents: Extents
    planes: Mapping[str, Source]
    trainer: Mapping[str, Any]

    @property
    def parameters(self) -> Source:
        """Return the source of parameters: masters if there are any, weights otherwise.

        Masters are float32 where the files of the weights are bfloat16. Resuming from rounded weights would lose the
        small updates of many steps.
        """
        weights, masters = self.planes[WEIGHTS], self.planes.get(MASTER)
        if masters is None:
            return weights
        return replace(
            weights, entries={**weights.entries, **masters.entries}, stamps={**weights.stamps, **masters.stamps}
        )

    def random_rows(self, mesh: Mesh) -> dict[str, Tensor]:
        """Return this rank's generator states; nothing if a different number of ranks saved."""
        entries, _, _ = read_header(self.directory / RANDOM_FILE)
        with opened(self.directory / RANDOM_FILE) as file:
            # Generator states belong to ranks, so they have no meaning for another number of ranks.
            if any(entry.shape[0] != mesh.axes.world for entry in entries):
                return {}
            size = {entry.key: entry.shape[1] for entry in entries}
            rows = {e.key: file.bytes_at(e.start + mesh.rank * size[e.key], size[e.key]) for e in entries}
        return {name: torch.frombuffer(bytearray(row), dtype=torch.uint8) for name, row in rows.items()}


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a checkpoint and verify manifest, headers and small files. No tensor is read.

    Reads a few MB on every rank: the manifest, the lists of extents, headers, config and tokenizer.
    """
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
    """Open a checkpoint, or the newest one of a folder that can be opened. Damaged ones are added to `damaged`."""
    while True:
        path = find(directory, exclude=damaged)
        try:
            return open_checkpoint(path)
        except BrokenCheckpointError as error:
            pass_over(directory, path, error, damaged)


def is_named(directory: Path, path: Path) -> bool:
    """Return whether the user named exactly this checkpoint, and not its folder or its run."""
    return path.parent not in (directory, directory / CHECKPOINTS)


def pass_over(directory: Path, path: Path, error: BrokenCheckpointError, damaged: list[Path]) -> None:
    """Record a damaged checkpoint of a folder, so that an older one is tried. Raise if the user named exactly this
    checkpoint.

    The damaged directory stays: it is evidence, and parts of it may be needed.
    """
    if is_named(directory, path):
        raise error
    logger.warning("%s is damaged (it is left as it is); trying an older checkpoint: %s", path, error)
    damaged.append(path)


def extents_of_model(directory: Path) -> Mapping[str, Sequence[Extent]]:
    """Return the checksums of a checkpoint's weights by file; nothing for a plain model directory.

    With them `mw.load` of a checkpoint verifies every byte of the weights as it reads them, as a resume does. Headers
    and small files are verified at once. Masters and optimizer state may have been removed from the checkpoint.
    """
    if not is_checkpoint(directory):
        return {}
    try:
        manifest = read_manifest(directory)
        state_folders = {f"{folder}/" for folder in (*manifest.planes.values(), RANDOM) if folder}
        of_model = {name: size for name, size in manifest.files.items() if not name.startswith(tuple(state_folders))}
        check_sizes(directory, of_model)
        extents = read_parts(directory, manifest).sorted()
        check_name(directory, manifest)
        _check_small(directory, {name: extents.get(name, []) for name in of_model})
    except BrokenFile as error:
        raise BrokenFile(f"{broken(directory)}: {error}") from error
    return {name: extents[name] for name in of_model}


def _check_small(directory: Path, extents: Mapping[str, Sequence[Extent]]) -> None:
    """Verify headers and files without tensors before they are parsed."""
    checks = Checks(directory, {})
    for file, file_extents in extents.items():
        with opened(directory / file) as source:
            for extent in file_extents:
                if extent.start == 0 or not file.endswith(".safetensors"):
                    checks.check(file, extent, source.bytes_at(extent.start, extent.stop - extent.start))


def _plane(directory: Path, folder: str, extents: Mapping[str, Sequence[Extent]]) -> Source:
    """Open a state set, with file names relative to the checkpoint."""
    source = replace(open_source(directory / folder), extents=extents)
    if not folder:
        return source
    entries = {key: entry._replace(file=f"{folder}/{entry.file}") for key, entry in source.entries.items()}
    stamps = {f"{folder}/{file}": stamp for file, stamp in source.stamps.items()}
    return Source(directory, entries, stamps=stamps, extents=extents)


@dataclass(frozen=True)
class RestoreTarget:
    """The shards that this rank fills from a source, by parameter. `names`: the parameters that any rank fills from it
    or compares. `same`: frozen FP8 weights, which must already have these values."""

    source: Source
    pieces: Mapping[str, Tensor]
    names: frozenset[str]
    same: Values = field(default_factory=lambda: Values({}))


def check_frozen(
    checkpoint: Checkpoint, spec: ShardingSpec, choice: Choice, targets: Sequence[RestoreTarget], mesh: Mesh
) -> None:
    """Check before anything is overwritten that frozen FP8 weights have the checkpoint's values. All ranks call it."""

    def compare() -> None:
        for each in targets:
            keymap = KeyMap(choice, keys_of(each.source), source=each.source)
            this_rank = range(mesh.rank, mesh.rank + 1)
            reads = plan_reads(spec, mesh.axes, this_rank, keymap, each.same)
            check_same(each.same, mesh.rank, list(reads), each.source)

    at, what = f"the comparison with {checkpoint.directory}", f"{checkpoint.directory} cannot be resumed"
    together(compare, at, mesh, what)


def restore(
    checkpoint: Checkpoint, spec: ShardingSpec, choice: Choice, targets: Sequence[RestoreTarget], mesh: Mesh
) -> None:
    """Fill this rank's shards and verify every byte of the checkpoint. All ranks call it; if one fails, all raise.

    `choice`: the layouts of the checkpoint.
    """

    def read() -> None:
        for each in targets:
            keymap = KeyMap(choice, keys_of(each.source), source=each.source)
            this_rank = range(mesh.rank, mesh.rank + 1)
            reads = plan_reads(spec, mesh.axes, this_rank, keymap, each.pieces)
            fill(each.pieces, mesh, list(reads), this_rank, each.source)
        # The rest is divided by rank number, so each of N ranks verifies one N-th in parallel.
        for file, extent in list(_unread(checkpoint, _filled(targets, spec.table, choice)))[
            mesh.rank :: mesh.axes.world
        ]:
            verify_extent(checkpoint, file, extent)

    together(read, f"the reading of {checkpoint.directory}", mesh, broken(checkpoint.directory))


def together(act: Callable[[], Made], at: str, mesh: Mesh, what: str) -> Made:
    """Run `act` on all ranks, like `Mesh.together`. If it fails on any rank, raise the same kind of error on all, so
    that either all ranks try an older checkpoint or none does.

    Only damaged bytes are a reason to try an older checkpoint. A rank that is out of memory would fail again.

    If ranks raised different errors, some would try an older checkpoint while others end, and the collectives of the
    former would wait for the latter.
    """
    made = list[Made]()
    damaged_error: BrokenCheckpointError | None = None
    failure = failure_in(lambda: made.append(act()), CheckpointError, what)
    if failure is not None and isinstance(failure.__cause__, BrokenFile | BrokenCheckpointError):
        failure, damaged_error = None, BrokenCheckpointError(str(failure))
    # Two rounds in a fixed order: if one rank has a broken file and another is out of memory, all raise the second
    # kind.
    mesh.all_or_none(failure, at, CheckpointError)
    mesh.all_or_none(damaged_error, at, BrokenCheckpointError)
    return made[0]


def broken(directory: Path) -> str:
    """Return the start of an error about a damaged checkpoint; it names an older one to use."""
    older = newest_whole(directory.parent, exclude=directory)
    hint = f"{older} has all its files: use that" if older else "there is no other one in its folder"
    return f"{directory} is broken ({hint})"


def _filled(targets: Sequence[RestoreTarget], table: Table, choice: Choice) -> set[tuple[str, int]]:
    """Return the keys that ranks read in full, by file and first byte. The result is equal on all ranks, which divide
    the rest."""
    filled = set()
    for each in targets:
        unread_keys = {key for param in table if param.name not in each.names for key in chosen(param, choice).keys}
        keys = {block.key for name in each.names for block in chosen(table[name], choice).blocks} - unread_keys
        # A key is read in full only if all its parameters are restored, so a fused tensor with a frozen part is not.
        filled |= {(each.source.entries[key].file, each.source.entries[key].start) for key in keys}
    return filled


def _unread(checkpoint: Checkpoint, filled: Container[tuple[str, int]]) -> Iterator[tuple[str, Extent]]:
    """Yield the extents of all other keys, of headers and of small files."""
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
    """Read an extent and verify its checksum."""
    entries = (entry for source in checkpoint.planes.values() for entry in source.entries.values())
    with opened(checkpoint.directory / file) as opened_file:
        data = opened_file.bytes_at(extent.start, extent.stop - extent.start)
    if not extent.matches(data):
        key = next((e.key for e in entries if e.file == file and e.start <= extent.start < e.stop), "")
        Checks(checkpoint.directory, {}).check(file, extent, data, key)
