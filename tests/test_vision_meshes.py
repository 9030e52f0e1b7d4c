"""Models with a tower on meshes: every gradient against one process in float64, whichever ranks have images."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.verify import Data, Trial
from meshwright.verify.small_data import Vision
from tests import parts, seeing, trials, worlds
from tests.trials import named, world_of

LENGTH = 96
NUM_STEPS = 2 if parts.ALL else 1  # the oracles take more
IMAGES: dict[str, list[list[list[str]]]] = {  # for each data rank in turn, the documents of each micro-batch
    "all": [
        [["text", "one place", "a video"], ["touching", "text"]],
        [["wide, then high"], ["first and last", "one place"]],
    ],
    "one rank": [[["two of a size"], ["a short video", "text"]], [["text"], ["text", "text"]]],
    "none": [[["text"], ["text", "text"]], [["text", "text"], ["text"]]],
    "the last": [[["text"], ["text", "text"]], [["text"], ["one place", "touching"]]],
    "the first": [[["beyond the table"], ["text"]], [["text"], ["text", "text"]]],
    "in between": [[["one place"], ["text"], ["a video"], ["text"]], [["text"], ["text"], ["text"], ["text"]]],
}
TRAINED: dict[str, Any] = {
    "all": "**",
    "the tower": "tower.*",
    "its merger": "tower.merger.*",
    "all but the tower": ["embed*", "layers.*", "head.*"],
    "parts": ["tower.blocks.2.*", "tower.merger.*", "head.*"],
}
MESHES: list[dict[str, int]] = [
    dict(fsdp=2),
    dict(tp=2),
    dict(cp=2),
    dict(pp=2),
    dict(replicate=2, fsdp=2),
    dict(cp=2, tp=2),
    dict(pp=2, tp=2),
    dict(fsdp=2, tp=2, ep=2),
]
LARGE: list[dict[str, int]] = [dict(fsdp=2, cp=2, tp=2, ep=4), dict(pp=2, fsdp=2, tp=2, ep=2)]
if not parts.ALL:  # on fewer ranks the same collectives run
    MESHES = [*MESHES[:4], dict(replicate=2)]
    LARGE = [dict(cp=2, tp=2, ep=4), dict(pp=2, fsdp=2, ep=2)]


FAMILIES = tuple(seeing.ODD)
Case = tuple[str, str, str, str]  # family, which ranks have images, what is trained, what is recomputed

CASES: list[Case] = [
    *((family, images, "all", "none") for family in FAMILIES for images in IMAGES),
    *((family, images, trained, "none") for family in FAMILIES[:3:2] for images in ("all", "the first")
      for trained in TRAINED if trained != "all"),
    *((family, "all", "all", kind) for family in FAMILIES for kind in ("selective", "full")),
]  # fmt: skip


# What `make test` runs: each family, and each kind of a case.
FEW: dict[str, list[Case]] = {
    "fsdp=2": [("qwen3_vl_moe", "one rank", "parts", "selective")],
    "tp=2": [("qwen3_vl", "the first", "all", "full")],
    "cp=2": [("qwen3_5", "all", "its merger", "none")],
    "pp=2": [("qwen4_exp", "the last", "all but the tower", "selective")],
    "replicate=2": [("qwen3_vl", "in between", "all", "none")],
    "cp=2,tp=2,ep=4": [("qwen3_vl_moe", "none", "all", "none")],
    "pp=2,fsdp=2,ep=2": [("qwen3_vl_moe", "all", "the tower", "none")],
}


def cases_on(mesh: dict[str, int]) -> list[Case]:
    """Return the cases of a mesh: all with MESHWRIGHT_ALL=1. `ep` takes families with experts alone."""
    return [case for case in CASES if "ep" not in mesh or "moe" in case[0]] if parts.ALL else FEW[named(mesh)]


Sources = Callable[[str, dict[str, int]], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Three layers, or four for two stages and for qwen4_exp: the first two of either add deepstack features."""
    at = tmp_path_factory.mktemp("seeing")

    @functools.cache
    def make(name: str, num_layers: int) -> Path:
        kinds = (["linear_attention", "full_attention"] * 2)[:num_layers]
        changes = {"layer_types": kinds} if name.startswith("qwen3_5") else {}
        return seeing.directory(at / f"{name}-{num_layers}", name, num_hidden_layers=num_layers, **changes)

    return lambda name, mesh: make(name, 4 if "pp" in mesh or name == "qwen4_exp" else 3)


def batches(images: str, data_rank: int) -> list[mw.Batch]:
    of_rank = IMAGES[images]
    return [seeing.packed(names, length=LENGTH) for names in of_rank[data_rank % len(of_rank)]]


def steps(source: Path, mesh: dict[str, int], case: Case, data_ranks: Sequence[int] = ()) -> list[Any]:
    """Loss, gradient norm and gradients of a step, and the weights after it. Without `data_ranks`, a rank takes its own
    data."""
    _, images, trained, recompute = case
    model = mw.load(
        source, trials.mesh_of(mesh), dtype=torch.float64, train=TRAINED[trained], tower=True,
        memory=mw.MemoryOptions(recompute=recompute),
    )  # fmt: skip
    engine, results = mw.Engine(model, lr=1e-2), list[Any]()
    for _ in range(NUM_STEPS):
        data = [batch for rank in data_ranks or [model.mesh.data_rank] for batch in batches(images, rank)]
        loss, grads = engine.backward(data), mw.gather(model, "grad")
        results.append((loss, engine.update(), {name: grad.clone() for name, grad in grads.items()}))
    return [*results, {name: weight.clone() for name, weight in mw.gather(model).items()}]


def differs(result: Any, expected: Any) -> list[str]:
    """Name everything that differs by more than 1e-9."""
    wrong = []
    for number, (step, one) in enumerate(zip(result[:-1], expected[:-1], strict=True)):
        assert step[2].keys() == one[2].keys()
        wrong += [f"step {number}: {a} for {b}" for a, b in zip(step[:2], one[:2], strict=True) if abs(a - b) > 1e-9]
        wrong += [f"step {number}: {name}" for name, grad in one[2].items() if off(step[2][name], grad) > 1e-9]
    # `gather` rounds weights to the float32 of the files, gradients it does not
    return wrong + [f"the weights of {name}" for name, weight in expected[-1].items() if off(result[-1][name], weight)
                    > 1e-6]  # fmt: skip


def off(result: torch.Tensor, one: torch.Tensor) -> float:
    return float((result - one).norm() / one.norm().clamp_min(1e-12))


_expected: dict[Any, Any] = {}


def check(source: Sources, mesh: dict[str, int], cases: Sequence[Case]) -> None:
    num = mesh.get("fsdp", 1) * mesh.get("replicate", 1)
    keys = {case: (source(case[0], mesh), case[1:3], num) for case in cases}
    lacking = [case for case in cases if keys[case] not in _expected]
    alone = {case: functools.partial(steps, keys[case][0], {}, (*case[:3], "none"), range(num)) for case in lacking}
    for case, (answer,) in (worlds.in_turn(1, alone) if alone else {}).items():
        _expected[keys[case]] = answer
    on_mesh = {case: functools.partial(steps, keys[case][0], mesh, case) for case in cases}
    for case, answers in worlds.in_turn(world_of(mesh), on_mesh, seconds=120).items():
        assert not differs(answers[0], _expected[keys[case]]), case


@pytest.mark.parametrize("mesh", MESHES, ids=named)
def test_gradients_equal_one_process(source: Sources, mesh: dict[str, int]) -> None:
    check(source, mesh, cases_on(mesh))


def seeing_trial(
    family: str, source: Path, mesh: dict[str, int], trained: str = "all", recompute: str = "none"
) -> Trial:
    """Some ranks have images in the first step, but none in its last micro-batch; none has any in the step of few
    tokens, and one of several data ranks in the long step."""
    share = mesh.get("cp", 1) * mesh.get("tp", 1)
    length, few, long = (-(-num // share) * share for num in (136, 8, 1100))
    vision = Vision(seeing.IMAGE, seeing.VIDEO, seeing.PATCH)
    data = Data(num=max(3, 2 * mesh.get("pp", 1)), length=length, few=few, long=long, vision=vision)
    router_aux = "previous" if "pp" in mesh else "pooled"
    patterns = TRAINED[trained]
    steps = 3 if parts.ALL else 1
    return trials.changed(
        trials.trial(source, mesh), tower=True, steps=steps, data=data, router_aux=router_aux, draws=trained == "all",
        train=patterns, memory=mw.MemoryOptions(recompute=recompute),
    )  # fmt: skip


Tried = tuple[str, dict[str, int], str, str]  # family, mesh, what is trained, what is recomputed
ORACLES_ON: list[Tried] = [
    ("qwen3_vl", dict(replicate=2, fsdp=2), "all", "none"),
    ("qwen3_5", dict(cp=2, tp=2), "all", "none"),
    ("qwen3_5_moe", dict(fsdp=2, tp=2, ep=2), "all", "none"),
    ("qwen3_vl_moe", dict(pp=2, tp=2), "all", "none"),
    ("qwen3_vl", dict(fsdp=2), "its merger", "none"),
    ("qwen3_vl_moe", dict(fsdp=2, ep=2), "parts", "full"),
    ("qwen3_vl_moe", dict(fsdp=2, tp=2, ep=2), "parts", "full"),
]
ALL_ORACLES: list[Tried] = [
    (family, mesh, trained, recompute) for family in ("qwen3_vl", "qwen3_5_moe") for mesh in (*MESHES, *LARGE)
    for trained in TRAINED for recompute in ("none", "full") if "ep" not in mesh or "moe" in family
]  # fmt: skip


@pytest.mark.parametrize("tried", parts.every(7, ORACLES_ON, 5), ids=str)
def test_every_oracle(source: Sources, tried: Tried) -> None:
    """The bill covers the tower: count and bytes of its collectives, and none for frozen parameters."""
    family, mesh, *how = tried
    assert not trials.findings(seeing_trial(family, source(family, mesh), mesh, *how))


@pytest.mark.slow
@parts.IN_MATRIX
@pytest.mark.parametrize("tried", parts.every(96, ALL_ORACLES, 36), ids=str)
def test_every_oracle_on_all_meshes(source: Sources, tried: Tried) -> None:
    test_every_oracle(source, tried)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", LARGE, ids=named)
def test_all_axes_at_once(source: Sources, mesh: dict[str, int]) -> None:
    check(source, mesh, cases_on(mesh))


ONCE = [
    ("qwen3_vl", dict(replicate=2), "all", dict(sum_once=True)),
    ("qwen3_vl_moe", dict(fsdp=2, tp=2, ep=2), "parts", dict(sum_once=True, gather_once=True)),
    ("qwen3_5", dict(fsdp=2), "all", dict(gather_once=True)),
    ("qwen3_5_moe", dict(fsdp=2), "its merger", dict(sum_once=True)),
]


@pytest.mark.parametrize("tried", parts.every(4, ONCE), ids=str)
def test_once_a_step(source: Sources, tried: tuple[str, dict[str, int], str, dict[str, bool]]) -> None:
    """No rank has images in the last micro-batch, after which gradients are reduced."""
    family, mesh, trained, once = tried
    trial = seeing_trial(family, source(family, mesh), mesh, trained)
    assert not trials.findings(trials.changed(trial, memory=mw.MemoryOptions(**once)))
