"""Write a Hugging Face directory from pieces: files, keys, layouts and dtypes as in the source; whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError, LoadError, failure_in
from ..log import Advance, progress
from ..mesh import Mesh
from ..ops.part_sizes import part_size
from ..sharding import Piece, written
from .checksums import Checks
from .file_version import Opened
from .keymap import KeyMap
from .output_dir import Target, atomic_directory, check_target
from .quant_formats import Places, dequantise, scales_to_float, unpacked
from .requantise import scales_for, write_scales
from .safetensors_header import DTYPES, Entry, read_json
from .small_files import SmallFiles
from .source import CONFIG, INDEX, Source
from .streaming import StoredModel
from .writer import Files, make_files, whole_rows

_COPY_BYTES = part_size(__name__, "_COPY_BYTES", 16 << 20, small=1001)
_PUT_BACK = (
    "tensors that are not trained are copied from it, and it is no longer the file that was loaded; move the old file "
    "back to its place (a copy of it is another file), and keep it while the model is in use"
)


@dataclass(frozen=True)
class Export:
    """What is to be written, and where. `small`: the tokenizer's and other small files, and where the model lies."""

    keymap: KeyMap
    config: Mapping[str, Any]
    small: SmallFiles
    directory: Path
    overwrite: bool = False

    def target(self) -> Target:
        names = {CONFIG, *self.keymap.files, *self.small.names}
        if _has_index(self.keymap):
            names.add(INDEX)
        return Target(self.directory, _total(self.keymap), frozenset(names), self.small.directory, self.overwrite)


def check_export(mesh: Mesh, export: Export) -> None:
    """All that can be known of the place before anything is written. Every rank calls it; rank 0 looks."""

    def check() -> None:
        check_target(export.target())
        export.small.check()
        _check_carried(export.keymap)

    what = f"nothing could be exported to {export.directory}"
    failure = failure_in(check, ExportError, what) if mesh.rank == 0 else None
    mesh.all_or_none(failure, f"the check of the export to {export.directory}", ExportError)


def write_directory(stored_model: StoredModel, export: Export) -> None:
    """Write the model. Every rank calls it, and writes what it holds; rank 0 makes and places the directory."""
    mesh = stored_model.mesh
    with contextlib.ExitStack() as made:
        scales = scales_for(stored_model, export.keymap)
        whole = _made(mesh, export, made)
        _write_all(stored_model, export, whole, scales)
        failure = _failure_of(export, made.close)
    mesh.all_or_none(failure, f"the export to {export.directory}", ExportError)


def _failure_of(export: Export, act: Callable[[], object]) -> BaseException | None:
    return failure_in(act, ExportError, f"nothing was exported to {export.directory}")


def _made(mesh: Mesh, export: Export, made: contextlib.ExitStack) -> Path:
    """The directory to fill, with all that is small, and every file in its size. Rank 0 makes it."""
    folder: list[Path] = []

    def make() -> None:
        folder.append(made.enter_context(atomic_directory(export.target())))
        write_small(export, folder[0])
        make_files(folder[0], export.keymap)

    failure = _failure_of(export, make) if mesh.rank == 0 else None
    mesh.all_or_none(failure, f"the making of {export.directory}", ExportError)
    path: Path = mesh.of_rank_0(folder[0] if folder else None)
    return path


def _write_all(stored_model: StoredModel, export: Export, folder: Path, scales: Mapping[str, Tensor]) -> None:
    """What this rank holds, and its share of what is copied. After a failure it still exchanges rows with the others;
    then all raise."""
    mesh = stored_model.mesh
    failure: BaseException | None = None
    label = f"export to {export.directory} on rank {mesh.rank}"
    with (
        interrupted_later() as interrupts,
        Files(folder, export.keymap, scales=scales) as files,
        progress(label, _num_written(stored_model), "elements", enabled=mesh.rank == 0) as advance,
    ):
        for act in _acts(stored_model, files, advance):
            if interrupts:
                failure = failure or KeyboardInterrupt()
            failure = failure or _failure_of(export, act)
        mesh.all_or_none(failure, f"the writing of {export.directory}", ExportError)


def _acts(stored_model: StoredModel, files: Files, advance: Advance) -> Iterator[Callable[[], None]]:
    def write(piece: Piece, values: Tensor) -> None:
        files.write(piece, values)
        advance(piece.numel)

    for piece, values in whole_rows(stored_model):
        yield functools.partial(write, piece, values)
    mine = (files, stored_model.mesh.rank, stored_model.mesh.axes.world)
    yield functools.partial(copy_carried, *mine)
    yield functools.partial(write_scales, *mine)
    yield files.to_disk


def _num_written(stored_model: StoredModel) -> int:
    spec, mesh = stored_model.spec, stored_model.mesh
    mine = (written(param, spec.rules, mesh.axes, mesh.rank) for param in spec.table)
    return sum(piece.numel for piece in mine if piece.param.name in stored_model.stored)


def copy_carried(files: Files, rank: int = 0, world: int = 1) -> None:
    """The keys that are not trained, each by one rank."""
    keymap = files.keymap
    for number, name in enumerate(sorted(keymap.carried)):
        if number % world == rank:
            files.copy(keymap.keys[name], _carried_bytes(keymap, name))


def _carried_bytes(keymap: KeyMap, name: str) -> Iterator[bytes]:
    """As they are; as values, where their scales are not written."""
    assert keymap.source is not None
    if name not in keymap.source.scales or name in keymap.scales:
        yield from raw_bytes(keymap.source, name)
        return
    wide = whole_values(keymap.source, name)
    values = wide.to(DTYPES[keymap.keys[name].dtype])
    if bool((wide.isfinite() & ~values.isfinite()).any()):
        raise ExportError(f"{name} has values that {values.dtype} cannot hold; export with a wider dtype=")
    yield values.view(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def interrupted_later() -> Iterator[list[int]]:
    """A Ctrl-C in here is noted, and takes effect at the end. Only the main thread gets one, and only it may ask."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        signal.raise_signal(signal.SIGINT)


def raw_bytes(source: Source, key: str) -> Iterator[bytes]:
    """The bytes of a carried tensor, as they are. Those of a checkpoint are compared with their checksums."""
    entry = source.entries[key]
    file = source.open(entry.file, _PUT_BACK)
    try:
        yield from _checked_bytes(source, entry, file) if entry.file in source.extents else _bytes(entry, file)
    finally:
        os.close(file.fd)


def _bytes(entry: Entry, file: Opened) -> Iterator[bytes]:
    for at in range(entry.start, entry.stop, _COPY_BYTES):
        yield file.bytes_at(at, min(entry.stop - at, _COPY_BYTES))


def _checked_bytes(source: Source, entry: Entry, file: Opened) -> Iterator[bytes]:
    checks = Checks(source.directory, source.extents)
    for start, stop, extent in checks.parts(entry.file, entry.start, entry.stop):
        data = file.bytes_at(extent.start, extent.stop - extent.start)
        checks.check(entry.file, extent, data, entry.key)
        yield data[start - extent.start : stop - extent.start]


def raw_tensor(source: Source, key: str) -> Tensor:
    """A tensor of the source, exactly as stored: a dtype that torch does not know as its bytes."""
    entry = source.entries[key]
    flat = torch.frombuffer(bytearray(b"".join(raw_bytes(source, key))) or bytearray(1), dtype=torch.uint8)
    flat = flat[: entry.stop - entry.start]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape) if entry.dtype in DTYPES else flat


def whole_values(source: Source, key: str) -> Tensor:
    """A tensor of the source; numbers times their scales, in float32, where it has some."""
    found, scale, shape = raw_tensor(source, key), source.scales.get(key), source.entries[key].shape
    if scale is None:
        return found
    found = unpacked(found).view(shape) if scale.packed else found
    scales = scales_to_float(raw_tensor(source, scale.key)).view(scale.grid(shape))
    scales = scales / raw_tensor(source, scale.divisor) if scale.divisor else scales
    return dequantise(found, Places.of(found, shape, scale).take(scales))


def _check_carried(keymap: KeyMap) -> None:
    if keymap.source is not None:
        of_source = {key: scale for key, scale in keymap.source.scales.items() if key in keymap.scales}
        read = {*keymap.carried, *of_source, *(key for scale in of_source.values() for key in scale.beside)}
        files = sorted({keymap.source.entries[key].file for key in read})
        keymap.source.check_unchanged(files, _PUT_BACK)


def write_small(export: Export, whole: Path) -> None:
    """Config, index, and copies of the small files."""
    keymap = export.keymap
    _check_carried(keymap)
    export.small.write(whole)
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


def exported_config(config: Mapping[str, Any], dtype: torch.dtype | None, keymap: KeyMap) -> dict[str, Any]:
    """The source's config; a stated dtype where the export was asked to change it. It tells of scales where some are
    written."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    if keymap.scales:
        config["quantization_config"] = keymap.quantization
    if dtype is None:
        return config
    name = str(dtype).removeprefix("torch.")
    out = {k: v for k, v in config.items() if k != "torch_dtype"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {**{k: v for k, v in out["text_config"].items() if k != "torch_dtype"}, "dtype": name}
    return {**out, "dtype": name}
