"""`python -m bench.precision`: the cost of bfloat16 is separate from the cost of the mesh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench import precision
from meshwright import parallel
from meshwright.data import pack
from meshwright.recipe import Recipe
from tests import tiny


def test_costs_by_hand() -> None:
    batch = pack([[0, 1, 0]], length=4)  # two targets, one filler
    even, skew = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    grads = {"a": torch.ones(4), "b": torch.ones(1), "c": torch.zeros(2)}
    wide = precision.Snapshot([even.expand(3, 2)], 2.0, 10.0, grads)
    result = precision.Snapshot([torch.cat([even, even, skew])], 2.5, 9.0, {**grads, "b": torch.zeros(1)})
    cost = precision.cost_of(result, wide, [batch], "lm")
    kl = 0.5 * torch.tensor([2.0, 2 / 3]).log().sum().item()
    assert cost.mean_kl == pytest.approx(kl / 3)  # of the three tokens one differs
    assert cost.max_score == 0  # and that one has no label
    assert (cost.loss, cost.norm) == (0.25, pytest.approx(0.1))
    assert cost.worst[0] == ("b", 1.0)
    assert all(error == 0 for _, error in cost.worst[1:])


def costs(source: Path, mesh: str, wide: str) -> dict[str, precision.Cost]:
    requested = precision.Options(Recipe(), (wide, "bfloat16"), precision.FULL)
    tried = precision.plan(str(source), precision.Axes(**precision.sizes_of(mesh)), requested)
    return precision.costs(tried, wide, source)


def test_what_bfloat16_adds(tmp_path: Path) -> None:
    result = costs(tiny.directory(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16), "tp=2,ep=2", "float64")
    alone, mesh, wide = (
        result[name] for name in ("bfloat16, one process", "bfloat16, tp=2 ep=2", "float64, tp=2 ep=2")
    )
    for cost in (alone, mesh):
        assert 1e-9 < cost.mean_kl < 1e-3
        assert 1e-5 < cost.max_score < 0.2
        assert 1e-4 < cost.worst[0][1] < 1
    assert abs(wide.mean_kl) < 1e-12
    assert max(wide.max_score, wide.loss, wide.norm, wide.worst[0][1]) < 1e-10


def test_what_the_mesh_adds_is_another_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "finish", lambda grads, mesh: None)
    result = costs(tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16), "tp=2", "float32")
    assert result["bfloat16, one process"].worst[0][1] < 0.3
    for name in ("bfloat16, tp=2", "float32, tp=2"):
        assert result[name].worst[0][1] > 0.3
        assert "norm.weight" in result[name].worst[0][0]


def test_a_value_head_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.directory(tmp_path / "m", "qwen3", dtype=torch.bfloat16)
    monkeypatch.setattr(sys, "argv", ["precision", str(source), "--head", "value", "--wide", "float32"])
    precision.main()
    out = capsys.readouterr().out
    assert "largest difference of a value" in out
    assert "KL" not in out
