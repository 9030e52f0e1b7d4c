"""A run of a file: the same losses and documents on every mesh, through interruptions, up to an export."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.cli import main
from meshwright.train import config_file, launch, loop
from meshwright.train.run import run
from tests import worlds
from tests.parts import ALL, IN_MATRIX
from tests.runs import STEPS, chats, file_of, lines, losses, on_mesh, source
from tests.started import Started, forked_ranks


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("qwen3_tied", [dict(replicate=2, fsdp=2), *([dict(tp=2), dict(fsdp=2), dict(pp=2)] if ALL else [])]),
        pytest.param("qwen3_5_moe", [dict(fsdp=2, tp=2, ep=4), dict(pp=2, cp=2)], marks=[pytest.mark.slow, IN_MATRIX]),
    ],
)
def test_losses_are_equal_on_every_mesh(tmp_path: Path, name: str, meshes: Sequence[dict[str, int]]) -> None:
    """Data ranks take 1, 2 or 4 micro-batches a step. The interrupted run below has fsdp=2 and pp=2."""
    model, steps = source(tmp_path / "m", name), STEPS if ALL else 4
    results = {}
    for number, mesh in enumerate([{}, *meshes]):
        at = tmp_path / str(number)
        at.mkdir()
        chats(at / "chats.jsonl")
        on_mesh(file_of(at, model, save={"export": False, "every": 100}, train={"steps": steps}), mesh)
        results[str(mesh)] = losses(at)
    assert all(len(each) == steps for each in results.values())
    assert results["{}"][-1] < results["{}"][0] - 0.5
    for mesh_name, each in results.items():
        assert each == pytest.approx(results["{}"], rel=1e-9), mesh_name


def documents_of(path: Path, *sets: str, stop_at: int | None = None) -> list[str]:
    """Run until a stop signal after some steps, and return the places of the documents."""
    message, real = [], loop.Loop._log_step

    def tell(self: loop.Loop, *args: Any, **kwargs: Any) -> None:
        first = self.position.stream - self.feed.streams_per_step
        message.extend(self.feed.place(first + n) for n in range(self.feed.streams_per_step))
        if stop_at == self.step_number and self.engine.model.mesh.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        real(self, *args, **kwargs)

    loop.Loop._log_step = tell  # type: ignore[method-assign]
    try:
        run(config_file.read(path, sets))
    finally:
        loop.Loop._log_step = real  # type: ignore[method-assign]
    return message


def test_an_interrupted_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """The parts train on each document once, and none is left out."""
    model = source(tmp_path / "m", "qwen3_tied")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        chats(tmp_path / name / "chats.jsonl", 80)
    whole, parts = (file_of(tmp_path / name, model, train=dict(epochs=2.0)) for name in ("whole", "parts"))
    for path in (whole, parts):
        path.write_text(path.read_text().replace(f"steps = {STEPS}\n", ""))
    [undisturbed] = worlds.run(1, documents_of, whole)
    first = worlds.run(2, functools.partial(documents_of, parts, "mesh.fsdp=2", stop_at=5))[0]
    second = worlds.run(2, functools.partial(documents_of, parts, "mesh.pp=2", stop_at=3))[
        0
    ]  # step 3 is behind it: none
    assert len(first) in (20, 24)
    assert [each.replace("/parts/", "/whole/") for each in [*first, *second]] == undisturbed
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    assert (tmp_path / "parts" / "out" / "export" / "config.json").is_file()


def test_other_data_are_refused(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model)
    on_mesh(path, {}, "train.steps=2")
    chats(tmp_path / "chats.jsonl", 151)
    with pytest.raises(mw.errors.RankError, match="was trained on other data"):
        on_mesh(path, {}, "train.steps=4")
    with pytest.raises(mw.errors.RankError, match="exists, and resume"):
        on_mesh(path, {}, "resume=never")
    chats(tmp_path / "chats.jsonl")
    with pytest.raises(mw.errors.RankError, match=r"train\.length: 128 before, 64 now; a run must keep this value"):
        on_mesh(path, {}, "train.length=64")
    newest = f"resume={tmp_path / 'out' / 'checkpoints' / 'step-000002'}"
    on_mesh(path, {}, newest, "train.steps=3", f"out={tmp_path / 'branch'}", "optim.lr=0.002")
    on_mesh(path, {}, "train.steps=3", "optim.lr=0.002")
    (tmp_path / "out" / "metrics.jsonl").rename(tmp_path / "kept.jsonl")
    (tmp_path / "branch" / "metrics.jsonl").rename(tmp_path / "out" / "metrics.jsonl")
    [third] = losses(tmp_path)
    (tmp_path / "kept.jsonl").rename(tmp_path / "out" / "metrics.jsonl")
    assert losses(tmp_path)[2] == third


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, chats, an export that transformers loads; then the same command has nothing more to do."""
    from transformers import AutoModelForCausalLM

    model = source(tmp_path / "m", "qwen3_tied")
    with chats(tmp_path / "chats.jsonl").open("a") as out:
        out.write(json.dumps({"prompt": "9?", "completion": "x" * 1000}) + "\n")
    path = file_of(tmp_path, model, mesh={"fsdp": 2}, train={"dtype": "float32"})
    path.write_text(path.read_text().replace("[[data]]\n", '[[data]]\ntoo_long = "drop"\n'))
    assert main(["train", str(path), "--dry-run"]) == 0
    planned, dropped = capsys.readouterr().out, "longer than 128 tokens left out"
    assert "2 micro-batches on each of 2 data ranks" in planned
    assert f"1 document {dropped}" in planned
    with Started(["train", str(path)]) as started:  # with ranks that are processes of Python; all others are forks
        assert started.end(120) == 0, started.output
    assert f"step {STEPS}/{STEPS}  loss " in started.output
    assert started.output.count(f"1 document of chats.jsonl {dropped}") == 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export", dtype=torch.float32)
    assert sum(p.numel() for p in loaded.parameters()) > 10_000
    assert config_file.read(tmp_path / "out" / "config.toml") == config_file.read(path)
    with pytest.raises(mw.ConfigError, match="--nproc 3, but the mesh of the run has 2"):
        launch.refuse_other_world(config_file.read(path), 3)


def test_what_is_learnt_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    assert main(["data", str(file_of(tmp_path, model)), "--show", "2"]) == 0
    message = capsys.readouterr().out
    assert "150 " in message
    assert f"{tmp_path / 'chats.jsonl'}:1: " in message
    assert f"{tmp_path / 'chats.jsonl'}:150: " in message
    row = json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[0])
    assert f"[{row['completion']}<|im_end|>]" in message
    assert f"user\n{row['prompt']}<|im_end|>" in message


@pytest.mark.slow
def test_a_signal_ends_the_command_with_a_checkpoint(tmp_path: Path) -> None:
    """The step is finished, the run saved, and the exit code is that of a shell; the same command goes on."""
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model, mesh={"fsdp": 2}, train={"steps": 2000}, save={"export": False})
    with forked_ranks(), Started(["train", str(path)]) as started:
        started.until(lambda: "step    3/" in started.output)
        os.kill(started.pid, signal.SIGTERM)
        assert started.end(100) == 128 + signal.SIGTERM, started.output
    assert started.last_line == f"meshwright: ended by signal 15; the same command resumes from {tmp_path / 'out'}"
    [saved] = (tmp_path / "out" / "checkpoints").iterdir()
    assert int(saved.name[5:]) == len(lines(tmp_path)) < 100
