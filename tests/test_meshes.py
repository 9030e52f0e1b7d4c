"""Every oracle on every mesh: one process is the reference, in float64; float32 and bfloat16 on some of them.

All that is tried on one mesh in one dtype shares a world, which the first of its cases runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.verify import Finding
from tests import parts, tiny, trials, worlds

# All that bfloat16 can break is in one of them: the others are tried on one mesh. The one tried by default has it all.
WIDE = {"qwen3_moe", "qwen3_5"} if parts.ALL else {"qwen3_5_moe"}
BOTH = dict(fsdp=2, tp=2)
# tests/test_value_heads.py has every oracle of a value head on two meshes, tests/test_matrix.py its pairs with families
VALUED = [*tiny.ODD] if parts.ALL else []
WIDEST = dict(**BOTH, ep=4)


class Case(NamedTuple):
    name: str
    head: str
    mesh: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return f"{self.name}-{self.head}-{trials.named(dict(self.mesh))}"


def of(name: str, head: str, mesh: dict[str, int]) -> Case:
    return Case(name, head, tuple(mesh.items()))


ALL = [*trials.MESHES, *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *parts.every(2, trials.EXPERT_MESHES)]


def families(number: int, mesh: dict[str, int]) -> list[str]:
    """Every second one on one mesh, on the others every sixth one in turn, of those with experts every second one. The
    pairs that are left are in tests/test_matrix.py."""
    if "ep" in mesh:
        return parts.every(2, (name for name in tiny.ODD if "moe" in name), number)
    return parts.every(2, tiny.ODD) if mesh == BOTH else parts.every(6, tiny.ODD, number)


CASES = [
    of(name, head, mesh)
    for number, mesh in enumerate(ALL)
    for name in families(number, mesh)
    for head in ("lm", "value")
    if "moe" in name or "ep" not in mesh  # without experts ep changes nothing, which tests/matrix.py tries
    if not (head == "value" and tiny.ODD[name]["tie_word_embeddings"])  # a value head is never tied
    if not (head == "value" and (mesh != BOTH or name not in VALUED))  # on every mesh in `make matrix`
]
# float32 casts nothing for its products, so that meshes add nothing to what float64 and bfloat16 prove of them
FLOAT32 = [
    case._replace(dtype=torch.float32)
    for case in CASES
    if case.head == "lm" and dict(case.mesh) in ([BOTH, WIDEST] if parts.ALL else [dict(tp=2)])
]
BFLOAT16 = [
    case._replace(dtype=torch.bfloat16)
    for case in CASES
    if case.head == "lm" and (case.name in WIDE or dict(case.mesh) == BOTH) and len(case.mesh) > 1
    if parts.ALL or (dict(case.mesh) == BOTH and case.name in WIDE)
]

Found = Callable[[Case], list[Finding]]


def grouped(cases: Sequence[Case]) -> list[list[Case]]:
    worlds_of: dict[Any, list[Case]] = {}
    for case in cases:
        worlds_of.setdefault((case.mesh, case.dtype), []).append(case)
    return list(worlds_of.values())


def findings(sources: dict[str, Path], group: Sequence[Case]) -> dict[Case, list[Finding]]:
    return trials.findings_in_turn(
        {case: trials.trial(sources[case.name], dict(case.mesh), case.head, case.dtype) for case in group}
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    at = tmp_path_factory.mktemp("sources")
    sources = {name: tiny.directory(at / name, name, dtype=torch.bfloat16) for name in tiny.ODD}
    return worlds.Shared(grouped([*CASES, *FLOAT32, *BFLOAT16]), partial(findings, sources))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(found: Found, case: Case) -> None:
    assert found(case) == []


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32(found: Found, case: Case) -> None:
    assert found(case) == []


@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_bfloat16(found: Found, case: Case) -> None:
    assert found(case) == []
