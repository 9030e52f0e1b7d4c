"""Data sets of Hugging Face: as save_to_disk leaves them, and by load_dataset, which a stub stands for where it is not
installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import meshwright as mw
from meshwright.data import hf_datasets, row_files
from meshwright.train import config_file
from meshwright.train.data_sources import RowReader, documents_of
from tests.runs import file_of, source

ROWS = [{"prompt": f"{n}?", "completion": "x" * (n + 1)} for n in range(9)]


def arrow(file: Path, rows: Sequence[Mapping[str, Any]], batch: int = 2) -> Path:
    table = pa.Table.from_pylist([*rows])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        for each in table.to_batches(batch):
            out.write_batch(each)
    return file


def saved(at: Path, *files: Sequence[Mapping[str, Any]], split: str = "train") -> Path:
    """Save like save_to_disk of datasets 5.2, with the caches of its maps."""
    at.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{len(files):05d}.arrow" for n in range(len(files))]
    for name, rows in zip(names, files, strict=True):
        arrow(at / name, rows)
    arrow(at / "cache-1.arrow", ROWS)
    (at / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], "_split": split}))
    return at


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source(tmp_path_factory.mktemp("m") / "m", "qwen3_tied")


def documents(at: Path, model: Path, *paths: Path | str, **fields: Any) -> Any:
    path = [str(each) for each in paths]
    config = config_file.read(_file(at, model, path, fields))
    return documents_of(config.data[0], RowReader(model, at / "cache"))


def _file(at: Path, model: Path, path: list[str], fields: Mapping[str, Any]) -> Path:
    file = file_of(at, model)
    message = "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
    file.write_text(file.read_text().replace(f'path = "{at / "chats.jsonl"}"', f"path = {json.dumps(path)}\n{message}"))
    return file


def tokens(result: Any) -> list[list[int]]:
    return [result.tokens(at).ids.tolist() for at in range(len(result))]


def test_a_saved_set_is_its_rows(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in the order of the files, whatever the size of a shard, each with its place."""
    lines = tmp_path / "chats.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    at = saved(tmp_path / "set", ROWS[:5], ROWS[5:])
    wanted, result = documents(tmp_path, model, lines), documents(tmp_path, model, at)
    assert tokens(result) == tokens(wanted)
    assert [result.place(n) for n in (3, 6)] == [
        f"{at}/data-00000-of-00002.arrow, row 3", f"{at}/data-00001-of-00002.arrow, row 1",
    ]  # fmt: skip
    monkeypatch.setattr(row_files, "_RANGE_BYTES", 1)
    shards = row_files.shards_of([at / "data-00000-of-00002.arrow"])
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 1), (1, 2), (2, 3)]
    assert [(row.at, row.values) for shard in shards for row in row_files.rows_of(shard)] == [*enumerate(ROWS[:5])]


def test_bad_rows_of_a_saved_set(tmp_path: Path, model: Path) -> None:
    at = saved(tmp_path / "set", ROWS[:3], [ROWS[3], {"prompt": "?", "completion": None}])
    with pytest.raises(mw.DataError, match=r"data-00001-of-00002.arrow, row 1: "):
        documents(tmp_path, model, at)
    assert documents(tmp_path, model, at, on_bad="skip").statistics.skipped == 1


def test_columns_of_json(tmp_path: Path) -> None:
    """Objects that differ from row to row are texts in the file: in lists, in objects, and where there is nothing."""
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', '{"b": [2]}', None]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3]), texts)
    objects = pa.StructArray.from_arrays([texts, pa.array([1, 2, 3])], ["x", "n"])
    table = pa.table({"messages": lists, "tools": objects})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    [shard] = row_files.shards_of([tmp_path / "a.arrow"])
    assert [row.values for row in row_files.rows_of(shard)] == [
        {"messages": [{"a": 1}, {"b": [2]}], "tools": {"x": {"a": 1}, "n": 1}},
        {"messages": [], "tools": {"x": {"b": [2]}, "n": 2}},
        {"messages": [None], "tools": {"x": None, "n": 3}},
    ]


def test_splits(tmp_path: Path, model: Path) -> None:
    at = tmp_path / "set"
    for split, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        saved(at / split, rows, split=split)
    (at / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(documents(tmp_path, model, at, hf_split="test")) == 5
    for fields, message in (
        ({}, "hf_split must name one of the splits of .*set: train, test"),
        ({"hf_split": "train[:10%]"}, "hf_split = 'train.:10%.' is none of the splits"),
        ({"hf_split": "train", "hf_subset": "x"}, "without subset and revision"),
    ):
        with pytest.raises(mw.DataError, match=message):
            documents(tmp_path, model, at, **fields)
    with pytest.raises(mw.DataError, match="is one split, 'test'; leave it out"):
        documents(tmp_path, model, at / "test", hf_split="train")
    (at / "test" / "data-00000-of-00001.arrow").write_bytes(b"x" * 64)
    with pytest.raises(mw.DataError, match="not a complete Arrow stream"):
        documents(tmp_path, model, at / "test")
    (at / "test" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(mw.DataError, match="does not exist; save or copy it anew"):
        documents(tmp_path, model, at / "test")


class Loaded(list[Path]):
    """Stand in for the result of load_dataset."""

    @property
    def cache_files(self) -> list[dict[str, str]]:
        return [{"filename": str(file)} for file in self]

    def __len__(self) -> int:
        return 9


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the calls of the stub."""
    requests: list[tuple[Any, ...]] = []

    def load(*args: Any, **more: Any) -> Loaded:
        requests.append((*args, *more.values()))
        if args[0] == "org/none":
            raise ConnectionError("Couldn't reach 'org/none' on the Hub")
        return Loaded([arrow(tmp_path / "hub.arrow", ROWS)])

    stub = SimpleNamespace(
        load_dataset=load, get_dataset_split_names=lambda *_, **__: ["train", "test"],
        exceptions=SimpleNamespace(DatasetsError=KeyError),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "datasets", stub)
    return requests


def test_a_hub_id(
    tmp_path: Path, model: Path, requests: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = documents(tmp_path, model, "org/set", hf_split="train", hf_subset="en", hf_revision="v1")
    assert requests == [("org/set", "en", "train", "v1")]
    assert len(result) == 9
    (tmp_path / "clone").mkdir()
    documents(tmp_path, model, tmp_path / "clone", hf_split="test")
    assert requests[1:] == [(str(tmp_path / "clone"), None, "test", None)]
    with pytest.raises(mw.DataError, match="hf_split must name one of the splits of org/set: train, test"):
        documents(tmp_path, model, "org/set")
    with pytest.raises(mw.DataError, match=r"Couldn't reach 'org/none'(?s:.*)hf_subset"):
        documents(tmp_path, model, "org/none", hf_split="train")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(mw.DataError, match=r"pip install 'meshwright\[hub\]'"):
        documents(tmp_path, model, "org/set", hf_split="train")


def test_what_is_no_data_set(tmp_path: Path, model: Path) -> None:
    with pytest.raises(mw.DataError, match="neither a file nor a directory"):
        documents(tmp_path, model, "chats/typo.jsonl")
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(mw.DataError, match="is not a data set, but hf_subset, hf_split"):
        documents(tmp_path, model, lines, hf_split="train")
    with pytest.raises(mw.ConfigError, match="a stream has no exact plan"):
        documents(tmp_path, model, "org/set", streaming=True)


def test_the_package_itself(tmp_path: Path, model: Path) -> None:
    """A directory that is laid out like a hub id, and what it saves."""
    datasets = pytest.importorskip("datasets")
    calls = [[{"function": {"name": "f", "arguments": {f"x{n}": n}}}] for n in range(len(ROWS))]
    requests = [{"role": "user", "content": row["prompt"]} for row in ROWS]
    message = [{"role": "assistant", "content": "", "tool_calls": each} for each in calls]
    rows = [{"messages": [*each]} for each in zip(requests, message, strict=True)]
    clone = tmp_path / "clone"
    clone.mkdir()
    for name, some in (("train", rows), ("test", rows[:2])):
        (clone / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    wanted = documents(tmp_path, model, clone / "train.jsonl")
    result = documents(tmp_path, model, clone, hf_split="train")
    datasets.load_dataset(str(clone)).save_to_disk(tmp_path / "saved")
    again = documents(tmp_path, model, tmp_path / "saved", hf_split="train")
    assert tokens(result) == tokens(again) == tokens(wanted)


@pytest.mark.parametrize("name", ["../out.arrow", "/tmp/out.arrow", "..", "", None, "a/../../out.arrow"])
def test_a_set_names_no_files_outside(tmp_path: Path, name: str | None) -> None:
    at = saved(tmp_path / "set", ROWS)
    arrow(tmp_path / "out.arrow", ROWS)
    (at / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": "train"}))
    with pytest.raises(mw.DataError, match=r"state.json names .*, which is not a file of its directory"):
        hf_datasets.saved_files(at, hf_datasets.Part())
    (at / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(mw.DataError, match=r"dataset_dict.json names .*, which is not a file of its directory"):
        hf_datasets.saved_files(at, hf_datasets.Part())


def test_a_set_that_chooses_rows_is_refused(tmp_path: Path) -> None:
    at = saved(tmp_path / "set", ROWS)
    state = json.loads((at / "state.json").read_text())
    for change, wanted in (
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "chooses rows by _indices_data_files"),
        ({"_data_files": None}, "_data_files of .*state.json is null, not a list"),
    ):
        (at / "state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(mw.DataError, match=wanted):
            hf_datasets.saved_files(at, hf_datasets.Part())
    (at / "state.json").write_text(json.dumps({**state, "_indices_data_files": None}))
    assert len(hf_datasets.saved_files(at, hf_datasets.Part())) == 1
    (at / "state.json").write_text("[]")
    with pytest.raises(mw.DataError, match=r"state.json holds an empty list"):
        hf_datasets.saved_files(at, hf_datasets.Part())
