"""Every oracle on every mesh, with one process as the reference: float64 on all meshes, float32 and bfloat16 on some.

All cases of one mesh and dtype share a world, which the first of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from meshwright.verify import Finding
from tests import parts, tiny, trials, worlds

# These have all modules that compute in bfloat16; other families run on one mesh.
WIDE = {"qwen3_moe", "qwen3_5"} if parts.ALL else {"qwen3_5_moe"}
BOTH = dict(fsdp=2, tp=2)
# tests/test_value_heads.py has value heads on two meshes, tests/test_matrix.py their pairs with families
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


ALL = [*trials.MESHES, *trials.CONTEXT_MESHES, *trials.PIPELINE_MESHES, *trials.EXPERT_MESHES]
# Each family once, each axis in a small world and in one of two axes. tests/test_matrix.py has the other pairs.
FEW: list[tuple[str, dict[str, int]]] = [
    ("qwen3", {}),
    ("qwen3_moe", dict(tp=2)),
    ("qwen3_5_moe", dict(fsdp=2)),
    ("qwen2", dict(replicate=2)),
    ("qwen3_5", BOTH),
    ("qwen3", dict(tp=4)),  # copies of 2 kv heads
    ("qwen3_tied", dict(cp=2, tp=2)),
    ("qwen3_next", dict(fsdp=2, cp=2)),
    ("qwen2", dict(pp=2, tp=2)),
    ("qwen3_moe", WIDEST),
    ("qwen4_exp", {}),
]
PAIRS = [(name, mesh) for mesh in ALL for name in tiny.ODD] if parts.ALL else FEW

CASES = [
    of(name, head, mesh)
    for name, mesh in PAIRS
    for head in ("lm", "value")
    if "moe" in name or "ep" not in mesh  # ep changes nothing without experts, as tests/matrix.py shows
    if not (head == "value" and tiny.ODD[name]["tie_word_embeddings"])  # a value head is never tied
    if not (head == "value" and (mesh != BOTH or name not in VALUED))  # on every mesh in `make matrix`
]
# float32 casts no operand of a matmul, so float64 and bfloat16 prove its meshes.
FLOAT32 = [
    case._replace(dtype=torch.float32)
    for case in CASES
    if case.head == "lm" and dict(case.mesh) in ([BOTH, WIDEST] if parts.ALL else [dict(tp=2)])
]
BFLOAT16 = [
    case._replace(dtype=torch.bfloat16)
    for case in CASES
    if case.head == "lm" and (case.name in WIDE or (dict(case.mesh) == BOTH and parts.ALL))
    if len(case.mesh) > 1 or not parts.ALL
]


Findings = Callable[[Case], list[Finding]]


def findings(sources: dict[str, Path], group: Sequence[Case]) -> dict[Case, list[Finding]]:
    tried = {
        case: trials.trial(
            sources[case.name], dict(case.mesh), case.head, case.dtype, trials.world_of(dict(case.mesh)) > 2
        )
        for case in group
    }
    if not parts.ALL:  # later steps of two axes are those of each axis, on two ranks; so are later documents alone
        tried = {case: replace(t, steps=1) if t.axes.world > 2 and t.axes.ep == 1 else t for case, t in tried.items()}
    return trials.findings_in_turn(tried)


@pytest.fixture(scope="module")
def findings_of(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    at, cases = tmp_path_factory.mktemp("sources"), [*CASES, *FLOAT32, *BFLOAT16]
    sources = {
        name: tiny.directory(at / name, name, dtype=torch.bfloat16, **tiny.two_layers(name))
        for name in {c.name for c in cases}
    }
    return worlds.shared({case: (case.mesh, case.dtype) for case in cases}, partial(findings, sources))


@pytest.mark.parametrize("case", [*CASES, *FLOAT32, *BFLOAT16], ids=lambda case: f"{case}-{str(case.dtype)[6:]}")
def test_every_oracle(findings_of: Findings, case: Case) -> None:
    assert findings_of(case) == []
