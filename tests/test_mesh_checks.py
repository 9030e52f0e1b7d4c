"""Checks of a mesh before a run: the model, the devices and the memory of a machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import ConfigError, MeshError
from meshwright.optim import AdamW
from meshwright.plan import mesh_checks
from meshwright.plan.mesh_checks import PROCESS_BYTES, as_option, check_devices, check_memory, objections
from meshwright.plan.resolve_model import TINY
from meshwright.recipe import ContextParallel, MemoryOptions, Recipe
from tests import tiny

MOE: dict[str, Any] = TINY["tiny-qwen3-moe-fp8"]


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


SHARING = "let ranks share a device: --ranks-per-device"


DEVICES: list[tuple[str, int, dict[str, int], int, str]] = [  # device, number of them, mesh, ranks of each, error
    ("cuda", 4, dict(fsdp=4), 1, ""), ("cuda", 4, dict(fsdp=8), 2, ""), ("cuda", 4, dict(tp=2), 1, ""),
    ("cuda:1", 4, {}, 1, ""), ("cuda:1", 4, dict(fsdp=2), 2, ""), ("xpu", 2, dict(tp=2), 1, ""),
    ("cuda", 4, dict(fsdp=5), 1, f"needs 5 devices, this machine has 4; .*, or {SHARING} 2$"),
    ("cuda", 4, dict(fsdp=9), 2, f"needs 5 devices of 2 ranks each, this machine has 4; .*, or {SHARING} 3$"),
    ("cuda", 0, {}, 1, "needs 1 device, this machine has 0; leave out --device to use CPU processes$"),
    ("cuda:1", 4, dict(fsdp=2), 1, f"needs 2 devices, --device cuda:1 has 1; .*, or {SHARING} 2$"),
    ("cuda:0", 1, dict(fsdp=2), 1, f"needs 2 devices, this machine has 1; .*, or {SHARING} 2$"),
    ("cuda:0", 0, {}, 1, "needs 1 device, this machine has 0; leave out --device to use CPU processes$"),
    ("xpu", 1, dict(tp=2), 1, "needs 2 devices, this machine has 1; leave out --device to use CPU processes$"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "has", "mesh", "each", "message"), DEVICES)
def test_devices_for_the_ranks_of_a_mesh(
    device: str, has: int, mesh: dict[str, int], each: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only NCCL ranks can share a device, and only if there is one."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: has)
    if not message:
        check_devices(Axes(**mesh), device, ranks_per_device=each)
        return
    with pytest.raises(MeshError, match=message):
        check_devices(Axes(**mesh), device, ranks_per_device=each)


def test_ranks_of_a_cpu_are_limited_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    check_devices(Axes(fsdp=16), "cpu")
    with pytest.raises(MeshError, match=r"17 processes for 1 core, .* at most 16 .*\n.*--mesh fsdp=17 shows"):
        check_devices(Axes(fsdp=17), "cpu")
    with pytest.raises(ConfigError, match=r"--ranks-per-device 2 lets NCCL .* needs --device cuda"):
        check_devices(Axes(), "xpu", ranks_per_device=2)


def test_a_mesh_as_an_option() -> None:
    assert as_option(Axes()) == "fsdp=1"
    assert as_option(Axes(pp=2, fsdp=4, ep=2)) == "pp=2,fsdp=4,ep=2"


def test_sizes_below_one_are_refused_alone() -> None:
    made = objections(Blueprint.of(MOE), dict(tp=0, fsdp=-2, cp=1, ep=3))
    assert [each.partition(" ")[0] for each in made] == ["fsdp=-2", "tp=0"]


WIDE = tiny.of("qwen3", hidden_size=512, intermediate_size=768, head_dim=128, num_attention_heads=4)


NARROW = {**WIDE, "intermediate_size": 192}


CHECKS: list[tuple[dict[str, Any], Recipe, dict[str, int], Any, str]] = [
    (WIDE, Recipe(), dict(tp=2), AdamW(state_dtype=torch.uint8), "state"),
    (WIDE, Recipe(), dict(tp=2), AdamW(), ""),
    (MOE, Recipe(fp8="block"), dict(tp=2), AdamW(), ""),
    (WIDE, Recipe(fp8="block"), dict(tp=4), AdamW(), "fp8='block' needs whole 128 x 128 blocks"),
    (WIDE, Recipe(context=ContextParallel(attention=2)), dict(cp=2), AdamW(), ""),
    (WIDE, Recipe(context=ContextParallel(attention=2)), dict(cp=3), AdamW(), "attention=2 of mw.ContextParallel"),
    (WIDE, Recipe(context=ContextParallel(attention=4)), dict(cp=4), AdamW(), ""),
    (WIDE, Recipe(context=ContextParallel(attention=4)), dict(cp=4, tp=2), AdamW(), "heads of layers.0.mixer"),
    (NARROW, Recipe(train=["*norm*"], frozen="nf4"), dict(tp=2), AdamW(), "frozen='nf4' has blocks of 64 columns"),
    (NARROW, Recipe(train=["*norm*"], frozen="nf4"), dict(fsdp=2), AdamW(), ""),
    (MOE, Recipe(memory=MemoryOptions(token_once=3)), dict(ep=4, fsdp=4), AdamW(), "token_once"),
    (MOE, Recipe(memory=MemoryOptions(token_once=2)), dict(ep=4, fsdp=4), AdamW(), ""),
    (MOE, Recipe(), dict(ep=4, fsdp=2), AdamW(), "ep=4"),
    (MOE, Recipe(), dict(ep=8, fsdp=8), AdamW(), "ep=8 does not divide expert=4"),
    (MOE, Recipe(), dict(pp=3), AdamW(), "3"),
    (MOE, Recipe(), dict(pp=2), AdamW(), ""),
]  # fmt: skip


@pytest.mark.parametrize(("config", "recipe", "mesh", "optimizer", "message"), CHECKS)
def test_meshes_that_a_model_refuses(
    config: dict[str, Any], recipe: Recipe, mesh: dict[str, int], optimizer: Any, message: str
) -> None:
    made = objections(Blueprint.of(config, None, recipe), mesh, None, optimizer)
    assert len(made) == bool(message), made
    assert message in "".join(made)


@pytest.mark.parametrize(("mesh", "training"), [(dict(replicate=3), False), (dict(fsdp=2), True), ({}, True)])
def test_all_ranks_of_a_machine_share_its_memory(
    mesh: dict[str, int], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blueprint, axes, held = Blueprint.of(MOE, None, Recipe(fp8="block")), Axes(**mesh), list[Any]()
    parts = [fake(num_bytes=100), fake(num_bytes=11)]
    monkeypatch.setattr(mesh_checks, "held_while_training", lambda *args, low: held.append((*args, low)))
    monkeypatch.setattr(mesh_checks, "Need", lambda *_: fake(stored=lambda: parts))
    wanted = axes.world * (PROCESS_BYTES + 111)
    for has in (wanted, wanted - 1):
        monkeypatch.setattr(mesh_checks, "memory_of", lambda *_, has=has, **__: fake(host_bytes=has))
        check_memory(blueprint, axes, torch.float64, "cuda", training=training)
        if has == wanted:
            check_memory(blueprint, axes, torch.float64, "cpu", training=training)
            continue
        with pytest.raises(MeshError, match="training on" if training else "holding the weights on"):
            check_memory(blueprint, axes, torch.float64, "cpu", training=training)
    trained = {*blueprint.table.params} if training else set()
    assert held == [(torch.float64, trained, blueprint.spec.fp8)] * 2
