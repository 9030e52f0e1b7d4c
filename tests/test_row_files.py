"""Rows of text, JSON and Arrow files: where each starts, and what of a file is a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshwright as mw
from meshwright.data import row_files
from meshwright.data.hf_datasets import (
    Part,
    fetched_files,
    groups_of,
    is_saved,
    num_rows_of,
    numbered_rows,
    saved_files,
)
from meshwright.data.json_values import kind_of, without_nulls
from meshwright.data.row_files import Shard, files_of, places_of, rows_of, shards_of, stamp
from meshwright.data.texts import Ready, TextOnly, Texts
from meshwright.data.tokens import tokens


def read(file: Path, content: str, split: Any = "file") -> list[tuple[int, Any]]:
    """Return the rows of a file with this content, and where they start."""
    file.write_bytes(content.encode())
    return [(row.at, row.wrong or dict(row.values)) for shard in shards_of([file], split) for row in rows_of(shard)]


@pytest.mark.parametrize(
    ("split", "content", "rows"),
    [
        ("file", "ä\n\nb\n", [(0, "ä\n\nb\n")]), ("file", " \n", []),
        ("paragraph", "\n \nä\nb \n\n\nc\r\n\r\n\r\nd", [(3, "ä\nb "), (11, "c"), (18, "d")]),
        ("paragraph", "a\n\n\n", [(0, "a")]),
        ("line", " a \r\n\n\t\nb\n", [(0, " a "), (8, "b")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_rows_of_a_text(tmp_path: Path, name: str, split: str, content: str, rows: Any) -> None:
    assert read(tmp_path / name, content, split) == [(at, {"text": text}) for at, text in rows]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (' \t[ {"a": "ä"} ,\r\n\t{"a": 2},3 ] \n', [(4, {"a": "ä"}), (20, {"a": 2}), (29, None)]),
        ("[ ]", []), ('{"a": 1}\n\n  \n{"b": [2]}', [(0, {"a": 1}), (13, {"b": [2]})]),
    ],
)  # fmt: skip
def test_rows_of_json(tmp_path: Path, content: str, rows: list[tuple[int, Any]]) -> None:
    made = read(tmp_path / "a.json", content)
    assert [(at, values if isinstance(values, dict) else None) for at, values in made] == rows
    with_mark = tmp_path / "b.json"
    with_mark.write_bytes(b"\xef\xbb\xbf[]")
    assert [shard.split for shard in shards_of([with_mark])] == ["array"]


def test_places_of_rows_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_SAMPLE_BYTES", 3)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n{}\n\n[1, 2]\n{}\n")
    assert places_of(file, [14, 0, 7, 3, 7]) == {at: f"{file}:{n}" for at, n in ((14, 5), (0, 1), (7, 4), (3, 2))}
    assert places_of(tmp_path / "a.arrow", [7]) == {7: f"{tmp_path / 'a.arrow'}, row 7"}


def test_files_of_nested_folders_are_sorted(tmp_path: Path) -> None:
    names = ["b/c.md", "b/a.jsonl", "a.txt", "z.parquet", "skipped.json", "skipped.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert files_of(tmp_path) == [tmp_path / name for name in sorted(names[:4])]
    for name, wanted in (("skipped.py", "is not a .jsonl"), ("no", "neither a file nor a directory")):
        with pytest.raises(mw.DataError, match=wanted):
            files_of(tmp_path / name)


def test_bytes_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_RANGE_BYTES", 4)
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("123456")
    rows.write_text("123456")
    assert shards_of([text, rows], "line") == [
        Shard(f, a, b, "line") for f in (text, rows) for a, b in ((0, 4), (4, 6))
    ]
    assert [shard.num_bytes for shard in shards_of([text, rows])] == [6, 4, 2]
    assert [shard.num_bytes for shard in shards_of([text], "line")] == [4, 2]


def test_a_stamp_has_the_size_and_the_whole_path(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("abc")
    assert stamp(file)[:3] == (str(file), 3, file.stat().st_mtime_ns)


def arrow(file: Path, sizes: list[int]) -> Path:
    """Write record batches of these numbers of rows, each with the number of the row and a text of 80 bytes."""
    schema, at = pa.schema([("n", pa.int64()), ("text", pa.string())]), 0
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as out:
        for size in sizes:
            rows = [{"n": n, "text": "x" * 80} for n in range(at, at + size)]
            out.write_batch(pa.RecordBatch.from_pylist(rows, schema))
            at += size
    return file


def test_ranges_of_record_batches(tmp_path: Path) -> None:
    """A range ends with the batch that fills it. Batches have 96, 288, 192, 96 and 96 bytes or some more."""
    file = arrow(tmp_path / "a.arrow", [1, 3, 2, 1, 1])
    assert num_rows_of(file) == 8
    assert groups_of(file, 250) == [(0, 2), (2, 4), (4, 5)]
    assert groups_of(file, 350) == [(0, 2), (2, 5)]
    assert groups_of(file, 1) == [(n, n + 1) for n in range(5)]
    assert groups_of(arrow(tmp_path / "none.arrow", []), 1) == []
    for start, stop, numbers in ((0, 2, range(4)), (2, 4, range(4, 7)), (4, 5, [7]), (1, 1, [])):
        rows = [*numbered_rows(file, start, stop)]
        assert [(at, values["n"]) for at, values in rows] == [(n, n) for n in numbers]


def test_files_that_a_saved_set_lists(tmp_path: Path) -> None:
    """Old versions of datasets list names, new ones objects with a name; without a state no set is saved."""
    assert not is_saved(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / name).write_text("")
    state = {"_data_files": [{"filename": "b"}, "a"], "_split": "odd"}
    (tmp_path / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    assert is_saved(tmp_path)
    assert is_saved(tmp_path / "train")
    files = [tmp_path / "train" / name for name in ("b", "a")]
    assert saved_files(tmp_path, Part(split="train")) == files
    assert saved_files(tmp_path / "train", Part(split="odd")) == saved_files(tmp_path / "train", Part()) == files
    for part in (Part(split="train"), Part(subset="s"), Part(revision="r")):
        with pytest.raises(mw.DataError, match=r"leave (it|them) out"):
            saved_files(tmp_path / "train", part)


def test_nulls_of_tables_are_dropped_at_every_depth() -> None:
    value = {"a": None, "b": [{"c": None, "d": 0}, None, [{"e": None}]], "f": {"g": {"h": None}}, "i": "", "j": False}
    assert without_nulls(value) == {"b": [{"d": 0}, None, [{}]], "f": {"g": {}}, "i": "", "j": False}
    assert [kind_of(each) for each in (None, False, True, 0, "", {}, [1])] == [
        "null", "false", "true", "a number", "an empty string", "an empty object", "a list",
    ]  # fmt: skip


class Letters:
    """A tokenizer whose ids are characters."""

    eos_token_id: int | None = 3

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(char) for char in text]


def test_texts_end_with_the_end_token_where_there_is_one() -> None:
    renamed = Texts(Letters(), {"text": "body"})
    [made] = renamed.documents({"body": "ab", "text": "c"})
    assert (made.ids.tolist(), made.spans) == ([97, 98, 3], ((0, 3),))
    assert renamed.unused({"body": "ab", "text": 0, "x": None}) == {"text"}
    endless = Letters()
    endless.eos_token_id = None
    [made] = Texts(endless).documents({"text": "ab"})
    assert (made.ids.tolist(), made.spans) == ([97, 98], ((0, 2),))
    assert Texts(Letters()).documents({"text": ""}) == []


def test_a_placeholder_in_any_document_of_a_text_is_refused() -> None:
    make = lambda row: [tokens(ids, []) for ids in row["ids"]]  # noqa: E731 - short
    only = TextOnly(make, (7, 9))
    assert len(only.documents({"ids": [[1, 8], [2]]})) == 2
    with pytest.raises(mw.DataError, match="it has the token 9"):
        only.documents({"ids": [[1], [2, 9]]})


@pytest.mark.parametrize("row", [
    {"ids": [1, 10]}, {"ids": [-1]}, {"ids": [True]}, {"ids": [1.0]}, {"ids": [1, 2], "trained": [1]},
    {"ids": [1, 2], "trained": [1, 0, 0]}, {"ids": [1], "trained": [2]},
    {"ids": [1, 2], "trained": [0.5, 1]}, {"ids": [1, 2], "trained": "01"},
    *({"ids": [1], name: value} for name in ("labels", "mask", "loss_mask", "completion_mask", "assistant_masks",
                                             "weight", "weights") for value in (0, [1])),
])  # fmt: skip
def test_ready_tokens_that_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(mw.DataError):
        Ready(10).documents(row)
    with pytest.raises(mw.DataError):
        Ready(10, {"trained": "m"}).documents({**row, "m": row.get("trained", [1] * len(row["ids"]))})


def test_names_of_ready_tokens() -> None:
    ready = Ready(10, {"ids": "input_ids", "trained": "loss_mask"})
    row = {"input_ids": [9, 0, 5], "loss_mask": [1, 0, 1], "ids": [], "trained": 0, "x": None}
    [made] = ready.documents(row)
    assert (made.ids.tolist(), made.spans) == ([9, 0, 5], ((0, 1), (2, 3)))
    assert ready.unused(row) == {"ids", "trained"}


@pytest.mark.parametrize("num_rows", [4, 5, 6])
def test_a_subset_and_a_revision_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """The splits are those of that subset and revision, and the files hold just the rows of the split."""
    files, asked = [arrow(tmp_path / str(size), [1, size - 1]) for size in (2, 3)], list[Any]()

    class Rows:
        cache_files = [dict(filename=str(file)) for file in files]  # noqa: RUF012 - as in datasets

        def __len__(self) -> int:
            return num_rows

    package = SimpleNamespace(
        get_dataset_split_names=lambda *names, **options: asked.append((names, options)) or ["train"],
        load_dataset=lambda *names, **options: asked.append((names, options)) or Rows(),
        exceptions=SimpleNamespace(DatasetsError=OSError),
    )
    monkeypatch.setitem(sys.modules, "datasets", package)
    if num_rows == 5:
        assert fetched_files("org/set", Part("sub", "", "v1")) == files
    else:
        with pytest.raises(mw.DataError, match=f"hold 5 rows, and its split has {num_rows}"):
            fetched_files("org/set", Part("sub", "train", "v1"))
    names, revision = ("org/set", "sub"), {"revision": "v1"}
    assert asked == [(names, revision), (names, {"split": "train", **revision})]
    with pytest.raises(mw.DataError, match="hf_split = 'test' is none of the splits"):
        fetched_files("org/set", Part("sub", "test", "v1"))


def test_both_ends_of_a_file_are_in_its_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_SAMPLE_BYTES", 2)
    file = tmp_path / "a"

    def ends(text: str) -> bytes:
        file.write_text(text)
        return row_files.stamp(file)[3]

    assert [ends(text) for text in ("abcdef", "abc", "a", "")] == [b"abef", b"abbc", b"aa", b""]


def test_rows_of_unequal_groups_of_a_table(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as out:
        for numbers in ([0, 1, 2], [3], [4, 5]):
            out.write_table(pa.table({"n": numbers}, schema))
    rows = [[*rows_of(shard)] for shard in shards_of([tmp_path / "a.parquet"])]
    assert [[(row.at, row.values["n"]) for row in each] for each in rows] == [
        [(0, 0), (1, 1), (2, 2)], [(3, 3)], [(4, 4), (5, 5)],
    ]  # fmt: skip
