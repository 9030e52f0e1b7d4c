"""A folder of checkpoints: names of steps, which is the newest whole one, and how one appears, all at once.

A checkpoint is made under a hidden name, `.step-000200.unfinished-<mark>`, and renamed when it is whole. Whoever makes
it holds a lock on a file inside; so the next save may remove what a killed process left, and nothing that is alive.
While one takes the place of another of the same step, the earlier one is `.step-000200.replaced-<mark>` for a moment.
If the process dies in that moment, both are whole under hidden names, and readers find them there.
`.step-000200.removed-<mark>` is on its way out.
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
from ..weights import MANIFEST, TRAINER
from .content import MASTER, RANDOM_FILE, Keep
from .manifest import LOCK, NOT_FINITE, PARTS, STEP, Manifest, read_manifest, to_disk, why_not_whole, write_manifest

CHECKPOINTS, RUN = "checkpoints", "config.toml"  # a run of `meshwright train` keeps the first beside the second
_HIDDEN = re.compile(r"\.(step-\d{6,})\.(unfinished|replaced|removed)-([0-9a-f]{8})")
_PLANES = (MASTER, *AdamW.state_names)  # a checkpoint of another optimizer is known by its other files
_REST = (TRAINER, *(f"{plane}/*.safetensors" for plane in _PLANES), RANDOM_FILE, f"{PARTS}/[0-9]*.json")
_MAKING_S = 3600.0  # a directory without a lock may be one that is just being made; for no longer than this


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def final_place(folder: Path, step: int) -> Path:
    return folder / step_name(step)


@dataclass(frozen=True, order=True)
class Found:
    """A directory that may be a checkpoint."""

    step: int
    visible: bool  # not under a hidden name
    newer: bool  # of two hidden ones of a step
    path: Path


def checkpoints(folder: Path) -> list[Found]:
    """All that may be checkpoints, the newest first. Under a hidden name are only those without a visible one."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if plain := STEP.fullmatch(path.name):
            found.append(Found(int(plain[1]), True, False, path))
        elif (hidden := _HIDDEN.fullmatch(path.name)) and _stands_in(path, hidden):
            found.append(Found(int(hidden[1][5:]), False, hidden[2] == "unfinished", path))
    return sorted(found, reverse=True)


def _stands_in(path: Path, hidden: re.Match[str]) -> bool:
    """Whether a hidden checkpoint has the place of a visible one, which a process that died did not name."""
    return hidden[2] != "removed" and (path / MANIFEST).is_file() and not (path.parent / hidden[1]).exists()


def newest_whole(folder: Path, but: Path | None = None) -> Path | None:
    """The newest checkpoint whose files are all there."""
    candidates = (found.path for found in checkpoints(folder))
    return next((path for path in candidates if path != but and not why_not_whole(path)), None)


def is_checkpoint(directory: Path) -> bool:
    """Whether a manifest lies there. Refuse a checkpoint that lost its manifest, as a copy does that was cut off:
    read as a plain model it would give rounded weights, no moments and step 0."""
    if os.path.lexists(directory / MANIFEST):
        return True
    rest = next((path for name in _REST for path in sorted(directory.glob(name))), None)
    if rest is not None:
        raise CheckpointError(
            f"{directory} holds {rest.relative_to(directory)} of a checkpoint and no {MANIFEST}, so nobody knows "
            "whether it is whole; copy it again (`meshwright copy` checks every byte), or take another one. To use its "
            "weights unchecked, remove all that is not of a Hugging Face model: "
            f"{TRAINER}, {', '.join(_PLANES)}, random, {PARTS}"
        )
    return False


def find(directory: Path, but: Collection[Path] = ()) -> Path:
    """Return a checkpoint: the directory itself, or the newest whole one of a folder of them, or of a run. `but`: not
    one of these."""
    if is_checkpoint(directory):
        return directory
    hidden = [found.path for found in checkpoints(directory.parent) if step_name(found.step) == directory.name]
    if not directory.exists() and hidden:
        return hidden[0]
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; give a checkpoint, a folder of them, or a run")
    folder = directory / CHECKPOINTS if _is_run(directory) else directory
    for found in checkpoints(folder):
        if found.path in but:
            continue
        wrong = why_not_whole(found.path)
        if not wrong:
            return found.path
        logger.warning("%s is not whole and is passed over: %s", found.path, wrong)
    damaged = f" ({', '.join(path.name for path in but)}: damaged)" if but else ""
    if folder != directory and not damaged:
        raise CheckpointError(
            f"{directory} is a run that has no whole checkpoint yet; give the model that it began with"
        )
    raise CheckpointError(
        f"{folder} holds no whole checkpoint{damaged}, neither {MANIFEST} nor step-000200 or the like; give another "
        "directory"
    )


def newest_of(directory: Path) -> Path:
    """Return the newest whole checkpoint of a run, or of a folder of checkpoints; any other directory as it is."""
    return find(directory) if _is_run(directory) or checkpoints(directory) else directory


def run_of(checkpoint: Path) -> Path | None:
    """Return the run that keeps a checkpoint, among its checkpoints or as its best, if one does."""
    run = checkpoint.absolute().parent.parent
    return run if _is_run(run) else None


def _is_run(directory: Path) -> bool:
    return (directory / RUN).is_file()


class Draft:
    """A checkpoint that is being made, by the process that holds its lock."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.final, self.mark = final_place(folder, step), secrets.token_hex(4)
        check_place(folder, step)
        _make(folder)
        _clean(folder)
        self.path = folder / f".{self.final.name}.unfinished-{self.mark}"
        self.path.mkdir()
        self._lock = _locked(self.path / LOCK)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()

    def commit(self, manifest: Manifest) -> None:
        """All files are on the disk. From the manifest on it is a checkpoint, at the end it has its name."""
        for directory in (path for path in self.path.rglob("*") if path.is_dir()):
            to_disk(directory)
        to_disk(self.path)
        write_manifest(self.path, manifest)
        replaced = self.folder / f".{self.final.name}.replaced-{self.mark}"
        if self.final.exists():
            self.final.rename(replaced)
        self.path.rename(self.final)
        to_disk(self.folder)
        self._unlock(self.final)
        _remove(replaced)

    def abandon(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock(self.path)

    def _unlock(self, directory: Path) -> None:
        with contextlib.suppress(OSError):
            (directory / LOCK).unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make(folder: Path) -> None:
    """With its name on the disk: a power cut would else take the folder with all that is in it."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        to_disk(folder.parent)


def check_not_in_use(final: Path, in_use: Path) -> None:
    """Every save reads from the directory that the model was loaded from."""
    if final.exists() and in_use.exists() and final.samefile(in_use):
        raise CheckpointError(
            f"the model was loaded from {final}, and its files are read again, so it cannot be replaced; save into "
            "another folder"
        )


def check_place(folder: Path, step: int) -> None:
    """Refuse a place in which nothing could be written, or something else than a checkpoint would be replaced."""
    final = final_place(folder, step)
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(f"{final} exists and is no checkpoint; move it away, or choose another folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise CheckpointError(f"{there} is a file, and {final} would lie in it; choose another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(f"this process may not write into {there}; choose another folder, or change its mode")


def check_room(folder: Path, num_bytes: int) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(there)
    if disk.total and disk.free < num_bytes:  # a total of 0 where a file system does not say
        raise CheckpointError(
            f"{num_bytes:,} bytes are to be written, and {there} has room for {disk.free:,}; make more (keep= removes "
            "earlier checkpoints), or choose another place"
        )


def remove_earlier(folder: Path, step: int, keep: Keep, in_use: Path) -> None:
    """Later ones stay too: they are of another run, or of a part of this one that was taken back. So does the one that
    the model was loaded from (`in_use`): every save copies what is not trained from there. One that nobody could go on
    from takes the place of none that is good."""
    mine = [found for found in checkpoints(folder) if found.step <= step and (found.path / MANIFEST).is_file()]
    good = 0
    for found in mine:
        if good < (keep.last or 0):
            good += _is_good(found.path)
            continue
        if (keep.every and found.step % keep.every == 0) or (in_use.exists() and found.path.samefile(in_use)):
            continue
        gone = folder / f".{step_name(found.step)}.removed-{secrets.token_hex(4)}"
        found.path.rename(gone)  # from here on it is no checkpoint, whatever becomes of the rest
        _remove(gone)


def _is_good(path: Path) -> bool:
    try:
        return NOT_FINITE not in read_manifest(path).about
    except LoadError:
        return False


def later_than(folder: Path, step: int) -> list[Path]:
    return [found.path for found in checkpoints(folder) if found.step > step]


def _clean(folder: Path) -> None:
    """Finish or remove what killed processes left, of which nobody holds the lock."""
    for path, final, mark in sorted(_leftovers(folder)):
        whole = (path / MANIFEST).is_file() and not why_not_whole(path)
        with _lock_of(folder / f".{final.name}.unfinished-{mark}") as free:
            if not free or not path.exists():
                continue
            if whole and not final.exists() and path == _best(folder, final):
                logger.warning("%s was whole and has its name now: %s", path, final)
                path.rename(final)
            else:
                logger.warning("%s was left by a save that did not end, and is removed", path)
                _remove(path)


def _leftovers(folder: Path) -> Iterator[tuple[Path, Path, str]]:
    for path in folder.iterdir():
        if hidden := _HIDDEN.fullmatch(path.name):
            yield path, folder / hidden[1], hidden[3]


def _best(folder: Path, final: Path) -> Path:
    """Which hidden one a reader would take for `final`."""
    step = int(final.name[5:])
    return next(found.path for found in checkpoints(folder) if found.step == step)


def _locked(path: Path) -> int | None:
    """None where the file system knows no locks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def _lock_of(directory: Path) -> Iterator[bool]:
    """Whether no process holds the lock of a directory. It is held until the end of the block."""
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
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():  # a network file system keeps what a reader has open
        logger.warning("%s could not be removed; remove it", path)
