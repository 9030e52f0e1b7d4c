"""Rows of files, each with its place; documents that are made once, and again when a file has changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshwright as mw
from meshwright.data import row_files, token_cache
from meshwright.data.row_files import place_of, rows_of, shards_of
from meshwright.data.token_cache import Documents, TokenizeSpec, prepare
from meshwright.data.tokens import Tokens, tokens
from meshwright.errors import counted
from tests import parts


def letters(row: Mapping[str, Any]) -> list[Tokens]:
    """A document for each word; words of capitals are not learnt. At the top of a module, for other processes."""
    if not isinstance(row.get("text"), str):
        raise mw.DataError("its field 'text' is no text")
    words = row["text"].split()
    return [tokens([ord(c) for c in word], [] if word.isupper() else [(0, len(word))]) for word in words]


def lines(path: Path, rows: Sequence[Any], ending: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + ending for row in rows).encode())
    return path


def recipe(*files: Path, **options: Any) -> TokenizeSpec:
    return TokenizeSpec(**{"name": "data", "files": files, "make": letters, "settings_key": "letters", **options})


def texts(documents: Documents) -> list[str]:
    return ["".join(map(chr, documents.tokens(at).ids)) for at in range(len(documents))]


def test_ranges_of_bytes_are_the_lines_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line, its end, or a character of several bytes may lie across a border."""
    dice = random.Random(0)
    for number, ending in enumerate(["\n", "\r\n"] * 20):
        rows = [{"text": "ä€𝄞x"[: dice.randint(0, 4)] * dice.randint(0, 9)} for _ in range(dice.randint(1, 12))]
        file = lines(tmp_path / f"{number}.jsonl", rows, ending)
        if number % 3 == 0:
            file.write_bytes(file.read_bytes().rstrip(b"\r\n"))
        for size in (1, 2, 7, 16, 1000):
            monkeypatch.setattr(row_files, "_RANGE_BYTES", size)
            result = [row for shard in shards_of([file]) for row in rows_of(shard)]
            assert [row.values for row in result] == rows
            assert [place_of(file, row.at) for row in result] == [f"{file}:{n + 1}" for n in range(len(rows))]


@pytest.mark.slow
@parts.IN_MATRIX
def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"w{n} " * (n % 5 + 1)} for n in range(300)]
    files = [lines(tmp_path / f"{at}.jsonl", rows[at::3]) for at in range(3)]
    monkeypatch.setattr(row_files, "_RANGE_BYTES", 1000)
    one = prepare(recipe(*files), tmp_path / "one")
    two = prepare(recipe(*files), tmp_path / "two", processes=2)
    [first], [other] = ([*cache.glob("*/")] for cache in (tmp_path / "one", tmp_path / "two"))
    assert {f.name: f.read_bytes() for f in first.iterdir()} == {f.name: f.read_bytes() for f in other.iterdir()}
    assert texts(one) == texts(two)
    assert len(one) == sum(n % 5 + 1 for n in range(300))


BAD = [
    (b'{"text": "fine"}', ""),
    (b"", ""),
    (b'{"text": "cut', "not valid JSON"),
    (b'["text"]', "a list, not an object"),
    (b'{"text": "\xff"}', "not UTF-8: invalid start byte at its byte 10"),
    (b'{"text": 7}', "its field 'text' is no text"),
    (b'{"texts": "x"}', "its field 'text' is no text"),
    (b'{"text": "UPPER"}', ""),
]


def test_each_bad_row_is_named_by_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(line for line, _ in BAD))
    with pytest.raises(mw.DataError) as error:
        prepare(recipe(file), tmp_path / "cache")
    message = str(error.value).splitlines()
    wanted = {at + 1: why for at, (_, why) in enumerate(BAD) if why}
    kinds = {why: number for number, why in reversed(wanted.items())}  # the first row of each
    assert len(message) == len(kinds) + 2
    for why, number in kinds.items():
        [line] = [line for line in message[1:-1] if why in line]
        assert f"{counted([*wanted.values()].count(why), 'row')}, the first {file}:{number}: " in line
    listing = Path(message[-1].split()[-1])
    assert [line.split(": ")[0] for line in listing.read_text().splitlines()] == [f"{file}:{n}" for n in (*wanted, 8)]
    assert not [*(tmp_path / "cache").glob("*/")]  # nothing that could be taken for whole
    caplog.clear()
    result = prepare(recipe(file, on_bad="skip"), tmp_path / "cache")
    assert (result.statistics.rows, result.statistics.skipped, result.statistics.without_targets) == (7, 5, 1)
    assert "5 rows of data cannot be used, left out; all of them are listed in " in caplog.text
    assert "1 row of data without trained tokens, left out; all of them are listed in " in caplog.text
    listing = Path(caplog.text.split("listed in ")[1].split(":")[0])
    assert f"{file}:8: no token of it is trained on" in listing.read_text()


def test_tables(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"w{n}" for n in range(10)]}), file, row_group_size=4)
    result = prepare(recipe(file), tmp_path / "cache")
    assert texts(result) == [f"w{n}" for n in range(10)]
    assert result.place(9) == f"{file}, row 9"


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(b"\x6f\0\0\0") if file.suffix == ".arrow" else len(data) // 2] ^= 1  # a token of "one"
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncated, zeroed, flipped, Path.unlink], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["000000.arrow", "info.json"])
def test_a_damaged_cache_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, damage: Callable[[Path], None],
) -> None:  # fmt: skip
    of = recipe(lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}]))
    cache, began = tmp_path / "cache", token_cache.BEGAN
    before = prepare(of, cache)
    file = cache / of.fingerprint / name
    whole = file.read_bytes()
    damage(file)
    for number in range(2):  # a run that begins now, and another one
        monkeypatch.setattr(token_cache, "BEGAN", began + 10**6 * (number + 1))
        monkeypatch.setattr(time, "time", lambda now=began + 10**6 * (number + 1): now + 1)
        again = prepare(of, cache)
        assert texts(again) == ["one", "two"]
        assert again.content == before.content
        assert file.read_bytes() == whole
    [warning] = caplog.messages
    assert str(file) in warning
    assert "damaged" in warning


def test_the_first_process_of_a_run_looks_at_the_cache_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, seen = recipe(lines(tmp_path / "a.jsonl", [{"text": "one"}])), list[Path]()
    monkeypatch.setattr(token_cache, "_check", lambda file, digest: seen.append(file))
    prepare(of, tmp_path / "cache")
    prepare(of, tmp_path / "cache")
    assert seen == []
    monkeypatch.setattr(token_cache, "BEGAN", time.time())
    prepare(of, tmp_path / "cache")
    prepare(of, tmp_path / "cache")
    assert [file.name for file in seen] == ["000000.arrow"]


def slowly(row: Mapping[str, Any]) -> list[Tokens]:
    with (Path(row["at"]) / "made").open("a") as out:
        out.write("x")
    time.sleep(0.02)
    return letters(row)


def test_a_killed_preparation_leaves_nothing(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": f"w{n}", "at": str(tmp_path)} for n in range(50)])
    of = recipe(file, make=slowly)
    child = multiprocessing.get_context("fork").Process(target=prepare, args=(of, tmp_path / "cache"))
    child.start()
    while not (tmp_path / "made").exists():
        time.sleep(0.005)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len([*(tmp_path / "cache").glob(".*making*")]) == 1
    assert len(prepare(of, tmp_path / "cache")) == 50
    assert not [*(tmp_path / "cache").glob(".*making*")]


def test_two_processes_do_it_once(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [{"text": f"w{n}", "at": str(tmp_path)} for n in range(20)])
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=prepare, args=(recipe(file, make=slowly), tmp_path / "cache")) for _ in range(2)]
    for child in both:
        child.start()
    for child in both:
        child.join()
    assert [child.exitcode for child in both] == [0, 0]
    assert (tmp_path / "made").read_text() == "x" * 20
