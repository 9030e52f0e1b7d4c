"""Products in 8 bits: every gradient on every mesh is that of one process; what is refused; what checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

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
    return {
        name: tiny.directory(at / name, name, dtype=torch.bfloat16, **tiny.ALIGNED[name]) for name in tiny.ALIGNED
    }


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
