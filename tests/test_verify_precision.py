"""`meshwright verify --full`: what bfloat16 adds is told apart from what the mesh adds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import cli, parallel
from meshwright.data import pack
from meshwright.verify import inspection
from meshwright.verify.precision import Portrait, cost_of
from tests import tiny
from tests.words import words


def full(capsys: pytest.CaptureFixture[str], source: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = cli.main(["verify", str(source), "--full", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)["runs"]


def test_costs_by_hand() -> None:
    batch = pack([[0, 1, 0]], length=4)  # two targets, one filler
    even, skew = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    grads = {"a": torch.ones(4), "b": torch.ones(1), "c": torch.zeros(2)}
    measure = Portrait([even.expand(3, 2)], 2.0, 10.0, grads)
    found = Portrait([torch.cat([even, even, skew])], 2.5, 9.0, {**grads, "b": torch.zeros(1)})
    cost = cost_of(found, measure, [batch], "lm")
    kl = 0.5 * torch.tensor([2.0, 2 / 3]).log().sum().item()
    assert cost.mean_kl == pytest.approx(kl / 3)  # of the three tokens one differs
    assert cost.max_score == 0  # and that one has no label
    assert (cost.loss, cost.norm) == (0.25, pytest.approx(0.1))
    assert cost.worst[0] == ("b", 1.0)
    assert all(error == 0 for _, error in cost.worst[1:])


def test_what_bfloat16_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16)
    code, runs = full(capsys, source, "--mesh", "tp=2,ep=2", "--dtypes", "bfloat16,float64")
    assert code == 0
    assert runs[1]["precision"] is None
    told = runs[0]["precision"]
    assert told["measure"] == "float64, one process"
    alone, mesh, wide = (
        told["costs"][name] for name in ("bfloat16, one process", "bfloat16, tp=2 ep=2", "float64, tp=2 ep=2")
    )
    for cost in (alone, mesh):
        assert 1e-9 < cost["mean_kl"] < 1e-3
        assert 1e-5 < cost["max_score"] < 0.2
        assert 1e-4 < cost["worst"][0][1] < 1
    assert abs(wide["mean_kl"]) < 1e-12
    assert max(wide["max_score"], wide["loss"], wide["norm"], wide["worst"][0][1]) < 1e-10


def test_what_the_mesh_adds_is_another_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "finish", lambda grads, mesh: None)
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    code, runs = full(capsys, source, "--mesh", "tp=2", "--dtypes", "float32,bfloat16")
    assert code == 1
    costs = runs[1]["precision"]["costs"]
    assert costs["bfloat16, one process"]["worst"][0][1] < 0.3
    for name in ("bfloat16, tp=2", "float32, tp=2"):
        assert costs[name]["worst"][0][1] > 0.3
        assert "norm.weight" in costs[name]["worst"][0][0]


def test_a_value_head_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    source, target = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16), tmp_path / "page.html"
    arguments = ["--mesh", "fsdp=2", "--head", "value", "--dtypes", "float32,bfloat16", "--html", str(target)]
    assert cli.main(["verify", str(source), "--full", *arguments]) == 0
    out = capsys.readouterr().out
    assert re.search(words("bfloat16", r"\bmesh\b", "one process"), out), out
    for text in (out, target.read_text()):
        assert "largest difference of a value" in text
        assert "KL" not in text


def test_no_weights_no_claim(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a shrunk model with drawn weights it would say nothing."""
    assert cli.main(["verify", "tiny-qwen3", "--dtypes", "float32,bfloat16", "--json"]) == 0
    assert all(run["precision"] is None for run in json.loads(capsys.readouterr().out)["runs"])


def test_what_the_oracles_found_is_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        raise ValueError("out of memory, say")

    monkeypatch.setattr(inspection, "cost_of", breaks)
    code, runs = full(capsys, tiny.directory(tmp_path / "m", "qwen3"), "--dtypes", "float32,bfloat16")
    assert code == 0
    assert runs[1]["precision"] is None
    assert re.search(words("bfloat16", r"\brank 0 of 1\b"), runs[1]["notes"][0]), runs[1]["notes"]
