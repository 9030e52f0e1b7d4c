"""Write a directory atomically: fill a hidden sibling, fsync, rename into place; and refuse targets that must not be
lost.

A killed export must never look like a model, and `overwrite=True` must never delete a user's own files. So a target is
replaced only if it is a model directory and holds only names that the export writes.

The steps of an export, and what a kill at each step leaves behind:

  mkdir .out.unfinished-1a2b3c4d      a hidden directory, ignored by every loader
  write files, fsync each             the same
  rename to .out.finished-1a2b3c4d    a complete model under a hidden name
  rename old out to .out.replaced-..  both complete, hidden
  rename to out, fsync the parent     the new model; the old one is removed
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..log import logger
from .source import CONFIG, INDEX, index_files

_ONE_FILE = "model.safetensors"


@dataclass(frozen=True)
class Target:
    """A directory to write. `names`: the names of all files that will be written. `source`: where the model was loaded
    from."""

    directory: Path
    num_bytes: int
    names: frozenset[str]
    source: Path
    overwrite: bool = False
    config: str = CONFIG  # the file that must be in a directory that is replaced

    @property
    def path(self) -> Path:
        return self.directory.resolve()  # a link stays, and its target is filled


def check_target(target: Target) -> None:
    """Refuse a target that cannot or must not be written, before anything is written."""
    path = target.path
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} exists and is not a directory; choose another name")
    if _has_files(path) and not target.overwrite:
        raise FileExistsError(f"{path} exists and is not empty; choose another, remove it, or give overwrite=True")
    if _has_files(path):
        _refuse_to_replace(path, target)
    # A process whose working directory is renamed away would keep running in a directory without a name.
    if path in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(f"the working directory {Path.cwd()} would be replaced; choose another directory")
    if path.is_mount():
        raise FileExistsError(f"{path} is a mount point, which a rename cannot replace; choose a directory inside it")
    check_writable(path, target.num_bytes)


def _has_files(path: Path) -> bool:
    """Return whether a directory exists and is not empty."""
    return path.exists() and any(path.iterdir())


def _refuse_to_replace(path: Path, target: Target) -> None:
    """Refuse to replace anything but a model directory that holds no other names, and never the source of the model.

    `overwrite=True` means "replace my earlier export". Files that this export does not write (logs, an optimizer state,
    a README) are named in the error, not deleted with the directory.
    """
    if target.source.exists() and path.samefile(target.source):
        raise FileExistsError(f"the model was loaded from {path}, and its files are read again; choose another")
    written = index_files(path)
    replaceable = {*target.names, *((INDEX, *written) if written else (_ONE_FILE,))}
    if not (path / target.config).is_file() or not any(path.glob("*.safetensors")):
        raise FileExistsError(
            f"{path} is not a model directory ({target.config} and safetensors files), so overwrite=True does not "
            "replace it; choose another directory, or remove it"
        )
    folders = {str(folder) for name in replaceable for folder in Path(name).parents}
    for entry in sorted(path.rglob("*")):
        name = str(entry.relative_to(path))
        allowed = not entry.is_symlink() and (name in replaceable if entry.is_file() else name in folders)
        if not allowed:
            raise FileExistsError(
                f"{path} holds {name}, which this export does not write and would remove; move it elsewhere, or choose "
                "another directory"
            )


def check_writable(path: Path, num_bytes: int) -> None:
    """Refuse a path below a file, without permission or without space.

    This check reserves nothing: another job may fill the disk meanwhile, and then the write fails.
    """
    parent = next(p for p in path.parents if p.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{path} cannot be created, because {parent} is a file; choose another directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write into {parent}; choose another directory, or change its mode")
    disk = shutil.disk_usage(parent)
    if disk.free < num_bytes and disk.total:  # total is 0 where a file system does not report it
        available = f"{parent} has room for {disk.free}"
        raise OSError(f"{num_bytes} bytes are to be written, but {available}; make more, or choose another place")


@contextlib.contextmanager
def atomic_directory(target: Target) -> Iterator[Path]:
    """Yield an empty directory to fill. At the end it is fsynced and renamed to the target.

    After a failure or an interrupt it is removed. If it is complete and only the rename fails, it stays as
    `.NAME.finished-...`: hours of work may be in it. A killed process leaves `.NAME.unfinished-...`; if killed during
    the swap, `.NAME.finished-...` and `.NAME.replaced-...`, both complete.
    """
    check_target(target)
    # A sibling of the target: rename is atomic only within one file system.
    path, suffix = target.path, secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.unfinished-{suffix}")
    draft.mkdir()
    try:
        yield draft
        # Everything is on disk before the name appears, so a power cut leaves either no model or a complete one.
        for each in (*draft.rglob("*"), draft):
            to_disk(each)
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o7777)
        draft = draft.rename(path.with_name(f".{path.name}.finished-{suffix}"))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    try:
        check_target(replace(target, num_bytes=0))  # again: the export took time, and other jobs use the disk
        _swap(draft, path, path.with_name(f".{path.name}.replaced-{suffix}"))
    except OSError as error:
        raise OSError(f"{error}; the finished export is in {draft}: rename it, or remove it") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _swap(draft: Path, path: Path, old: Path) -> None:
    """Replace a directory by renames. The old one is kept until the new one is in place, and put back if that fails.

    rename(2) cannot replace a directory that has files, so there are two renames. If the second fails, the first is
    undone.
    """
    try:
        if _has_files(path):
            path.rename(old)
        draft.rename(path)  # rename(2) replaces an empty directory
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    to_disk(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():  # NFS keeps files that a reader has open
        logger.warning("%s was replaced and could not be removed; remove %s", path, old)


def to_disk(path: Path) -> None:
    """Fsync a file or a directory. A rename is durable only when its directory is."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # some network file systems cannot fsync a directory
            raise
    finally:
        os.close(fd)
