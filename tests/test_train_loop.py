"""Beyond its steps a run has: losses by source, operations, several held-out sets, the best checkpoint."""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import meshwright as mw
from meshwright.checkpoint import manifest, opened_at
from meshwright.cli import main
from meshwright.data import tokenizer_of
from meshwright.mesh.memory_limits import expand_segments
from meshwright.plan.step_time import Flops, flops_of
from meshwright.sharding import Param
from meshwright.train import config_file
from meshwright.train.config import SampleSection
from meshwright.train.loop import Loop
from meshwright.train.rank import PREFIX, _Prefixed
from meshwright.train.run import Trainer, run
from meshwright.train.samples import sample_at
from tests import parts, tiny, worlds
from tests.runs import STEPS, chats, file_of, lines, losses, source


def three_sources(at: Path) -> Path:
    """Name the second of three sources."""
    model = source(at / "m", "qwen3_tied", num_hidden_layers=1)
    for number, name in enumerate("abc"):
        chats(at / f"{name}.jsonl", 30 + number)
    path = file_of(at, model, save=dict(export=False), train=dict(steps=3))
    sources = "".join(f'[[data]]\npath = "{at / name}.jsonl"\n' for name in "ac")
    text = path.read_text().replace("chats.jsonl", "b.jsonl").replace("[[data]]\n", '[[data]]\nname = "second"\n', 1)
    path.write_text(text + sources)
    return path


def by_source(path: Path, *sets: str) -> None:
    """Compute the loss of the first step, by source, from log-probabilities before it."""
    trainer = Trainer(config_file.read(path, sets))
    batches = trainer.feed.step(0).batches
    rows = []
    for batch in batches:
        scores, targets = -mw.logprobs(trainer.model, batch), batch.labels != -100
        own = [targets & (batch.fields["source"] == s) for s in range(3)]
        rows.append([[float(scores[mask].sum()), int(mask.sum())] for mask in own])
    result = trainer.mesh.all_or_none(None, "the test", None, [n for row in rows for pair in row for n in pair])
    total = result.view(len(result), -1, 3, 2).sum((0, 1))
    for _ in trainer.steps():
        pass
    if trainer.mesh.rank == 0:
        step = json.loads((trainer.out / "metrics.jsonl").read_text().splitlines()[1])
        wanted = (total[:, 0] / total[:, 1]).tolist()
        assert [step[f"train/loss/{name}"] for name in ("second", "a.jsonl", "c.jsonl")] == pytest.approx(wanted)
        assert step["train/loss"] == pytest.approx(float(total[:, 0].sum() / total[:, 1].sum()))


def test_the_loss_of_each_source(tmp_path: Path) -> None:
    path = three_sources(tmp_path)
    worlds.run(1, functools.partial(by_source, path))
    worlds.run(2, functools.partial(by_source, path, "mesh.fsdp=2", f"out={tmp_path / 'mesh'}"))
    one, mesh = ([json.loads(x) for x in (tmp_path / o / "metrics.jsonl").open()] for o in ("out", "mesh"))
    for a, b in zip(one, mesh, strict=True):
        names = [name for name in a if name.startswith("train/loss")]
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-9)
        assert len(names) in (0, 4)


def operations(directory: Path, **options: Any) -> tuple[Flops, list[Param]]:
    model = mw.load(str(directory), mw.Mesh(), dtype=torch.float32, **options)
    return flops_of(model.blueprint, {*model.trained}), [*model.table]


@pytest.mark.parametrize("name", parts.every(2, ["qwen2", "qwen3", "qwen3_moe", "qwen3_tied"]))
def test_operations_are_those_that_torch_counts(tmp_path: Path, name: str) -> None:
    """transformers computes the masked half of attention, too."""
    from transformers import AutoModelForCausalLM

    directory, tokens = tiny.directory(tmp_path, name), 24
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **plain)
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(1, tokens + 1)[None]
        peer(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    [(flops, _)] = worlds.run(1, operations, directory)
    rope = counter.get_total_flops() - flops.of(tokens, 2 * tokens**2)
    head = 10 if name != "qwen2" else 9
    assert 0 <= rope <= 2 * tokens * head, rope  # transformers multiplies positions by frequencies as matrices


def test_operations_of_what_is_frozen_and_of_delta_nets(tmp_path: Path) -> None:
    directory = tiny.directory(tmp_path, "qwen3_5")
    [(flops, table)] = worlds.run(1, operations, directory)
    [(frozen, _)] = worlds.run(1, functools.partial(operations, train="layers.**"), directory)
    params = {param.name: param for param in table}
    assert flops.per_token - frozen.per_token == 2 * params["head.weight"].numel
    wide = sum(p.numel for p in table if p.cols and "tap" not in p.cols and p.name != "embed.weight")
    nets = [p for p in table if "chan" in p.rows and "embed" in p.cols]
    states = [(p.rows, params[p.name.replace("qkv", "out")].cols["value"]) for p in nets]
    rule = sum(18 * rows["key"] * (rows["chan"] - value) // 2 * value for rows, value in states)
    assert len(nets) > 0
    assert flops.per_token == 6 * wide + rule


def rising(at: Path, **train: Any) -> Path:
    """A rate that is far too high, two held-out sets."""
    model = source(at / "m", "qwen3_tied")
    for name in ("chats", "one", "two"):
        chats(at / f"{name}.jsonl", 150 if name == "chats" else 12)
    options = dict(early_stopping=2, steps=40, deterministic=True, **train)
    path = file_of(
        at, model, train=options, optim=dict(lr=0.1, schedule="constant"), eval={"every": 2, "best": True},
        save=dict(every=3, wait=True, keep=1),
    )  # fmt: skip
    sets = "".join(f'[[eval.sets]]\nname = "{name}"\npath = "{at / name}.jsonl"\n' for name in ("one", "two"))
    path.write_text(path.read_text() + sets)
    return path


def stopped_once(path: Path, at_step: int, *sets: str) -> str:
    """Run until a signal after a step."""
    trainer = Trainer(config_file.read(path, sets))
    for _ in trainer.steps():
        if trainer.engine.steps == at_step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    return trainer.why


def look_at_the_best(out: Path, best: int, last: int) -> None:
    """Commands take a run, a folder of checkpoints, or one checkpoint."""
    for where, step in ((out, last), (out / "best", best), (out / "best" / f"step-{best:06d}", best)):
        assert opened_at(where).manifest.step == step
        assert main(["convert", str(where), str(out.parent / f"{where.name}-hf"), "--to", "hf"]) == 0
        made = out.parent / f"{where.name}-hf"
        checkpoint = load_file(opened_at(where).directory / "model.safetensors")
        assert {key: t.tolist() for key, t in load_file(made / "model.safetensors").items()} == {
            key: t.tolist() for key, t in checkpoint.items()
        }
        assert tokenizer_of(made).chat_template
    section = SampleSection.model_construct(prompts=["3?"], tokens=4, top_p=None)
    places = (out, out / "best", out.parent / "best-hf")
    requested = {str(at): functools.partial(sample_at, str(at), section, seed=0, text=False) for at in places}
    message = {at: answer for at, [answer] in worlds.in_turn(1, requested).items()}
    assert len(message) == 3
    assert all(prompt == "3?" for [(prompt, _)] in message.values())


def test_the_best_checkpoint_and_the_end_of_patience(tmp_path: Path) -> None:
    path = rising(tmp_path)
    worlds.run(1, functools.partial(run, config_file.read(path)))
    result = {line["step"]: line for line in lines(tmp_path, "eval")}
    means = {n: (line["eval/one/loss"] + line["eval/two/loss"]) / 2 for n, line in result.items()}
    best = min(means, key=means.__getitem__)
    assert max(result) == best + 4 < 40
    assert lines(tmp_path, "end")[-1]["why"] == "early stopping"
    assert [p.name for p in (tmp_path / "out" / "best").iterdir()] == [f"step-{best:06d}"]
    assert lines(tmp_path, "save")[-1]["step"] == best + 4
    assert (tmp_path / "out" / "export" / "config.json").is_file()
    look_at_the_best(tmp_path / "out", best, best + 4)
    worlds.run(1, functools.partial(run, config_file.read(path)))  # there is nothing left to do
    assert max(line["step"] for line in lines(tmp_path)) == best + 4
    out = f"out={tmp_path / 'parts'}"
    [why] = worlds.run(1, functools.partial(stopped_once, path, best + 3, out))  # one evaluation of patience is used up
    assert why == "signal 15"
    worlds.run(2, functools.partial(run, config_file.read(path, [out, "mesh.fsdp=2"])))
    (tmp_path / "out").rename(tmp_path / "whole")
    (tmp_path / "parts").rename(tmp_path / "out")
    assert {line["step"]: line["eval/two/loss"] for line in lines(tmp_path, "eval")} == pytest.approx(
        {n: line["eval/two/loss"] for n, line in result.items()}, rel=1e-6
    )
    assert len(losses(tmp_path)) == best + 4


def test_the_best_weights_are_those_of_the_last_start(tmp_path: Path) -> None:
    """A run is killed after its best step, and goes on from an earlier one with another rate."""
    model, held = source(tmp_path / "m", "qwen3_tied"), chats(tmp_path / "held.jsonl", 12)
    chats(tmp_path / "chats.jsonl", 150)
    path = file_of(
        tmp_path, model, train=dict(steps=4), optim=dict(lr=1e-3, schedule="constant"),
        eval={"every": 2, "best": True, "path": str(held)}, save=dict(every=2),
    )  # fmt: skip
    best, saved = tmp_path / "out" / "best", tmp_path / "out" / "checkpoints"
    contents = []
    for sets in ((), ("optim.lr=3e-3",)):
        worlds.run(1, functools.partial(run, config_file.read(path, sets)))
        assert [each.name for each in best.iterdir()] == ["step-000004"]
        files = [at / "step-000004" / "model.safetensors" for at in (best, saved)]
        contents.append(files[0].read_bytes())
        assert contents[-1] == files[1].read_bytes()
        shutil.rmtree(saved / "step-000004")
    assert contents[0] != contents[1]


def test_what_a_run_leaves(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    chats(tmp_path / "chats.jsonl")
    small: Any = dict(train=dict(tokens_per_step=256), save=dict(export=False))
    worlds.run(2, functools.partial(run, config_file.read(file_of(tmp_path, model, mesh=dict(fsdp=2, ep=2), **small))))
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert layout["world"] == 2
    assert layout["parameters"] == layout["trained"]
    [experts] = [row for row in layout["table"] if row["name"].endswith("experts.down")]
    assert experts["cut"] == "expert by ep=2"
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    [start], [end] = lines(tmp_path, "start"), lines(tmp_path, "end")
    assert (start["num_steps"], start["world"], end["why"], end["step"]) == (STEPS, 2, "", STEPS)
    assert {axis: size for axis, size in start["mesh"].items() if size > 1} == {"fsdp": 2, "ep": 2}
    assert start["experts"]["num"] == len(lines(tmp_path, "experts")[0]["load"][0])
    first, *later = lines(tmp_path, "experts")
    assert (first["step"], *(each["step"] for each in later)) == (1, 11, STEPS)
    step = lines(tmp_path)[0]
    assert sum(first["load"][0]) == pytest.approx(step["train/tokens"] * 3)
    assert step["memory/peak_bytes"] > 10**7


SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("device", "begun", "before", "after"),
    [
        (True, False, {}, SEGMENTS), (True, False, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
        (True, False, {"PYTORCH_ALLOC_CONF": ""}, None), (True, False, {"PYTORCH_HIP_ALLOC_CONF": ""}, None),
        (True, True, {}, None), (False, False, {}, None),
    ],
)  # fmt: skip
def test_segments_grow_unless_the_user_says_otherwise(
    device: bool, begun: bool, before: dict[str, str], after: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    environment = dict(before)
    with caplog.at_level("INFO", "meshwright"):
        expand_segments(environment)
    assert environment == (before if after is None else after)
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in caplog.text) == (after is not None)


def test_segments_are_chosen_before_a_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    monkeypatch.setattr("meshwright.train.run.expand_segments", lambda environment: began.append("segments"))
    monkeypatch.setattr("meshwright.train.run.check_sinks", lambda config: None)
    monkeypatch.setattr("meshwright.train.run.Mesh", lambda **options: began.append("mesh") or 1 / 0)
    config = mw.train.config_of(model="m", out="o", data=[{"path": "d"}])
    with pytest.raises(ZeroDivisionError):
        Trainer(config)
    assert began == ["segments", "mesh"]


def test_the_terminal_shows_warnings_alone() -> None:
    """The launcher shows the lines of a rank's log that have the prefix."""
    for level, shown in ((logging.INFO, "one\ntwo"), (logging.WARNING, f"{PREFIX}one\n{PREFIX}two")):
        record = logging.makeLogRecord({"levelno": level, "msg": "one\ntwo"})
        assert _Prefixed().format(record) == shown


def test_a_new_best_replaces_what_an_earlier_start_saved_later(tmp_path: Path) -> None:
    """A run that resumes before its best step takes that step again, maybe with other options."""
    best = tmp_path / "best"
    for number in (4, 6, 8):
        step = best / f"step-{number:06d}"
        step.mkdir(parents=True)
        manifest.write_manifest(step, manifest.Manifest(number, {}, {}, {}, {}))
    (best / "step-000009").mkdir()  # without a manifest it is no checkpoint
    model = SimpleNamespace(mesh=SimpleNamespace(rank=0), small=SimpleNamespace(directory=best / "step-000008"))
    log = Mock()
    run = SimpleNamespace(folder=tmp_path, engine=SimpleNamespace(model=model), _log=log)
    run._remove_undone = functools.partial(Loop._remove_undone, cast(Loop, run))
    path = {"path": str(best / "step-000004")}
    for rank, values in ((0, path), (1, path | {"best": True}), (0, path | {"best": True})):
        model.mesh.rank = rank
        run._writing = 5, values  # the run has skipped a step
        Loop._log_saved(cast(Loop, run))
        removed = "best" in values and rank == 0
        left = [4, 8, 9] if removed else [4, 6, 8, 9]  # the model was loaded from step 8
        assert sorted(int(each.name[5:]) for each in best.iterdir()) == left
    assert log.call_count == 3
