"""Write a checkpoint: every rank what it holds, rank 0 the small files and, when all have written, the manifest.

No rank plans for another. Rows that tp cuts into strips are exchanged within tp (weights/writer.py); all else is
written by those who hold it, and travels nowhere.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError, failure_in
from ..log import logger, progress
from ..mesh import Mesh
from ..sharding import Piece, across, place
from ..weights import (
    TRAINER,
    Export,
    Extents,
    Files,
    StoredModel,
    copy_carried,
    interrupted_later,
    make_files,
    whole_rows,
    write_small,
)
from .content import RANDOM, WEIGHTS, Content, Group, StateSet
from .folder import LOCK, Draft, check_not_in_use, check_room, final_place, later_than, remove_earlier
from .manifest import NOT_FINITE, PARTS, Manifest, Part, to_disk, write_part

Act = Callable[[], object]


class Agreement(Protocol):
    """How the ranks of a save tell each other that they are done, or why not."""

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        """What every rank has written. If one failed, all raise."""

    def end(self, failure: BaseException | None) -> None:
        """Whether rank 0 made a checkpoint of it. If it failed, all raise."""


class CollectiveAgreement:
    """By collectives."""

    def __init__(self, mesh: Mesh, step: int) -> None:
        self.mesh, self.at = mesh, f"the saving of step {step}"

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        rows = self.mesh.all_or_none(failure, self.at, CheckpointError, part.numbers())
        return [Part.of_numbers(rank, row) for rank, row in enumerate(rows.tolist())]

    def end(self, failure: BaseException | None) -> None:
        self.mesh.all_or_none(failure, self.at, CheckpointError)


class RankFiles:
    """What this rank writes of a checkpoint. All ranks make theirs together; rank 0 makes the directory."""

    def __init__(self, content: Content, mesh: Mesh) -> None:
        self.content, self.mesh, self.extents = content, mesh, Extents()
        self._part, made = Part("", 0, 0), list[Draft]()
        self._not_finite, self._trained = -1, frozenset[str](content.trainer["trained"])
        failure = self._failure_of(lambda: made.append(self._make())) if mesh.rank == 0 else None
        mesh.all_or_none(failure, f"the making of {content.folder}", CheckpointError)
        self.draft = made[0] if made else None
        self.path: Path = mesh.of_rank_0(self.draft.path if self.draft else None)
        planes = content.all_planes(mesh.axes)
        self.files = {plane.name: Files(self.path, plane.keymap, self.extents, plane.folder) for plane in planes}

    def _make(self) -> Draft:
        """The directory to fill, with all that is small, and every file in its size."""
        content, axes = self.content, self.mesh.axes
        content.export.small.check()
        check_not_in_use(final_place(content.folder, content.step), content.export.small.directory)
        check_room(content.folder, content.num_bytes(axes))
        with Draft(content.folder, content.step) as draft:
            self._fill(draft.path)
        return draft

    def _fill(self, path: Path) -> None:
        content = self.content
        write_beside(content.export, path, content.trainer, self.extents)
        for plane in content.all_planes(self.mesh.axes):
            make_files(path, plane.keymap, self.extents, plane.folder)

    def acts(self, *, keep: bool = False) -> Iterator[Act]:
        """What to write. With `keep` it is copied, and may be written at any time; otherwise before the next is made.

        Every rank must run through it to the end: ranks of tp exchange rows within it, in an order that is theirs
        alone. All else each rank writes in an order of its own, because a file system lets only one write to a file.
        """
        spec, axes = self.content.spec, self.mesh.axes
        travels = {
            param.name for param in spec.table if self.mesh.size_of(across(param, place(param, spec.rules, axes))) > 1
        }
        groups = list(self.content.by_values())
        first = self.mesh.rank % len(groups)
        yield from self._acts(groups, lambda name: name in travels, keep)
        yield from self._acts([*groups[first:], *groups[:first]], lambda name: name not in travels, keep)

    def _acts(self, groups: Iterable[Group], wanted: Callable[[str], bool], keep: bool) -> Iterator[Act]:
        for values, planes in groups:
            some = StoredModel(self.content.spec, self.mesh, values.only(wanted))
            for piece, rows in whole_rows(some, keep=keep):
                yield functools.partial(self._write, planes, piece, rows)

    def _write(self, planes: Iterable[StateSet], piece: Piece, rows: Tensor) -> None:
        for plane in planes:
            self.files[plane.name].write(piece, rows)
        is_weight = any(plane.name == WEIGHTS for plane in planes)
        if is_weight and piece.param.name in self._trained and not _is_finite(rows):
            self._not_finite = list(self.content.spec.table.params).index(piece.param.name)
        self._advance(piece.numel)

    def complete(self, acts: Iterable[Act], agreement: Agreement) -> None:
        """Write, agree with the others, and make a checkpoint of it. If a rank fails, all raise and nothing is left."""
        with contextlib.ExitStack() as undo:
            if self.draft:
                undo.callback(self.draft.abandon)
            with interrupted_later() as interrupts:
                failure = self._write_all(acts, interrupts) or self._failure_of(self._finish)
                parts = agreement.parts(failure, self._part)
                commit = functools.partial(self._commit, parts)
                agreement.end(self._failure_of(commit) if self.draft else None)
            undo.pop_all()

    def _write_all(self, acts: Iterable[Act], interrupts: list[int]) -> BaseException | None:
        """After a failure nothing more is written; but rows are exchanged, since the others wait for theirs."""
        failure: BaseException | None = None
        content, mesh = self.content, self.mesh
        label = f"save step {content.step} to {content.folder} on rank {mesh.rank}"
        total = content.num_elements(mesh.axes, mesh.rank)
        with progress(label, total, "elements", enabled=mesh.rank == 0) as self._advance:
            for act in acts:
                if interrupts:
                    failure = failure or KeyboardInterrupt()
                failure = failure or self._failure_of(act)
        return failure

    def _finish(self) -> None:
        """What no other rank has to do with; then all of it to the disk, and the list of it."""
        copy_carried(self.files[WEIGHTS], self.mesh.rank, self.mesh.axes.world)
        for name, state in self.content.random.items():
            self.files[RANDOM].put(name, state, self.mesh.rank * len(state))
        for files in self.files.values():
            files.fsync()
            files.close()
        self._part = replace(write_part(self.path, self.mesh.rank, self.extents), not_finite=self._not_finite)

    def _commit(self, parts: Sequence[Part]) -> None:
        """Rank 0 alone: all others have written."""
        assert self.draft is not None
        about, odd = self.content.about, max(part.not_finite for part in parts)
        if odd >= 0:
            about = {**about, NOT_FINITE: list(self.content.spec.table.params)[odd]}
            logger.warning(
                "%s has values that are not finite in step %d; keep= does not count this checkpoint. Resume an earlier "
                "one by its name, or remove this one", about[NOT_FINITE], self.content.step,
            )  # fmt: skip
        commit(self.draft, self.content.planes, parts, about)
        _tidy(self.content)

    def _failure_of(self, act: Act) -> BaseException | None:
        """Of what a rank does alone: the others must be told, so nothing is raised yet."""
        place = final_place(self.content.folder, self.content.step)
        return failure_in(act, CheckpointError, f"rank {self.mesh.rank} saved nothing to {place}")


def _is_finite(rows: Tensor) -> bool:
    """Smallest and largest are not a number where any is none, and take a third of the time of asking each."""
    return not rows.numel() or bool(torch.stack(torch.aminmax(rows)).isfinite().all())


def commit(draft: Draft, planes: Sequence[StateSet], parts: Sequence[Part], about: Mapping[str, Any]) -> None:
    """Make a checkpoint of what has been written and is on the disk."""
    path = draft.path
    files = {str(each.relative_to(path)): each.stat().st_size for each in path.rglob("*") if each.is_file()}
    files = {name: size for name, size in sorted(files.items()) if name != LOCK and not name.startswith(PARTS + "/")}
    written, expected = sum(part.num_bytes for part in parts), sum(files.values())
    if written != expected:
        raise CheckpointError(f"the ranks have written {written} bytes of {expected}; this is a bug: please report it")
    folders, digests = {plane.name: plane.folder for plane in planes}, {part.name: part.checksum for part in parts}
    draft.commit(Manifest(draft.step, folders, files, digests, about))


def write_beside(export: Export, path: Path, trainer: Mapping[str, Any], extents: Extents) -> None:
    """All that is small."""
    (path / PARTS).mkdir()
    write_small(export, path)
    (path / TRAINER).write_text(json.dumps(trainer, indent=1) + "\n")
    for file in sorted(each for each in path.rglob("*") if each.is_file() and each.name != LOCK):
        extents.add(str(file.relative_to(path)), 0, file.read_bytes())
        to_disk(file)


def _tidy(content: Content) -> None:
    """The checkpoint is whole: what happens to earlier ones must not look like its failure."""
    later = later_than(content.folder, content.step)
    if later:
        logger.warning(
            "%s is later than step %d and would be resumed first: remove it, or resume by the name of a step",
            ", ".join(path.name for path in later), content.step,
        )  # fmt: skip
    if content.keep.last is not None:
        try:
            remove_earlier(content.folder, content.step, content.keep, content.export.small.directory)
        except OSError as error:
            logger.warning("earlier checkpoints in %s could not be removed: %s", content.folder, error)


def save(content: Content, mesh: Mesh) -> None:
    """Every rank calls it, and returns when the checkpoint is whole."""
    rank_files = RankFiles(content, mesh)
    rank_files.complete(rank_files.acts(), CollectiveAgreement(mesh, content.step))
