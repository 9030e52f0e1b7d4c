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
from meshwright.train.config import SampleSection, SourceSection
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


def test_a_run_begins_on_each_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No two ranks of two seeds draw the same numbers. Rank 0 alone says which documents are dropped, of any set."""
    seeds: list[int] = []
    nothing = lambda *_: None  # noqa: E731 - short
    for name in ("check_sinks", "be_deterministic", "expand_segments", "_lock_of", "warn_of_memory", "model_directory"):
        monkeypatch.setattr(run_module, name, nothing)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(run_module, "training_data", lambda *_: of(left_out=lambda: ["of the data"]))
    monkeypatch.setattr(run_module, "held_out_of", lambda *_: {"set": of(left_out=lambda: ["of a set"])})
    monkeypatch.setattr(run_module, "prompts_of", Mock(side_effect=mw.DataError("it goes on")))
    monkeypatch.setattr(run_module.logger, "propagate", True)
    for seed in (0, 1, 2):
        config = mw.train.config_of(model="m", out="o", data=[{"path": "x"}], seed=seed, mesh={"fsdp": 4})
        for number in range(4):
            caplog.clear()
            monkeypatch.setattr(run_module, "Mesh", lambda rank=number, **_: of(rank=rank, axes=of(world=4)))
            with pytest.raises(mw.DataError, match="it goes on"):
                Trainer(config)
            said = [each.getMessage() for each in caplog.records]
            assert said == (["of the data", "of a set"] if number == 0 else [])
    assert len({*seeds}) == 12


@pytest.mark.parametrize(("reference", "key"), [("", "of the fields"), ("of a model", "of a model")])
def test_a_run_is_checked_before_anything_is_scored_or_loaded(
    reference: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    nothing = lambda *_, **__: of(left_out=list, rank=1, axes=of(world=2))  # noqa: E731 - short
    for name in (
        "check_sinks", "be_deterministic", "expand_segments", "_lock_of", "warn_of_memory", "model_directory",
        "prompts_of", "training_data", "Mesh",
    ):  # fmt: skip
        monkeypatch.setattr(run_module, name, nothing)
    monkeypatch.setattr(torch, "manual_seed", nothing)
    monkeypatch.setattr(run_module, "held_out_of", lambda *_: {"set": "held out"})
    scores = of(key=reference, score_named=lambda: calls.append("reference"))
    fields = of(key="of the fields", score=lambda sets: calls.append(("teacher", len(sets))))
    monkeypatch.setattr(run_module, "WithReference", lambda config, mesh, sets, cache: scores if len(sets) == 2 else 0)
    monkeypatch.setattr(run_module, "BatchFields", lambda *_: fields)
    monkeypatch.setattr(run_module, "check_reference", lambda config, mesh, key: calls.append(("check", key)))
    monkeypatch.setattr(run_module, "load", lambda *_, **__: "model")
    prompts = dict(query_prompt="q: ", document_prompt="d: ")
    monkeypatch.setattr(run_module, "add_embedding_files", added := Mock(side_effect=mw.DataError("it goes on")))
    config = mw.train.config_of(model="m", out="o", data=[{"path": "x"}], objective="embedding", embedding=prompts)
    with pytest.raises(mw.DataError, match="it goes on"):
        Trainer(config)
    assert calls == [("check", key), "reference", ("teacher", 2)]
    added.assert_called_once_with("model", **prompts)


@pytest.mark.parametrize(
    ("number", "signal_at", "why", "recorded"),
    [(0, 15, "signal 15", True), (1, 15, "signal 15", True), (0, None, "", False), (0, 15, "the time limit", False)],
)
def test_steps_of_a_run(
    number: int, signal_at: int | None, why: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes the record and the metrics. A failure is overcome by a step after the last one that was made."""
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 7}\n')
    calls: list[Any] = []

    class Loop:
        def __init__(self, *given: Any) -> None:
            self.why, self.sinks = why, given[8]
            given[6].signal = signal_at

        def begin(self, values: Any) -> None:
            calls.append(("begin", values, len(self.sinks)))

        def steps(self) -> Any:
            yield "a record"

    monkeypatch.setattr(run_module, "write_record", lambda out, *_: calls.append(("record", out)))
    monkeypatch.setattr(run_module, "write_thumbnails", lambda out, _: calls.append(("thumbnails", out)))
    monkeypatch.setattr(run_module.failure, "Overcome", lambda out, reached: calls.append((out, reached)))
    monkeypatch.setattr(run_module.failure, "record_signal", lambda *given: calls.append(("record_signal", *given)))
    monkeypatch.setattr(run_module, "Loop", Loop)
    monkeypatch.setattr(run_module, "_loop_options", lambda _: None)
    monkeypatch.setattr(run_module, "_speed", lambda _: None)
    monkeypatch.setattr(run_module, "sinks_of", lambda config, out, first: calls.append(("sinks", first)) or [])
    monkeypatch.setattr(Trainer, "_start_metrics", lambda self: "values")
    mesh, feed = of(rank=number), of(close=lambda: calls.append("closed"))
    config = of(train=of(streams_per_step=8), log=of(every=1, profile=0))
    trainer = trainer_of(
        mesh=mesh, model=of(mesh=mesh), out=tmp_path, config=config, data=of(num_steps=40), position=of(stream=24),
        feed=feed, engine=0, held_out={}, sample=None, prepare=None, sinks=[],
    )  # fmt: skip
    assert [*trainer.steps()] == ["a record"]
    of_rank_0 = [("record", tmp_path), ("thumbnails", tmp_path), (tmp_path, 7), ("sinks", 4)] * (number == 0)
    signals = [("record_signal", 15, number)] * recorded
    assert calls == [*of_rank_0, ("begin", "values", 0 if number else 3), *signals, "closed"]
    assert trainer.why == why


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


def test_prompts_that_a_run_cannot_answer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand for images, or leave too few positions for the answer."""
    monkeypatch.setattr(samples, "tokenizer_of", lambda *_: "words")
    monkeypatch.setattr(samples, "prompter", lambda *_: lambda text: [*map(int, text.split())])
    monkeypatch.setattr(samples, "read_config", lambda _: {"max_position_embeddings": 8})
    monkeypatch.setattr(samples, "text_config", lambda config: config)
    monkeypatch.setattr(samples, "placeholders_in", lambda _: [7])
    monkeypatch.setattr(samples, "vocab_size_of", lambda _: 10)
    monkeypatch.setattr(samples, "stop_ids_of", lambda *_: {9})
    monkeypatch.setattr(samples, "generation_config_of", lambda _: {})
    ask = lambda *prompts: samples.prompts_of(  # noqa: E731 - short
        SampleSection(prompts=[*prompts], tokens=4), SourceSection(path=[]), Path("m")
    )
    assert ask() is None
    made = ask("1 2 3 4", "5")
    assert made == samples.Prompts(["1 2 3 4", "5"], [[1, 2, 3, 4], [5]], cast(Any, {9}), "words")
    for wrong, message in (("1 7", "prompt 1 has the token 7"), ("1 2 3 4 5", "prompt 1 has 5 tokens"), ("1 10", "10")):
        with pytest.raises(mw.DataError, match=f"^the prompts of a sample: .*{message}"):
            ask("1", wrong)


@pytest.mark.parametrize("text", [True, False])
def test_samples_are_drawn_as_asked(text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a run are formatted like its first source."""
    section = SampleSection(prompts=["a", "b"], tokens=4, top_p=0.5, temperature=0.25)
    prompts = samples.Prompts(["a", "b"], [[1], [2]], frozenset({9}), of(decode=str))
    first, last = SourceSection(path=["x"]), SourceSection(path=["y"])
    trained = of(sources=[first, last], directory="d", load=lambda: "model")
    monkeypatch.setattr(samples, "TrainedModel", of(at=lambda where: trained if where == "w" else None))
    monkeypatch.setattr(samples, "prompts_of", asked := Mock(return_value=prompts))
    monkeypatch.setattr(samples, "sample", drawn := Mock(return_value=[[3, 9], [4]]))
    assert samples.sample_at("w", section, seed=5, text=text) == [("a", "[3]"), ("b", "[4]")]
    drawn.assert_called_once_with(
        "model", [[1], [2]], tokens=4, top_p=0.5, temperature=0.25, stop=frozenset({9}), seed=5
    )
    asked.assert_called_once_with(section, SourceSection(path=[], kind="text") if text else first, "d")


# Trained models


@pytest.mark.parametrize(
    ("newest", "lora", "expected"),
    [
        ("w", None, ("w", "w")),  # no run
        ("w/checkpoints/step-9", False, ("w/checkpoints/step-9", "w/checkpoints/step-9")),
        ("w/checkpoints/step-9", True, ("w/checkpoints/step-9", "base")),  # adapters alone are in it
    ],
)
def test_a_path_leads_to_a_model_and_its_base(
    newest: str, lora: bool | None, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = of(model="base", recipe=Recipe(lora=Lora(rank=3) if lora else None))
    monkeypatch.setattr(trained_model, "newest_of", lambda _: Path(newest))
    monkeypatch.setattr(trained_model, "is_checkpoint", lambda _: lora is not None)
    monkeypatch.setattr(trained_model, "run_of", lambda _: Path("run"))
    monkeypatch.setattr(trained_model, "read", lambda file: config if file == Path("run/config.toml") else None)
    made = TrainedModel.at("w")
    assert (made.where, made.base) == expected
    assert (made.config, made.lora) == ((None, None) if lora is None else (config, config.recipe.lora))


def test_an_adapter_is_added_to_the_base_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").touch()
    monkeypatch.setattr(trained_model.peft_files, "base_of", lambda where: "base" if where == str(tmp_path) else "")
    assert TrainedModel.at(str(tmp_path)) == TrainedModel(str(tmp_path), "base", None, Lora(path=str(tmp_path)))


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
