"""Every oracle on every mesh: one process is the reference, in float64; float32 and bfloat16 on some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tiny, trials

NARROW = {"qwen2", "qwen3_5_moe"}  # made of parts that the others prove: bfloat16 on one mesh
BOTH = dict(fsdp=2, tp=2)

CASES = [
    pytest.param(name, head, mesh, id=f"{name}-{head}-{trials.named(mesh)}")
    for name in tiny.ODD
    for head in ("lm", "value")
    for mesh in (*trials.MESHES, *trials.EXPERT_MESHES)
    if "moe" in name or mesh in trials.MESHES  # without experts ep changes nothing, which tests/matrix.py tries
    if not (head == "value" and tiny.ODD[name]["tie_word_embeddings"])  # a value head is never tied
    if not (head == "value" and mesh != BOTH)  # on every mesh in `make matrix`
]
# float32 casts nothing for its products, so that meshes add nothing to what float64 and bfloat16 prove of them
SMOKE = {
    torch.float32: [case for case in CASES if case.values[1:] in (("lm", BOTH), ("lm", dict(**BOTH, ep=4)))],
    torch.bfloat16: [c for c in CASES if c.values[1] == "lm" and (c.values[0] not in NARROW or c.values[2] == BOTH)],
}


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("sources")
    return {name: tiny.directory(at / name, name, dtype=torch.bfloat16) for name in tiny.ODD}


@pytest.mark.parametrize(("name", "head", "mesh"), CASES)
def test_float64(sources: dict[str, Path], name: str, head: str, mesh: dict[str, int]) -> None:
    assert trials.findings(trials.trial(sources[name], mesh, head)) == []


@pytest.mark.parametrize(("name", "head", "mesh"), SMOKE[torch.float32])
def test_float32(sources: dict[str, Path], name: str, head: str, mesh: dict[str, int]) -> None:
    assert trials.findings(trials.trial(sources[name], mesh, head, torch.float32)) == []


@pytest.mark.parametrize(("name", "head", "mesh"), SMOKE[torch.bfloat16])
def test_bfloat16(sources: dict[str, Path], name: str, head: str, mesh: dict[str, int]) -> None:
    assert trials.findings(trials.trial(sources[name], mesh, head, torch.bfloat16)) == []
