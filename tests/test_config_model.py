"""The model of a config on its mesh: which optimizer, how many micro-batches, what is refused and what is estimated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.axes import Axes
from meshwright.blueprint import Blueprint, file_dtype
from meshwright.errors import LayoutError
from meshwright.objectives import Distill, Dpo, Reward, Simpo
from meshwright.optim import AdamW, Muon
from meshwright.recipe import ContextParallel, Lora, MemoryOptions, Pipeline, Recipe
from meshwright.train import config_file, config_model
from meshwright.train.config import Config, OptimSection
from tests import tiny

SHARED: dict[str, Any] = dict(betas=[0.7, 0.8], eps=1e-3, weight_decay=0.3, state_dtype="bfloat16")
OF_MUON: dict[str, Any] = dict(momentum=0.6, by_head=True, exclude=["a", "b"], matrix_dtype="float32")
BY_HAND: dict[str, Any] = {**SHARED, "betas": (0.7, 0.8), "state_dtype": torch.bfloat16}
MUON_BY_HAND: dict[str, Any] = {**OF_MUON, "exclude": ("a", "b"), "matrix_dtype": torch.float32}


def config(model: str = "m", **sections: Any) -> Config:
    return Config.model_validate({"model": model, "out": "o", "data": [{"path": "x"}], **sections})


def blueprint(name: str = "qwen3", train: str = "**") -> Blueprint:
    return Blueprint.of(tiny.of(name), recipe=config(train={"train": train}).recipe)


@pytest.mark.parametrize(
    ("section", "optimizer"),
    [
        (dict(SHARED), AdamW(**BY_HAND)),
        (dict(kind="muon", **SHARED, **OF_MUON), Muon(**BY_HAND, **MUON_BY_HAND)),
        (dict(state_dtype="uint8"), AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, state_dtype=torch.uint8)),
        ({}, AdamW(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, state_dtype=None)),
    ],
)
def test_the_optimizer_has_all_options_of_the_file(section: dict[str, Any], optimizer: Any) -> None:
    assert config_model.optimizer_of(OptimSection(**section)) == optimizer


def test_the_recipe_has_all_options_of_the_file() -> None:
    """Take values that differ from each other and from the defaults."""
    memory = dict(recompute="full", reshard=False, compiled=True, gather_once=True, narrow_grads=True, token_once=3)
    pipeline, context = dict(schedule="zero-bubble", stages=3, ends=[2, 5], hold=True), dict(attention=2, delta=5)
    lora = dict(rank=3, alpha=5.0, targets=["q_proj"], expert_rank=7, rslora=True, path="a")
    more = dict(train="layers.**", tower=True, mtp="all", mtp_weight=0.5, fp8="block", fp8_skip=["*.o"], frozen="mxfp4")
    sections = dict(pipeline=pipeline, context=context, lora=lora, train={**memory, **more, "dtype": "float64"})
    classes = dict(objective="classify", classify=dict(labels=["a", "b"]))
    assert config(**sections, **classes).recipe == Recipe(
        head="value", labels=("a", "b"), dtype=torch.float64, memory=MemoryOptions(**memory), lora=Lora(**lora),
        pipeline=Pipeline(**pipeline), context=ContextParallel(**context), **more,
    )  # fmt: skip
    assert [config(objective=name).recipe.head for name in ("reward", "embedding", "dpo")] == ["value", "none", "lm"]


def test_ranks_of_a_mesh() -> None:
    """Experts take ranks of the other axes."""
    mesh = config(mesh=dict(replicate=2, fsdp=3, tp=5, ep=7, cp=11, pp=13)).mesh
    assert (mesh.num_data_ranks, mesh.world) == (6, 2 * 3 * 5 * 11 * 13)


@pytest.mark.parametrize(
    ("objective", "section", "options"),
    [
        ("dpo", dict(beta=0.3, kind="ipo", sft_weight=0.2, reference="r"), Dpo(beta=0.3, kind="ipo", sft_weight=0.2)),
        ("distill", dict(top_k=3, alpha=0.25, temperature=2.0, teacher="t", scores="s"),
         Distill(top_k=3, alpha=0.25, temperature=2.0)),
        ("simpo", dict(beta=3.0, margin=0.5), Simpo(beta=3.0, margin=0.5)),
        ("reward", {}, Reward()), ("sft", {}, None),
    ],
)  # fmt: skip
def test_the_objective_has_the_options_of_its_section(objective: str, section: dict[str, Any], options: Any) -> None:
    """A teacher and a reference are no options of the loss."""
    sections = {objective: section} if section else {}
    assert config(objective=objective, **sections).objective_options == options


@pytest.mark.parametrize(
    ("size", "mesh", "num"),
    [
        (72, {}, 6), (72, dict(fsdp=2), 3), (72, dict(replicate=3), 2), (72, dict(replicate=3, fsdp=2), 1),
        (72, dict(cp=2, tp=3, pp=5), 6), (60, dict(fsdp=2), None), (None, dict(fsdp=4), 8), (12, dict(fsdp=2), None),
    ],
)  # fmt: skip
def test_micro_batches_are_those_of_a_data_rank(size: int | None, mesh: dict[str, int], num: int | None) -> None:
    assert config_model._num_batches(config(mesh=mesh, train=dict(length=12, tokens_per_step=size))) == num


@pytest.mark.parametrize(
    ("name", "mesh", "starts"),
    [
        ("qwen3", dict(fsdp=2), []),
        ("qwen3", dict(fsdp=2, ep=2), ["ep=2 divides experts"]),
        ("qwen3", dict(ep=3), ["ep=3 divides experts"]),  # not also that it does not divide fsdp
        ("qwen3", dict(ep=2, tp=3), ["ep=2 divides experts", "tp=3 does not divide"]),
        ("qwen3_moe", dict(fsdp=2, ep=2), []),
        ("qwen3_moe", dict(ep=2), ["ep=2 does not divide"]),
    ],
)
def test_the_mesh_is_refused_for_each_reason_once(name: str, mesh: dict[str, int], starts: list[str]) -> None:
    refused = config_model.objections_to(blueprint(name), config(mesh=mesh))
    assert [any(text.startswith(start) for text in refused) for start in starts] == [True] * len(starts)
    assert len(refused) == len(starts)


def test_the_schedule_is_checked_for_the_micro_batches_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(config_model, "objections", lambda *given: asked.append(given[1:]) or ["no"])
    given = config(mesh=dict(fsdp=2, pp=3), train=dict(length=12, tokens_per_step=72))
    assert config_model.objections_to(blueprint(), given) == ["no"]
    assert asked == [(dict(replicate=1, fsdp=2, tp=1, ep=1, cp=1, pp=3), 3)]


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "uint8"])
def test_blocks_of_8_bits_are_checked_for_trained_parameters(
    dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(config_model, "check_blocks", lambda spec, axes, names, fix: asked.append((axes, names, fix)))
    monkeypatch.setattr(AdamW, "quantised", lambda self, table, trained: [*trained])
    given = config(mesh=dict(fsdp=3, tp=2), optim=dict(state_dtype=dtype))
    config_model.check_state(blueprint(train="layers.0.mlp.*"), given)
    if dtype != "uint8":
        assert not asked
        return
    [(axes, names, fix)] = asked
    assert axes == Axes(fsdp=3, tp=2)
    assert names
    assert all(name.startswith("layers.0.mlp.") for name in names)
    assert fix == 'state_dtype = "bfloat16"'


def stored(at: Path, **sections: Any) -> Config:
    """Return the config of a run of a model whose files hold no weights."""
    (at / "config.json").write_text(json.dumps(tiny.of("qwen3")))
    return config(str(at), **sections)


def test_a_layout_has_the_work_and_the_optimizer_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    work_of = config_model.work_of
    monkeypatch.setattr(config_model, "work_of", lambda *given: asked.append(given) or work_of(*given))
    for size, num in ((96, 2), (72, 1)):  # 72 tokens are no whole number of micro-batches
        train = dict(length=24, tokens_per_step=size)
        figures = config_model.layout_of(stored(tmp_path, mesh=dict(fsdp=2), train=train, optim=dict(eps=1e-3)))
        assert asked.pop() == (Axes(fsdp=2), 24, num)
        assert figures.axes == Axes(fsdp=2)
        assert figures.optimizer == AdamW(betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)


def test_a_layout_is_refused_for_the_state_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise LayoutError("a block is cut")

    monkeypatch.setattr(config_model, "check_blocks", refuse)
    config_model.layout_of(stored(tmp_path))
    with pytest.raises(LayoutError, match="a block is cut"):
        config_model.layout_of(stored(tmp_path, optim=dict(state_dtype="uint8")))
    monkeypatch.setattr(AdamW, "check", refuse)
    with pytest.raises(LayoutError, match="a block is cut"):
        config_model.layout_of(stored(tmp_path))


@pytest.mark.parametrize(
    ("rank", "train", "estimates"),
    [
        (0, {}, True), (0, dict(train=["**"]), True), (1, {}, False), (0, dict(train="layers.*"), False),
        (0, dict(dtype="float32"), False), (0, dict(dtype="float64"), False), (0, dict(compiled=True), False),
    ],
)  # fmt: skip
def test_memory_is_estimated_by_rank_0_for_what_it_can_simulate(
    rank: int, train: dict[str, Any], estimates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(config_model, "layout_of", asked.append)  # then fails, which is no error of the run
    mesh: Any = SimpleNamespace(rank=rank, least_bytes=1, memory=None)
    config_model.warn_of_memory(config(train=train), mesh)
    assert bool(asked) == estimates


@dataclass(frozen=True)
class Layout:
    """A layout that needs what its device has."""

    device: int | None = None

    @property
    def need(self) -> Any:
        return SimpleNamespace(stored=lambda: self.device)


@pytest.mark.parametrize("fits", [True, False])
def test_the_smallest_device_of_all_ranks_decides_whether_a_step_fits(
    fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan of a pipeline gathers once where the device has room for it."""
    asked: list[Any] = []
    monkeypatch.setattr(config_model, "layout_of", lambda _: Layout())
    monkeypatch.setattr(config_model, "fits", lambda *given: asked.append(given) or fits)
    monkeypatch.setattr(config_model, "too_large", lambda need, memory: f"{need.stored()} of {memory}")
    mesh: Any = SimpleNamespace(rank=0, least_bytes=7, memory="memory")
    config_model.warn_of_memory(config(), mesh)
    assert asked == [(7, "memory")]
    warned = [] if fits else ["a step will probably fail: 7 of memory"]
    assert [each.getMessage() for each in caplog.records] == warned


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32), ({"dtype": "float16"}, torch.float16), ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float64", "torch_dtype": "bfloat16"}, torch.float64),
        ({"text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ({"dtype": None, "text_config": {"dtype": "float16"}}, torch.float16),
        ({"dtype": "float64", "text_config": {"dtype": "float16"}}, torch.float64),
    ],
)  # fmt: skip
def test_the_dtype_of_files_may_stand_in_the_config_of_the_text_model(config: Any, dtype: torch.dtype) -> None:
    assert file_dtype({"model_type": "qwen3_vl", **config}) == dtype


@pytest.mark.parametrize(("key", "values"), [(0, [7, 2]), (1, [1, 7]), (2, [1, 2, 7])])
def test_a_field_of_a_list_is_replaced_or_appended(key: int, values: list[int]) -> None:
    before = [1, 2]
    config_file._put(before, key, 7)
    assert before == values
