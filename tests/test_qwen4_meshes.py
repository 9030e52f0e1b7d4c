"""Run Qwen4-Exp on every kind of mesh in float64, with every oracle. Documents cross every border of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import meshwright as mw
from meshwright.verify import Data, Finding, Trial
from tests import parts, tiny, trials, worlds

SHORT = 24
TIES = dict(indexer_n_heads=1)  # a score is then 0 for every second block, and the choice among equals must not differ


@dataclass(frozen=True)
class Short(Data):
    """Short streams, in which parts of 4 ranks have 6 tokens: fewer than the 9 before a token that its n-grams'
    convolution needs. With a small vocabulary, texts end often, and n-grams repeat within a rank and on several."""

    length: int = SHORT
    vocab: int = 12

    def documents(self, data_rank: int, step: int = 0) -> list[list[list[int]]]:
        sizes = [[3, 20, 1], [17, 7], [1, 1, 21]]
        out = []
        for number in range(self.num):
            g = self._generator(data_rank, step, number)
            out.append(
                [torch.randint(self.vocab, (size,), generator=g).tolist() for size in sizes[(data_rank + number) % 3]]
            )
        return out


class Case(NamedTuple):
    """A mesh, and the options of a run. `train`: "*" trains the tables of n-grams too."""

    mesh: dict[str, int]
    recompute: str
    train: str
    data: Data = Data()

    def __str__(self) -> str:
        table = "trained" if self.train == "*" else "frozen"
        return f"{trials.named(self.mesh)}-{self.recompute}-{table}-{self.data.length}"


TRAINED, FROZEN = "*", "**"
CASES = [
    Case(dict(cp=2, tp=2), "none", TRAINED, Short()),
    Case(dict(fsdp=2), "full", TRAINED),
    Case(dict(fsdp=3), "selective", FROZEN),
    Case(dict(tp=2), "full", TRAINED, Short()),
    Case(dict(tp=4), "none", FROZEN, Short()),
    Case(dict(tp=4), "selective", TRAINED),
    Case(dict(cp=2), "selective", TRAINED),
    Case(dict(cp=2), "none", FROZEN, Short()),
    Case(dict(cp=4), "full", FROZEN),
    Case(dict(cp=4), "selective", TRAINED, Short()),
    Case(dict(pp=2), "none", FROZEN),
    Case(dict(pp=2), "full", TRAINED, Short(num=3)),
    Case(dict(pp=4), "full", TRAINED, Data(num=4)),
    Case(dict(fsdp=2, tp=2, ep=2), "selective", TRAINED),
    Case(dict(fsdp=2, tp=2, ep=2), "full", FROZEN, Short()),
    Case(dict(cp=2, tp=2), "full", FROZEN),
    Case(dict(pp=2, cp=2), "full", FROZEN, Short()),
    Case(dict(pp=2, cp=2), "none", TRAINED),
    Case(dict(replicate=2, fsdp=2), "selective", TRAINED, Short()),
    Case(dict(fsdp=2, cp=2, ep=4), "full", TRAINED, Short()),
    Case(dict(fsdp=2, cp=2, ep=4), "none", FROZEN),
    Case(dict(fsdp=2, ep=2), "full", FROZEN, Short()),
]
EIGHT = Case(dict(pp=2, fsdp=2, tp=2, ep=2), "selective", TRAINED, Short())
FEW = [CASES[6], CASES[11], CASES[-1]]
TRIED = [*CASES, EIGHT] if parts.ALL else FEW


def trial_of(source: Path, case: Case) -> Trial:
    return trials.changed(
        trials.trial(source, case.mesh), data=case.data, train=case.train, steps=3 if parts.ALL else 1,
        memory=mw.MemoryOptions(recompute=case.recompute),
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("m") / "m", "qwen4_exp", dtype=torch.bfloat16, **TIES)


@pytest.fixture(scope="module")
def findings_of(source: Path) -> Callable[[str], list[Finding]]:
    cases = {str(case): case for case in TRIED}

    def findings(group: Sequence[str]) -> dict[str, list[Finding]]:
        return trials.findings_in_turn({name: trial_of(source, cases[name]) for name in group})

    return worlds.shared({name: case.mesh for name, case in cases.items()}, findings)


@pytest.mark.parametrize("case", [*map(str, TRIED)])
def test_every_oracle(findings_of: Callable[[str], list[Finding]], case: str) -> None:
    assert findings_of(case) == []
