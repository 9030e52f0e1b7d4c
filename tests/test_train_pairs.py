"""Objectives of `meshwright train`: the same numbers on every mesh, pairs kept together, reference scores kept."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import meshwright as mw
from meshwright.cli.main import main
from meshwright.objectives import teacher_scores
from meshwright.ops.part_sizes import shrunk_part_sizes
from meshwright.recipe import Recipe
from meshwright.train import config_file, dry_run, launch, loop, reference_scores, teacher_files
from meshwright.train import run as run_module
from meshwright.train.run import run
from tests import parts, runs, worlds
from tests.templates import tokenizer
from tests.words import words

STEPS = 30 if parts.ALL else 2
MESHES: list[dict[str, int]] = [
    dict(fsdp=2, ep=2), *([dict(fsdp=2, tp=2, ep=2), dict(tp=2), dict(cp=2), dict(pp=2)] if parts.ALL else []),
]  # fmt: skip
ON_MESHES: dict[str, dict[str, Any]] = {
    "reward": {"centre": 0.01}, "classify": {"labels": ["bad", "good", "odd"]},
    "distill": {"top_k": 7, "temperature": 2.0}, "embedding": {"dims": [36, 12], "query_prompt": "Q:"},
}  # fmt: skip
# Of dpo, and of distill with scores in files, tests below compare losses of one and of two ranks.
ALONE: dict[str, dict[str, Any]] = {
    "dpo": {"sft_weight": 0.1}, "rerank": {"answers": ["n", "y"]}, "simpo": {}, "orpo": {},
}  # fmt: skip


OBJECTIVES = {**ON_MESHES, **ALONE}
LAYERS = {} if parts.ALL else {"num_hidden_layers": 1}


def pairs(path: Path, num: int = 50) -> Path:
    """Write preferences of very unequal length, in two formats."""
    dice = random.Random(1)
    with path.open("w") as out:
        for number in range(num):
            question, good, bad = f"{dice.randint(0, 99)}?", "x" * dice.randint(1, 30), "y" * dice.randint(1, 12)
            row: dict[str, Any] = {"prompt": question, "chosen": good, "rejected": bad}
            if number % 3 == 1:
                asked = {"role": "user", "content": question}
                answers = {"chosen": good, "rejected": bad}
                row = {k: [asked, {"role": "assistant", "content": v}] for k, v in answers.items()}
            out.write(json.dumps(row) + "\n")
    return path


def labelled(path: Path) -> Path:
    dice = random.Random(2)
    rows: list[dict[str, Any]] = []
    for number in range(60):
        label = dice.choice(OBJECTIVES["classify"]["labels"])
        text = {"bad": "a", "good": "b", "odd": "c"}[label] * dice.randint(1, 40)
        rows.append({"text": text, "label": label if number % 2 else ["bad", "good", "odd"].index(label)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def retrieved(path: Path) -> Path:
    """Write queries with one or two positives and none to three hard negatives."""
    dice = random.Random(3)
    word = lambda: "".join(dice.choice("abcdef ") for _ in range(dice.randint(6, 15))) + "."  # noqa: E731 - short
    with path.open("w") as out:
        for number in range(40):
            row: dict[str, Any] = {"query": word(), "positive": word()}
            if number % 3:
                row = {
                    "query": word(),
                    "pos": [word(), word()][: number % 3],
                    "neg": [word() for _ in range(number % 4)],
                }
            out.write(json.dumps(row) + "\n")
    return path


ROWS = {"classify": labelled, "distill": runs.chats, "embedding": retrieved, "rerank": retrieved}


def file_of(at: Path, objective: str, model: Path, **sections: Any) -> Path:
    at.mkdir(parents=True)
    steps = STEPS + (objective == "distill")  # whose loss must fall
    rows = ROWS.get(objective, pairs)(at / "chats.jsonl").read_text().splitlines(keepends=True)
    (at / "few.jsonl").write_text("".join(rows if parts.ALL else rows[:12]))
    held_out = {"path": str(at / "few.jsonl"), "every": steps, **sections.pop("eval", {})}
    options = {**OBJECTIVES[objective], **sections.pop("options", {})}
    options |= {"teacher": str(model.parent / "teacher")} if objective == "distill" else {}
    length = {"length": 320, "tokens_per_step": 1280} if objective == "rerank" else {}  # its prompt is long
    train = {"steps": steps, **length, **sections.pop("train", {})}
    sections |= {objective: options} if options else {}
    # With a small eps AdamW divides rounding by rounding once pairs are learnt, and no two meshes agree for long.
    sections["optim"] = {"eps": 1e-4, **sections.get("optim", {})}
    path = runs.file_of(at, model, eval=held_out, train=train, **sections)
    text = path.read_text()
    if objective == "classify":
        text = text.replace("[[data]]\n", '[[data]]\nkind = "text"\n').replace("[eval]\n", '[eval]\nkind = "text"\n')
    path.write_text(f'objective = "{objective}"\n{text}')
    return path


def figures(at: Path) -> list[dict[str, float]]:
    """The numbers of each step that must not depend on the mesh; both answers tie at first, up to rounding."""
    by_step = {(line["step"], kind): line for kind in ("step", "eval") for line in runs.lines(at, kind)}
    kept = lambda name: name.startswith(("train/", "eval/")) and "expert" not in name  # noqa: E731 - short
    return [
        {name: x for name, x in line.items() if kept(name) and (step > 1 or "accuracy" not in name)}
        for (step, _), line in sorted(by_step.items())
    ]


def all_runs(paths: Mapping[str, Path], sets: list[str]) -> None:
    for path in paths.values():
        run(config_file.read(path, sets))


def on_mesh(paths: Mapping[str, Path], mesh: dict[str, int]) -> None:
    sets = [f"mesh.{axis}={n}" for axis, n in mesh.items()]
    worlds.run(
        prod(n for axis, n in mesh.items() if axis != "ep"),
        functools.partial(all_runs, paths, sets),
        seconds=900 if parts.ALL else 120,
    )


@pytest.mark.timeout(1800 if parts.ALL else 300)
def test_curves_are_equal_on_every_mesh(tmp_path: Path) -> None:
    """A data rank takes 1, 2 or 4 micro-batches. Evaluations have the metrics of the objective."""
    model, _ = runs.source(tmp_path / "m", "qwen3_moe", **LAYERS), runs.source(tmp_path / "teacher", "qwen3", **LAYERS)
    curves: dict[str, dict[str, Any]] = {}
    for number, mesh in enumerate([{}, *MESHES]):
        options: dict[str, Any] = {"save": {"export": False}} if mesh else {}
        paths = {
            name: file_of(tmp_path / f"{number}" / name, name, model, **options)
            for name in (OBJECTIVES if parts.ALL else ON_MESHES)
        }
        on_mesh(paths, mesh)
        curves[str(mesh)] = {name: figures(path.parent) for name, path in paths.items()}
    distilled = [line["train/kl"] for line in curves["{}"]["distill"] if "train/kl" in line]
    assert distilled[-1] < distilled[0]
    assert {"train/positive_cosine", "train/accuracy"} < curves["{}"]["embedding"][-1].keys()
    evaluations = {name for line in curves["{}"]["classify"] for name in line if name.startswith("eval/")}
    assert evaluations == {"eval/held-out/loss", "eval/held-out/accuracy"}
    for mesh_name, of_mesh in curves.items():
        for name, steps in of_mesh.items():
            for own, wanted in zip(steps, curves["{}"][name], strict=True):
                assert own == pytest.approx(wanted, rel=1e-7, abs=1e-9), (mesh_name, name)
    _exports_load_in_transformers(tmp_path / "0")


def _exports_load_in_transformers(at: Path) -> None:
    """Reward models and classifiers are classifiers of transformers, with the names of their labels."""
    for name, num in (("reward", 1), ("classify", 3)):
        exported = at / name / "out" / "export"
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float64)
        assert theirs.config.num_labels == num
    assert theirs.config.id2label == {0: "bad", 1: "good", 2: "odd"}
    settings = json.loads((at / "embedding" / "out" / "export" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": "Q:", "document": ""}


def stopped(path: Path, at_step: int, *sets: str) -> tuple[list[str], int]:
    """Run up to a step. Return the pairs of each stream, and how many streams the reference model scored."""
    seen, scored, real, score = list[str](), list[int](), loop.Loop._log_step, reference_scores.logprobs

    def note(self: loop.Loop, *args: Any) -> None:
        first = self.position.stream - self.feed.streams_per_step
        seen.extend(self.feed.place(first + n) for n in range(self.feed.streams_per_step))
        self.stop.signal = 15 if self.step_number == at_step else None  # type: ignore[assignment] # as a signal would
        real(self, *args)

    def count(model: mw.Model, batches: list[mw.Batch]) -> Any:
        scored.append(len(batches))
        return score(model, batches)

    loop.Loop._log_step, reference_scores.logprobs = note, count  # type: ignore[assignment]
    try:
        with shrunk_part_sizes():  # several chunks of scores
            run(config_file.read(path, sets))
    finally:
        loop.Loop._log_step, reference_scores.logprobs = real, score  # type: ignore[method-assign]
    return seen, sum(scored)


def test_a_run_goes_on_with_its_pairs_and_scores(tmp_path: Path) -> None:
    """On another number of ranks. Other weights of the reference are refused, and a damaged chunk is scored anew."""
    model = runs.source(tmp_path / "m", "qwen3", **LAYERS)
    options: dict[str, Any] = {"train": {"steps": 5}, "save": {"export": False}}
    whole, parted = (file_of(tmp_path / name, "dpo", model, **options) for name in ("whole", "parted"))
    [(undisturbed, _)] = worlds.run(1, stopped, whole, 99)
    first, num_scored = worlds.run(2, stopped, parted, 2, "mesh.fsdp=2")[0]
    assert num_scored > 8
    chunk = next((tmp_path / "parted" / "cache" / "reference").glob("*/000000"))
    kept = chunk.read_bytes()
    chunk.unlink()  # as if it had been killed before
    second, num_scored = worlds.run(1, stopped, parted, 99)[0]
    assert 0 < num_scored <= 4
    assert [each.replace("/parted/", "/whole/") for each in [*first, *second]] == undisturbed
    assert {"train/margins", "train/rewards_chosen"} < figures(whole.parent)[0].keys()
    assert runs.losses(tmp_path / "parted") == pytest.approx(runs.losses(tmp_path / "whole"), rel=1e-9)
    chunk.write_bytes(kept[:-1] + b"x")
    assert 0 < worlds.run(1, stopped, parted, 99, "train.steps=6")[0][1] <= 4
    rows, before = (np.frombuffer(content[16:]).reshape(-1, 3) for content in (chunk.read_bytes(), kept))
    assert np.allclose(rows, before, rtol=1e-12)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(mw.errors.RankError, match=words("reference model with other weights")):
        worlds.run(1, stopped, parted, 99, "train.steps=7")


def reference_of(path: Path, *sets: str) -> torch.Tensor:
    """Return the reference scores of the first step, of a model whose adapters are drawn."""
    real = run_module.load

    def drawn(*args: Any, **options: Any) -> mw.Model:
        model = real(*args, **options)
        for name, factor in model.stored().items():
            if name.endswith("lora.b"):
                factor.normal_()
        return model

    run_module.load = drawn
    try:
        trainer = mw.Trainer(config_file.read(path, sets))
    finally:
        run_module.load = real
    batches = trainer.feed.step(0).batches
    return torch.cat([batch.fields["reference"] for batch in batches])


def with_adapters_and_others(at: Path, model: Path, other: Path) -> list[torch.Tensor]:
    drawn = dict(lora={"rank": 4}, save={"export": False})
    paths = [
        file_of(at / "own", "dpo", model), file_of(at / "lora", "dpo", model, **drawn),
        file_of(at / "named", "dpo", model, options={"reference": str(other)}),
        file_of(at / "copy", "dpo", other),
    ]  # fmt: skip
    return [reference_of(path) for path in paths]


def test_the_reference_is_the_model_without_adapters_or_another(tmp_path: Path) -> None:
    model = runs.source(tmp_path / "m", "qwen3", **LAYERS)
    shutil.copytree(model, tmp_path / "other")
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    weights.lm_head.weight.data *= 1.5
    weights.save_pretrained(tmp_path / "other")
    [(own, lora, other, copy)] = worlds.run(1, with_adapters_and_others, tmp_path, model, tmp_path / "other")
    assert torch.equal(own, lora)
    assert torch.equal(other, copy)
    assert not torch.allclose(own, other)


BAD: dict[str, tuple[list[str], str]] = {
    "beta": (["dpo.beta=0.0"], words(r"dpo\.beta", "above 0")),
    "smoothing of ipo": (['dpo.kind="ipo"', "dpo.label_smoothing=0.1"], words("label_smoothing", "ipo")),
    "joined": (['data.0.turns="joined"'], words(r"data\[0\]\.turns")),
    "samples of a reward model": (['objective="reward"', "dpo=", 'sample.prompts=["Hi"]'], words("sample.prompts")),
    "labels": (['objective="classify"', "dpo=", 'classify.labels=["a", "a"]'], words("classify.labels", "different")),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_reported_before_anything_runs(tmp_path: Path, name: str) -> None:
    path = file_of(tmp_path / "run", "dpo", tmp_path / "m")
    with pytest.raises(mw.ConfigError, match=BAD[name][1]):
        config_file.read(path, BAD[name][0])


def reranked(path: Path) -> tuple[float, float]:
    """Return the loss of the first step before training, and the same by hand: from logits, and texts of the rows."""
    trainer = mw.Trainer(config_file.read(path))
    batches = trainer.prepare(trainer.feed.step(0).batches)
    known, rows = tokenizer(), [json.loads(line) for line in (path.parent / "chats.jsonl").read_text().splitlines()]
    positives = {(row["query"], text) for row in rows for text in row.get("pos", [row.get("positive")])}
    ids, terms = [known.encode(word, add_special_tokens=False)[0] for word in ("n", "y")], []
    for batch in batches:
        for tokens, logits in zip(batch.split(batch.tokens), batch.split(mw.logits(trainer.model, batch)), strict=True):
            text = known.decode(tokens)
            query, document = text.split("<Query>: ")[1].split("<|im_end|>")[0].split("\n<Document>: ")
            assert 'can only be "y" or "n"' in text
            terms.append(-logits[-1, ids].log_softmax(-1)[int((query, document) in positives)])
    return trainer.engine.evaluate(batches), float(torch.stack(terms).mean())


def test_a_reranker_is_scored_as_its_prompt_says(tmp_path: Path) -> None:
    path = file_of(tmp_path / "run", "rerank", runs.source(tmp_path / "m", "qwen3", **LAYERS))
    [(loss, by_hand)] = worlds.run(1, reranked, path)
    assert loss == pytest.approx(by_hand, rel=1e-9)


def with_scores(path: Path, *sets: str) -> tuple[int, int]:
    """Run. Return how often a teacher was loaded, and how many batches it scored for files."""
    loaded, scored, load, score = list[Any](), list[int](), teacher_files.load, teacher_scores.top_logprobs

    def count(model: mw.Model, batches: list[mw.Batch], *args: Any, **options: Any) -> Any:
        scored.append(len(batches))
        return score(model, batches, *args, **options)

    teacher_files.load = lambda *args, **options: loaded.append(args) or load(*args, **options)  # type: ignore[assignment]
    teacher_scores.top_logprobs = count  # type: ignore[assignment]
    try:
        run(config_file.read(path, sets))
    finally:
        teacher_files.load, teacher_scores.top_logprobs = load, score
    return len(loaded), sum(scored)


def test_a_teacher_is_asked_once(tmp_path: Path) -> None:
    """Scores are kept in files, of held-out data too. A killed run scores what lacks."""
    model, _ = runs.source(tmp_path / "m", "qwen3", **LAYERS), runs.source(tmp_path / "teacher", "qwen3_moe", **LAYERS)
    scores = tmp_path / "scores"
    asked, *kept = (
        file_of(tmp_path / name, "distill", model, options={"scores": where} if where else {}, save={"export": False})
        for name, where in (("asked", ""), ("one", str(scores)), ("two", str(scores)), ("three", str(scores)))
    )
    [(_, scored)] = worlds.run(1, with_scores, asked)
    assert not scored
    prepared = launch.prepared(config_file.read(kept[0]))
    said = dry_run.dry_run(config_file.read(kept[0]), prepared.data, prepared.held_out)
    assert re.search("teacher lack for the data, held out: held-out: computed before", said)
    counts = worlds.run(2, with_scores, kept[0], "mesh.fsdp=2")
    assert counts[0][0] == 1
    assert counts[0][1] > 3 * 2  # held-out batches too
    assert runs.losses(tmp_path / "one") == pytest.approx(runs.losses(tmp_path / "asked"), rel=1e-5)
    said = dry_run.dry_run(config_file.read(kept[0]), prepared.data, prepared.held_out)
    assert f"all are in {scores}; the teacher is not loaded" in said
    assert worlds.run(1, with_scores, kept[1]) == [(0, 0)]
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "asked"), rel=1e-5)
    marks = [*scores.glob("complete-*")]
    for mark in marks:
        mark.unlink()  # as if it had been killed at the end
    assert worlds.run(1, with_scores, kept[2]) == [(1, 0)]
    assert [*scores.glob("complete-*")] == marks
    for lost in (*marks, next(scores.glob("scores-*"))):
        lost.unlink()  # and earlier
    [(loaded, scored)] = worlds.run(1, with_scores, kept[2], "train.steps=4")
    assert loaded == 1
    assert scored > 0


@pytest.mark.parametrize(("objective", "names"), [("classify", {"bad", "good", "odd"}), ("rerank", {"n", "y"})])
def test_labels_are_shown_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, names: set[str]
) -> None:
    """`meshwright data --show` has no numbers of classes, and no ids of answers."""
    path = file_of(tmp_path / "run", objective, runs.source(tmp_path / "m", "qwen3", **LAYERS))
    assert main(["data", str(path), "--show", "30"]) == 0
    assert {*re.findall(r" -> \[(.*?)\]", capsys.readouterr().out)} == names


def test_scores_are_kept_apart_by_all_that_they_depend_on(tmp_path: Path) -> None:
    """Scores of a reference model depend on its weights and how it computes, a teacher's on the data and the steps."""
    plain = reference_scores.Reference(tmp_path, Recipe(), "w")
    changes: list[dict[str, Any]] = [
        dict(dtype=torch.float32), dict(fp8="block"), dict(fp8="block", fp8_skip=("*.o",)), dict(frozen="nf4"),
    ]  # fmt: skip
    others = [replace(plain, recipe=replace(plain.recipe, **each)) for each in changes]
    keys = [each.key for each in (plain, replace(plain, weights="v"), *others)]
    assert len({*keys}) == len(keys)
    amounts: list[Any] = [
        SimpleNamespace(plan=SimpleNamespace(fingerprint=fingerprint, num_streams=streams))
        for fingerprint, streams in (("a", 1), ("a", 2), ("b", 1))
    ]
    assert len({teacher_files._mark(tmp_path, each) for each in amounts}) == 3
