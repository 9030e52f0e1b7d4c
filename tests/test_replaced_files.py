"""A directory that is replaced, or written into, while it is loaded is an error, never a mixture of two versions."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.weights import Reader, read_plan
from meshwright.weights import source as sources
from meshwright.weights.file_version import Stamp
from tests import tiny, worlds
from tests.words import words

FILES = ["a.safetensors", "b.safetensors"]
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], None]


def two_files(at: Path) -> Path:
    """A model in two files, and in `next` another version of it: the same shapes, other values."""
    tiny.directory(at, "qwen3", dtype=torch.bfloat16)
    tensors = load_file(at / "model.safetensors")
    (at / "model.safetensors").unlink()
    parts = {file: {k: tensors[k] for k in sorted(tensors)[i::2]} for i, file in enumerate(FILES)}
    (at / "next").mkdir()
    for file, part in parts.items():
        save_file(part, at / file)
        save_file({k: v + 1 for k, v in part.items()}, at / "next" / file)
    index = json.dumps({"weight_map": {k: file for file, part in parts.items() for k in part}})
    for folder in (at, at / "next"):
        (folder / INDEX).write_text(index)
        (folder / "config.json").write_bytes((at / "config.json").read_bytes())
    return at


def replaced(*files: str) -> Change:
    def change(at: Path) -> None:
        for file in files:
            os.replace(at / "next" / file, at / file)

    return change


def replaced_with_the_old_time(at: Path) -> None:
    for file in FILES:
        old = (at / file).stat()
        replaced(file)(at)
        os.utime(at / file, ns=(old.st_atime_ns, old.st_mtime_ns))


def written_into(at: Path) -> None:
    """Write into the file, at the same size."""
    for file in FILES:
        with (at / file).open("r+b") as out:
            out.write((at / "next" / file).read_bytes())
        os.utime(at / file, ns=(0, (at / file).stat().st_mtime_ns + 1))  # a tick of the clock later


def before_the_fill(at: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = read_plan.fill

    def changed(*args: Any) -> int:
        change(at)
        return fill(*args)

    monkeypatch.setattr("meshwright.engine.model.fill", changed)


def between_the_files(at: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is read; the other is not open yet."""
    read, seen = Reader._pread, set[str]()

    def pread(self: Reader, entry: Any, *rest: Any) -> None:
        if seen and entry.file not in seen:
            change(at)
        seen.add(entry.file)
        read(self, entry, *rest)

    monkeypatch.setattr(Reader, "_pread", pread)


def at_the_end(at: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read: what was read first may have been written into since."""
    checked = sources.Source.check_unchanged

    def check(self: sources.Source, *args: Any) -> None:
        change(at)
        checked(self, *args)

    monkeypatch.setattr(sources.Source, "check_unchanged", check)


def between_the_headers(at: Path, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    read = sources.read_header

    def read_header(path: Path) -> Any:
        result = read(path)
        if path.name == FILES[0]:
            change(at)
        return result

    monkeypatch.setattr(sources, "read_header", read_header)


BOTH = replaced(*FILES)
ANOTHER, WRITTEN = (
    words(r"[ab]\.safetensors", "another file", "inode"),
    words(r"[ab]\.safetensors", "written into", r"touch -d @\d+\.\d{9}\b"),
)
CASES: dict[str, tuple[Callable[..., None], Change, str]] = {
    "replaced before the fill": (before_the_fill, BOTH, ANOTHER),
    "replaced between two files": (between_the_files, BOTH, ANOTHER),
    "replaced between two headers": (between_the_headers, BOTH, ANOTHER),
    "replaced after one is read": (between_the_files, replaced(FILES[0]), ANOTHER),
    "replaced, with the old time": (between_the_files, replaced_with_the_old_time, ANOTHER),
    "written into before the fill": (before_the_fill, written_into, WRITTEN),
    "written into between two files": (between_the_files, written_into, WRITTEN),
    "written into after all is read": (at_the_end, written_into, WRITTEN),
    "another config.json": (at_the_end, replaced("config.json"), words(r"config\.json", "another file")),
    "another index": (at_the_end, replaced(INDEX), words(r"index\.json", "another file")),
    "cut short": (at_the_end, lambda at: os.truncate(at / FILES[1], 1000), words(r"b\.safetensors", r"\b1000 bytes\b")),
    "removed": (at_the_end, lambda at: (at / FILES[1]).unlink(), words(r"b\.safetensors", "cannot be read")),
}


@pytest.mark.parametrize(
    ("now", "text"),
    [
        (Stamp(2, 11, 7), r"another file now \(inode 2, it was 1\)$"),
        (Stamp(1, 11, 7), "has 11 bytes now, it had 10$"),
        (Stamp(1, 10, 5_500_000_008), r"touched, 2\.500 s after .* `touch -d @3\.000000007 FILE`\)$"),
    ],
)  # fmt: skip
def test_versions_of_a_file_differ_in_one_direction(now: Stamp, text: str) -> None:
    assert re.search(text, Stamp(1, 10, 3_000_000_007).change_to(now))


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except (mw.LoadError, mw.ExportError) as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_files(tmp_path_factory.mktemp("made") / "m")


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "m")


def loaded(source: Path, case: str) -> str:
    moment, change, _ = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        moment(source, change, patch)
        return error_of(lambda: mw.load(source))


@pytest.fixture(scope="module")
def errors(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    sources = {case: shutil.copytree(made, tmp_path_factory.mktemp("case") / "m") for case in CASES}
    return worlds.in_turn(1, {case: functools.partial(loaded, at, case) for case, at in sources.items()})


@pytest.mark.parametrize("case", CASES)
def test_a_version_is_loaded_whole_or_not_at_all(errors: dict[str, list[str]], case: str) -> None:
    [text] = errors[case]
    assert re.search(CASES[case][2], text), text


def test_the_error_says_what_to_do(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    between_the_files(source, BOTH, monkeypatch)
    [text] = worlds.run(1, error_of, lambda: mw.load(source))
    assert re.search(words(r"/m/[ab]\.safetensors", "load again", "writer", "rename"), text), text
    monkeypatch.undo()  # the writer has finished
    [again] = worlds.run(1, lambda: mw.gather(mw.load(source)))
    assert all(torch.equal(again[key], value) for key, value in load_file(source / FILES[1]).items())


def test_one_reader_tells_its_node(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for what it sends."""
    between_the_files(source, BOTH, monkeypatch)
    by_one = lambda: mw.load(source, mw.Mesh(fsdp=2), read="node")  # noqa: E731
    first, second = worlds.run(2, error_of, by_one, seconds=20)
    assert "another file" in first
    assert "rank 0" in second


def after_another_version(source: Path, act: Callable[[mw.Model], object], head: str) -> str:
    model = mw.load(source, head=head)
    replaced_with_the_old_time(source)
    return error_of(lambda: act(model))


def test_weights_are_compared_with_the_version_that_was_loaded(source: Path) -> None:
    [text] = worlds.run(1, after_another_version, source, mw.check_weights, "lm")
    assert re.search(ANOTHER, text), text


def test_carried_tensors_are_copied_from_the_version_that_was_loaded(source: Path, tmp_path: Path) -> None:
    export = lambda model: mw.export(model, tmp_path / "out")  # noqa: E731
    [text] = worlds.run(1, after_another_version, source, export, "none")
    assert re.search(words(ANOTHER, "move the old file"), text), text
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
