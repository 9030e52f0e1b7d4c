"""Export a model to a Hugging Face directory (safetensors, index, config, tokenizer), sharded and atomic.

Every rank writes the rows it holds into files that rank 0 created at their final size, so no rank gathers the model.
Keys, layouts, dtypes and file names are those of the source. Exports that derive them from the module instead lose
tensors without an error: MTP weights that the module lacks (ms-swift#7848), a second head of a tied model
(lmms-engine#157), float32 `A_log` written as bfloat16 (ms-swift#9412).

The live model is only read. Casting parameters in place for the export would change the training that continues
(VeOmni#461); adding 1 to zero-centred norms and forgetting to subtract it would shift them at each export
(Megatron-Bridge#1929).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
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
from ..sharding import Block, Box, Piece, Table, rows_to_write
from ..watch import deferred_signal
from .checksums import Checks
from .file_version import Opened
from .keymap import KeyMap
from .output_dir import Target, atomic_directory, check_target
from .quant_formats import as_in_file
from .reader import Reader
from .requantise import scales_for, write_scales
from .safetensors_header import DTYPES, Entry, read_json
from .small_files import SmallFiles
from .source import CONFIG, INDEX, Source
from .streaming import StoredModel
from .writer import Files, make_files, whole_rows

_COPY_BYTES = part_size(__name__, "_COPY_BYTES", 16 << 20, small=1001)
_RESTORE_SOURCE = (
    "untrained tensors are copied from it, so it must be the file that was loaded; move the old file back (a copy has "
    "another inode and will not do), and keep it while the model is in use"
)


@dataclass(frozen=True)
class Export:
    """A planned export: key map, config, small files (tokenizer, templates) and target directory.

    Nothing in it refers to the live model. It can be planned, checked and reported before a tensor is touched.
    """

    keymap: KeyMap
    config: Mapping[str, Any]
    small: SmallFiles
    directory: Path
    overwrite: bool = False

    def target(self) -> Target:
        """Return the target with the names and bytes to write, for checks before anything is written."""
        names = {CONFIG, *self.keymap.files, *self.small.names}
        if _has_index(self.keymap):
            names.add(INDEX)
        return Target(self.directory, _total(self.keymap), frozenset(names), self.small.directory, self.overwrite)


def check_export(mesh: Mesh, export: Export) -> None:
    """Check the target before anything is written: all ranks call it, rank 0 checks, all raise.

    The checks are cheap, but a failure after an hour of writing is not. They cover the target, free space, the
    tokenizer files, and that the files to copy from are unchanged.
    """

    def check() -> None:
        if mesh.rank == 0:
            check_target(export.target())
            export.small.check()
            _check_carried(export.keymap)

    at, what = f"the check of the export to {export.directory}", f"nothing could be exported to {export.directory}"
    mesh.together(check, at, ExportError, what)


def write_directory(stored_model: StoredModel, export: Export) -> None:
    """Export the model. All ranks call it and write their own shards; rank 0 creates the directory and renames it into
    place."""
    mesh = stored_model.mesh
    # Compute scales first: they need collectives, and a failure in these then leaves no directory behind.
    with contextlib.ExitStack() as stack:
        scales = scales_for(stored_model, export.keymap)
        directory = _create_directory(mesh, export, stack)
        _write_all(stored_model, export, directory, scales)
        mesh.together(stack.close, f"the export to {export.directory}", ExportError, _nothing(export))


def _nothing(export: Export) -> str:
    return f"nothing was exported to {export.directory}"


def _create_directory(mesh: Mesh, export: Export, stack: contextlib.ExitStack) -> Path:
    """Create the directory with small files and every weight file at its final size, on rank 0; return its path on all
    ranks."""

    def create() -> Path | None:
        if mesh.rank:
            return None
        folder = stack.enter_context(atomic_directory(export.target()))
        write_small(export, folder)
        make_files(folder, export.keymap)
        return folder

    path: Path = mesh.broadcast_object(
        mesh.together(create, f"the making of {export.directory}", ExportError, _nothing(export))
    )
    return path


def _write_all(stored_model: StoredModel, export: Export, folder: Path, scales: Mapping[str, Tensor]) -> None:
    """Write this rank's rows and its share of carried tensors and scales.

    After a failure a rank keeps taking part in the exchanges of rows, without writing, until all ranks learn of it. A
    rank that left early would leave the others in a collective until the timeout.
    """
    mesh = stored_model.mesh
    failure: BaseException | None = None
    label = f"export to {export.directory} on rank {mesh.rank}"
    with (
        deferred_signal(signal.SIGINT) as interrupts,
        Files(folder, export.keymap, scales=scales) as files,
        progress(label, _num_written(stored_model), "elements", enabled=mesh.rank == 0) as advance,
    ):
        # Each action may contain an exchange of rows, in the generator between two yields. So the loop runs to its end
        # even after a failure; only the writing is skipped.
        for act in _write_actions(stored_model, files, advance):
            if interrupts:
                failure = failure or KeyboardInterrupt()
            failure = failure or failure_in(act, ExportError, _nothing(export))
        mesh.all_or_none(failure, f"the writing of {export.directory}", ExportError)


def _write_actions(stored_model: StoredModel, files: Files, advance: Advance) -> Iterator[Callable[[], None]]:
    """Yield the writes of this rank one by one, so that a failed write does not skip the collectives of the next
    one."""

    def write(piece: Piece, values: Tensor) -> None:
        files.write(piece, values)
        advance(piece.numel)

    for piece, values in whole_rows(stored_model):
        yield functools.partial(write, piece, values)
    args = (files, stored_model.mesh.rank, stored_model.mesh.axes.world)
    yield functools.partial(copy_carried, *args)
    yield functools.partial(write_scales, *args)
    yield files.fsync


def _num_written(stored_model: StoredModel) -> int:
    """Count the elements that this rank writes."""
    spec, mesh = stored_model.spec, stored_model.mesh
    pieces = (rows_to_write(param, spec.rules, mesh.axes, mesh.rank) for param in spec.table)
    return sum(piece.numel for piece in pieces if piece.param.name in stored_model.stored)


def copy_carried(files: Files, rank: int = 0, world: int = 1) -> None:
    """Copy the keys that are not trained; key number n is copied by rank n mod world.

    For Qwen3.5 trained as text these are the vision tower and the MTP layers: config.json counts them, so an export
    without them would not load.
    """
    keymap = files.keymap
    for number, name in enumerate(sorted(keymap.carried)):
        if number % world == rank:
            files.copy(keymap.keys[name], _carried_bytes(keymap, name))


def _carried_bytes(keymap: KeyMap, name: str) -> Iterator[bytes]:
    """Yield the bytes of a carried tensor unchanged; dequantised if the export writes no scales."""
    assert keymap.source is not None
    # Copy the bytes unchanged, unless the export is dequantised and the tensor is not.
    if name not in keymap.source.scales or name in keymap.scales:
        yield from raw_bytes(keymap.source, name)
        return
    values32 = whole_values(keymap.source, name)
    values = values32.to(DTYPES[keymap.keys[name].dtype])
    if bool((values32.isfinite() & ~values.isfinite()).any()):
        raise ExportError(f"{name} has values that {values.dtype} cannot hold; export with a wider dtype=")
    yield values.view(-1).view(torch.uint8).numpy().tobytes()


def raw_bytes(source: Source, key: str) -> Iterator[bytes]:
    """Yield the bytes of a tensor of the source, verified against their checksums if the source is a checkpoint."""
    entry = source.entries[key]
    file = source.open(entry.file, _RESTORE_SOURCE)
    try:
        yield from _checked_bytes(source, entry, file) if entry.file in source.extents else _bytes(entry, file)
    finally:
        os.close(file.fd)


def first_bytes(source: Source, key: str) -> bytes:
    """Return the first KB of a tensor of the source."""
    entry = source.entries[key]
    file = source.open(entry.file, _RESTORE_SOURCE)
    try:
        return file.bytes_at(entry.start, min(entry.stop - entry.start, 1024))
    finally:
        os.close(file.fd)


def _bytes(entry: Entry, file: Opened) -> Iterator[bytes]:
    """Yield the bytes of a tensor in parts of bounded size."""
    for at in range(entry.start, entry.stop, _COPY_BYTES):
        yield file.bytes_at(at, min(entry.stop - at, _COPY_BYTES))


def _checked_bytes(source: Source, entry: Entry, file: Opened) -> Iterator[bytes]:
    """Yield the bytes of a tensor by extents. An extent is read whole to verify it, and cut to the tensor."""
    checks = Checks(source.directory, source.extents)
    for start, stop, extent in checks.split(entry.file, entry.start, entry.stop):
        data = file.bytes_at(extent.start, extent.stop - extent.start)
        checks.check(entry.file, extent, data, entry.key)
        yield data[start - extent.start : stop - extent.start]


def raw_tensor(source: Source, key: str) -> Tensor:
    """Return a tensor of the source as stored. A dtype that torch lacks comes back as uint8 bytes."""
    entry = as_in_file(source.entries[key])
    flat = torch.frombuffer(bytearray(b"".join(raw_bytes(source, key))) or bytearray(1), dtype=torch.uint8)
    flat = flat[: entry.stop - entry.start]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape) if entry.dtype in DTYPES else flat


def check_constants(table: Table, source: Source) -> None:
    """Refuse a source whose integer tensors are not those that its config implies: a hash for another vocabulary or
    seed would read and train the wrong rows of a table without an error."""
    for key, expected in table.constants.items():
        if key in source.entries and (stored := raw_tensor(source, key).flatten().tolist()) != [*expected]:
            at = next((i for i, both in enumerate(zip(stored, expected, strict=False)) if both[0] != both[1]), -1)
            what = (
                f"number {at} is {stored[at]}, and {expected[at]} follows"
                if at >= 0
                else f"it has {len(stored)} numbers"
            )
            raise LoadError(
                f"{key}: {what} from vocab_size, seed and the fields of n-grams in config.json; correct config.json, "
                "or fetch the files again"
            )


def whole_values(source: Source, key: str) -> Tensor:
    """Return the values of a quantised tensor of the source, dequantised to float32.

    It serves tensors outside the model (carried, converted).
    """
    entry, whole = source.entries[key], Box.whole(source.entries[key].shape)
    with Reader(source) as reader:
        return reader.read(entry, Block(whole, key, tuple(entry.shape), whole), whole)


def _check_carried(keymap: KeyMap) -> None:
    """Check that the files from which tensors or scales will be copied are still those that were loaded."""
    if keymap.source is not None:
        of_source = {key: scale for key, scale in keymap.source.scales.items() if key in keymap.scales}
        read = {*keymap.carried, *of_source, *(key for scale in of_source.values() for key in scale.companion_keys)}
        files = sorted({keymap.source.entries[key].file for key in read})
        keymap.source.check_unchanged(files, _RESTORE_SOURCE)


def write_small(export: Export, folder: Path) -> None:
    """Write config, index and small files."""
    keymap = export.keymap
    _check_carried(keymap)
    export.small.write(folder)
    # An unchanged config keeps the bytes of its source. A changed one is written with the bytes of save_pretrained.
    if not _has_config(folder / CONFIG, export.config):
        (folder / CONFIG).write_text(json.dumps(export.config, indent=2) + "\n")
    if _has_index(keymap):
        # Keep the fields that the source's index has in addition to weight_map and total_size.
        index = dict(keymap.source.index or {}) if keymap.source else {}
        index["metadata"] = {**index.get("metadata", {}), "total_size": _total(keymap)}
        index["weight_map"] = {k.name: k.file for k in sorted(keymap.keys.values(), key=lambda k: k.name)}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _has_index(keymap: KeyMap) -> bool:
    """Return whether an index is written: for several files, or if the source has one."""
    return len(keymap.files) > 1 or (keymap.source is not None and keymap.source.index is not None)


def _has_config(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a file holds exactly this config."""
    try:
        return path.is_file() and read_json(path) == config
    except LoadError:
        return False


def _total(keymap: KeyMap) -> int:
    return sum(k.num_bytes for k in keymap.keys.values())


def exported_config(config: Mapping[str, Any], dtype: torch.dtype | None, keymap: KeyMap) -> dict[str, Any]:
    """Return the config of the export: the source's config with the requested dtype and the quantisation of the written
    files.

    Loaders trust the config. A config that says float16 over bfloat16 tensors, or that names a quantisation that is
    gone, breaks them (TorchSpec#39).
    """
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    if keymap.scales:
        config["quantization_config"] = keymap.quantization
    if dtype is None:
        return config
    name = str(dtype).removeprefix("torch.")
    # `torch_dtype` is the old name of `dtype`; a config with both would be ambiguous. Multimodal configs repeat the
    # dtype for the text model.
    out = {k: v for k, v in config.items() if k != "torch_dtype"}
    if isinstance(out.get("text_config"), dict):
        out["text_config"] = {**{k: v for k, v in out["text_config"].items() if k != "torch_dtype"}, "dtype": name}
    return {**out, "dtype": name}
