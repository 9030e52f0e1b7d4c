"""The manifest of a checkpoint: it lists every file, and is written last. A directory is a checkpoint if and only if
its manifest is whole.

Each rank lists what it wrote in a file of its own, so that nobody gathers the lists of all; the manifest has their
checksums. docs/checkpoint.md describes both for other programs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ..errors import BrokenFile, LoadError
from ..weights import MANIFEST, Extents, checksum, extents_of_json, read_stamped_json, short

PARTS, LOCK = "runs", ".lock"
NOT_FINITE = "not_finite"  # a parameter of which this is true, among what is said for people
STEP = re.compile(r"step-(\d{6,})")
FORMAT, VERSION = "meshwright checkpoint", 1
_ENDING = ', "checksum": "'


@dataclass(frozen=True)
class Manifest:
    step: int
    planes: Mapping[str, str]  # the folder of each; that of the weights is the directory itself
    files: Mapping[str, int]  # bytes of each
    parts: Mapping[str, int]  # checksum of each file of runs
    about: Mapping[str, Any]  # for people: the mesh, versions, the date


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Under another name first, so that no half of one is ever seen."""
    parts = {name: f"{number:016x}" for name, number in manifest.parts.items()}
    fields = {"format": FORMAT, "version": VERSION, **asdict(manifest), "parts": parts}
    text = json.dumps(fields, indent=1)[:-2]
    made = directory / f".{MANIFEST}"
    with made.open("w") as out:
        out.write(f'{text}{_ENDING}{_checksum(text)}"}}\n')
        out.flush()
        os.fsync(out.fileno())
    made.rename(directory / MANIFEST)
    to_disk(directory)


def _checksum(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_manifest(directory: Path) -> Manifest:
    """A BrokenFile where it is not whole, or of another version, or names what lies elsewhere."""
    path = directory / MANIFEST
    fields, _ = read_stamped_json(path)
    text, ending, rest = path.read_text().rpartition(_ENDING)
    if not ending or rest != f'{_checksum(text)}"}}\n':
        raise BrokenFile(f"{path} fails its own checksum; fetch it again, or take another checkpoint")
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise BrokenFile(
            f"{path} is {short(fields.get('format'))} of version {short(fields.get('version'))}; this meshwright reads "
            f"{FORMAT} of version {VERSION}: install one that reads both, and convert"
        )
    try:
        manifest = _manifest(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenFile(f"{path} is malformed: {error!r:.200}; take another checkpoint") from error
    return manifest


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    found = Manifest(
        int(fields["step"]),
        {str(name): _plain(folder, empty=True) for name, folder in fields["planes"].items()},
        {_plain(name): int(num_bytes) for name, num_bytes in fields["files"].items()},
        {_plain(name): int(digest, 16) for name, digest in fields["parts"].items()},
        dict(fields["about"]),
    )
    if found.step < 0 or min(found.files.values(), default=0) < 0:
        raise ValueError("a number below 0")
    return found


def _plain(name: str, *, empty: bool = False) -> str:
    """A path inside of the directory, spelled in the one way that it has."""
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or ".." in parts or name.startswith("/") or "/".join(parts) != name:
        raise ValueError(f"{short(name)} is no name of a file in the directory")
    if not name and not empty:
        raise ValueError("an empty name")
    return name


def why_not_whole(directory: Path) -> str:
    """Nothing, if a checkpoint lies there with all its files in their sizes. Their bytes are not looked at."""
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest)
        check_name(directory, manifest)
    except (LoadError, OSError) as error:
        return str(error)
    return ""


def check_files(directory: Path, manifest: Manifest) -> None:
    check_sizes(directory, manifest.files)
    for name in manifest.parts:
        if not (directory / name).is_file():
            raise BrokenFile(f"{directory / name} is missing; the manifest lists it")


def check_name(directory: Path, manifest: Manifest) -> None:
    """Refuse a step under the name of another step: it would be resumed, or replaced, as that one."""
    named = STEP.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise BrokenFile(
            f"{directory} is named as step {int(named[1])}, and its manifest was written for step {manifest.step}; "
            f"give it back its name, step-{manifest.step:06d}"
        )


def check_sizes(directory: Path, files: Mapping[str, int]) -> None:
    for name, num_bytes in files.items():
        path = directory / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read: {error.strerror}; the manifest lists it") from error
        if found != num_bytes:
            raise BrokenFile(f"{path} has {found} bytes, and {num_bytes} were written")


@dataclass(frozen=True)
class Part:
    """One rank's share of the files: the file that lists it, the checksum of that file, and the bytes that it lists.

    `not_finite`: the place in the table of a trained parameter that has values that are not finite; -1 for none.
    """

    name: str
    checksum: int
    num_bytes: int
    not_finite: int = -1

    def numbers(self) -> tuple[float, float, float, float]:
        """As floats, which hold 53 bits exactly."""
        return self.num_bytes, self.checksum >> 32, self.checksum & 0xFFFFFFFF, self.not_finite

    @staticmethod
    def of_numbers(rank: int, numbers: Sequence[float]) -> Part:
        num_bytes, high, low, not_finite = map(int, numbers)
        return Part(part_name(rank), high << 32 | low, num_bytes, not_finite)


def write_part(directory: Path, rank: int, extents: Extents) -> Part:
    """What a rank wrote."""
    name, text = part_name(rank), extents.as_json().encode()
    with (directory / name).open("wb") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    return Part(name, checksum(text), extents.num_bytes)


def part_name(rank: int) -> str:
    return f"{PARTS}/{rank:05d}.json"


def read_parts(directory: Path, manifest: Manifest) -> Extents:
    """All runs of all ranks. A BrokenFile if they are not the files, each byte once."""
    extents = Extents()
    for name, digest in manifest.parts.items():
        path = directory / name
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read: {error.strerror}") from error
        if checksum(text) != digest:
            raise BrokenFile(f"{path} fails its checksum; take another checkpoint")
        try:
            extents.update(extents_of_json(text))
        except ValueError as error:
            raise BrokenFile(f"{path} is malformed: {error}") from error
    for file, num_bytes in manifest.files.items():
        if wrong := extents.find_gap(file, num_bytes):
            raise BrokenFile(f"{directory / file}: {wrong}, so it was not written as a whole; take another checkpoint")
    return extents


def to_disk(path: Path) -> None:
    """A file, or the names in a directory. Some network file systems cannot for a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(fd)
