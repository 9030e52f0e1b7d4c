"""Products in 8 bits: every gradient on every mesh is that of one process; what is refused; what checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import meshwright as mw
from meshwright.ops.fp8 import rounded_matrix
from meshwright.verify import Finding
from tests import parts, tiny, trials, worlds

BOTH = dict(fsdp=2, tp=2)


class Case(NamedTuple):
    name: str
    mesh: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.name}-{trials.named(dict(self.mesh))}"


ALL = [*trials.MESHES, *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *trials.EXPERT_MESHES]


def families(number: int, mesh: dict[str, int]) -> list[str]:
    names = [name for name in tiny.ALIGNED if "moe" in name or "ep" not in mesh]
    return names if mesh == BOTH else parts.every(4, names, number)


CASES = [Case(name, (*mesh.items(),)) for number, mesh in enumerate(ALL) for name in families(number, mesh)]
ROUNDED = [
    Case(name, (*BOTH.items(),), dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for name in parts.every(3, tiny.ALIGNED, 1)
]
Found = Callable[[Case], list[Finding]]


def skipped(mesh: dict[str, int]) -> list[str]:
    """With two kv heads on four ranks, each has but a share of their gradients."""
    return ["*.k.weight", "*.v.weight"] if mesh.get("tp", 1) > 2 else []


def findings(sources: dict[str, Path], group: list[Case]) -> dict[Case, list[Finding]]:
    def tried(case: Case) -> trials.Trial:
        mesh = dict(case.mesh)
        plain = trials.trial(sources[case.name], mesh, "lm", case.dtype)
        return replace(plain, fp8="block", fp8_skip=skipped(mesh))

    return trials.findings_in_turn({case: tried(case) for case in group})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("aligned")
    return {name: tiny.directory(at / name, name, dtype=torch.bfloat16, **tiny.ALIGNED[name]) for name in tiny.ALIGNED}


@pytest.fixture(scope="module")
def found(sources: dict[str, Path]) -> Found:
    worlds_of: dict[object, list[Case]] = {}
    for case in [*CASES, *ROUNDED]:
        worlds_of.setdefault((case.mesh, case.dtype), []).append(case)
    return worlds.Shared([*worlds_of.values()], partial(findings, sources))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(found: Found, case: Case) -> None:
    assert found(case) == []


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: f"{case}-{case.dtype}")
def test_rounded(found: Found, case: Case) -> None:
    assert found(case) == []


def in_blocks(name: str, stored: torch.Tensor, config: dict[str, object]) -> torch.Tensor:
    """What products see of a parameter, expert by expert."""
    num = config["num_experts"] if ".experts." in name else 1
    matrices = stored.bfloat16().float().view(num, -1, stored.shape[-1])
    return torch.stack([rounded_matrix(each) for each in matrices]).view(stored.shape)


def seen_and_written(source: Path, at: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    mesh = mw.Mesh(device="cpu")
    model = mw.load(source, mesh, fp8="block")
    mw.Engine(model, lr=1e-2).step(tiny.batches(0))
    mw.export(model, at / "as-fp8", format="fp8")
    mw.export(model, at / "as-is")
    read = mw.load(at / "as-fp8", mesh, dtype=torch.float32).stored()
    low = sorted(model.blueprint.spec.fp8)
    return {name: (in_blocks(name, model.stored()[name], model.config), read[name]) for name in low}


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen2"])
def test_what_is_served_is_what_was_trained(sources: dict[str, Path], tmp_path: Path, name: str) -> None:
    """The blocks of products are those of the files, and both are of what bfloat16 leaves of the masters."""
    (found,) = worlds.run(1, seen_and_written, sources[name], tmp_path)
    assert found
    for low, (seen, written) in found.items():
        assert torch.equal(seen, written), low
