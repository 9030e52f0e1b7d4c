"""Copy a checkpoint to an object store or another disk and back, through fsspec (`s3://`, `gs://`, ...).

Object stores have no atomic rename, and some show an object whose upload failed. So only the manifest makes a copy
valid, and it is sent last, when all other objects have arrived in full. Every byte is compared with its checksum in
both directions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ..errors import BrokenFile, CheckpointError, LoadError
from ..log import Advance, logger, progress
from ..weights import MANIFEST, Extent, path_of, to_disk
from .folder import Draft, final_place, find, step_name
from .manifest import STEP, Manifest, read_manifest, read_parts

TRIES = 4
_WAIT_S = 1.0  # before the second try; the wait doubles for each further try
_FILES_AT_ONCE = 8
_PART_BYTES = 32 << 20  # per part of a multipart upload: S3 allows 10,000 parts per object, so 335 GB
_FINAL = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError)

Given = str | os.PathLike[str]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Place:
    """A directory that fsspec reaches. `url`: its URL as the user wrote it."""

    fs: Any  # fsspec has no types
    path: str
    url: str

    def __truediv__(self, name: str) -> Place:
        return Place(self.fs, f"{self.path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}")

    def read(self) -> bytes:
        """Read a file."""
        return tried(lambda: bytes(self.fs.cat_file(self.path)), f"{self.url} cannot be read")

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below, by relative name."""

        def listed() -> Mapping[str, Mapping[str, Any]]:
            # fsspec caches listings, which then miss what this process has written since.
            self.fs.invalidate_cache()
            return self.fs.find(self.path, detail=True) if self.fs.exists(self.path) else {}

        root = self.path.strip("/")
        entries = tried(listed, f"{self.url} cannot be listed")
        return {name.strip("/")[len(root) :].lstrip("/"): int(entry["size"]) for name, entry in entries.items()}


@dataclass(frozen=True)
class Whole:
    """A complete checkpoint to copy. `small`: a local directory with its manifest and lists of extents."""

    place: Place
    manifest: Manifest
    extents: Mapping[str, list[Extent]]
    small: Path


def copy_checkpoint(source: Given, target: Given) -> str:
    """Copy a checkpoint, or the newest complete one of a folder, into the folder `target`. Return where the copy is.

    Both may be directories or URLs that fsspec knows (`s3://bucket/run` needs s3fs). Run it in one process.

    An interrupted copy can be repeated: files are written again, and without a manifest nothing counts as a checkpoint.
    """
    with contextlib.ExitStack() as stack:
        small = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = _complete(source, small)
        if is_url(target):
            return _send(checkpoint, _place(target) / step_name(checkpoint.manifest.step))
        return str(_fetch(checkpoint, path_of(target).absolute()))


def is_url(given: Given) -> bool:
    """Return whether a location is a URL."""
    return "://" in str(given)


def _place(given: Given) -> Place:
    """Resolve a URL."""
    try:
        fs, path = fsspec.core.url_to_fs(str(given))
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{given} cannot be reached: {error}") from error
    return Place(fs, path, str(given))


def tried(act: Callable[[], Answer], what: str) -> Answer:
    """Try a few times with growing pauses: networks fail occasionally, and every store raises its own exceptions.

    Permanent errors (permissions, missing files) are not retried.
    """
    for number in range(1, TRIES + 1):
        try:
            return act()
        except Exception as error:
            if number == TRIES or isinstance(error, _FINAL):
                raise CheckpointError(f"{what}: {type(error).__name__}: {error} (tried {number} times)") from error
            logger.warning("%s: %s: %s; trying again", what, type(error).__name__, error)
            time.sleep(_WAIT_S * 2 ** (number - 1))
    raise AssertionError


def _complete(source: Given, small: Path) -> Whole:
    """Return the checkpoint to copy, skipping newer ones that are incomplete."""
    if is_url(source):
        places = _candidates(_place(source))
    else:
        path = find(path_of(source).absolute())
        places = [Place(fsspec.filesystem("file"), str(path), str(path))]
    for place in places:
        try:
            return _read_small(place, small)
        except LoadError as error:
            if place is places[-1]:
                raise CheckpointError(f"no complete checkpoint: {_at(place, small, error)}") from error
            logger.warning("skipping %s, which is incomplete: %s", place.url, _at(place, small, error))
    raise CheckpointError(
        f"{source} holds neither {MANIFEST} nor directories such as step-000200; give another location"
    )


def _at(place: Place, small: Path, error: Exception) -> str:
    """Return the message of an error about a local copy of a small file, with the file's own URL."""
    return str(error).replace(str(small), place.url)


def _candidates(place: Place) -> list[Place]:
    """Return the checkpoints of a location, newest first."""
    sizes = place.sizes()
    if MANIFEST in sizes:
        return [place]
    names = {name.split("/")[0] for name in sizes if name.endswith(f"/{MANIFEST}")}
    steps = sorted((int(match[1]), name) for name in names if (match := STEP.fullmatch(name)))
    return [place / name for _, name in reversed(steps)]


def _read_small(place: Place, small: Path) -> Whole:
    """Fetch manifest and lists of extents, and check the sizes of all files."""
    (small / MANIFEST).write_bytes((place / MANIFEST).read())
    manifest = read_manifest(small)
    sizes = place.sizes()
    for name, num_bytes in manifest.files.items():
        if sizes.get(name) != num_bytes:
            raise BrokenFile(f"{place.url}/{name} has {sizes.get(name, 'no')} bytes, but {num_bytes} were written")

    def copied(name: str) -> None:
        (small / name).parent.mkdir(parents=True, exist_ok=True)
        (small / name).write_bytes((place / name).read())

    _all_at_once({name: functools.partial(copied, name) for name in manifest.parts})
    return Whole(place, manifest, read_parts(small, manifest).sorted(), small)


def _all_at_once(acts: Mapping[str, Callable[[], object]]) -> None:
    """Run functions in threads; the first error, or Ctrl-C, cancels those that have not begun.

    Threads suffice: uploads wait for the network, and xxh3 and reads release the GIL.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        waiting = [threads.submit(act) for act in acts.values()]
        try:
            for each in waiting:
                each.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(checkpoint: Whole, target: Place) -> None:
    """Copy everything except the manifest."""
    source, manifest, extents = checkpoint.place, checkpoint.manifest, checkpoint.extents
    total = sum(manifest.files.values())
    with progress(f"copy {source.url} to {target.url}", total, "bytes", enabled=True) as advance:
        _all_at_once({
            name: functools.partial(_copy_file, source / name, target / name, extents.get(name, []), advance)
            for name in manifest.files
        })  # fmt: skip
    parts = {name: (checkpoint.small / name).read_bytes() for name in manifest.parts}
    _all_at_once({name: functools.partial(_put, target / name, text) for name, text in parts.items()})


def _copy_file(source: Place, target: Place, extents: list[Extent], advance: Advance) -> None:
    """Copy a file extent by extent, and verify each."""

    def copied() -> None:
        with _opened(source) as file, _made(target) as out:
            for extent in extents:
                data = file.read(extent.stop - extent.start)
                if not extent.matches(data):
                    raise BrokenFile(f"bytes {extent.start} to {extent.stop} of {source.url} fail their checksum")
                out.write(data)
        _check_size(target, extents[-1].stop if extents else 0)

    tried(copied, f"{source.url} was not copied to {target.url}")
    advance(extents[-1].stop if extents else 0)


def _opened(place: Place) -> Any:
    """Open a file for reading."""
    return place.fs.open(place.path, "rb", block_size=_PART_BYTES, cache_type="readahead")


def _made(place: Place) -> Any:
    """Open a file for writing, with its folder."""
    place.fs.makedirs(place.path.rpartition("/")[0], exist_ok=True)
    return place.fs.open(place.path, "wb", block_size=_PART_BYTES)


def _put(target: Place, data: bytes) -> None:
    """Write a small file."""

    def put() -> None:
        with _made(target) as out:
            out.write(data)
        _check_size(target, len(data))

    tried(put, f"{target.url} was not written")


def _check_size(target: Place, num_bytes: int) -> None:
    """Check the size of a written object: a store may keep half of it without an error."""
    target.fs.invalidate_cache()
    stored_bytes = target.fs.info(target.path)["size"]
    if stored_bytes != num_bytes:
        raise OSError(f"{target.url} has {stored_bytes} bytes, but {num_bytes} were sent")


def _send(checkpoint: Whole, target: Place) -> str:
    """Copy to a store, the manifest last. If the store already has an identical copy, do nothing.

    Objects of an interrupted copy are overwritten; only a complete manifest protects a checkpoint from that.
    """
    text = (checkpoint.small / MANIFEST).read_bytes()
    earlier_text = (target / MANIFEST).read() if MANIFEST in target.sizes() else b""
    if earlier_text == text:
        logger.info("%s exists already", target.url)
        return target.url
    if _is_manifest(earlier_text):
        raise CheckpointError(f"{target.url} is another checkpoint; remove it, or choose another folder")
    _copy(checkpoint, target)
    _put(target / MANIFEST, text)
    if (target / MANIFEST).read() != text:
        raise CheckpointError(f"{target.url}/{MANIFEST} is not what was sent; copy again")
    return target.url


def _is_manifest(text: bytes) -> bool:
    """Return whether bytes are a complete manifest. Half of a manifest may be replaced."""
    with tempfile.TemporaryDirectory() as at:
        (Path(at) / MANIFEST).write_bytes(text)
        try:
            read_manifest(Path(at))
        except LoadError:
            return False
    return True


def _fetch(checkpoint: Whole, folder: Path) -> Path:
    """Copy to a local folder, as atomically as a save."""
    manifest = checkpoint.manifest
    final = final_place(folder, manifest.step)
    if (final / MANIFEST).exists():
        if read_manifest(final) == manifest:
            logger.info("%s exists already", final)
            return final
        raise CheckpointError(f"{final} is another checkpoint; remove it, or choose another folder")
    with _draft(folder, manifest.step, sum(manifest.files.values())) as draft:
        _copy(checkpoint, Place(fsspec.filesystem("file"), str(draft.path), str(final)))
        for name in (*manifest.files, *manifest.parts):
            to_disk(draft.path / name)
        draft.commit(manifest)
    return final


@contextlib.contextmanager
def _draft(folder: Path, step: int, num_bytes: int) -> Iterator[Draft]:
    """Open a draft, with OSErrors as CheckpointErrors."""
    try:
        with Draft(folder, step, num_bytes) as draft:
            yield draft
    except OSError as error:
        raise CheckpointError(f"{final_place(folder, step)} was not written: {error}") from error
