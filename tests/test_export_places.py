"""Places and contents of an export, and files next to its source."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.weights import small_files
from tests import tiny, worlds
from tests.test_weights import same_files
from tests.words import words


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


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tiny.directory(tmp_path / "m", "qwen3"))
    worlds.run(1, lambda: mw.export(mw.load("~/m"), "~/out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]
    assert not (tmp_path / "m" / "~").exists()


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
