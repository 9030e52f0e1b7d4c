"""Open a model directory as a map from key to byte range, from config.json, the index and the headers. Pickles are
refused."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import BrokenFile, LoadError
from .checksums import Extent
from .file_version import Opened, Stamp, open_file
from .quant_formats import Scale, scales_of, states_of, with_matrices
from .safetensors_header import Entry, read_header, read_stamped_json, short

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
_LOAD_AGAIN = "load again when its writer has finished; a writer should fill a new directory and rename it into place"
_LOOKS, _LOOK = 512, 64  # a checksum samples: tensors (all, if a model has fewer), and bytes of each


@dataclass(frozen=True)
class Source:
    """The content of a directory, in the order of its files and of their bytes."""

    directory: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by file
    index: Mapping[str, Any] | None = None  # the index file, if there is one
    stamps: Mapping[str, Stamp] = field(default_factory=dict)  # version of each file when it was first read
    scales: Mapping[str, Scale] = field(default_factory=dict)  # by the key of a quantised matrix
    quantization: Mapping[str, Any] = field(default_factory=dict)  # quantization_config
    extents: Mapping[str, Sequence[Extent]] = field(default_factory=dict)  # checksums of a checkpoint, by file, sorted
    # What loading divides the scales of a matrix by when it quantises it to NVFP4, once it is computed.
    divisors: dict[tuple[str, int], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_headers(self) -> bool:
        """Return whether headers were read: an index alone knows keys, but neither shapes nor dtypes."""
        return bool(self.stamps)

    def scaled_by(self, config: Mapping[str, Any]) -> Source:
        """Return the source with the scales that its config describes, and an entry for each packed matrix."""
        states = states_of(config, self.entries, self._bytes) if self.has_headers else {}
        entries = with_matrices(config, self.entries, states)
        scales = scales_of(config, entries, states) if self.has_headers else {}
        with_entries = replace(self, entries=entries)
        return (
            replace(with_entries, scales=scales, quantization=config["quantization_config"]) if scales else with_entries
        )

    def _bytes(self, entry: Entry) -> bytes:
        """Read a small tensor."""
        file = self.open(entry.file)
        try:
            return file.bytes_at(entry.start, entry.stop - entry.start)
        finally:
            os.close(file.fd)

    @property
    def files(self) -> list[str]:
        """Return the names of files that hold tensors, in order."""
        return list(dict.fromkeys(e.file for e in self.entries.values()))

    def checksum(self) -> int:
        """Return a checksum of the headers, and of 64 bytes from the middle of each tensor (of a sample, if there are
        many).

        Ranks compare it to notice that they load different models. Training changes all weights, so separately trained
        copies differ in these bytes, and the model need not be read twice.
        """
        entries = sorted(self.entries.values(), key=lambda e: e.key)
        crc = zlib.crc32(repr([(e.key, e.dtype, e.shape) for e in entries]).encode())
        with contextlib.ExitStack() as files:
            fds: dict[str, int] = {}
            for entry in entries[:: max(1, len(entries) // _LOOKS)]:
                if entry.file not in fds:
                    fds[entry.file] = self.open(entry.file).fd
                    files.callback(os.close, fds[entry.file])
                middle = (entry.start + entry.stop) // 2
                crc = zlib.crc32(os.pread(fds[entry.file], min(_LOOK, entry.stop - middle), middle), crc)
        return crc

    def open(self, file: str, fix: str = _LOAD_AGAIN) -> Opened:
        """Open the version of a file whose header was read, and refuse any other. The caller closes it.

        Every later read goes through this, so a model that is replaced under a running job is noticed at the next
        access.
        """
        now = open_file(self.directory / file)
        try:
            now.refuse_other_than(self.stamps[file], fix)
        except LoadError:
            os.close(now.fd)
            raise
        return now

    def check_unchanged(self, files: Iterable[str], fix: str = _LOAD_AGAIN) -> None:
        """Raise if any of these files was replaced or written into."""
        for file in files:
            os.close(self.open(file, fix).fd)


def open_source(directory: str | os.PathLike[str], others: Mapping[str, Stamp] | None = None) -> Source:
    """Read the headers of a Hugging Face directory. `others`: versions of files that were read already.

    A header has a few KB to a few MB, so all ranks read all headers; nothing is broadcast.
    """
    root = Path(directory)
    files, index, stamps = _files(root)
    stamps |= others or {}
    entries: dict[str, Entry] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        entries_of_file, metadata[file], stamps[file] = read_header(root / file)
        for entry in entries_of_file:
            if entry.key in entries:
                raise LoadError(
                    f"{short(entry.key)} is in both {entries[entry.key].file} and {file} of {root}; remove one of them"
                )
            entries[entry.key] = entry
    if index is not None:
        _check_index(root, index["weight_map"], entries)
    if not entries:
        raise LoadError(f"{root} holds no tensor in {', '.join(files)}; fetch the files again")
    return Source(root, entries, metadata, index, stamps)


def open_index(directory: str | os.PathLike[str]) -> Source:
    """Read the keys that an index lists, without its files: enough to choose layouts. Without an index there are no
    keys.

    `meshwright plan` uses it for models whose weights are not downloaded: a few hundred KB instead of hundreds of GB.
    """
    root = Path(directory)
    if not exists(root / INDEX, Path.is_file):
        return Source(root, {})
    index, _ = _read_index(root / INDEX)
    return Source(root, {key: Entry(key, file, "", (), 0, 0) for key, file in index["weight_map"].items()}, index=index)


def index_files(directory: Path) -> list[str]:
    """Return the files that an index names; none without an index.

    It helps to decide whether a directory is an earlier export that may be replaced.
    """
    if not exists(directory / INDEX, Path.is_file):
        return []
    return list(dict.fromkeys(_read_index(directory / INDEX)[0]["weight_map"].values()))


def path_of(path: str | os.PathLike[str]) -> Path:
    """Expand `~` as a shell does."""
    return Path(os.path.expanduser(path))


def exists(path: Path, is_kind: Callable[[Path], bool]) -> bool:
    """Return `is_kind(path)`, such as `path.is_dir()`; raise LoadError where the system denies access."""
    try:
        return is_kind(path)
    except OSError as error:
        raise LoadError(f"{short(str(path))}: {error.strerror}; check the name and its permissions") from error


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read config.json."""
    return read_stamped_config(directory)[0]


def read_stamped_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Stamp]:
    """Read config.json, and the version of the file."""
    path = Path(directory) / CONFIG
    if not exists(path, Path.is_file):
        checkpoints = sorted(path.name for path in Path(directory).glob("step-*") if (path / CONFIG).is_file())
        hint = (
            f"it holds checkpoints: give one of them, such as {Path(directory) / checkpoints[-1]}"
            if checkpoints
            else ""
        )
        raise LoadError(f"{directory} has no config.json; {hint or 'give a Hugging Face model directory'}")
    return read_stamped_json(path)


def _files(root: Path) -> tuple[list[str], Mapping[str, Any] | None, dict[str, Stamp]]:
    """Return the files that hold weights, the index if there is one, and its version."""
    if not exists(root, Path.is_dir):
        raise LoadError(f"{root} is not a directory; give a Hugging Face model directory")
    try:
        names = sorted(os.listdir(root))
    except OSError as error:
        raise LoadError(f"{root} cannot be listed: {error.strerror}; check its permissions") from error
    # An index is authoritative: it lists the files, and every other safetensors file is refused. A loader that globs
    # for *.safetensors would mix two exports that were written into one directory.
    if INDEX in names:
        index, stamp = _read_index(root / INDEX)
        listed = _indexed(root, index["weight_map"])
        _refuse_others(root, names, listed, f"{INDEX} does not list")
        return listed, index, {INDEX: stamp}
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        _refuse_others(root, names, ["model.safetensors"], "is next to model.safetensors without an index")
        return ["model.safetensors"], None, {}
    if not files:
        # A .bin file is a pickle, which can run any code on loading.
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
        hint = f"{pickles[0]} is a pickle, which may run code: convert it to safetensors" if pickles else "fetch one"
        raise LoadError(f"{root} holds no safetensors file; {hint}")
    return files, None, {}


def _refuse_others(root: Path, names: list[str], files: list[str], why: str) -> None:
    """Refuse a directory with other safetensors files, because one would have to guess which files are the model."""
    siblings = [name for name in names if name.endswith(".safetensors") and name not in files]
    if siblings:
        raise LoadError(f"{root} holds {siblings[0]}, which {why}; remove it, or the index that is out of date")


def _read_index(path: Path) -> tuple[Mapping[str, Any], Stamp]:
    """Read and check an index."""
    index, stamp = read_stamped_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise BrokenFile(
            f"{path}: weight_map is {short(weight_map)}; it must map keys to file names; fetch the index again"
        )
    if not isinstance(index.get("metadata", {}), dict):
        raise BrokenFile(f"{path}: metadata is {short(index['metadata'])}, not an object; fetch the index again")
    return index, stamp


def _indexed(root: Path, weight_map: Mapping[str, str]) -> list[str]:
    """Return the files of an index, which must lie in exactly this directory (no path that leads outside)."""
    files = list(dict.fromkeys(weight_map.values()))
    for file in files:
        is_local = file == os.path.basename(file) and file.endswith(".safetensors")
        if not is_local or not exists(root / file, Path.is_file):
            raise LoadError(
                f"{INDEX} names {short(file)}, which is not a safetensors file in {root}; fetch that file, or correct "
                "the index"
            )
    return files


def _check_index(root: Path, weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    """Check that the index and the headers agree about every key."""
    for key, file in weight_map.items():
        if key not in entries or entries[key].file != file:
            where = entries[key].file if key in entries else "no file"
            raise LoadError(f"{root}: the index puts {short(key)} into {file}, but {where} has it; correct the index")
    extra = [key for key in entries if key not in weight_map]
    if extra:
        raise LoadError(
            f"{root}: {entries[extra[0]].file} holds {short(extra[0])}, which the index does not list "
            f"({len(extra)} such keys); correct the index"
        )
