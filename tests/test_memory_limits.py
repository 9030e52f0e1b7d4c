"""Memory limits: ranks share the host of a machine; device and host memory are limited separately."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.memory.budget import (
    Need,
    _smallest_mesh,
    _with_offload,
    choices,
    fits,
    held_while_training,
    too_large,
    with_hold,
)
from meshwright.memory.simulate import StepWork
from meshwright.mesh import Mesh, loopback, memory_limits, shared_devices
from meshwright.mesh.memory_limits import Memory, memory_of
from meshwright.plan.resolve_model import TINY
from meshwright.recipe import MemoryOptions, Pipeline, Recipe
from meshwright.sharding import HELD, Stored, gathered_in_fp8
from tests import tiny


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "_host_bytes", lambda: 1000)
    assert memory_of(torch.device("cpu"), 3) == Memory(333, 333, shared=True)


def test_a_mesh_on_some_ranks_leaves_the_others_their_memory() -> None:
    mesh = SimpleNamespace(device=torch.device("cpu"), global_node=range(4), node=range(2))
    with patch("meshwright.mesh.memory_of", lambda _, local_ranks: local_ranks):
        assert cast(property, Mesh.memory).__get__(mesh) == 4


def test_the_smallest_limit_of_a_container_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup may have no limit ("max"), and one of two may be absent. Only the machine itself then limits."""
    files = tmp_path / "v2", tmp_path / "v1"
    monkeypatch.setattr(memory_limits, "_LIMITS", tuple(map(str, files)))
    machine = memory_limits._host_bytes()
    files[0].write_text("max\n")
    assert memory_limits._host_bytes() == machine > 5000
    files[1].write_text("5000\n")
    assert memory_limits._host_bytes() == 5000
    files[0].write_text("7000")
    assert memory_limits._host_bytes() == 5000
    files[1].write_text(str(1 << 63))
    assert memory_limits._host_bytes() == 7000


def test_neighbouring_ranks_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes each for a host of its own. What the user has set stays."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    assert shared_devices.environment_of(1, 1) == {}
    chosen = [shared_devices.environment_of(rank, 2) for rank in range(4)]
    assert [each["LOCAL_RANK"] for each in chosen] == ["0", "0", "1", "1"]
    assert len({each["NCCL_HOSTID"] for each in chosen}) == 4
    assert all("NCCL_MAX_CTAS" not in each and each["NCCL_IB_DISABLE"] == "1" for each in chosen)


def test_ranks_of_one_machine_stay_on_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has another name on macOS. A choice of the user stays, and no device is no choice."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    devices = [(1, "eth0"), (2, "lo0")]
    monkeypatch.setattr(loopback.socket, "if_nameindex", lambda: devices)
    assert loopback.loopback_devices() == {"NCCL_SOCKET_IFNAME": "=lo0"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert loopback.loopback_devices() == {"GLOO_SOCKET_IFNAME": "lo0", "NCCL_SOCKET_IFNAME": "=lo0"}
    devices.pop()
    assert loopback.loopback_devices() == {}


def test_an_error_names_what_is_missing_where() -> None:
    need = cast(Need, SimpleNamespace(axes="fsdp=2", stored=lambda: STORED))
    with patch("meshwright.memory.budget.ways_out", lambda *_: "choose fsdp=4"):
        apart, shared = (too_large(need, Memory(5 * 10**9, 7 * 10**9, shared=each)) for each in (False, True))
    expected = "fsdp=2 does not fit: a rank needs 9 GB (parameters 6 GB, masters 3 GB on the host) and has 5 GB"
    assert (apart, shared) == (f"{expected}, and 7 GB on the host; choose fsdp=4", f"{expected}; choose fsdp=4")


@dataclass(frozen=True)
class Shrinking:
    """A need of 1,000 bytes, divided by fsdp."""

    axes: Axes

    def stored(self) -> list[Stored]:
        return [Stored("parameters", 1000 // self.axes.fsdp)]


@pytest.mark.parametrize(
    ("fsdp", "num_bytes", "mesh"),
    [(2, 250, Axes(fsdp=4, tp=2)), (2, 249, Axes(fsdp=8, tp=2)), (3, 83, Axes(fsdp=12, tp=2)), (4096, 0, None)],
)
def test_the_smallest_mesh_that_fits_is_suggested(fsdp: int, num_bytes: int, mesh: Axes | None) -> None:
    need = cast(Need, Shrinking(Axes(fsdp=fsdp, tp=2)))
    assert _smallest_mesh(need, Memory(num_bytes, 0, shared=False)) == mesh


@pytest.mark.parametrize(
    ("options", "offload"), [(dict(gather_once=True), False), (dict(sum_once=True), False), (dict(), True)]
)
def test_offload_is_no_way_out_where_it_is_refused(options: dict[str, bool], offload: bool) -> None:
    need = SimpleNamespace(
        spec=SimpleNamespace(recipe=Recipe(memory=MemoryOptions(**options))), passing=None,
        held=SimpleNamespace(offload=offload),
    )  # fmt: skip
    assert _with_offload(cast(Need, need)) is None


def test_offload_moves_what_is_held_and_what_is_simulated() -> None:
    blueprint = Blueprint.of(tiny.of("qwen3"))
    held = held_while_training(torch.bfloat16, frozenset(blueprint.table.params))
    work = StepWork(64, 3, memory=MemoryOptions("full"))
    moved = _with_offload(Need(blueprint.spec, Axes(fsdp=2), held, work))
    assert moved is not None
    assert moved.held.offload
    assert moved.passing == replace(work, memory=MemoryOptions("full", offload=True))
    assert _with_offload(moved) is None


def test_a_pipeline_holds_what_takes_less_than_a_third() -> None:
    """All parameters gathered for a whole step, and their gradients. A schedule that needs it holds it anyway."""
    blueprint, axes = Blueprint.of(tiny.of("qwen3")), Axes(pp=2, fsdp=2)
    holds = blueprint.with_options(pipeline=Pipeline(hold=True))
    held = held_while_training(torch.bfloat16, frozenset(blueprint.trained()))
    once = sum(each.num_bytes for each in Need(holds.spec, axes, held).stored() if each.what in HELD)

    def hold(pipeline: Pipeline, device_bytes: int) -> bool | None:
        changed = with_hold(blueprint.with_options(pipeline=pipeline), axes, torch.bfloat16, device_bytes)
        return changed.recipe.pipeline.hold

    assert [hold(Pipeline(), 3 * once + more) for more in (0, 1)] == [False, True]
    assert [hold(Pipeline(hold=each), 0) for each in (True, False)] == [True, False]
    assert hold(Pipeline("zero-bubble"), 0)


@pytest.mark.parametrize(
    ("mesh", "recipe"),
    [
        (dict(pp=2), Recipe(memory=MemoryOptions(offload=True))),  # a copy from the host is wrapped on one shard too
        (dict(pp=2, fsdp=2), Recipe(fp8="block")),  # gathered as codes
        (dict(pp=2, fsdp=2), Recipe(fp8="block", memory=MemoryOptions(narrow_grads=True))),
    ],
)
def test_what_a_pipeline_holds_depends_on_its_options(mesh: dict[str, int], recipe: Recipe) -> None:
    blueprint, axes = Blueprint.of(TINY["tiny-qwen3-moe-fp8"], None, recipe), Axes(**mesh)
    spec = blueprint.with_options(pipeline=Pipeline(hold=True)).spec
    trained = frozenset(blueprint.trained())
    low = gathered_in_fp8(spec, trained, wide=recipe.memory.gathers_wide)
    held = held_while_training(torch.bfloat16, trained, offload=recipe.memory.offload, low=low)
    once = sum(each.num_bytes for each in Need(spec, axes, held).stored() if each.what in HELD)
    assert once > 0
    holds = [with_hold(blueprint, axes, torch.bfloat16, 3 * once + more).recipe.pipeline.hold for more in (0, 1)]
    assert holds == [False, True]


@dataclass(frozen=True)
class Recomputing:
    """A need of 900 bytes, 800 with selective and 100 with full recomputation, on the largest mesh."""

    passing: StepWork
    axes = Axes(fsdp=4096)
    held = SimpleNamespace(offload=True)
    spec = SimpleNamespace(recipe=Recipe())

    def stored(self) -> list[Stored]:
        return [Stored("x", {"none": 900, "selective": 800, "full": 100}[self.passing.memory.recompute])]


@pytest.mark.parametrize(("recompute", "advised"), [("none", True), ("selective", True), ("full", False)])
def test_full_recomputation_is_advised_to_all_who_recompute_less(recompute: str, advised: bool) -> None:
    """Where that is enough."""
    need = cast(Need, Recomputing(StepWork(8, memory=MemoryOptions(recompute))))
    for num_bytes in (100, 99):
        options = choices(need, Memory(num_bytes, 0, shared=False))
        assert options == ['MemoryOptions(recompute="full")'] * (advised and num_bytes == 100)


STORED = [Stored("parameters", 6 * 10**9), Stored("masters", 3 * 10**9, host=True)]


@pytest.mark.parametrize(
    ("device", "host", "apart", "together"), [(60, 90, True, False), (61, 10, False, True), (10, 91, False, True)]
)
def test_device_and_host_count_apart_unless_they_share_memory(
    device: int, host: int, apart: bool, together: bool
) -> None:
    stored = [Stored("parameters", device), Stored("masters", host, host=True)]
    assert fits(stored, Memory(60, 90, shared=False)) == apart
    assert fits(stored, Memory(120, 120, shared=True)) == together
