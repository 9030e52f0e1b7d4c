"""The manifest of a checkpoint: it lists every file and is written last, so a directory with a valid manifest is
complete.

Each rank lists its written extents with checksums in its own file; the manifest has only the checksums of these lists.
So no rank gathers a list of the whole checkpoint. docs/checkpoint-format.md describes both for other programs.

Shortened example:

  {"format": "meshwright checkpoint", "version": 1, "step": 200,
   "planes": {"weights": "", "master": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
   "files": {"model.safetensors": 15269889, "master/model.safetensors": 30539400, ...},
   "parts": {"runs/00000.json": "8c1f...", "runs/00001.json": "02aa..."}, "about": {...}, "checksum": "..."}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from ..errors import BrokenFile, LoadError
from ..weights import MANIFEST, Extents, checksum, extents_of_json, read_stamped_json, short, to_disk

PARTS, LOCK = "runs", ".lock"
NOT_FINITE = "not_finite"  # key of `about`: a trained parameter with NaN or infinite values
STEP = re.compile(r"step-(\d{6,})")
FORMAT, VERSION = "meshwright checkpoint", 1
_ENDING = ', "checksum": "'


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: its step, state sets, and every file with its size."""

    step: int
    planes: Mapping[str, str]  # folder of each state set; "" for weights
    files: Mapping[str, int]  # size of each file
    parts: Mapping[str, int]  # checksum of each list of extents
    about: Mapping[str, Any]  # for people: mesh, versions, date


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest atomically: temporary name, fsync, rename, fsync of the directory. It ends in its own
    checksum."""
    parts = {name: f"{number:016x}" for name, number in manifest.parts.items()}
    fields = {"format": FORMAT, "version": VERSION, **asdict(manifest), "parts": parts}
    # The checksum is the last field of the file and covers every byte before it. So a prefix of the file is never a
    # valid manifest, whatever the file system did.
    text = json.dumps(fields, indent=1)[:-2]
    temporary = directory / f".{MANIFEST}"
    temporary.write_text(f'{text}{_ENDING}{_checksum(text)}"}}\n')
    to_disk(temporary)
    temporary.rename(directory / MANIFEST)
    to_disk(directory)


def _checksum(text: str) -> str:
    """Return the xxh3 checksum of text, 128 bits in hex."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest. Raise BrokenFile if it is torn, has another version, or names a path outside the
    directory."""
    path = directory / MANIFEST
    fields, _ = read_stamped_json(path)
    text, ending, stored_checksum = path.read_text().rpartition(_ENDING)
    # Compare the text before any field is used: JSON that still parses after a bit flip must not be accepted.
    if not ending or stored_checksum != f'{_checksum(text)}"}}\n':
        raise BrokenFile(f"{path} fails its own checksum; fetch it again, or use another checkpoint")
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise BrokenFile(
            f"{path} has format {short(fields.get('format'))}, version {short(fields.get('version'))}, but this "
            f"meshwright reads {FORMAT}, version {VERSION}; convert it with a meshwright that reads both"
        )
    try:
        manifest = _manifest(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenFile(f"{path} is malformed: {error!r:.200}; use another checkpoint") from error
    return manifest


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    """Build a manifest from parsed JSON; raise for wrong types."""
    manifest = Manifest(
        int(fields["step"]),
        {str(name): _relative_path(folder, empty=True) for name, folder in fields["planes"].items()},
        {_relative_path(name): int(num_bytes) for name, num_bytes in fields["files"].items()},
        {_relative_path(name): int(digest, 16) for name, digest in fields["parts"].items()},
        dict(fields["about"]),
    )
    if manifest.step < 0 or min(manifest.files.values(), default=0) < 0:
        raise ValueError("a negative step or size")
    return manifest


def _relative_path(name: str, *, empty: bool = False) -> str:
    """Check that a path is inside the directory and in canonical form, so that two spellings cannot name one file.

    A manifest may come from elsewhere, and copying a checkpoint must never write `../../.ssh/authorized_keys`.
    """
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or ".." in parts or name.startswith("/") or "/".join(parts) != name:
        raise ValueError(f"{short(name)} is not a relative path inside the checkpoint")
    if not name and not empty:
        raise ValueError("an empty name")
    return name


def why_not_whole(directory: Path) -> str:
    """Return why a directory is not a complete checkpoint, or "". Sizes are compared, bytes are not read.

    This is the cheap test of completeness: one stat per file.
    """
    try:
        manifest = read_manifest(directory)
        check_files(directory, manifest)
        check_name(directory, manifest)
    except (LoadError, OSError) as error:
        return str(error)
    return ""


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that all files and lists of extents exist, in their sizes."""
    check_sizes(directory, manifest.files)
    for name in manifest.parts:
        if not (directory / name).is_file():
            raise BrokenFile(f"{directory / name} is missing; the manifest lists it")


def check_name(directory: Path, manifest: Manifest) -> None:
    """Refuse a step under the name of another step, as which it would be resumed or replaced."""
    step_in_name = STEP.fullmatch(directory.name)
    if step_in_name and int(step_in_name[1]) != manifest.step:
        raise BrokenFile(
            f"{directory} is named as step {int(step_in_name[1])}, but its manifest is of step {manifest.step}; rename "
            f"it to step-{manifest.step:06d}"
        )


def check_sizes(directory: Path, files: Mapping[str, int]) -> None:
    """Check the sizes of files."""
    for name, num_bytes in files.items():
        path = directory / name
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read: {error.strerror}; the manifest lists it") from error
        if actual != num_bytes:
            raise BrokenFile(f"{path} has {actual} bytes, but {num_bytes} were written")


@dataclass(frozen=True)
class Part:
    """The report of one rank: its list of extents, the checksum of that list, and the bytes that it lists.

    `not_finite`: index in the table of a trained parameter with NaN or infinite values, or -1. The commit adds up the
    reports of all ranks. Each rank sends only these four numbers, for a model of any size.
    """

    name: str
    checksum: int
    num_bytes: int
    not_finite: int = -1

    def to_floats(self) -> tuple[float, float, float, float]:
        """Encode as float64 for an all-gather. Floats hold 53 bits exactly, so the checksum is split in two."""
        return self.num_bytes, self.checksum >> 32, self.checksum & 0xFFFFFFFF, self.not_finite

    @staticmethod
    def from_floats(rank: int, floats: Sequence[float]) -> Part:
        """Decode the report of another rank."""
        num_bytes, high, low, not_finite = map(int, floats)
        return Part(part_name(rank), high << 32 | low, num_bytes, not_finite)


def write_part(directory: Path, rank: int, extents: Extents) -> Part:
    """Write this rank's list of extents."""
    name, text = part_name(rank), extents.as_json().encode()
    (directory / name).write_bytes(text)
    to_disk(directory / name)
    return Part(name, checksum(text), extents.num_bytes)


def part_name(rank: int) -> str:
    """Return the file name of a rank's list."""
    return f"{PARTS}/{rank:05d}.json"


def read_parts(directory: Path, manifest: Manifest) -> Extents:
    """Read all lists. Raise BrokenFile unless their extents tile every file.

    Each list is verified before it is parsed; then all extents together must tile all files.
    """
    extents = Extents()
    for name, digest in manifest.parts.items():
        path = directory / name
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BrokenFile(f"{path} cannot be read: {error.strerror}") from error
        if checksum(text) != digest:
            raise BrokenFile(f"{path} fails its checksum; use another checkpoint")
        try:
            extents.update(extents_of_json(text))
        except ValueError as error:
            raise BrokenFile(f"{path} is malformed: {error}") from error
    # Checksums are not enough: a rank that never wrote its part leaves a hole of zeros, which contradicts no extent. So
    # tiling is checked too.
    for file, num_bytes in manifest.files.items():
        if wrong := extents.find_gap(file, num_bytes):
            raise BrokenFile(f"{directory / file}: {wrong}, so it was not written completely; use another checkpoint")
    return extents
