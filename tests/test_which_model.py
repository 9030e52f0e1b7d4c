"""Ranks that hold up different models, or the same name for different files: told apart before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import RankError
from tests import tiny, trials, worlds
from tests.trials import mine


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("which") / "m", "qwen3")


def crossed(source: Path, out: Path, call: str) -> str:
    mesh = mw.Mesh(fsdp=2, timeout_s=20)
    both = [mw.load(source, mesh, dtype=torch.float64) for _ in range(2)]
    mw.Engine(both[1], lr=1e-1).step(tiny.batches(mesh.data_rank))
    model = both[mesh.rank]
    calls: dict[str, Any] = {
        "logprobs": lambda: mw.logprobs(model, tiny.batches(mesh.data_rank)[0]),
        "export": lambda: mw.export(model, out / "crossed"),
        "step": lambda: mw.Engine(model, lr=1e-2).step(tiny.batches(mesh.data_rank)),
    }
    try:
        calls[call]()
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("call", ["logprobs", "export", "step"])
def test_two_models_of_one_config(source: Path, tmp_path: Path, call: str) -> None:
    for text in worlds.run(2, crossed, source, tmp_path, call):
        assert "which model this is, of those that all ranks have used together (0: none yet), is 1 on" in text
    assert list(tmp_path.iterdir()) == []


def elsewhere(sources: list[Path], axes: dict[str, int]) -> str:
    mesh = mw.Mesh(**axes)
    engine = mw.Engine(mw.load(sources[mesh.rank], mesh, dtype=torch.float64), lr=1e-2)
    try:
        engine.step(mine(engine))
    except RankError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("mesh", [dict(replicate=2), dict(fsdp=2), dict(tp=2)], ids=trials.named)
def test_other_weights_under_the_same_config(source: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    """Each node has a disk of its own, and one of the copies is an older one."""
    shutil.copytree(source, tmp_path / "same")
    for text in worlds.run(2, elsewhere, [source, tmp_path / "same"], mesh):
        assert text == "nothing"
    stale = worlds.run(1, trained, source, tmp_path / "stale")[0]
    for text in worlds.run(2, elsewhere, [source, stale], mesh):
        assert "the checksum of the files that the model was loaded from is" in text


def trained(source: Path, out: Path) -> Path:
    model = mw.load(source, dtype=torch.float32)
    mw.Engine(model, lr=1e-5).step(tiny.batches(0))
    mw.export(model, out)
    return out
