"""A directory of safetensors files as a map from key to bytes. Nothing in it is executed."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import BrokenFile, LoadError
from .checksums import Extent
from .file_version import Opened, Stamp, open_file
from .quant_formats import Scale, scales_of, with_matrices
from .safetensors_header import Entry, read_header, read_stamped_json, short

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_LOAD_AGAIN = (
    "load again when its writer has finished; who writes a new version should write another directory and rename it"
)
_LOOKS, _LOOK = 512, 64  # tensors that a checksum looks at, at least if there are so many, and bytes of each


@dataclass(frozen=True)
class Source:
    """What a directory holds, in the order in which its files hold it."""

    directory: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by file
    index: Mapping[str, Any] | None = None  # of the index file, where there is one
    stamps: Mapping[str, Stamp] = field(default_factory=dict)  # by file, as its header or its fields were read
    scales: Mapping[str, Scale] = field(default_factory=dict)  # by the key of a matrix of 8-bit numbers
    quantization: Mapping[str, Any] = field(default_factory=dict)  # what `config.json` tells of them
    extents: Mapping[str, Sequence[Extent]] = field(default_factory=dict)  # checksums of a checkpoint, by file, sorted

    @property
    def has_headers(self) -> bool:
        """Not only an index, which knows keys but neither shapes nor dtypes."""
        return bool(self.stamps)

    def scaled_by(self, config: Mapping[str, Any]) -> Source:
        """The same, with the scales that its `config.json` tells of, and the matrices of packed numbers as entries."""
        entries = with_matrices(config, self.entries)
        scales = scales_of(config, entries) if self.has_headers else {}
        found = replace(self, entries=entries)
        return replace(found, scales=scales, quantization=config["quantization_config"]) if scales else found

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(e.file for e in self.entries.values()))

    def checksum(self) -> int:
        """A checksum of the headers and of a few bytes from the middle of each tensor (of some, if they are many).

        Training changes those bytes, so two copies that were trained apart differ in it.
        """
        entries = sorted(self.entries.values(), key=lambda e: e.key)
        crc = zlib.crc32(repr([(e.key, e.dtype, e.shape) for e in entries]).encode())
        with contextlib.ExitStack() as files:
            found: dict[str, int] = {}
            for entry in entries[:: max(1, len(entries) // _LOOKS)]:
                if entry.file not in found:
                    found[entry.file] = self.open(entry.file).fd
                    files.callback(os.close, found[entry.file])
                middle = (entry.start + entry.stop) // 2
                crc = zlib.crc32(os.pread(found[entry.file], min(_LOOK, entry.stop - middle), middle), crc)
        return crc

    def open(self, file: str, way_out: str = _LOAD_AGAIN) -> Opened:
        """The very version of a file whose header was read; another one is refused. The caller closes it."""
        now = open_file(self.directory / file)
        try:
            now.refuse_other_than(self.stamps[file], way_out)
        except LoadError:
            os.close(now.fd)
            raise
        return now

    def check_unchanged(self, files: Iterable[str], way_out: str = _LOAD_AGAIN) -> None:
        """None was replaced, and none was written into."""
        for file in files:
            os.close(self.open(file, way_out).fd)


def open_source(directory: str | os.PathLike[str], others: Mapping[str, Stamp] | None = None) -> Source:
    """Read the headers of a Hugging Face directory. `others`: stamps of files that were read already."""
    root = Path(directory)
    files, index, stamps = _files(root)
    stamps |= others or {}
    entries: dict[str, Entry] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        found, metadata[file], stamps[file] = read_header(root / file)
        for entry in found:
            if entry.key in entries:
                raise LoadError(
                    f"{short(entry.key)} stands in both {entries[entry.key].file} and {file} of {root}; "
                    "remove one of them"
                )
            entries[entry.key] = entry
    if index is not None:
        _check_index(root, index["weight_map"], entries)
    if not entries:
        raise LoadError(f"{root} holds no tensor in {', '.join(files)}; fetch the files again")
    return Source(root, entries, metadata, index, stamps)


def open_index(directory: str | os.PathLike[str]) -> Source:
    """The keys that an index promises, where its files are not here. They tell how the model is spelled.

    Without an index there are no keys.
    """
    root = Path(directory)
    if not exists(root / INDEX, Path.is_file):
        return Source(root, {})
    index, _ = _read_index(root / INDEX)
    return Source(root, {key: Entry(key, file, "", (), 0, 0) for key, file in index["weight_map"].items()}, index=index)


def index_files(directory: Path) -> list[str]:
    """The files that an index names; none without an index."""
    if not exists(directory / INDEX, Path.is_file):
        return []
    return list(dict.fromkeys(_read_index(directory / INDEX)[0]["weight_map"].values()))


def path_of(given: str | os.PathLike[str]) -> Path:
    """As a shell reads it: `~` is the home."""
    return Path(os.path.expanduser(given))


def exists(path: Path, is_kind: Callable[[Path], bool]) -> bool:
    """`path.is_dir()` or the like; a LoadError where the system refuses to tell."""
    try:
        return is_kind(path)
    except OSError as error:
        raise LoadError(f"{short(str(path))}: {error.strerror}; check the name and its permissions") from error


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    return read_stamped_config(directory)[0]


def read_stamped_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Stamp]:
    path = Path(directory) / CONFIG
    if not exists(path, Path.is_file):
        steps = sorted(path.name for path in Path(directory).glob("step-*") if (path / CONFIG).is_file())
        found = f"it holds checkpoints: give one of them, such as {Path(directory) / steps[-1]}" if steps else ""
        raise LoadError(f"{directory} has no config.json; {found or 'give a Hugging Face model directory'}")
    return read_stamped_json(path)


def _files(root: Path) -> tuple[list[str], Mapping[str, Any] | None, dict[str, Stamp]]:
    """Those that hold weights; the index, if there is one, and its stamp."""
    if not exists(root, Path.is_dir):
        raise LoadError(f"{root} is no directory; give a Hugging Face model directory")
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise LoadError(f"{root} cannot be listed: {error.strerror}; check its permissions") from error
    if INDEX in names:
        index, stamp = _read_index(root / INDEX)
        listed = _indexed(root, index["weight_map"])
        _refuse_others(root, names, listed, f"{INDEX} does not list")
        return listed, index, {INDEX: stamp}
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        _refuse_others(root, names, ["model.safetensors"], "stands beside model.safetensors without an index")
        return ["model.safetensors"], None, {}
    if not files:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
        hint = f"{pickles[0]} is a pickle, which may run code: convert it to safetensors" if pickles else "fetch one"
        raise LoadError(f"{root} holds no safetensors file; {hint}")
    return files, None, {}


def _refuse_others(root: Path, names: list[str], files: list[str], why: str) -> None:
    """We do not guess which of several files is the model."""
    others = [name for name in names if name.endswith(".safetensors") and name not in files]
    if others:
        raise LoadError(f"{root} holds {others[0]}, which {why}; remove it, or the index that is out of date")


def _read_index(path: Path) -> tuple[Mapping[str, Any], Stamp]:
    index, stamp = read_stamped_json(path)
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise BrokenFile(f"{path}: weight_map is {short(found)}; it must map keys to file names; fetch the index again")
    if not isinstance(index.get("metadata", {}), dict):
        raise BrokenFile(f"{path}: metadata is {short(index['metadata'])}, not an object; fetch the index again")
    return index, stamp


def _indexed(root: Path, weight_map: Mapping[str, str]) -> list[str]:
    """The files of an index: all of them in this very directory."""
    files = list(dict.fromkeys(weight_map.values()))
    for file in files:
        plain = file == os.path.basename(file) and file.endswith(".safetensors")
        if not plain or not exists(root / file, Path.is_file):
            raise LoadError(
                f"{INDEX} names {short(file)}, which is no safetensors file in {root}; fetch that file, or mend the "
                "index"
            )
    return files


def _check_index(root: Path, weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    for key, file in weight_map.items():
        if key not in entries or entries[key].file != file:
            where = entries[key].file if key in entries else "no file"
            raise LoadError(f"{root}: the index puts {short(key)} into {file}, but {where} has it; mend the index")
    extra = [key for key in entries if key not in weight_map]
    if extra:
        raise LoadError(
            f"{root}: {entries[extra[0]].file} holds {short(extra[0])}, which the index does not list "
            f"({len(extra)} such keys); mend the index"
        )
