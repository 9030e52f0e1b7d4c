"""Where an export may appear, and what lies beside its source."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import RankError
from tests import tiny, worlds


def test_export_beside_a_link_to_nothing(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (source / "tokenizer.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(RankError, match=r"nothing was exported .*tokenizer\.json is a link to what is not there"):
        worlds.run(1, export_into, source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def export_into(source: Path, out: Path) -> None:
    mw.export(mw.load(source), out)


def test_export_where_the_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(RankError, match=r"this process runs in .*/here, which would be replaced"):
        worlds.run(1, export_into, source, Path())


def test_an_empty_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(0o700)
    worlds.run(1, export_into, tiny.directory(tmp_path / "m", "qwen3"), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tiny.directory(tmp_path / "m", "qwen3"))
    worlds.run(1, lambda: mw.export(mw.load("~/m"), "~/out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert not (tmp_path / "m" / "~").exists()
