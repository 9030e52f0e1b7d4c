"""FP8 products leave nothing in a checkpoint: scales depend on the values alone, not on the mesh.

TransformerEngine#2713 repairs what goes wrong where they are state: scales of a rank that travel with shards of another
mesh, histories of largest values that are lost, experts that are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import meshwright as mw
from tests import parts, tiny, worlds

OF_A_RUN = re.compile("scale|amax|_extra_state", re.IGNORECASE)
MESHES = [dict(fsdp=2, ep=2), dict(tp=2), dict(pp=2), dict(fsdp=3), dict(fsdp=2, tp=2, ep=2), {}]


def engine_of(source: Path, mesh: Mapping[str, int]) -> mw.Engine:
    return mw.Engine(mw.load(source, mw.Mesh(**mesh), fp8="block"), lr=1e-3)


def train(engine: mw.Engine, num: int) -> list[float]:
    rank = engine.model.mesh.data_rank
    return [engine.step(tiny.batches(100 * engine.steps + rank)).loss for _ in range(num)]


def begun(source: Path, mesh: Mapping[str, int], out: Path) -> list[float]:
    """Save a step in both ways; return the loss of the next."""
    engine = engine_of(source, mesh)
    train(engine, 1)
    mw.save(engine, out / "ours")
    dcp.save(engine.state_dict(), checkpoint_id=out / "dcp")
    return train(engine, 1)


def gone_on(source: Path, mesh: Mapping[str, int], out: Path, way: str, to: Path) -> list[float]:
    engine = engine_of(source, mesh)
    if way == "dcp":
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=out / "dcp")
        engine.load_state_dict(state)
    else:
        mw.resume(engine, out / "ours")
    mw.save(engine, to)
    return train(engine, 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("fp8") / "m"
    return tiny.directory(at, "qwen3_5_moe", dtype=torch.bfloat16, **tiny.in_blocks("qwen3_5_moe"))


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """Save on the first mesh in both ways; return the checkpoint and the next loss of each rank."""
    at = tmp_path_factory.mktemp("saved")
    return at, worlds.run(world_of(MESHES[0]), begun, source, MESHES[0], at)


def world_of(mesh: Mapping[str, int]) -> int:
    return prod(size for axis, size in mesh.items() if axis != "ep")


def written(folder: Path) -> dict[str, bytes]:
    """All but the states of random numbers, of which each rank has one."""
    (step,) = folder.glob("step-*")
    return {
        str(p.relative_to(step)): p.read_bytes() for p in sorted(step.rglob("*.safetensors")) if "random" not in p.parts
    }


@pytest.mark.parametrize("way", ["ours", *(["dcp"] if parts.ALL else [])])
def test_transformer_engine_2713(source: Path, saved: Any, tmp_path: Path, way: str) -> None:
    """A checkpoint of dense layers, the delta net and grouped experts is bitwise the same after any other mesh, and so
    is the next step on its own mesh."""
    at, before = saved
    expected = written(at / "ours")
    some = [MESHES[0], MESHES[1 if way == "dcp" else 2]]
    for number, other in enumerate(MESHES if parts.ALL else some):
        after = worlds.run(world_of(other), gone_on, source, other, at, way, tmp_path / f"again-{number}")
        assert written(tmp_path / f"again-{number}") == expected, other
        if other == MESHES[0]:
            assert after == before


def test_nothing_of_a_run_is_in_a_checkpoint(source: Path, tmp_path: Path) -> None:
    worlds.run(1, begun, source, {}, tmp_path)
    (step,) = (tmp_path / "ours").glob("step-*")
    ours = [key for file in step.rglob("*.safetensors") for key in load_file(file)]
    torchs = list(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    assert ours
    assert torchs
    assert [name for name in [*ours, *torchs] if OF_A_RUN.search(name)] == []
