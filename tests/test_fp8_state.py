"""FP8 products leave nothing in a checkpoint: scales depend on the values alone, not on the mesh.

TransformerEngine#2713 repairs what goes wrong where they are state: scales of a rank that travel with shards of another
mesh, histories of largest values that are lost, experts that are left out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import meshwright as mw
from tests import parts, tiny, trials, worlds

OF_A_RUN = re.compile("scale|amax|_extra_state", re.IGNORECASE)
MESHES = [dict(fsdp=2, ep=2), dict(tp=2), dict(pp=2), dict(fsdp=3), dict(fsdp=2, tp=2, ep=2), {}]
# How a checkpoint is written, and the mesh that reads it.
ON = {
    f"{way} on {trials.named(mesh)}": (way, mesh)
    for way in ("ours", "dcp")
    for mesh in MESHES
    if parts.ALL or (way == "ours" and mesh in (MESHES[0], MESHES[2]))
}


def engine_of(source: Path, mesh: Mapping[str, int]) -> mw.Engine:
    return mw.Engine(mw.load(source, trials.mesh_of(dict(mesh)), fp8="block"), lr=1e-3)


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


Losses = list[list[float]]


@pytest.fixture(scope="module")
def ran(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Losses]]:
    """Save on the first mesh in both ways, and go on from either on others. Return the checkpoints, and the next loss
    of each rank. Meshes of one size share a world."""
    at = tmp_path_factory.mktemp("saved")
    acts = {"begun": functools.partial(begun, source, MESHES[0], at)}
    result: dict[str, Losses] = {}
    for size in (2, *([3, 4, 1] if parts.ALL else [])):
        for name, (way, mesh) in ON.items():
            if trials.world_of(mesh) == size:
                acts[name] = functools.partial(gone_on, source, mesh, at, way, at / name)
        result, acts = result | worlds.in_turn(size, acts), {}
    return at, result


def written(folder: Path) -> dict[str, bytes]:
    """All but the states of random numbers, of which each rank has one."""
    (step,) = folder.glob("step-*")
    return {
        str(p.relative_to(step)): p.read_bytes() for p in sorted(step.rglob("*.safetensors")) if "random" not in p.parts
    }


@pytest.mark.parametrize("name", ON)
def test_transformer_engine_2713(ran: tuple[Path, dict[str, Losses]], name: str) -> None:
    """A checkpoint of dense layers, the delta net and grouped experts is bitwise the same after any other mesh, and so
    is the next step on its own mesh."""
    at, losses = ran
    assert written(at / name) == written(at / "ours")
    if ON[name][1] == MESHES[0]:
        assert losses[name] == losses["begun"]


def test_nothing_of_a_run_is_in_a_checkpoint(ran: tuple[Path, dict[str, Losses]]) -> None:
    at, _ = ran
    (step,) = (at / "ours").glob("step-*")
    ours = [key for file in step.rglob("*.safetensors") for key in load_file(file)]
    torchs = list(dcp.FileSystemReader(at / "dcp").read_metadata().state_dict_metadata)
    assert ours
    assert torchs
    assert [name for name in [*ours, *torchs] if OF_A_RUN.search(name)] == []
