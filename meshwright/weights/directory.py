"""Write a Hugging Face directory from pieces: files, keys, layouts and dtypes as in the source; whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import ExportError, LoadError
from ..log import progress
from .header import DTYPES, read_json
from .keymap import Key, KeyMap
from .source import Source
from .streaming import StoredModel, whole_tensors

# What a tokenizer, a processor or a reader needs.
_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".py", ".md", "LICENSE", "NOTICE")
_TEMPLATES = "additional_chat_templates"
_COPY_BYTES = 16 << 20
_PUT_BACK = (
    "tensors that are not trained are copied from it, and it is no longer the file that was loaded; move the old file "
    "back to its place (a copy of it is another file), and keep it while the model is in use"
)


def write_directory(
    stored_model: StoredModel, keymap: KeyMap, config: Mapping[str, Any], beside: Path, directory: Path
) -> None:
    """Write the model to `directory`, which must not exist yet or be empty. Every rank calls it; rank 0 writes.
    `beside`: where the tokenizer's and other small files are copied from.
    """
    failure: ExportError | None = None
    trained = [k for k in keymap.keys.values() if k.name not in keymap.carried]
    tensors = whole_tensors(stored_model, keymap, trained, as_filed=True)
    if stored_model.mesh.rank == 0:
        try:
            with atomic_directory(directory, _total(keymap)) as whole:
                _write_small(keymap, config, beside, whole)  # what can be lacking is missed before the long work
                _write_all(tensors, keymap, whole, f"export to {directory}")
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank raises
            failure = ExportError(f"nothing was exported to {directory}: {error}")
            failure.__cause__ = error
    for _ in tensors:  # other ranks send here; after a failure rank 0 takes what they still send
        pass
    stored_model.mesh.all_or_none(failure, f"the export to {directory}", ExportError)


@contextlib.contextmanager
def atomic_directory(directory: Path, num_bytes: int) -> Iterator[Path]:
    """An empty directory to fill. It takes the place of `directory` when it is whole and on the disk.

    After a failure or an interrupt nothing is left of it. A killed process leaves a hidden `.NAME.unfinished-...`.
    """
    target = directory.resolve()  # a link stays, and what it points to is filled
    _check_target(target, num_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = target.with_name(f".{target.name}.unfinished-{secrets.token_hex(4)}")
    whole.mkdir()
    try:
        yield whole
        for path in (*whole.rglob("*"), whole):
            _to_disk(path)
        if target.exists():
            whole.chmod(target.stat().st_mode & 0o7777)
        whole.rename(target)  # an empty directory is replaced
        _to_disk(target.parent)
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise


def _check_target(target: Path, num_bytes: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; choose another or remove it")
    if target in (Path.cwd(), *Path.cwd().parents):
        raise FileExistsError(f"this process runs in {Path.cwd()}, which would be replaced; choose another directory")
    if target.is_mount():
        raise FileExistsError(f"{target} is a mount point, which no whole directory can replace; choose one inside it")
    there = next(p for p in target.parents if p.exists())
    disk = shutil.disk_usage(there)
    if disk.free < num_bytes and disk.total:  # of 0 where a file system does not say
        room = f"{there} has room for {disk.free}"
        raise OSError(f"{num_bytes} bytes are to be written, but {room}; make more, or choose another place")


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if not path.is_dir():  # some network file systems cannot for a directory
            raise
    finally:
        os.close(fd)


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
    made, tensor = next(tensors)
    assert made.name == key.name, (made.name, key.name)
    out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


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


def _write_small(keymap: KeyMap, config: Mapping[str, Any], beside: Path, whole: Path) -> None:
    """Config, index, and copies of whatever small files lie beside the source (tokenizer, templates)."""
    if keymap.source is not None:
        files = sorted({keymap.source.entries[key].file for key in keymap.carried})
        keymap.source.check_unchanged(files, _PUT_BACK)
    for path in sorted(beside.iterdir()):
        small = path.name.endswith(_SMALL) and not path.name.endswith(".index.json")
        if small and path.is_symlink() and not path.exists():
            raise FileNotFoundError(f"{path} is a link to what is not there; mend or remove it")
        if small and path.is_file() and path.name not in keymap.files:
            shutil.copyfile(path, whole / path.name)
    if (beside / _TEMPLATES).is_dir():
        shutil.copytree(beside / _TEMPLATES, whole / _TEMPLATES)
    if not _holds(whole / "config.json", config):  # else the copy is kept, to the byte
        (whole / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # to the byte as transformers does
    if len(keymap.files) > 1 or (keymap.source is not None and keymap.source.index is not None):
        index = dict(keymap.source.index or {}) if keymap.source else {}
        index["metadata"] = {**index.get("metadata", {}), "total_size": _total(keymap)}
        index["weight_map"] = {k.name: k.file for k in sorted(keymap.keys.values(), key=lambda k: k.name)}
        (whole / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
