"""A folder of checkpoints: step names, the newest complete one, atomic creation, retention, and clean-up after kills.

A checkpoint is written as `.step-000200.unfinished-<suffix>` and renamed when it is complete. Its writer holds an flock
on a file inside, so a later save removes the leftovers of a killed process but never those of a live one: several jobs
may share a folder.

When it replaces a checkpoint of the same step, the old one is `.step-000200.replaced-<suffix>` for a moment. If the
process dies in that moment, both are complete under hidden names, which readers try too. A directory
`.step-000200.removed-<suffix>` is being deleted.

The tests replay every prefix of a save's system calls as a power cut (each file and name that was not fsynced kept,
lost or torn) and look for a complete checkpoint.

A folder during a save:

  step-000100/                          complete
  .step-000200.unfinished-9f8e7d6c/     being written; .lock inside is held by its writer
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, LoadError
from ..log import logger
from ..optim import AdamW
from ..weights import MANIFEST, TRAINER, check_writable, to_disk
from .content import MASTER, RANDOM_FILE, Keep
from .manifest import LOCK, NOT_FINITE, PARTS, STEP, Manifest, read_manifest, why_not_whole, write_manifest

CHECKPOINTS, RUN = "checkpoints", "config.toml"  # a run of `meshwright train` has both in its directory
# Hidden names carry state: what the directory is, and 32 random bits that tell the drafts of several jobs apart.
_HIDDEN = re.compile(r"\.(step-\d{6,})\.(unfinished|replaced|removed)-([0-9a-f]{8})")
_STATE_SETS = (MASTER, *AdamW.state_names)  # of AdamW; the files below also reveal other checkpoints
_CHECKPOINT_FILES = (
    TRAINER, *(f"{name}/*.safetensors" for name in _STATE_SETS), RANDOM_FILE, f"{PARTS}/[0-9]*.json"
)  # fmt: skip
_MAKING_S = 3600.0  # a newer directory without a lock file may still be in creation; older ones are leftovers


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step-{step:06d}"


def final_place(folder: Path, step: int) -> Path:
    """Return the directory of a step."""
    return folder / step_name(step)


@dataclass(frozen=True, order=True)
class Candidate:
    """A directory that may be a checkpoint."""

    step: int
    visible: bool  # has its final name
    newer: bool  # the one that was being saved, of two hidden directories of a step
    path: Path


def checkpoints(folder: Path) -> list[Candidate]:
    """Return all candidates, newest step first; hidden ones only where no visible one has their step."""
    candidates = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if visible := STEP.fullmatch(path.name):
            candidates.append(Candidate(int(visible[1]), True, False, path))
        elif (hidden := _HIDDEN.fullmatch(path.name)) and _is_interrupted_swap(path, hidden):
            candidates.append(Candidate(int(hidden[1][5:]), False, hidden[2] == "unfinished", path))
    return sorted(candidates, reverse=True)


def _is_interrupted_swap(path: Path, hidden: re.Match[str]) -> bool:
    """Return whether a hidden directory is complete and its visible name is missing: its process died during the
    swap."""
    return hidden[2] != "removed" and (path / MANIFEST).is_file() and not (path.parent / hidden[1]).exists()


def newest_whole(folder: Path, exclude: Path | None = None) -> Path | None:
    """Return the newest checkpoint whose files all exist in their full sizes.

    Only sizes are checked: reading a terabyte to choose a directory would be too slow, and a resume verifies the bytes.
    """
    candidates = (candidate.path for candidate in checkpoints(folder))
    return next((path for path in candidates if path != exclude and not why_not_whole(path)), None)


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory has a manifest. Refuse one that has other files of a checkpoint but no manifest.

    An interrupted copy looks like that. If loaded as a plain model, it would silently give rounded weights, no
    optimizer state and step 0.

    `lexists` instead of `exists`: a broken link in place of the manifest is damage, not absence.
    """
    if os.path.lexists(directory / MANIFEST):
        return True
    leftover = next((path for name in _CHECKPOINT_FILES for path in sorted(directory.glob(name))), None)
    if leftover is not None:
        raise CheckpointError(
            f"{directory} holds {leftover.relative_to(directory)} of a checkpoint but no {MANIFEST}, so it may be "
            "incomplete; copy it again (`meshwright copy` checks every byte), or use another one. To load its weights "
            "unchecked, remove everything that is not part of a Hugging Face model: "
            f"{TRAINER}, {', '.join(_STATE_SETS)}, random, {PARTS}"
        )
    return False


def find(directory: Path, exclude: Collection[Path] = ()) -> Path:
    """Return a checkpoint: the directory itself, or the newest complete one of a folder or of a run, except `exclude`.

    Damaged and incomplete checkpoints are skipped with a warning. If the user named such a checkpoint directly, that is
    an error, because the user did not ask for an older one.
    """
    if is_checkpoint(directory):
        return directory
    hidden = [
        candidate.path for candidate in checkpoints(directory.parent) if step_name(candidate.step) == directory.name
    ]
    if not directory.exists() and hidden:
        return hidden[0]
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a checkpoint, a folder of them, or a run")
    folder = directory / CHECKPOINTS if _is_run(directory) else directory
    for candidate in checkpoints(folder):
        if candidate.path in exclude:
            continue
        reason = why_not_whole(candidate.path)
        if not reason:
            return candidate.path
        logger.warning("skipping %s, which is incomplete: %s", candidate.path, reason)
    damaged = f" ({', '.join(path.name for path in exclude)}: damaged)" if exclude else ""
    if folder != directory and not damaged:
        raise CheckpointError(
            f"{directory} is a run without a complete checkpoint so far; give the model that it started from"
        )
    raise CheckpointError(
        f"{folder} holds no complete checkpoint{damaged}: neither {MANIFEST} nor directories such as step-000200; give "
        "another directory"
    )


def newest_of(directory: Path) -> Path:
    """Return the newest complete checkpoint of a run or folder; any other directory unchanged."""
    return find(directory) if _is_run(directory) or checkpoints(directory) else directory


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that keeps a checkpoint, if one does."""
    run = checkpoint.absolute().parent.parent
    return run if _is_run(run) else None


def _is_run(directory: Path) -> bool:
    """Return whether a directory is a run of `meshwright train`."""
    return (directory / RUN).is_file()


class Draft:
    """A checkpoint that is being written, by the process that holds its lock.

    Use it as a context manager: it removes itself on an error. `commit` is the only way to make it visible.
    """

    def __init__(self, folder: Path, step: int, num_bytes: int = 0) -> None:
        """Create the directory and lock it. `num_bytes`: how much disk space the checkpoint needs."""
        self.folder, self.step = folder, step
        self.final, self.suffix = final_place(folder, step), secrets.token_hex(4)
        _check_place(self.final, num_bytes)
        _make_durable(folder)
        # Every save cleans up first, so a folder never accumulates the leftovers of kills (each as large as a
        # checkpoint).
        _clean(folder)
        self.path = folder / f".{self.final.name}.unfinished-{self.suffix}"
        self.path.mkdir()
        self._lock = _locked(self.path / LOCK)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()

    def commit(self, manifest: Manifest) -> None:
        """Turn the draft into a checkpoint: fsync directories, write the manifest, rename, fsync the parent.

        The order matters. A manifest before the data would make a torn checkpoint look complete; without the last fsync
        a power cut may undo the rename. All files were fsynced before.
        """
        # An fsynced file whose name is not fsynced may still vanish in a power cut: names belong to the directory.
        for directory in (path for path in self.path.rglob("*") if path.is_dir()):
            to_disk(directory)
        to_disk(self.path)
        write_manifest(self.path, manifest)
        # There is no atomic swap of directories in POSIX, so the old one moves aside first. Between the two renames no
        # visible name exists; readers then look for complete hidden ones.
        replaced = self.folder / f".{self.final.name}.replaced-{self.suffix}"
        if self.final.exists():
            self.final.rename(replaced)
        self.path.rename(self.final)
        to_disk(self.folder)
        # The lock file has moved with the directory.
        self._unlock(self.final)
        _remove(replaced)

    def abandon(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock(self.path)

    def _unlock(self, directory: Path) -> None:
        """Remove the lock file and release the lock."""
        with contextlib.suppress(OSError):
            (directory / LOCK).unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_durable(folder: Path) -> None:
    """Create a folder and fsync its parents, or a power cut could lose it with everything inside."""
    if not folder.is_dir():
        _make_durable(folder.parent)
        folder.mkdir(exist_ok=True)
        to_disk(folder.parent)


def check_not_in_use(final: Path, in_use: Path) -> None:
    """Refuse to replace the directory that the model was loaded from: saves copy untrained tensors from it."""
    if final.exists() and in_use.exists() and final.samefile(in_use):
        raise CheckpointError(
            f"the model was loaded from {final} and its files are still read, so it cannot be replaced; save into "
            "another folder"
        )


def _check_place(final: Path, num_bytes: int) -> None:
    """Refuse a place that cannot be written, or where something other than a checkpoint would be replaced.

    A directory with the name of a step but without a manifest may be anything, so it is never replaced.
    """
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(f"{final} exists and is not a checkpoint; move it away, or choose another folder")
    try:
        check_writable(final.absolute(), num_bytes)
    except OSError as error:
        raise CheckpointError(str(error)) from error


def remove_earlier(folder: Path, step: int, keep: Keep, in_use: Path) -> None:
    """Remove checkpoints that `keep` does not cover, among those up to `step`.

    It keeps later steps (of another run, or undone by a rewind), the directory that the model was loaded from
    (`in_use`), and the last `keep.last` good checkpoints. A checkpoint with NaN weights does not count: a run that
    diverged must not push out the last one that it could resume from.

    `every` keeps milestones forever, `last` bounds disk space.
    """
    own_run = [
        candidate
        for candidate in checkpoints(folder)
        if candidate.step <= step and (candidate.path / MANIFEST).is_file()
    ]
    num_good = 0
    for candidate in own_run:
        # Newest first, so the first `last` good checkpoints stay. Checkpoints with NaN among them stay too, until they
        # are older.
        if num_good < (keep.last or 0):
            num_good += _is_good(candidate.path)
            continue
        if not (keep.every and candidate.step % keep.every == 0):
            _remove_unless_in_use(candidate, in_use)


def remove_later(checkpoint: Path, in_use: Path) -> None:
    """Remove the later steps beside a checkpoint, except the one that the model was loaded from (`in_use`)."""
    candidates = checkpoints(checkpoint.parent)
    own = [each.step for each in candidates if each.path == checkpoint]
    for candidate in candidates if own else ():
        if candidate.step > own[0] and (candidate.path / MANIFEST).is_file():
            _remove_unless_in_use(candidate, in_use)


def _remove_unless_in_use(candidate: Candidate, in_use: Path) -> None:
    if in_use.exists() and candidate.path.samefile(in_use):
        return
    # Rename first: an interrupted deletion must not leave a visible checkpoint with half of its files.
    removed = candidate.path.parent / f".{step_name(candidate.step)}.removed-{secrets.token_hex(4)}"
    candidate.path.rename(removed)
    _remove(removed)


def _is_good(path: Path) -> bool:
    """Return whether a checkpoint is readable and has no NaN or infinite weights."""
    try:
        return NOT_FINITE not in read_manifest(path).about
    except LoadError:
        return False


def later_than(folder: Path, step: int) -> list[Path]:
    """Return the checkpoints after a step."""
    return [candidate.path for candidate in checkpoints(folder) if candidate.step > step]


def _clean(folder: Path) -> None:
    """Complete or remove leftovers of killed processes, unless a process holds their lock."""
    for path, final, suffix in sorted(_leftovers(folder)):
        # If a directory has a manifest, its writer died in the swap after completing it, so rename it instead of
        # removing it.
        is_complete = (path / MANIFEST).is_file() and not why_not_whole(path)
        # The lock of the draft covers all three hidden names of one save.
        with _lock_of(folder / f".{final.name}.unfinished-{suffix}") as is_free:
            if not is_free or not path.exists():
                continue
            if is_complete and not final.exists() and path == _taken_by_readers(folder, final):
                logger.warning("%s was complete and has been renamed to %s", path, final)
                path.rename(final)
            else:
                logger.warning("removing %s, which an interrupted save left behind", path)
                _remove(path)


def _leftovers(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield hidden directories, with their final path and suffix."""
    for path in folder.iterdir():
        if hidden := _HIDDEN.fullmatch(path.name):
            yield path, folder / hidden[1], hidden[3]


def _taken_by_readers(folder: Path, final: Path) -> Path:
    """Return the hidden directory that a reader would use as `final`."""
    step = int(final.name[5:])
    return next(each.path for each in checkpoints(folder) if each.step == step)


def _locked(path: Path) -> int | None:
    """Create and lock a file; return its descriptor, or None where locks are not supported or held by another
    process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # flock instead of a file with a pid: the kernel releases it however the process dies, and pids are reused.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _lock_of(directory: Path) -> Iterator[bool]:
    """Try to hold the lock of a directory during the block; yield whether it was free."""
    if not (directory / LOCK).exists():
        yield not directory.exists() or time.time() - directory.stat().st_mtime > _MAKING_S
        return
    fd = _locked(directory / LOCK)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _remove(path: Path) -> None:
    """Remove a directory, and warn if parts stay."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():  # NFS keeps files that a reader has open
        logger.warning("%s could not be removed; remove it", path)
