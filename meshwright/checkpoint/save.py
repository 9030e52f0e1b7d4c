"""Save a checkpoint: every rank writes its shards, fsyncs and lists its extents; then rank 0 commits the manifest.

Ownership follows the data. Rows that tp cuts into strips are exchanged within tp (weights/writer.py). The rank that
holds any other data writes it, and never sends it. With a fixed owner for each 16 MiB of a file, an fsdp2 rank would
send 128 MB of its 450.

No rank plans for another: each computes its writes from the declaration, in 0.6 s for one of 1,024 ranks of a 235B
model.

Order of a save, on N ranks:

  rank 0: draft directory, headers, small files      all: agree
  all: write rows, fsync, list extents               all: agree, with sizes and checksums of the lists
  rank 0: fsync directories, manifest, rename        all: agree
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError, failure_in
from ..log import logger, progress
from ..mesh import Mesh
from ..sharding import Piece, column_axes, place
from ..watch import deferred_signal
from ..weights import (
    TRAINER,
    Export,
    Extents,
    Files,
    StoredModel,
    copy_carried,
    make_files,
    to_disk,
    whole_rows,
    write_small,
)
from .content import RANDOM, WEIGHTS, Content, Group, StateSet
from .folder import LOCK, Draft, check_not_in_use, final_place, later_than, remove_earlier
from .manifest import NOT_FINITE, PARTS, Manifest, Part, write_part

WriteAction = Callable[[], object]


class Agreement(Protocol):
    """Lets the ranks of a save learn that all have written, or that one failed."""

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        """Return the report of every rank. If one failed, all raise."""

    def end(self, failure: BaseException | None) -> None:
        """Wait for rank 0's commit. If it failed, all raise."""


class CollectiveAgreement:
    """An agreement by collectives, for a save that blocks training."""

    def __init__(self, mesh: Mesh, step: int) -> None:
        self.mesh, self.at = mesh, f"the saving of step {step}"

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        """All-gather the reports of the ranks, and their failures."""
        rows = self.mesh.all_or_none(failure, self.at, CheckpointError, part.to_floats())
        return [Part.from_floats(rank, row) for rank, row in enumerate(rows.tolist())]

    def end(self, failure: BaseException | None) -> None:
        """All-gather the outcome of the commit."""
        self.mesh.all_or_none(failure, self.at, CheckpointError)


class RankFiles:
    """This rank's part of a checkpoint. Created by all ranks together; rank 0 creates the directory."""

    def __init__(self, content: Content, mesh: Mesh) -> None:
        self.content, self.mesh, self.extents = content, mesh, Extents()
        self._part = Part("", 0, 0)
        self._not_finite, self._trained = -1, frozenset[str](content.trainer["trained"])
        # Before each collective of a save, all ranks know whether any has failed. They agree here, after the writes,
        # and after the commit.
        at = f"the making of {content.folder}"
        self.draft = mesh.together(self._create_draft, at, CheckpointError, self._nothing)
        self.path: Path = mesh.broadcast_object(self.draft.path if self.draft else None)
        planes = content.all_planes(mesh.axes)
        self.files = {plane.name: Files(self.path, plane.keymap, self.extents, plane.folder) for plane in planes}

    def _create_draft(self) -> Draft | None:
        """Create the directory with small files, and every other file at its full size, on rank 0."""
        if self.mesh.rank:
            return None
        content, axes = self.content, self.mesh.axes
        content.export.small.check()
        check_not_in_use(final_place(content.folder, content.step), content.export.small.directory)
        with Draft(content.folder, content.step, content.num_bytes(axes)) as draft:
            self._write_small_files(draft.path)
        return draft

    def _write_small_files(self, path: Path) -> None:
        """Write small files and the headers of all state sets."""
        content = self.content
        write_beside(content.export, path, content.trainer, self.extents)
        for plane in content.all_planes(self.mesh.axes):
            make_files(path, plane.keymap, self.extents, plane.folder)

    def write_actions(self, *, keep: bool = False) -> Iterator[WriteAction]:
        """Yield the writes of this rank. With `keep` they hold copies and may run at any time; otherwise run each
        before the next.

        Every rank must iterate to the end, because ranks of tp exchange rows, all in the same order. Exchanged
        parameters come first. Each rank writes the rest in another order, rotated by rank: a file system lets
        only one writer at a time into a file.

        The actions are lazy: without `keep` at most one window of rows (16 MB) is in flight, so a save needs almost no
        memory.
        """
        spec, axes = self.content.spec, self.mesh.axes
        exchanged_params = {
            param.name
            for param in spec.table
            if self.mesh.size_of(column_axes(param, place(param, spec.rules, axes))) > 1
        }
        groups = list(self.content.by_values())
        first = self.mesh.rank % len(groups)
        yield from self._write_actions(groups, lambda name: name in exchanged_params, keep)
        yield from self._write_actions(
            [*groups[first:], *groups[:first]], lambda name: name not in exchanged_params, keep
        )

    def _write_actions(
        self, groups: Iterable[Group], selects: Callable[[str], bool], keep: bool
    ) -> Iterator[WriteAction]:
        """Yield the writes of the parameters that `selects` accepts."""
        for values, planes in groups:
            selected = StoredModel(self.content.spec, self.mesh, values.only(selects))
            for piece, rows in whole_rows(selected, keep=keep):
                yield functools.partial(self._write, planes, piece, rows)

    def _write(self, planes: Iterable[StateSet], piece: Piece, rows: Tensor) -> None:
        """Write rows to all their state sets, and note NaN or infinite weights."""
        for plane in planes:
            self.files[plane.name].write(piece, rows)
        is_weight = any(plane.name == WEIGHTS for plane in planes)
        if is_weight and piece.param.name in self._trained and not _is_finite(rows):
            self._not_finite = list(self.content.spec.table.params).index(piece.param.name)
        self._advance(piece.numel)

    def complete(self, write_actions: Iterable[WriteAction], agreement: Agreement) -> None:
        """Write, agree, commit. If a rank fails, all raise, and nothing is left on the disk.

        The blocking save calls it, and so does the thread of an asynchronous save, with staged copies and the other
        agreement.
        """
        # Any early exit from this block, including Ctrl-C, removes the draft. `pop_all` cancels that after the commit.
        with contextlib.ExitStack() as undo:
            if self.draft:
                undo.callback(self.draft.abandon)
            with deferred_signal(signal.SIGINT) as interrupts:
                failure = self._write_all(write_actions, interrupts) or self._failure_of(self._finish)
                parts = agreement.parts(failure, self._part)
                commit = functools.partial(self._commit, parts)
                agreement.end(self._failure_of(commit) if self.draft else None)
            undo.pop_all()

    def _write_all(self, write_actions: Iterable[WriteAction], interrupts: list[int]) -> BaseException | None:
        """Run the writes. After a failure nothing more is written, but rows are still exchanged, because other ranks
        wait for them."""
        failure: BaseException | None = None
        content, mesh = self.content, self.mesh
        label = f"save step {content.step} to {content.folder} on rank {mesh.rank}"
        total = content.num_elements(mesh.axes, mesh.rank)
        with progress(label, total, "elements", enabled=mesh.rank == 0) as self._advance:
            for act in write_actions:
                if interrupts:
                    failure = failure or KeyboardInterrupt()
                failure = failure or self._failure_of(act)
        return failure

    def _finish(self) -> None:
        """Write the files that need no other rank, fsync everything, and write the list of extents."""
        copy_carried(self.files[WEIGHTS], self.mesh.rank, self.mesh.axes.world)
        for name, state in self.content.random.items():
            self.files[RANDOM].put(name, state, self.mesh.rank * len(state))
        for files in self.files.values():
            files.fsync()
            files.close()
        self._part = replace(write_part(self.path, self.mesh.rank, self.extents), not_finite=self._not_finite)

    def _commit(self, parts: Sequence[Part]) -> None:
        """Commit on rank 0, after all ranks have written."""
        assert self.draft is not None
        about, not_finite = self.content.about, max(part.not_finite for part in parts)
        if not_finite >= 0:
            about = {**about, NOT_FINITE: list(self.content.spec.table.params)[not_finite]}
            logger.warning(
                "%s has NaN or infinite values at step %d; keep= does not count this checkpoint. Resume an earlier one "
                "by its name, or remove this one", about[NOT_FINITE], self.content.step,
            )  # fmt: skip
        commit(self.draft, self.content.planes, parts, about)
        _apply_retention(self.content)

    @property
    def _nothing(self) -> str:
        return f"rank {self.mesh.rank} saved nothing to {final_place(self.content.folder, self.content.step)}"

    def _failure_of(self, act: WriteAction) -> BaseException | None:
        """Run an action on this rank and return its failure, because other ranks must learn of it before this rank
        raises."""
        return failure_in(act, CheckpointError, self._nothing)


def _is_finite(rows: Tensor) -> bool:
    """Return whether all values are finite. min and max propagate NaN, and take a third of the time of
    `isfinite().all()`."""
    return not rows.numel() or bool(torch.stack(torch.aminmax(rows)).isfinite().all())


def commit(draft: Draft, planes: Sequence[StateSet], parts: Sequence[Part], about: Mapping[str, Any]) -> None:
    """Write the manifest of the fsynced files, and rename the checkpoint into place."""
    path = draft.path
    files = {str(each.relative_to(path)): each.stat().st_size for each in path.rglob("*") if each.is_file()}
    files = {name: size for name, size in sorted(files.items()) if name != LOCK and not name.startswith(PARTS + "/")}
    # The bytes that ranks report must add up to those on the disk. This catches a rank that wrote into another draft.
    written, expected = sum(part.num_bytes for part in parts), sum(files.values())
    if written != expected:
        raise CheckpointError(f"the ranks wrote {written} bytes of {expected}; this is a bug: please report it")
    folders, digests = {plane.name: plane.folder for plane in planes}, {part.name: part.checksum for part in parts}
    draft.commit(Manifest(draft.step, folders, files, digests, about))


def write_beside(export: Export, path: Path, trainer: Mapping[str, Any], extents: Extents) -> None:
    """Write config, tokenizer and trainer state, and record their extents."""
    (path / PARTS).mkdir()
    write_small(export, path)
    (path / TRAINER).write_text(json.dumps(trainer, indent=1) + "\n")
    for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != LOCK):
        extents.add(str(file.relative_to(path)), 0, file.read_bytes())
        to_disk(file)


def _apply_retention(content: Content) -> None:
    """Remove earlier checkpoints. The new one is complete, so a failure is only a warning.

    Warn about later steps: after a rewind to an older step, a plain resume would take them as the newest.
    """
    later = later_than(content.folder, content.step)
    if later:
        logger.warning(
            "%s is later than step %d and would be resumed instead of it: remove it, or resume a step by its name",
            ", ".join(path.name for path in later), content.step,
        )  # fmt: skip
    if content.keep.last is not None:
        try:
            remove_earlier(content.folder, content.step, content.keep, content.export.small.directory)
        except OSError as error:
            logger.warning("earlier checkpoints in %s could not be removed: %s", content.folder, error)


def save(content: Content, mesh: Mesh) -> None:
    """Save a checkpoint; every rank calls it, and returns when it is complete."""
    rank_files = RankFiles(content, mesh)
    rank_files.complete(rank_files.write_actions(), CollectiveAgreement(mesh, content.step))
