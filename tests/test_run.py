"""A run on one rank: its exports, its first step, its lock, and the models and images that it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.axes import Axes
from meshwright.recipe import Lora, Recipe
from meshwright.train import rank, samples, thumbnails, trained_model
from meshwright.train import run as run_module
from meshwright.train.config import SourceSection
from meshwright.train.lock import OutInUse
from meshwright.train.run import Trainer
from meshwright.train.trained_model import TrainedModel

of = SimpleNamespace
FACTORS = {"a.lora.a": True, "a.lora.b": True, "norm": False}


def trainer_of(**fields: Any) -> Any:
    trainer = object.__new__(Trainer)
    vars(trainer).update(fields)
    return trainer


@pytest.mark.parametrize(
    ("lora", "merged", "trained", "adapter", "export", "loads"),
    [
        (False, False, ["norm"], False, True, True),
        (True, False, ["a.lora.a", "a.lora.b"], True, False, True),
        (True, True, ["a.lora.a", "a.lora.b"], True, True, True),
        (True, True, ["a.lora.a", "norm"], False, True, True),  # an adapter has no place for the norm
        (True, False, ["norm", "a.lora.a"], True, False, True),  # which is refused
        (True, False, ["a.lora.a"], True, False, False),  # likewise
        (True, True, ["a.lora.a"], False, True, False),  # no class loads the adapter
    ],
)
def test_exports_of_a_run(
    lora: bool, merged: bool, trained: list[str], adapter: bool, export: bool, loads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The check before the first step is that of the export at the end."""
    called: list[Any] = []
    for name in ("check_export", "check_export_adapter", "export", "export_adapter"):
        note = lambda model, path, name=name, **options: called.append((name, path, options))  # noqa: E731 - short
        monkeypatch.setattr(run_module, name, note)
    table = {name: of(adapter=is_factor) for name, is_factor in FACTORS.items()}
    model = of(table=table, trained=trained, blueprint=of(loads=loads))
    monkeypatch.setattr(run_module, "why_without_class", lambda blueprint: "" if blueprint.loads else "other keys")
    config = of(lora=Lora() if lora else None, save=of(merged=merged, export=True))
    trainer = trainer_of(model=model, config=config, out=Path("out"))
    trainer._check_export()
    trainer._export()
    overwrite, merge = {"overwrite": True}, {"overwrite": True, "merge": merged}
    expected = [
        (f"{prefix}{name}", Path("out") / folder, options)
        for prefix in ("check_", "")
        for name, folder, options in [("export_adapter", "adapter", overwrite)] * adapter
        + [("export", "export", merge)] * export
    ]
    assert called == expected


@pytest.mark.parametrize(
    ("why", "export", "exports", "returned"),
    [("", True, 1, ""), ("early stopping", True, 1, ""), ("signal 15", True, 0, "signal 15"),
     ("the time limit", True, 0, "the time limit"), ("", False, 0, ""), ("early stopping", False, 0, "")],
)  # fmt: skip
def test_a_run_exports_at_a_normal_end(
    why: str, export: bool, exports: int, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(why="", config=of(save=of(export=export)))
    monkeypatch.setattr(Trainer, "steps", lambda self: iter([setattr(self, "why", why)]))
    monkeypatch.setattr(Trainer, "_export", exported := Mock())
    assert trainer.run() == returned
    assert exported.call_count == exports


@pytest.mark.parametrize(
    ("head", "objective", "experts", "writes"),
    [
        ("lm", "sft", 6, True),
        ("lm", "rerank", 0, False),
        ("value", "reward", 0, False),
        ("none", "embedding", 0, False),
    ],
)
def test_what_the_live_view_is_told_at_the_start(head: str, objective: str, experts: int, writes: bool) -> None:
    axes = Axes(replicate=1, fsdp=4, tp=2, cp=1, pp=1, ep=2)
    blueprint = of(balance=of(num_experts=experts, top_k=3), head=head)
    config = of(train=of(streams_per_step=8, step_tokens=512), objective=objective)
    trainer = trainer_of(
        mesh=of(axes=axes), model=of(blueprint=blueprint), data=of(num_steps=40), config=config, position=of(stream=24)
    )
    assert trainer._first_step == 4
    assert trainer._start_metrics() == {
        "num_steps": 40, "world": 8, "mesh": dict(replicate=1, fsdp=4, cp=1, tp=2, pp=1, ep=2),
        "tokens_per_step": 512, "from": 3, "writes": writes,
        **({"experts": {"num": 6, "top_k": 3}} if experts else {}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "launched", "in_use", "holds", "refused"),
    [(0, False, False, True, False), (0, True, False, False, False), (1, False, False, False, False),
     (0, False, True, True, True), (1, False, True, False, True)],
)  # fmt: skip
def test_rank_0_locks_out_unless_its_launcher_has(
    number: int, launched: bool, in_use: bool, holds: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(rank.LAUNCHER, raising=False)
    if launched:
        monkeypatch.setenv(rank.LAUNCHER, "7")
    hold = Mock(return_value="lock", side_effect=OutInUse("in use") if in_use else None)
    monkeypatch.setattr(run_module, "hold", hold)
    mesh: Any = of(rank=number, broadcast_object=lambda value: value or ("in use" if in_use else ""))
    if refused:
        with pytest.raises(OutInUse, match="in use"):
            run_module._lock_of(Path("out"), mesh)
    else:
        assert cast(Any, run_module._lock_of(Path("out"), mesh)) == ("lock" if holds else None)
    assert hold.call_count == holds


@pytest.mark.parametrize("enabled", [True, False])
def test_deterministic_operations(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", switched := Mock())
    monkeypatch.setattr(os, "environ", environment := {})
    run_module.be_deterministic(enabled)
    assert environment == ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if enabled else {})
    assert [each.args for each in switched.call_args_list] == [(True,)] * enabled


@pytest.mark.parametrize(("peak", "expected"), [(50.0, 300.0), (None, None)])
def test_the_peak_is_that_of_all_devices(
    peak: float | None, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "peak_of", lambda name: peak if name == "cpu" else 1 / 0)
    monkeypatch.setattr(run_module, "flops_of", lambda blueprint, trained: (blueprint, trained))
    mesh = of(device=torch.device("cpu"), axes=of(world=6))
    speed = run_module._speed(cast(Any, of(mesh=mesh, blueprint="blueprint", trained=["a", "b"])))
    assert (speed.flops, speed.peak) == (("blueprint", {"a", "b"}), expected)


# Samples


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([9], ""), ([3, 9], "3"), ([9, 3], "9 3"), ([3, 9, 9], "3 9")]
)
def test_an_answer_is_shown_without_the_token_that_ended_it(ids: list[int], text: str) -> None:
    tokenizer = of(decode=lambda ids: " ".join(map(str, ids)))
    assert samples.Prompts([], [], frozenset({8, 9}), tokenizer).text_of(ids) == text


def test_samples_of_each_step_and_seed_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(samples, "generated", lambda model, prompts, section, seed: seeds.append(seed))
    for seed, steps in ((0, 5), (0, 6), (1, 5), (1, 6), (0, 5)):
        samples.Samples(cast(Any, of(model=0, steps=steps)), cast(Any, 0), cast(Any, of(seed=seed, sample=0)))()
    assert len({*seeds}) == 4
    assert seeds[0] == seeds[4]


# Trained models


@pytest.mark.parametrize(
    ("lora", "tower", "config", "sees"),
    [
        (False, None, {"vision_config": {}, "image_token_id": 5}, True), (False, None, {"image_token_id": 5}, False),
        (False, None, {"vision_config": {}}, False), (False, False, {"vision_config": {}, "image_token_id": 5}, True),
        (True, True, {}, True), (True, False, {"vision_config": {}, "image_token_id": 5}, False),
        (True, None, {"vision_config": {}, "image_token_id": 5}, False),
    ],
)  # fmt: skip
def test_which_models_can_see(
    lora: bool, tower: bool | None, config: dict[str, Any], sees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters need a run that trained the tower."""
    monkeypatch.setattr(trained_model, "model_directory", lambda name: name)
    monkeypatch.setattr(trained_model, "read_config", lambda directory: config)
    monkeypatch.setattr(
        trained_model, "placeholders_in", lambda config: [config.get("image_token_id")] * ("image_token_id" in config)
    )
    run: Any = None if tower is None else of(recipe=of(tower=tower))
    assert TrainedModel("a", "b", run, Lora() if lora else None).can_see == sees


def test_a_model_is_loaded_to_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "load", load := Mock())
    monkeypatch.setattr(trained_model, "Engine", lambda model, lr: ("engine", model, lr))
    monkeypatch.setattr(trained_model, "resume", resume := Mock())
    run: Any = of(recipe=Recipe(train="x"), train=of(dtype="float32"), data=["source"])
    TrainedModel("a", "b").load(tower=True)
    TrainedModel("a", "b", run).load()
    TrainedModel("a", "b", None, lora := Lora()).load()
    resume.assert_not_called()
    plain = dict(train=[], tower=False, lora=None)
    assert [each.kwargs for each in load.call_args_list] == [
        {**plain, "dtype": torch.bfloat16, "tower": True}, {**plain, "dtype": torch.float32},
        {**plain, "dtype": torch.bfloat16, "lora": lora},
    ]  # fmt: skip
    assert {each.args for each in load.call_args_list} == {("b",)}
    TrainedModel("a", "b", run, lora).load()
    assert load.call_args.kwargs == vars(run.recipe)
    resume.assert_called_once_with(("engine", load.return_value, 0.0), "a")
    assert [*TrainedModel("a", "b", run).sources] == ["source"]
    assert [*TrainedModel("a", "b").sources] == [SourceSection(path=[])]


# Thumbnails


def pictures(name: str, views: list[int], broken: int = -1) -> Any:
    def thumbnail(number: int) -> str:
        if number == broken:
            raise mw.DataError("no image")
        return f"{name}{number}"

    view = lambda number: of(files=[f"{number}.png", "later"], thumbnail=lambda side: thumbnail(number))  # noqa: E731
    return of(
        name=name, num_views=np.array(views), place=lambda n: f"{name}:{n}", tokens=lambda n: of(views=[view(n), 0])
    )


@pytest.mark.parametrize(
    ("num", "broken", "expected"),
    [(1, -1, [1]), (2, -1, [1, 9]), (3, -1, [1, 4, 9]), (9, -1, [1, 3, 4, 7, 9]), (3, 4, [1, 9])],
)
def test_shown_images_are_evenly_spaced(num: int, broken: int, expected: list[int]) -> None:
    documents = pictures("a", [0, 2, 0, 1, 1, 0, 0, 1, 0, 3], broken)
    entries = [*thumbnails._entries(documents, num)]
    assert entries == [{"place": f"a:{n}", "file": f"{n}.png", "jpeg": f"a{n}"} for n in expected]


def test_each_source_with_images_shows_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "_NUM", 5)
    data: Any = of(documents=[pictures("a", [1] * 9), pictures("b", [0] * 9), pictures("c", [0, 1, 1])])
    thumbnails.write_thumbnails(tmp_path, data)
    shown = json.loads((tmp_path / "images.json").read_text())["images"]
    assert [each["place"] for each in shown] == ["a:0", "a:8", "c:1", "c:2"]
    many: Any = of(documents=[pictures(str(n), [1]) for n in range(9)])
    thumbnails.write_thumbnails(tmp_path, many)
    assert len(json.loads((tmp_path / "images.json").read_text())["images"]) == 5
    thumbnails.write_thumbnails(tmp_path, of(documents=data.documents[1:2]))  # type: ignore[arg-type]
    assert not (tmp_path / "images.json").exists()
