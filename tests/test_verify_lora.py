"""`meshwright verify --lora`: all oracles of a run with adapters, those of adapters alone, and their planted bugs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.axes import Axes
from meshwright.cli import main
from meshwright.engine import Engine
from meshwright.errors import ConfigError
from meshwright.mesh import Mesh
from meshwright.models import text_config
from meshwright.recipe import Lora, Recipe
from meshwright.verify import (
    Options,
    RunResult,
    Trial,
    adapters,
    examine,
    plan,
    run_reference,
    session,
    transformers_oracles,
)
from meshwright.verify.report import ROWS
from meshwright.verify.results import Notes
from meshwright.verify.session import lacks_head
from tests import parts, tiny, trials, worlds
from tests.published_configs import QWEN3_30B_A3B
from tests.test_verify import OF_FP8, directory

OPTIONS = ["--lora-rank", "3", "--dtypes", "float64", "--json"]
RUNS = {"experts of another rank": "tiny-qwen3-moe --mesh fsdp=2,ep=2 --lora-expert-rank 2"}
CAUGHT = {"own-rows": ("tiny-qwen3 --mesh fsdp=2", "E2")}
if parts.ALL:
    RUNS |= {
        "delta nets": "tiny-qwen3.5-moe --mesh tp=2,ep=2 --lora-rslora",
        "few targets": "tiny-qwen3.5 --mesh cp=2 --lora-targets q_proj,in_proj_qkv",
        "a new value head": "tiny-qwen2 --mesh replicate=2,fsdp=2 --head value",
        "an MTP head": "tiny-qwen3.5-moe --mesh fsdp=2 --mtp all",
        "FP8 matmuls": "tiny-qwen3-moe-fp8 --mesh fsdp=2,ep=2 --fp8 --recompute full",
        "V": "tiny-qwen3-moe --mesh pp=2 --schedule v",
    }
    CAUGHT |= {
        "drawn-by-rank": ("tiny-qwen3 --mesh fsdp=2", "W1"),
        "merge-left-out": ("tiny-qwen3-moe --mesh fsdp=2", "E2"),
        "update-lost": ("tiny-qwen3 --mesh fsdp=2", "U1"),
        "sum-left-out": ("tiny-qwen3 --mesh tp=2", "G1"),
    }


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["verify", *arguments, *OPTIONS])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_all_oracles_hold_with_adapters(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    if not parts.ALL:  # M1 has no adapters: tests/test_verify.py tries it
        monkeypatch.setattr(session, "_run_transformers", lambda *_: RunResult("transformers", 0.0, [], ()))
    result = verified(capsys, *RUNS[name].split())
    assert result["ok"], [rows for run in result["runs"] for rows in run["oracles"].values() if rows]
    expected = {*ROWS} - OF_FP8 - ({"H1"} if result["head"] == "value" else set())
    expected |= {"Q1"} if "--fp8" in RUNS[name] else set()
    expected -= set() if parts.ALL else {"M1", "R1"}
    assert {oracle for run in result["runs"] for oracle in run["oracles"]} == expected
    assert result["lora"]["rank"] == 3
    assert all(margins for run in result["runs"] for row, margins in run["margins"].items() if row != "RUN")
    assert not [text for text in result["untried"] if "M2" in text]


@pytest.mark.slow
@parts.IN_MATRIX
@pytest.mark.parametrize("bug", CAUGHT)
def test_bugs_are_caught(bug: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, oracle = CAUGHT[bug]
    result = verified(capsys, *arguments.split(), "--against", "none", "--plant", bug)
    findings = [row for run in result["runs"] for row, rows in run["oracles"].items() if rows]
    assert findings[:1] == [oracle]


def test_a_bug_of_adapters_needs_adapters() -> None:
    with pytest.raises(ConfigError, match=r"own-rows is a bug of adapters.*--lora"):
        plan("tiny-qwen3", Axes(fsdp=2), Options(plant="own-rows"), lambda _: None)


def test_targets_that_name_layers_become_kinds_of_modules(tmp_path: Path) -> None:
    """The small model has two layers, and targets may name others."""
    lora = Lora(rank=4, targets=["model.layers.4?.self_attn.q_proj", "model.layers.40.mlp.experts.*"])
    source = directory(tmp_path / "m", QWEN3_30B_A3B)
    tried = plan(source, Axes(fsdp=2), Options(Recipe(lora=lora), kind="shrunk"), lambda _: None)
    adapted = {param.name.split(".", 2)[2] for param in tried.runs.table if param.adapter}
    assert text_config(tried.runs.config)["num_hidden_layers"] < 40
    assert adapted == {
        f"{name}.{factor}"
        for name in ("mixer.q.lora", "mlp.experts.gate_up_lora", "mlp.experts.down_lora")
        for factor in "ab"
    }


def test_without_peft_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    notes, why_not = transformers_oracles.compare_with_peft(tmp_path, [], Lora(), tmp_path)
    assert "peft" in why_not
    assert not notes.margins


def _resumed(tried: Trial) -> dict[int | None, list[str]]:
    """Run one process and resume its checkpoint without each part of its state. Return the keys of E3's findings."""
    reference = run_reference(tried)
    examine(tried, reference, Mesh(device="cpu"), None)
    reported: dict[int | None, list[str]] = {}
    for forgets in (0, 1, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapters, "resume", functools.partial(_forgetful, adapters.resume, forgets))
            reported[forgets] = [finding.name for finding in adapters.e3_resume(tried, reference, Notes())]
    return reported


def _forgetful(resume: Any, forgets: int | None, engine: Engine, at: Path) -> None:
    resume(engine, at)
    for state in engine.optimizer.state.values():
        if forgets is not None:
            state[forgets].zero_()


def test_a_resumed_run_has_the_state_of_its_optimizer(tmp_path: Path) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3")
    tried = trials.changed(
        trials.trial(source, {}), lora=Lora(rank=3, b_std=0.1), keeps_all=True, checkpoint=tmp_path / "checkpoint"
    )
    [reported] = worlds.run(1, _resumed, tried)
    assert {forgets: bool(keys) for forgets, keys in reported.items()} == {0: True, 1: True, None: False}
    assert all(".lora_" in key for keys in reported.values() for key in keys)


def test_a_head_may_be_trained_too(tmp_path: Path) -> None:
    """The entropy does not depend on an MTP head, and files may lack a value head."""
    of_mtp = tiny.with_mtp(tiny.directory(tmp_path / "mtp", "qwen3_5"))
    of_lm = tiny.directory(tmp_path / "lm", "qwen3")
    own = dict(lora=Lora(rank=3, b_std=0.1), train="**", thorough=True)
    cases = {
        "mtp": trials.changed(trials.trial(of_mtp, {}), mtp="all", **own),
        "value": trials.changed(trials.trial(of_lm, {}, "value"), **own),
    }
    for name, reference in zip(cases, trials.references([*cases.values()]), strict=True):
        assert list(map(str, reference.notes.findings)) == []
        assert ("H1" in {margin.oracle for margin in reference.notes.margins}) == (name == "mtp")
        assert ("score.weight" in reference.fresh) == (name == "value")


def test_a_small_model_lacks_the_head_that_the_files_lack(tmp_path: Path) -> None:
    def lacks(source: str | Path, lora: Lora | None, head: str = "value") -> bool:
        return lacks_head(plan(source, Axes(), Options(Recipe(head=head, lora=lora)), lambda _: None).blueprint)

    of_lm = tiny.directory(tmp_path / "lm", "qwen3")
    with_head = tiny.classifier(tmp_path / "value", "qwen3", "Token", num_labels=1)
    assert lacks(of_lm, None)
    assert lacks(of_lm, Lora())
    assert not lacks(of_lm, Lora(), "lm")
    assert not lacks(with_head, Lora())
    assert not lacks("tiny-qwen3", None)
    assert lacks("tiny-qwen3", Lora())
