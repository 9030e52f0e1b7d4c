"""A run with adapters: resumed on another mesh, exported, sampled from. A run on one process is the reference."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.report.end_of_run import last_words
from meshwright.train import config_file, preflight
from meshwright.weights import peft_files
from tests import worlds
from tests.runs import chats, file_of, lines, losses, on_mesh, source
from tests.words import words

LORA = {"rank": 3, "alpha": 6.0}


def sampled(folders: list[Path]) -> None:
    for where in folders:
        assert main(["sample", str(where), "--prompt", "3?", "--tokens", "5", "--json"]) == 0


def test_a_run_with_adapters_resumes_on_another_mesh(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second start finds a checkpoint of another mesh, as after a crash in the third step."""
    model, results = source(tmp_path / "m", "qwen3_moe"), {}
    for name, meshes in {"whole": [{}], "resumed": [dict(fsdp=2, ep=2), dict(tp=2, ep=2)]}.items():
        at = tmp_path / name
        at.mkdir()
        chats(at / "chats.jsonl", 60)
        path = file_of(
            at, model, save={"every": 2, "merged": True}, lora=LORA, train={"steps": 4, "tokens_per_step": 256}
        )
        for mesh in meshes:
            shutil.rmtree(at / "out/checkpoints/step-000004", ignore_errors=True)
            on_mesh(path, mesh)
        results[name] = losses(at)
    assert results["resumed"] == pytest.approx(results["whole"], rel=1e-9)
    assert len(lines(tmp_path / "resumed")) == 6, "the second start took the last two steps"
    assert results["whole"][-1] < results["whole"][0]
    out = tmp_path / "resumed" / "out"
    assert {path.name for path in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (out / "export" / "model.safetensors").is_file()
    modes = {oct(path.stat().st_mode) for path in (out / "adapter").iterdir()}
    assert modes == {oct((out / "export" / "model.safetensors").stat().st_mode)}, "others may not read the adapter"
    assert "adapter " in "\n".join(last_words(out, str(out)))
    layout = json.loads((out / "layout.json").read_text())
    assert 0 < layout["trained"] < layout["parameters"]
    step = out / "checkpoints" / "step-000004"
    assert (step / "adapters.safetensors").is_file()
    assert not (step / "model.safetensors").exists()
    capfd.readouterr()
    worlds.run(1, sampled, [out / "adapter", out / "export", out])
    texts = re.findall('"text": (.*)', capfd.readouterr().out)
    assert len(texts) == 3
    assert texts[0] == texts[1], "the adapter beside its base is the merged model"


def test_a_run_with_adapters_is_no_model(tmp_path: Path) -> None:
    """The run, its checkpoint and PEFT's directory are refused before the start, with the ways to go on."""
    chats(tmp_path / "chats.jsonl")
    model = source(tmp_path / "m", "qwen3")
    path = file_of(tmp_path, model, lora=LORA, train={"steps": 1})
    on_mesh(path, {})
    out = tmp_path / "out"
    for at, what in ((out, "step-000001 is a checkpoint of adapters"), (out / "adapter", "is a directory of adapters")):
        match = words(what, r"lora\.path=", "merged = true")
        with pytest.raises(mw.ConfigError, match=match):
            config_file.read(path, [f"model={at}"], preflight.mistakes)
        with pytest.raises(mw.LoadError, match=match):
            mw.load(next(at.glob("checkpoints/*"), at))
    shutil.copy(model / "config.json", out / "adapter")  # a model with PEFT's files next to its own
    peft_files.check_has_base(out / "adapter")


def test_other_adapters_are_refused_on_resume(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model, save={"export": False, "every": 1}, lora=LORA, train={"steps": 1})
    on_mesh(path, {})
    with pytest.raises(
        worlds.RankError, match=r"have rank=3, the engine's model has 5; load the model with lora\.rank=3"
    ):
        on_mesh(path, {}, "lora.rank=5", "train.steps=2")
