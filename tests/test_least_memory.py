"""Bounds and estimates of a search by hand, checks of a mesh, and which files a plan of a model reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import ConfigError, LoadError
from meshwright.plan import least_memory, one_of_each_layer, resolve_model
from meshwright.plan.least_memory import LeastMemory
from meshwright.plan.resolve_model import TINY
from meshwright.recipe import Lora, MemoryOptions, Recipe
from meshwright.sharding import Charge, Work
from meshwright.weights import peft_files
from tests import tiny

MOE: dict[str, Any] = TINY["tiny-qwen3-moe-fp8"]
ONE_MATRIX = 256 * 256


def fake(**fields: Any) -> Any:
    return cast(Any, SimpleNamespace(**fields))


def test_trained_elements_by_kind() -> None:
    """Experts count apart, and frozen parameters in neither."""
    least = LeastMemory(Blueprint.of(MOE, None, Recipe(train=["*experts*", "*norm*"])), 8, 3.0)
    norms = sum(param.numel for param in least.blueprint.table if "norm" in param.name)
    assert (least._expert_elements, least._dense_elements) == (4 * 256 * 128 * 3, norms)


def test_frozen_parameters_count_as_they_are_stored() -> None:
    """Matrices in 4 bits take their codes and scales, the rest the dtype of its files."""
    blueprint = Blueprint.of(MOE, None, Recipe(train=["*norm*"], frozen="nf4"))
    names = {*blueprint.trained()}
    codings, dtypes = blueprint.codings(names, Axes()), blueprint.stored_dtypes(least_memory.COMPUTE, names)
    expected = 0
    for param in blueprint.table:
        if param.name in codings:
            expected += param.numel // 2 + param.numel // 64 * 4
        elif param.name not in names:
            expected += param.numel * dtypes[param.name].itemsize
    assert codings.keys() & {"layers.0.mlp.down.weight"}
    assert LeastMemory(blueprint, 8, 3.0)._frozen_bytes == expected


@pytest.mark.parametrize(("num_experts", "spread", "mesh"), [
    (9, True, dict(fsdp=3, ep=3)), (9, False, dict(fsdp=2)), (8, True, dict(fsdp=2, ep=2)),
    (7, True, dict(fsdp=7, ep=7)),
])  # fmt: skip
def test_the_fewest_ranks_that_shard_a_model(
    num_experts: int, spread: bool, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def simulated(spec: Any, stage: Any, mesh: Any, work: Any) -> Any:
        made[:] = [mesh.axes, work]
        return fake(kept=5)

    monkeypatch.setattr(least_memory, "activations", simulated)
    blueprint: Any = fake(balance=fake(num_experts=num_experts), spec=fake(stages=lambda axes, rank: [axes]))
    assert LeastMemory(blueprint, 77, 3.0)._kept("full", spread) == 5
    assert made[0] == Axes(**mesh)
    assert (made[1].tokens, made[1].compute, made[1].memory) == (77, torch.bfloat16, MemoryOptions("full"))


# One layer of each kind


def test_layers_that_differ_in_fp8_alone_are_of_two_kinds() -> None:
    config = {**MOE, "num_hidden_layers": 5, "mlp_only_layers": [0, 1, 2]}
    wide = Blueprint.of(config, None, Recipe(fp8="block", fp8_skip=["layers.1.*"]))
    model = one_of_each_layer.one_of_each_layer(wide)
    assert model.num == {0: 2, 1: 1, 3: 2}
    assert {name.split(".")[1] for name in model.blueprint.spec.fp8} == {"0", "3"}
    assert {p.layer for p in model.blueprint.table} == {None, 0, 1, 3}
    assert {p.name for p in model.blueprint.table if p.layer is None} == {p.name for p in wide.table if p.layer is None}


def test_the_rank_with_most_layers_sets_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers on two ranks of pp: three of five on the first. Embedding and head count whole."""
    model = one_of_each_layer.one_of_each_layer(Blueprint.of({**MOE, "num_hidden_layers": 5}))
    assert model.num == {0: 1, 1: 4}
    charges = [Charge(what, "all_gather", ("fsdp",), 8, 10) for what in ("layers.0", "layers.1.mlp.experts", "head")]
    asked: list[Any] = []

    def bill(blueprint: Any, axes: Axes, rank: int, work: Any, router: str) -> list[Charge]:
        asked[:] = [blueprint, axes, rank, router]
        return charges

    class Cost:
        def __init__(self, whole: Any, axes: Axes, work: Any, memory: Any, cluster: Any, flops: Any) -> None:
            assert (whole, axes.pp, flops) == (model.whole, 2, model.flops)

        def estimate(self, *parts: Any) -> Any:
            return parts

    monkeypatch.setattr(one_of_each_layer, "engine_bill", bill)
    monkeypatch.setattr(one_of_each_layer, "fsdp_units", lambda *_: "units")
    monkeypatch.setattr(one_of_each_layer, "StepCost", Cost)
    memory, work = MemoryOptions("full"), Work(64, 3, 2)
    made: Any = one_of_each_layer.quick_estimate(model, Axes(pp=2, fsdp=2, tp=2), work, memory, cast(Any, "cluster"))
    assert [charge.count for charge in made[0][:3]] == pytest.approx([6, 24, 10])
    assert (asked[1:], asked[0].recipe.memory) == ([Axes(fsdp=2, tp=2), 0, "previous"], memory)
    [sent] = made[0][3:]
    assert (sent.op, sent.axes, sent.num_bytes, sent.count) == ("send", ("pp",), 64 // 2 * 256 * 2, 6)


def test_options_that_hold_parameters_and_gradients() -> None:
    for own in (MemoryOptions("full", offload=True), MemoryOptions("full", narrow_grads=True)):
        assert one_of_each_layer.hold_options(own) == MemoryOptions("full", gather_once=True, sum_once=True)


# Models by name


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note how files of models are opened and downloaded."""
    calls: list[str] = []

    def note(call: str) -> bool:
        calls.append(call)
        return True

    for name in ("open_index", "open_source"):
        monkeypatch.setattr(resolve_model, name, lambda at, name=name: note(name) and fake(entries=[at]))
    monkeypatch.setattr(
        resolve_model, "download", lambda model, weights: note(f"{model} {weights}") and tmp_path / "weights"
    )
    monkeypatch.setattr(resolve_model, "Blueprint", fake(of=lambda *args, **kwargs: (args, kwargs)))
    for name in ("weights", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"x": 1}')
    (tmp_path / "weights" / "model.safetensors").touch()
    (tmp_path / "config-8b.json").write_text('{"x": 2}')
    return calls


@pytest.mark.parametrize(
    ("model", "weights", "calls"),
    [
        ("weights", False, ["open_source"]),
        ("weights", True, ["open_source"]),
        ("weights/config.json", False, ["open_source"]),
        ("bare", False, ["open_index"]),
        ("a/b", False, ["a/b False", "open_index"]),  # the cache of the hub may hold some of the files
        ("a/b", True, ["a/b True", "open_source"]),
    ],
)
def test_files_that_show_a_model(
    model: str, weights: bool, calls: list[str], opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (config, source, _), options = cast(Any, resolve_model.find(model, Recipe(), weights, lambda _: None))
    assert opened == calls
    assert (config, bool(source), options["stored"]) == ({"x": 1}, True, torch.float64)
    assert options["directory"].name == ("bare" if model == "bare" else "weights")


def test_a_config_alone_has_no_weights(opened: list[str], tmp_path: Path) -> None:
    at = tmp_path / "config-8b.json"
    (config, source, _), options = cast(Any, resolve_model.find(str(at), Recipe(), False, lambda _: None))
    assert (config, source, options, opened) == ({"x": 2}, None, {}, [])
    for model, message in ((str(at), "a config without weights"), ("tiny-qwen3", "no trained weights"),
                           (str(tmp_path / "bare"), "no .*safetensors")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            resolve_model.find(model, Recipe(), True, lambda _: None)
    with pytest.raises(ConfigError, match="neither a directory"):
        resolve_model.find("nothing", Recipe(), False, lambda _: None)


def test_files_of_adapters_decide_what_is_planned(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_files, "recipe_of", lambda lora: Lora(rank=5) if lora.path == "adapter" else lora)
    for lora in (Lora(path="adapter"), Lora(rank=5)):
        (_, _, recipe), _ = cast(Any, resolve_model.find("tiny-qwen3", Recipe(lora=lora), False, lambda _: None))
        assert recipe == Recipe(lora=Lora(rank=5))
    assert not opened


@pytest.mark.parametrize("file", [peft_files.ADAPTERS, peft_files.CONFIG_FILE])
def test_adapters_alone_are_no_model(file: str, opened: list[str], tmp_path: Path) -> None:
    """A checkpoint of a run has the config of its base, and PEFT's files have none."""
    (tmp_path / "bare" / file).touch()
    if file == peft_files.CONFIG_FILE:
        (tmp_path / "bare" / "config.json").unlink()
    with pytest.raises(LoadError, match="holds no base"):
        resolve_model.find(str(tmp_path / "bare"), Recipe(), False, lambda _: None)
    assert not opened


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
