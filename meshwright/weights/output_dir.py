"""Where an export may appear: whole or not at all, and in the place of nothing but a model directory of its names."""

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
    """A directory that is to be written. `names`: of all that is written. `source`: where the model was loaded from."""

    directory: Path
    num_bytes: int
    names: frozenset[str]
    source: Path
    overwrite: bool = False

    @property
    def path(self) -> Path:
        return self.directory.resolve()  # a link stays, and what it points to is filled


def check_target(target: Target) -> None:
    """Refuse what could not be written, before a byte is."""
    path = target.path
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} exists and is not a directory; choose another name")
    if _is_full(path) and not target.overwrite:
        raise FileExistsError(f"{path} exists and is not empty; choose another, remove it, or give overwrite=True")
    if _is_full(path):
        _refuse_to_replace(path, target)
    if path in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(f"this process runs in {Path.cwd()}, which would be replaced; choose another directory")
    if path.is_mount():
        raise FileExistsError(f"{path} is a mount point, which no whole directory can replace; choose one inside it")
    check_writable(path, target.num_bytes)


def _is_full(path: Path) -> bool:
    return path.exists() and any(path.iterdir())


def _refuse_to_replace(path: Path, target: Target) -> None:
    """Only a model directory of the same names is replaced: nobody's notes, and no optimizer's file."""
    if target.source.exists() and path.samefile(target.source):
        raise FileExistsError(f"the model was loaded from {path}, and its files are read again; choose another")
    written = index_files(path)
    known = {*target.names, *((INDEX, *written) if written else (_ONE_FILE,))}
    if not (path / CONFIG).is_file() or not any(path.glob("*.safetensors")):
        raise FileExistsError(
            f"{path} is no model directory, which has {CONFIG} and safetensors files, so it is not replaced; choose "
            "another or remove it"
        )
    folders = {str(folder) for name in known for folder in Path(name).parents}
    for found in sorted(path.rglob("*")):
        name = str(found.relative_to(path))
        plain = not found.is_symlink() and (name in known if found.is_file() else name in folders)
        if not plain:
            raise FileExistsError(
                f"{path} holds {name}, which this export does not write and would remove; move it elsewhere, or choose "
                "another directory"
            )


def check_writable(path: Path, num_bytes: int) -> None:
    """Refuse a place below a file, without permission or without room."""
    there = next(p for p in path.parents if p.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, and {path} would lie in it; choose another directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"this process may not write into {there}; choose another place, or change its mode")
    disk = shutil.disk_usage(there)
    if disk.free < num_bytes and disk.total:  # of 0 where a file system does not say
        room = f"{there} has room for {disk.free}"
        raise OSError(f"{num_bytes} bytes are to be written, but {room}; make more, or choose another place")


@contextlib.contextmanager
def atomic_directory(target: Target) -> Iterator[Path]:
    """An empty directory to fill. It takes the place of the target when it is whole and on the disk.

    After a failure or an interrupt nothing is left of it; but if it is whole and only its place cannot be taken, it is
    kept as `.NAME.finished-...`, since the work of hours may be in it. A killed process leaves it beside the target,
    under a hidden name that says what it is: `.NAME.unfinished-...`; or, in the moment in which they change places,
    whole as `.NAME.finished-...`, with the earlier one as `.NAME.replaced-...`.
    """
    check_target(target)
    path, mark = target.path, secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.unfinished-{mark}")
    whole.mkdir()
    try:
        yield whole
        for each in (*whole.rglob("*"), whole):
            to_disk(each)
        if path.exists():
            whole.chmod(path.stat().st_mode & 0o7777)
        whole = whole.rename(path.with_name(f".{path.name}.finished-{mark}"))
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise
    try:
        check_target(replace(target, num_bytes=0))  # somebody may have put something there meanwhile
        _take_its_place(whole, path, path.with_name(f".{path.name}.replaced-{mark}"))
    except OSError as error:
        raise OSError(f"{error}; what was to be there is whole in {whole}: rename it, or remove it") from error
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise


def _take_its_place(whole: Path, path: Path, earlier: Path) -> None:
    """By renames. What stands there is kept until then, and put back if that fails."""
    try:
        if _is_full(path):
            path.rename(earlier)
        whole.rename(path)  # an empty directory is replaced
    except BaseException:
        if earlier.exists() and not path.exists():
            earlier.rename(path)
        raise
    to_disk(path.parent)
    shutil.rmtree(earlier, ignore_errors=True)
    if earlier.exists():  # a network file system keeps what a reader has open
        logger.warning("%s was replaced and could not be removed; remove %s", path, earlier)


def to_disk(path: Path) -> None:
    """Write a file, or the names in a directory, from memory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # some network file systems cannot for a directory
            raise
    finally:
        os.close(fd)
