"""Bounds and estimates of a search by hand, checks of a mesh, and which files a plan of a model reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint
from meshwright.errors import ConfigError, MeshError
from meshwright.optim import AdamW
from meshwright.plan import least_memory, mesh_checks, one_of_each_layer, resolve_model
from meshwright.plan.least_memory import LeastMemory
from meshwright.plan.mesh_checks import PROCESS_BYTES, check_memory, objections
from meshwright.plan.resolve_model import TINY
from meshwright.recipe import MemoryOptions, Recipe
from meshwright.sharding import Charge, Work
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


def test_least_bytes_in_the_first_backward() -> None:
    """Before it there are no gradients, after it no activations of its micro-batch: one of the moments is the peak."""
    least = LeastMemory(Blueprint.of(MOE), 8, 3.0)
    least.__dict__.update(_dense_elements=600, _expert_elements=400, _frozen_bytes=0.0)
    least._kept = lambda kind, spread: 700  # type: ignore[assignment]
    moments = {1: 4000, 2: 4000 + 700}
    for num_batches, moment in moments.items():
        assert least.num_bytes(Axes(), num_batches, MemoryOptions(), holds=False) == 7 * 1000 + moment


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


# Checks of a mesh


def test_sizes_below_one_are_refused_alone() -> None:
    made = objections(Blueprint.of(MOE), dict(tp=0, fsdp=-2, cp=1, ep=3))
    assert [each.partition(" ")[0] for each in made] == ["fsdp=-2", "tp=0"]


WIDE = tiny.of("qwen3", hidden_size=512, intermediate_size=768, head_dim=128, num_attention_heads=4)
CHECKS: list[tuple[dict[str, Any], Recipe, dict[str, int], Any, str]] = [
    (WIDE, Recipe(), dict(tp=2), AdamW(state_dtype=torch.uint8), "state"),
    (WIDE, Recipe(), dict(tp=2), AdamW(), ""),
    (MOE, Recipe(fp8="block"), dict(tp=2), AdamW(), ""),
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
