"""What users of other libraries try first gets an error that says what does its work here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from tests import tiny, worlds
from tests.trials import build

TRIED: dict[str, tuple[Any, str]] = {
    "model(batch)": (lambda e: e.model([1, 2]), r"StateError: .*mw\.logits.*mw\.Engine\(model"),
    "model.generate": (lambda e: e.model.generate([1]), r"AttributeError: mw\.Model has no 'generate'.*mw\.stream"),
    "model.parameters": (lambda e: e.model.parameters(), r"AttributeError: .*mw\.gather\(model\).*stored"),
    "model.save_pretrained": (lambda e: e.model.save_pretrained("x"), r"AttributeError: .*mw\.export\(model"),
    "model.train": (lambda e: e.model.train(), r"AttributeError: .*no modes"),
    "model.push_to_hub": (lambda e: e.model.push_to_hub("org/name"), r"AttributeError: .*mw\.export.*hf upload"),
    "model.resize": (
        lambda e: e.model.resize_token_embeddings(9), r"AttributeError: .*'resize_token_embeddings'.*transformers",
    ),
    "engine.save_model": (lambda e: e.save_model("x"), r"AttributeError: .*mw\.export\(engine\.model"),
    "mw.from_pretrained": (lambda _: mw.from_pretrained("x"), r"AttributeError: mw has no 'from_pret.*mw\.load\("),
    "mw.save": (lambda e: mw.save(e.model, "x"), r"ConfigError: mw\.save takes an engine, not a.*mw\.export\(model"),
    "mw.Trainer": (
        lambda e: mw.Trainer(e.model),
        r"ConfigError: mw\.Trainer takes the config of a run, not a Model; .*mw\.Engine",
    ),
    "mw.frobnicate": (lambda _: mw.frobnicate, r"AttributeError: mw has no 'frobnicate'$"),
    "torch_dtype": (
        lambda _: mw.load("x", torch_dtype=torch.bfloat16), r"ConfigError: mw\.load has no 'torch_dtype'; .*: dtype=",
    ),
    "mw.init(device=)": (lambda _: mw.init("x", device="cpu"), r"ConfigError: mw\.init has no 'device'.*mw\.Mesh\("),
    "an argument nobody knows": (lambda _: mw.load("x", colour=1), "TypeError: .*'colour'"),
    "learning_rate": (
        lambda e: mw.Engine(e.model, learning_rate=1.0), r"ConfigError: mw\.Engine has no 'learning_rate'; .*: lr=$",
    ),
    "optimizer": (lambda e: mw.Engine(e.model, lr=1.0, optimizer="sgd"), r"ConfigError: .*sgd.*mw\.AdamW"),
    "betas": (lambda e: mw.Engine(e.model, lr=1.0, betas=(0.9, 0.99)), r"ConfigError: .*optimizer=mw\.AdamW\(betas="),
    "dtype='bfloat16'": (lambda _: mw.load("x", dtype="bfloat16"), r"ConfigError: .*give dtype=torch\.bfloat16, or"),
    "any other": (lambda e: e.model.frobnicate, r"AttributeError: mw\.Model has no 'frobnicate'$"),
    "engine(batch)": (lambda e: e([1]), r"StateError: .*engine\.step\(batches\)"),
    "engine.save": (lambda e: e.save("x"), r"AttributeError: mw\.Engine has no 'save'; .*mw\.export\(engine\.model"),
    "engine.zero_grad": (lambda e: e.zero_grad(), r"AttributeError: .*discard"),
    "Mesh(2)": (lambda _: mw.Mesh(2), r"MeshError: .*mw\.Mesh\(fsdp=2\)"),
    "Mesh(dp=2)": (lambda _: mw.Mesh(dp=2), r"MeshError: .*'dp'; choose fsdp=2"),
    "Mesh(dp_replicate=2)": (lambda _: mw.Mesh(dp_replicate=2), r"MeshError: .*choose replicate=2"),
    "Mesh(foo=2)": (lambda _: mw.Mesh(foo=2), r"MeshError: .*'foo'; there are pp, replicate, fsdp, cp, tp, ep"),
    "a scheduler": (
        lambda e: mw.Engine(e.model, lr=torch.optim.lr_scheduler.StepLR), "ConfigError: lr=StepLR .*lambda step",
    ),
    "a scheduler's object": (
        lambda e: mw.Engine(e.model, lr=torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)),
        "ConfigError: lr=.*lambda step",
    ),
    "torch's loss": (
        lambda e: mw.Engine(e.model, lr=1.0, loss=torch.nn.functional.cross_entropy),
        r"ConfigError: .*torch's.*mw\.losses\.cross_entropy",
    ),
    "torch's loss, a module": (
        lambda e: mw.Engine(e.model, lr=1.0, loss=torch.nn.CrossEntropyLoss()), r"ConfigError: .*mw\.losses",
    ),
}  # fmt: skip


def said_and_shown(source: Path) -> tuple[dict[str, str], str, bool]:
    engine = build(source, {})
    said = {}
    for name, (act, _) in TRIED.items():
        try:
            act(engine)
        except Exception as error:  # noqa: BLE001 - its kind is what is looked at
            said[name] = f"{type(error).__name__}: {error}"
    return said, repr(engine), hasattr(engine.model, "parameters")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], str, bool]:
    return worlds.run(1, said_and_shown, tiny.directory(tmp_path_factory.mktemp("names") / "m", "qwen3"))[0]


@pytest.mark.parametrize("name", TRIED)
def test_a_way_out(answers: tuple[dict[str, str], str, bool], name: str) -> None:
    assert re.search(TRIED[name][1], answers[0].get(name, "nothing")), answers[0].get(name)


def test_an_engine_shows_itself_in_a_line(answers: tuple[dict[str, str], str, bool]) -> None:
    assert answers[1] == "Engine(step 0, lr 0.01, Model(qwen3, 27,796 parameters, torch.float64, one process))"
    assert not answers[2]


@pytest.mark.slow
def test_python_still_tells_a_name_that_is_alike() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import meshwright as mw; mw.logprob"], capture_output=True, text=True, check=False
    )
    assert done.stderr.rstrip().endswith("mw has no 'logprob'. Did you mean: 'logprobs'?")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"meshwright {mw.__version__}, ")
    assert torch.__version__ in said
