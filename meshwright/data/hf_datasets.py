"""Read Hugging Face data sets as Arrow files: those of a directory that `save_to_disk` has written, or those that
`datasets.load_dataset` makes from a hub id or a directory.

Nothing is streamed: with streaming, the documents that are trained on would depend on the number of ranks and on
restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..errors import DataError
from .json_values import kind_of, read_object

_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class Part:
    """The part of a data set to read. "" stands for the only subset, the only split, the newest revision."""

    subset: str = ""
    split: str = ""
    revision: str = ""


def is_saved(directory: Path) -> bool:
    """Return whether `save_to_disk` wrote a directory, as one split or several."""
    return any((directory / name).is_file() for name in (_SAVED, _SAVED_SPLITS))


def saved_files(directory: Path, part: Part) -> list[Path]:
    if part.subset or part.revision:
        raise DataError(f"{directory} was written by save_to_disk, without subset and revision; leave them out")
    file = directory / (_SAVED_SPLITS if (directory / _SAVED_SPLITS).is_file() else _SAVED)
    about = read_object(file)
    if "splits" in about:
        splits = [_inside(file, each) for each in _listed(file, about, "splits")]
        return saved_files(directory / _one(str(directory), splits, part.split), Part())
    if part.split not in ("", about.get("_split")):
        raise DataError(
            f"hf_split = {part.split!r}, and {directory} is one split, {about.get('_split')!r}; leave it out"
        )
    if about.get("_indices_data_files"):
        raise DataError(
            f"{file} chooses rows by _indices_data_files, as old versions of datasets did, which are not read; write "
            "the set anew: datasets.load_from_disk(DIRECTORY).flatten_indices().save_to_disk(OTHER)"
        )
    named = [each.get("filename") if isinstance(each, dict) else each for each in _listed(file, about, "_data_files")]
    files = [directory / _inside(file, name) for name in named]
    if lacking := [str(file) for file in files if not file.is_file()]:
        raise DataError(f"{', '.join(lacking)} of the data set {directory} does not exist; save or copy it anew")
    return files


def _listed(file: Path, about: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(entries := about.get(name), list):
        raise DataError(f"{name} of {file} is {kind_of(entries)}, not a list; save or copy the data set anew")
    return entries


def _inside(file: Path, name: Any) -> str:
    """Return a file name that a data set lists. Refuse one that leads out of its directory."""
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise DataError(
            f"{file} names {name!r:.80}, which is not a file of its directory; save or copy the data set anew"
        )
    return name


def fetched_files(name: str, part: Part) -> list[Path]:
    """Download a data set of the hub, or read a directory laid out like one, and return its Arrow files.

    They lie in the cache of `datasets`, which decides on the location.
    """
    try:
        import datasets  # imported late: it is slow, and optional
    except ImportError:
        raise DataError(
            f"{name} is not a file on this machine, and the package datasets, which reads data sets of Hugging Face, "
            "is not installed: pip install 'meshwright[hub]'; or download its files, and give their directory as path"
        ) from None
    where = {"revision": part.revision or None}
    try:
        splits = datasets.get_dataset_split_names(name, part.subset or None, **where)
        split = _one(name, splits, part.split)
        dataset = datasets.load_dataset(name, part.subset or None, split=split, **where)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name} could not be loaded: {type(error).__name__}: {error}\nLook at path, hf_subset, hf_split and "
            "hf_revision, the network, and the room on the disk. A set that is too large for the disk cannot be "
            "trained on by an exact plan: take a subset or a split of it, or download some of its files"
        ) from error
    return _whole(name, dataset)


def _whole(name: str, dataset: Any) -> list[Path]:
    """Return the files of a split. Refuse files that hold more or fewer rows than the split."""
    files = [Path(each["filename"]) for each in dataset.cache_files]
    if (num_rows := sum(map(num_rows_of, files))) != len(dataset):
        raise DataError(
            f"the files of {name} hold {num_rows} rows, and its split has {len(dataset)}; write it to a directory with "
            "save_to_disk, and give that as path"
        )
    return files


def _one(name: str, splits: Sequence[str], wanted: str) -> str:
    """Choose a split by name, or the only one.

    Slices and sums of splits (`train[:10%]`) are refused, because no file holds just their rows.
    """
    if wanted in splits:
        return wanted
    if not wanted and len(splits) == 1:
        return splits[0]
    problem = f"hf_split = {wanted!r} is none" if wanted else "hf_split must name one"
    raise DataError(f"{problem} of the splits of {name}: {', '.join(splits)}")


def groups_of(file: Path, num_bytes: int) -> list[tuple[int, int]]:
    """Split the batches of a file into ranges of about `num_bytes` each. Only headers are read."""
    ranges, start, held, at = list[tuple[int, int]](), 0, 0, -1
    for at, batch in enumerate(_batches(file)):
        held += batch.nbytes
        if held >= num_bytes:
            ranges.append((start, at + 1))
            start, held = at + 1, 0
    return [*ranges, (start, at + 1)] if start <= at else ranges


def num_rows_of(file: Path) -> int:
    return sum(len(batch) for batch in _batches(file))


def numbered_rows(file: Path, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a range of batches, each with its number in the file."""
    at = 0
    for batch in islice(_batches(file), stop):
        if start <= 0:
            kinds = {field.name: field.type for field in batch.schema}
            for row, values in enumerate(batch.to_pylist(), at):
                yield row, {name: _decoded(value, kinds[name]) for name, value in values.items()}
        start, at = start - 1, at + len(batch)


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    try:
        yield from pa.ipc.open_stream(pa.memory_map(str(file)))
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{file} is not a complete Arrow stream, as datasets writes it: {error}; make it anew"
        ) from error


def _decoded(value: Any, kind: Any) -> Any:
    """Return the values of JSON texts: such a column holds objects that differ from row to row."""
    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value)
    if isinstance(value, list):
        return [_decoded(each, kind.value_type) for each in value]
    return {name: _decoded(each, kind.field(name).type) for name, each in value.items()}
