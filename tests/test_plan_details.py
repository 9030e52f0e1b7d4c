"""Details of plans: devices of a machine, lists of options, the nearest mesh, printed checks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.checkpoint import inspect
from meshwright.errors import ConfigError, MeshError
from meshwright.memory.fsdp_buffers import sharded_units
from meshwright.memory.meta_model import Seen
from meshwright.plan import search
from meshwright.plan.least_memory import LeastMemory
from meshwright.plan.mesh_checks import as_option, check_devices
from meshwright.plan.search import Cut, Search
from meshwright.plan.svg import _caption
from meshwright.plan.wording import saved
from meshwright.recipe import Lora, MemoryOptions, Recipe
from tests import tiny

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


def test_captions_of_the_mesh() -> None:
    plain, replicas = _caption(Axes(fsdp=4)), _caption(Axes(replicate=2, fsdp=4))
    assert plain == "Each cell is a rank, and its shade is its data rank."
    assert replicas == "One replica of 2 is shown. " + plain
    assert _caption(Axes(pp=2, fsdp=2, ep=2)) == (
        "The ranks of a place on pp hold the same layers. Each cell is a rank, and its shade is its place on ep: ranks "
        "of one shade hold the same experts of a place."
    )


@pytest.mark.parametrize(
    ("memory", "optimizer", "wanted"),
    [
        ({}, mw.AdamW(), []),
        (dict(recompute="full", offload=True), mw.AdamW(), ["recompute=full", "offload=True"]),
        (dict(token_once=2), mw.AdamW(state_dtype=torch.bfloat16), ["token_once=2", "state_dtype=bfloat16"]),
        ({}, mw.AdamW(state_dtype=torch.uint8), ["state_dtype=uint8"]),
    ],
)  # fmt: skip
def test_options_that_differ_from_their_defaults(memory: dict[str, Any], optimizer: Any, wanted: list[str]) -> None:
    figures = cast(Any, SimpleNamespace(memory=MemoryOptions(**memory), optimizer=optimizer))
    assert saved(figures) == wanted


def test_the_nearest_mesh_is_among_those_with_the_smallest_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among meshes with equal parts, those with the most tp and pp are costed. The nearest is named."""
    costed: list[str] = []
    left = {"tp=8": -9, "pp=2 tp=4": -5, "tp=4": -1, "fsdp=2 tp=4": -3, "replicate=8": 100}

    def in_full(cut: Cut, variant: str) -> Any:
        costed.append(f"{cut.axes} {variant}")
        return SimpleNamespace(left_bytes=left[str(cut.axes)], cut=cut)

    monkeypatch.setattr(search, "_NEAREST", 3)
    request, recipe = SimpleNamespace(recompute=("none", "full")), SimpleNamespace(memory=MemoryOptions())
    searching = cast(Any, SimpleNamespace(
        blueprint=SimpleNamespace(recipe=recipe), request=request, _once=False, _seconds=0.0, _in_full=in_full,
        least=SimpleNamespace(elements=lambda axes: 8 / axes.world * axes.replicate),
        _variants=lambda _, memory: ["first", f"{memory.recompute} {memory.offload}"], _report_progress=lambda _: None,
    ))  # fmt: skip
    meshes = [Axes(replicate=8), Axes(fsdp=2, tp=4), Axes(tp=4), Axes(tp=8), Axes(pp=2, tp=4)]
    nearest = Search._nearest(searching, [Cut(axes, 1) for axes in meshes])
    assert costed == ["tp=8 full True", "pp=2 tp=4 full True", "fsdp=2 tp=4 full True"]
    assert str(cast(Any, nearest).cut.axes) == "fsdp=2 tp=4"
    costed.clear()
    searching._once, searching._seconds = True, 10.0**9  # no offload with gradients that are summed once; out of time
    nearest = Search._nearest(searching, [Cut(axes, 1) for axes in meshes])
    assert costed == ["tp=8 full False", "pp=2 tp=4 full False", "fsdp=2 tp=4 full False"]
    assert str(cast(Any, nearest).cut.axes) == "tp=8"


def difference(largest: float | None = 0.25) -> Any:
    return SimpleNamespace(plane="weights", key="k", why="values differ", num=1200, largest=largest)


@pytest.mark.parametrize(
    ("wrong", "apart", "lines"),
    [
        (None, None, ["bytes not read; --verify compares them with their checksums"]),
        ([], None, ["every byte is as it was written"]),
        (["bytes 0 to 8 are damaged"], None, ["bytes 0 to 8 are damaged"]),
        ([], [], ["every byte is as it was written", "no tensor differs"]),
        (None, [difference()],
         ["bytes not read; .*", "1 tensor differs", "weights k: values differ, 1,200 elements, by up to 0.25"]),
        (None, [difference(None)] * 2, ["bytes not read; .*", "2 tensors differ", *["weights k: values differ"] * 2]),
        (None, [difference(None)], ["bytes not read; .*", "1 tensor differs", "weights k: values differ"]),
    ],
)  # fmt: skip
def test_printed_checks_of_a_checkpoint(
    wrong: Any, apart: Any, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect._print_checks(inspect.Console(width=200), wrong, apart)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(lines)
    for line, pattern in zip(printed, lines, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize("more", [0, 1])
def test_only_the_first_differences_are_printed(more: int, capsys: pytest.CaptureFixture[str]) -> None:
    inspect._print_checks(inspect.Console(width=200), [], [difference()] * (inspect._MOST + more))
    printed = capsys.readouterr().out.splitlines()
    assert sum("weights k" in line for line in printed) == inspect._MOST
    assert [line for line in printed if "--json" in line] == ["  and 1 more; --json has them all"] * more


def test_frozen_weights_that_are_offloaded_take_no_device_memory() -> None:
    blueprint = Blueprint.of(tiny.of("qwen3"), None, Recipe(lora=Lora(rank=2)))

    def bound(least: LeastMemory, offload: bool) -> float:
        return least.num_bytes(Axes(), 1, MemoryOptions("full", offload=offload), holds=False)

    least = LeastMemory(blueprint, 16, 8)
    frozen = least._frozen_bytes
    on_device, offloaded = bound(least, False), bound(least, True)
    least._frozen_bytes = 2 * frozen  # type: ignore[misc] # a cached property
    assert bound(least, False) == on_device + frozen
    assert bound(least, True) == offloaded


@pytest.mark.parametrize(
    ("mesh", "offload", "wrapped"),
    [({}, False, False), ({}, True, True), (dict(tp=2), False, False), (dict(replicate=2), False, True),
     (dict(fsdp=2), False, True), (dict(cp=2), False, True)],
    ids=str,
)  # fmt: skip
def test_the_simulation_has_buffers_for_what_fsdp_wraps(mesh: dict[str, int], offload: bool, wrapped: bool) -> None:
    """FSDP wraps a unit that it shards, one that it only replicates, and one that it offloads."""
    spec, axes = Blueprint.of(tiny.of("qwen3")).spec, Axes(**mesh)
    units = spec.stages(axes, 0)[0].units
    seen = Seen(torch.bfloat16, MemoryOptions(offload=offload))
    assert len(sharded_units(spec, units, axes, axes.coords(0), seen)) == wrapped * len(units)
