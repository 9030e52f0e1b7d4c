"""Context parallelism beyond the heads: what attention gathers, the state that a delta net passes; how it is chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.engine.step_bill import engine_bill
from meshwright.errors import LayoutError, RankError
from meshwright.ops import Parts, delta
from meshwright.plan import objections
from meshwright.sharding import Work, ways
from meshwright.verify import Data, Finding
from tests import parts, tiny, trials, worlds
from tests.plants import planted
from tests.words import words

CHOSEN = mw.ContextParallel()
ALL = mw.ContextParallel(attention=1, delta=1)  # no neighbours swap
GATHERED = mw.ContextParallel(attention=1)


@dataclass(frozen=True)
class Case:
    """`plant` is a bug, and `first` its first finding."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    context: mw.ContextParallel = CHOSEN
    recompute: str = "none"
    plant: str = ""
    first: str = ""

    def __str__(self) -> str:
        way = ",".join(f"{name}={size}" for name, size in vars(self.context).items() if size)
        return " ".join(filter(None, (self.name, trials.named(dict(self.mesh)), way, self.recompute, self.plant)))


def on(name: str, context: mw.ContextParallel = CHOSEN, recompute: str = "none", **mesh: int) -> Case:
    return Case(name, tuple(mesh.items()), context, recompute)


CASES = parts.every(
    6,
    [
        on("qwen3", mw.ContextParallel(attention=2), cp=4),
        on("qwen3_5_moe", ALL, "full", cp=4, ep=2),
        on("qwen3_5", mw.ContextParallel(attention=2, delta=2), "selective", cp=4),
        on("qwen3_5", cp=3),  # of 4 heads: nothing can be swapped
        on("qwen3_moe", GATHERED, fsdp=2, cp=2, ep=4),
        on("qwen3_5", ALL, cp=2, tp=2),
    ],
    2,
)


class Own:
    """Parts, of which each takes itself for the one before it."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.part, self.real = parts.parts, parts.part + 1, parts

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.real(x)


def halo_of_its_own(patch: pytest.MonkeyPatch) -> None:
    real = delta._before
    patch.setattr(delta, "_before", lambda x, num, halo: real(x, num, Own(halo)))


def top_left(patch: pytest.MonkeyPatch) -> None:
    """Mask like torch's `is_causal`: the first query sees the first key alone."""
    real = torch.Tensor.tril
    patch.setattr(torch.Tensor, "tril", lambda x, diagonal=0: real(x, 0 if x.dtype == torch.bool else diagonal))


def first_rank_left_out(patch: pytest.MonkeyPatch) -> None:
    """It needs nothing of the others, and takes no part in their backward."""
    real = delta.delta_rule

    def forgetful(*args: Any) -> Tensor:
        states = args[-1]
        return real(*args[:-1], Forgetful(states) if states.part == 0 else states)

    patch.setattr("meshwright.models.qwen3_5.ops.delta_rule", forgetful)


class Forgetful(Own):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.part = parts.part

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.real(x).detach()


PLANTED = [
    replace(on("qwen3_5", ALL, cp=2), plant="halo_of_its_own", first=r"D1 layers\.0\.mixer"),
    replace(on("qwen3", GATHERED, cp=2), plant="top_left", first=r"D1 layers\.0\.mixer"),
]


def around(case: Case) -> AbstractContextManager[None]:
    return planted(globals()[case.plant] if case.plant else None)


def trial(at: Path, case: Case) -> Any:
    mesh = dict(case.mesh)
    share = mesh["cp"] * mesh.get("tp", 1)
    data = Data(length=-(-tiny.LENGTH // share) * share, few=-(-8 // share) * share)  # parts shorter than a convolution
    two = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]} if "3_5" in case.name else {}
    tried = trials.trial(tiny.directory(at / case.name, case.name, dtype=torch.bfloat16, **two), mesh)
    return trials.changed(
        tried,
        data=data,
        steps=1 if case.plant else 2,
        context=case.context,
        memory=mw.MemoryOptions(recompute=case.recompute),
    )


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> worlds.Shared[Case, list[Finding]]:
    at, cases = tmp_path_factory.mktemp("context"), [*CASES, *PLANTED]

    def run(group: Sequence[Case]) -> dict[Case, list[Finding]]:
        return trials.findings_in_turn({case: trial(at, case) for case in group}, around)

    return worlds.Shared([list(group) for _, group in groupby(cases, lambda case: case.mesh)], run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_oracle(findings: worlds.Shared[Case, list[Finding]], case: Case) -> None:
    assert findings(case) == []


@pytest.mark.parametrize("case", PLANTED, ids=str)
def test_bugs_are_caught(findings: worlds.Shared[Case, list[Finding]], case: Case) -> None:
    assert re.match(case.first, str(findings(case)[0]))


def test_a_rank_left_out_of_backward_is_named(tmp_path: Path) -> None:
    """Only the recorder turns this hang into an error."""
    case = replace(on("qwen3_5", ALL, cp=2), plant="first_rank_left_out")
    with pytest.raises(
        RankError, match=words("rank 1 is at reduce_scatter", r"layers\.0\.mixer\.states, backward", "rank 0")
    ):
        trials.findings_in_turn({case: trial(tmp_path, case)}, around)


QWEN3_8B = dict(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=1,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_5_9B = {
    **tiny.ODD["qwen3_5"],
    **dict(num_attention_heads=16, num_key_value_heads=4, head_dim=256, layer_types=["linear_attention"]),
    **dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128),
    **dict(num_hidden_layers=1),
}


def sent(config: dict[str, Any], cp: int, context: mw.ContextParallel = CHOSEN) -> dict[str, float]:
    """MB of the mixer of one layer in forward, by where they go, at 128k tokens in bfloat16."""
    blueprint = Blueprint.of(config).with_options(context=context)
    charges = engine_bill(blueprint, Axes(cp=cp), 0, Work(131072, 1))
    findings: dict[str, float] = {}
    for charge in charges:
        if charge.what.startswith("layers.0.mixer.") and charge.op != "reduce_scatter":
            name = charge.what.removeprefix("layers.0.mixer.").partition(",")[0]
            findings[name] = findings.get(name, 0) + charge.num_bytes / 1e6
    return {name: round(mb, 1) for name, mb in findings.items()}


def test_what_a_layer_sends() -> None:
    """A swap of n sends T/(cp/n) x (2 x 32/n queries + 2 x kv heads) x 128 x 2 bytes; a gather T x 2 x 8."""
    assert sent(QWEN3_8B, 8) == dict(swap=335.5)
    assert sent(QWEN3_8B, 16) == dict(swap=201.3)
    assert sent(QWEN3_8B, 64) == dict(swap=67.1, all_k=33.6, all_v=33.6)  # 32 x 2: each has one of the kv heads
    assert sent(QWEN3_8B, 8, GATHERED) == dict(all_k=268.4, all_v=268.4)
    # 16 key heads of 128 + 128 + 256 channels, 2 x 2 gates, 256 that come back; 32 states of [128, 128 + 128]
    assert sent(QWEN3_5_9B, 4) == dict(swap=809.5)
    assert sent(QWEN3_5_9B, 4, ALL) == dict(halo=0.2, states=16.8)


def test_what_is_chosen() -> None:
    """Attention swaps with as many neighbours as divide cp and the heads of a tp rank; a delta net swaps with all or
    none."""
    delta_net = Blueprint.of(tiny.of("qwen3_5", num_attention_heads=12, num_key_value_heads=3))
    chosen = {
        (): "",
        (("cp", 2),): "delta: swap 2, attention: swap 2",
        (("cp", 4), ("tp", 2)): "delta: state 4, attention: swap 2 x gather 2",
        (("cp", 5),): "delta: state 5, attention: gather 5",
        (("cp", 8),): "delta: state 8, attention: swap 4 x gather 2",
    }
    for mesh, way in chosen.items():
        assert objections(delta_net, dict(mesh)) == []
        assert ways(delta_net.spec, Axes(**dict(mesh))) == way
    requested = delta_net.with_options(context=mw.ContextParallel(attention=1, delta=2)).spec
    assert ways(requested, Axes(cp=4)) == "delta: swap 2 x state 2, attention: gather 4"


@pytest.mark.parametrize(
    ("name", "context", "mesh", "text"),
    [
        ("qwen3", dict(attention=3), dict(cp=4), words("attention=3", "cp=4", r"4 heads of layers\.0", "1, 2, 4$")),
        ("qwen3", dict(attention=4), dict(cp=4, tp=2), words("attention=4", r"2 heads.*\btp=2 leaves", "from 1, 2$")),
        ("qwen3_5", dict(delta=2), dict(), words("delta=2", "cp=1", "choose delta from 1$")),
        ("qwen3", dict(delta=1), dict(cp=2), words("delta=1", "no such mixer", "leave it out")),
    ],
)  # fmt: skip
def test_refused(name: str, context: dict[str, int], mesh: dict[str, int], text: str) -> None:
    (message,) = objections(Blueprint.of(tiny.of(name)).with_options(context=mw.ContextParallel(**context)), mesh)
    assert re.search(text, message), message


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "swap"])
def test_what_is_no_number_of_neighbours(size: Any) -> None:
    with pytest.raises(LayoutError, match=f"delta={size!r} of mw.ContextParallel"):
        mw.ContextParallel(delta=size)
