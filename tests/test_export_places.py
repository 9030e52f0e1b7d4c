"""Places and contents of an export, and files next to its source."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.errors import RankError
from meshwright.weights import small_files
from tests import tiny, worlds
from tests.test_weights import same_files
from tests.words import words


def test_export_next_to_a_broken_link(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (source / "tokenizer.json").symlink_to(tmp_path / "gone.json")
    with pytest.raises(RankError, match=words("ExportError", r"tokenizer\.json", r"\blink\b")):
        worlds.run(1, export_into, source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def export_into(source: Path, out: Path) -> None:
    mw.export(mw.load(source), out)


def changed_after_loading(source: Path, out: Path) -> str:
    """The tokenizer is changed after the model was loaded, then the whole directory is removed."""
    shutil.copytree(source, out / "source")
    model = mw.load(source)
    engine = mw.Engine(model, lr=1e-3)
    (source / "tokenizer.json").write_text('{"changed": 1}')
    (source / "additional_chat_templates" / "tools.jinja").unlink()
    mw.export(model, out / "changed")
    shutil.rmtree(source)
    mw.export(model, out / "removed")
    mw.save(engine, out / "run")
    shutil.copytree(out / "source", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_files, "_KEPT_BYTES", 10)
        model = mw.load(source)
    mw.export(model, out / "large")
    (source / "tokenizer.json").write_text('{"changed": 1}')
    with pytest.raises(mw.ExportError) as refused:
        mw.export(model, out / "refused")
    return str(refused.value)


def test_small_files_are_those_that_the_model_was_loaded_with(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (source / "tokenizer.json").write_text('{"added_tokens": []}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    [message] = worlds.run(1, changed_after_loading, source, tmp_path / "out")
    assert re.search(words(r"m/tokenizer\.json", "has changed", "load the model again"), message)
    whole = tmp_path / "out" / "source"
    for name in ("changed", "removed", "large"):
        same_files(whole, tmp_path / "out" / name)
    for each in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        for name in ("changed", "removed", "large", "run/step-000000"):
            assert (tmp_path / "out" / name / each).read_bytes() == (whole / each).read_bytes(), name
    assert not (tmp_path / "out" / "refused").exists()


def test_export_where_the_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(RankError, match=words("ExportError", r"/work\b", "working directory")):
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


def test_a_link_that_moves_on(tmp_path: Path) -> None:
    """An export never mixes the weights of one step with the tokenizer of another."""
    for step in "AB":
        (tiny.directory(tmp_path / step, "qwen3") / "tokenizer.json").write_text(step)
    (tmp_path / "latest").symlink_to(tmp_path / "A")
    worlds.run(1, export_of_a_link, tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "A"


def export_of_a_link(at: Path) -> None:
    model = mw.load(at / "latest")
    (at / "latest").unlink()
    (at / "latest").symlink_to(at / "B")
    mw.export(model, at / "out")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    with pytest.raises(mw.LoadError, match=words(r"config\.json", r"\bfile\b", r"\bdirectory\b")):
        mw.load(source / "config.json")


def test_a_tied_head_stored_twice_in_two_dtypes(tmp_path: Path) -> None:
    """A trained weight is rounded in one of the two."""
    source = tiny.directory(tmp_path / "m", "qwen3_tied", layout="twice")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    worlds.run(1, trained_and_loaded_again, source, tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(result["lm_head.weight"].bfloat16(), result["model.embed_tokens.weight"])
    assert not torch.equal(result["lm_head.weight"], tensors["lm_head.weight"])


def trained_and_loaded_again(source: Path, out: Path) -> None:
    model = mw.load(source, dtype=torch.float32)
    mw.Engine(model, lr=1e-2).step(tiny.batches(0))
    mw.export(model, out)
    mw.load(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_float64_that_nothing_narrower_holds(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(RankError, match=words("ExportError", r"\b1e\+39\b", str(dtype), "dtype=")):
        worlds.run(1, overflowing, tiny.directory(tmp_path / "m", "qwen3"), tmp_path / "out", dtype)
    assert not (tmp_path / "out").exists()


def overflowing(source: Path, out: Path, dtype: torch.dtype) -> None:
    model = mw.load(source, dtype=torch.float64)
    next(iter(model.stored().values())).view(-1)[3] = -1e39
    mw.export(model, out, dtype=dtype)
