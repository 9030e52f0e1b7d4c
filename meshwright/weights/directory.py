"""Write a Hugging Face directory from pieces: files, keys, layouts and dtypes as in the source; whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import ExportError, LoadError
from ..log import progress
from ..mesh import Mesh
from .header import DTYPES, read_json
from .keymap import Key, KeyMap
from .source import CONFIG, INDEX, Source
from .streaming import StoredModel, whole_tensors
from .target import Target, atomic_directory, check_target

# What a tokenizer, a processor or a reader needs.
_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".py", ".md", "LICENSE", "NOTICE")
_TEMPLATES = "additional_chat_templates"
_COPY_BYTES = 16 << 20
_PUT_BACK = (
    "tensors that are not trained are copied from it, and it is no longer the file that was loaded; move the old file "
    "back to its place (a copy of it is another file), and keep it while the model is in use"
)


@dataclass(frozen=True)
class Export:
    """What is to be written, and where. `beside`: where the tokenizer's and other small files are copied from."""

    keymap: KeyMap
    config: Mapping[str, Any]
    beside: Path
    directory: Path
    overwrite: bool = False

    def target(self) -> Target:
        names = {CONFIG, *self.keymap.files, *map(str, small_files(self.beside, self.keymap))}
        if _has_index(self.keymap):
            names.add(INDEX)
        return Target(self.directory, _total(self.keymap), frozenset(names), self.beside, self.overwrite)


def check_export(mesh: Mesh, export: Export) -> None:
    """All that can be known of the place before anything is written. Every rank calls it; rank 0 looks."""
    failure: ExportError | None = None
    if mesh.rank == 0:
        try:
            check_target(export.target())
            _check_readable(export)
            _check_carried(export.keymap)
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank raises
            failure = ExportError(f"nothing could be exported to {export.directory}: {error}")
            failure.__cause__ = error
    mesh.all_or_none(failure, f"the check of the export to {export.directory}", ExportError)


def write_directory(stored_model: StoredModel, export: Export) -> None:
    """Write the model. Every rank calls it; rank 0 writes."""
    failure: BaseException | None = None
    keymap, mesh = export.keymap, stored_model.mesh
    trained = [k for k in keymap.keys.values() if k.name not in keymap.carried]
    tensors = whole_tensors(stored_model, keymap, trained, as_filed=True)
    if mesh.rank == 0:
        try:
            _write(export, tensors)
        except KeyboardInterrupt as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank raises
            failure = ExportError(f"nothing was exported to {export.directory}: {error}")
            failure.__cause__ = error
    for _ in tensors:  # other ranks send here; after a failure rank 0 takes what they still send
        pass
    mesh.all_or_none(failure, f"the export to {export.directory}", ExportError)


def _write(export: Export, tensors: Iterator[tuple[Key, Tensor]]) -> None:
    with atomic_directory(export.target()) as whole:
        _write_small(export, whole)  # what can be lacking is missed before the long work
        _write_all(tensors, export.keymap, whole, f"export to {export.directory}")


def _write_all(tensors: Iterator[tuple[Key, Tensor]], keymap: KeyMap, whole: Path, label: str) -> None:
    with progress(label, _total(keymap), "bytes", enabled=True) as advance:
        for file in keymap.files:
            keys = [k for k in keymap.keys.values() if k.file == file]
            with (whole / file).open("wb") as out:
                out.write(header(keys, keymap.metadata.get(file, {})))
                for key in keys:
                    _write_key(out, key, tensors, keymap)
                    advance(key.num_bytes)


def _write_key(out: BinaryIO, key: Key, tensors: Iterator[tuple[Key, Tensor]], keymap: KeyMap) -> None:
    if key.name in keymap.carried:
        assert keymap.source is not None
        out.writelines(raw_bytes(keymap.source, key.name))
        return
    with interrupted_later():  # within it, an interrupt would end the iterator, and others go on sending
        made, tensor = next(tensors)
    assert made.name == key.name, (made.name, key.name)
    out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """A Ctrl-C in here takes effect at the end. Only the main thread gets one, and only it may ask."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        signal.raise_signal(signal.SIGINT)


def header(keys: Iterable[Key], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header whose tensors lie in the order of `keys`."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key in keys:
        fields[key.name] = {"dtype": key.dtype, "shape": list(key.shape), "data_offsets": [at, at + key.num_bytes]}
        at += key.num_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def raw_bytes(source: Source, key: str) -> Iterator[bytes]:
    """The bytes of a carried tensor, as they are."""
    entry = source.entries[key]
    file = source.open(entry.file, _PUT_BACK)
    try:
        for at in range(entry.start, entry.stop, _COPY_BYTES):
            yield file.bytes_at(at, min(entry.stop - at, _COPY_BYTES))
    finally:
        os.close(file.fd)


def raw_tensor(source: Source, key: str) -> Tensor:
    """A tensor of the source, exactly as stored: a dtype that torch does not know as its bytes."""
    entry = source.entries[key]
    flat = torch.frombuffer(bytearray(b"".join(raw_bytes(source, key))) or bytearray(1), dtype=torch.uint8)
    flat = flat[: entry.stop - entry.start]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape) if entry.dtype in DTYPES else flat


def small_files(beside: Path, keymap: KeyMap) -> Iterator[Path]:
    """Whatever small files lie beside the source (tokenizer, templates), as paths in its directory."""
    top = [p for p in beside.iterdir() if p.name.endswith(_SMALL) and p.name not in keymap.files]
    for path in sorted([*top, *(beside / _TEMPLATES).rglob("*")]):
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} is a link to what is not there; mend or remove it")
        if path.is_file() and not path.name.endswith(".index.json"):
            yield path.relative_to(beside)


def _check_readable(export: Export) -> None:
    for name in small_files(export.beside, export.keymap):
        if not os.access(export.beside / name, os.R_OK):
            raise PermissionError(f"{export.beside / name} is to be copied and cannot be read; change its mode")


def _check_carried(keymap: KeyMap) -> None:
    if keymap.source is not None:
        files = sorted({keymap.source.entries[key].file for key in keymap.carried})
        keymap.source.check_unchanged(files, _PUT_BACK)


def _write_small(export: Export, whole: Path) -> None:
    """Config, index, and copies of the small files."""
    keymap = export.keymap
    _check_carried(keymap)
    for name in small_files(export.beside, keymap):
        (whole / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(export.beside / name, whole / name)
    if not _holds(whole / CONFIG, export.config):  # else the copy is kept, to the byte
        (whole / CONFIG).write_text(json.dumps(export.config, indent=2) + "\n")  # to the byte as transformers does
    if _has_index(keymap):
        index = dict(keymap.source.index or {}) if keymap.source else {}
        index["metadata"] = {**index.get("metadata", {}), "total_size": _total(keymap)}
        index["weight_map"] = {k.name: k.file for k in sorted(keymap.keys.values(), key=lambda k: k.name)}
        (whole / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _has_index(keymap: KeyMap) -> bool:
    return len(keymap.files) > 1 or (keymap.source is not None and keymap.source.index is not None)


def _holds(path: Path, config: Mapping[str, Any]) -> bool:
    try:
        return path.is_file() and read_json(path) == config
    except LoadError:
        return False


def _total(keymap: KeyMap) -> int:
    return sum(k.num_bytes for k in keymap.keys.values())


def exported_config(config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The source's config; a stated dtype where the export was asked to change it."""
    if dtype is None:
        return dict(config)
    name = str(dtype).removeprefix("torch.")
    out = {k: v for k, v in config.items() if k != "torch_dtype"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {**{k: v for k, v in out["text_config"].items() if k != "torch_dtype"}, "dtype": name}
    return {**out, "dtype": name}
