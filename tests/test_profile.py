"""A trace of some steps holds phases, layers and doors by their names, and changes nothing."""

from __future__ import annotations

import functools
import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from meshwright.models import Layer
from meshwright.train import config_file, profiler
from meshwright.train.run import Trainer
from meshwright.watch import trace
from tests import worlds
from tests.runs import chats, file_of, losses, source


def regions(file: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def traced(path: Path, *sets: str) -> None:
    """A run, and the same without a trace."""
    trainer = Trainer(config_file.read(path, sets))
    layers = [layer for layer in trainer.model.parts[0].modules() if isinstance(layer, Layer)]
    runs = [layer.run for layer in layers]
    trainer.run()
    assert [layer.run for layer in layers] == runs
    assert not trace.on
    plain = ["log.profile=0", "eval.every=100", "sample.every=100", f"out={path.parent / 'plain' / 'out'}"]
    Trainer(config_file.read(path, [*sets, *plain])).run()


def test_a_trace_names_its_regions(tmp_path: Path) -> None:
    """Recomputation passes some doors again in backward."""
    model = source(tmp_path / "m", "qwen3_moe")
    chats(tmp_path / "chats.jsonl")
    chats(tmp_path / "few.jsonl", 5)
    path = file_of(
        tmp_path, model, save={"export": False, "every": 3}, eval={"path": str(tmp_path / "few.jsonl"), "every": 3},
        sample={"prompts": ["3?"], "tokens": 2, "every": 3}, mesh={"tp": 2, "ep": 2}, log={"profile": 1},
        train={"steps": 4, "recompute": "selective", "tokens_per_step": 256},
    )  # fmt: skip
    worlds.run(2, functools.partial(traced, path))
    assert losses(tmp_path) == losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "out" / "profile").exists()
    for rank in range(2):
        result = regions(tmp_path / "out" / "profile" / f"rank-{rank}.json.gz")
        assert [result[each] for each in ("step", "wait for data", "forward and backward", "update")] == [1] * 4
        assert [result[each] for each in ("evaluate", "sample", "save")] == [1] * 3  # step 3
        assert result["layers.0"] == result["layers.1"] == result["layers.2"] > 2
        doors = [name for name in result if name.startswith("layers.0.")]
        for door in ("layers.0.mixer.enter", "layers.0.mixer.leave"):
            assert result[f"{door}, forward"] >= result["layers.0"], doors
            assert result[f"{door}, backward"] == 2, doors  # of 2 micro-batches
        assert any("dispatch" in name for name in doors), doors


def cut_off(path: Path, last: int) -> None:
    trainer = Trainer(config_file.read(path, [f"out={path.parent / str(last)}"]))
    for record in trainer.steps():
        if record is not None and record.step == last:
            trainer.position.stream = trainer.data.plan.num_streams  # as if it were the last


def test_a_run_that_ends_early_writes_what_it_has(tmp_path: Path) -> None:
    model = source(tmp_path / "m", "qwen3_tied")
    chats(tmp_path / "chats.jsonl")
    path = file_of(tmp_path, model, save={"export": False, "every": 100}, log={"profile": 9})
    worlds.run(1, lambda: [cut_off(path, last) for last in (1, 3)])
    assert not (tmp_path / "1" / "profile").exists()
    assert regions(tmp_path / "3" / "profile" / "rank-0.json.gz")["step"] == 1


@pytest.mark.parametrize(("num_steps", "traced"), [(0, []), (1, [3]), (3, [3, 4, 5])])
def test_layers_of_all_stages_are_named_while_steps_are_traced(
    num_steps: int, traced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of an interleaved pipeline has several stages."""
    running, seen = Mock(), list[int]()
    stages: Any = [torch.nn.ModuleDict({f"layer {n}": torch.nn.Linear(1, 1)}) for n in (0, 1)]
    layers = [next(iter(stage.values())) for stage in stages]
    for layer in layers:
        layer.run = "run"
    monkeypatch.setattr(profiler, "Layer", torch.nn.Linear)
    monkeypatch.setattr(profiler, "profile", lambda: running)
    model: Any = SimpleNamespace(parts=stages, mesh=SimpleNamespace(rank=5))
    with profiler.Profiler(model, tmp_path, num_steps) as made:
        for step in range(1, 8):
            with made.step():
                wraps = [layer.run != "run" for layer in layers]
                assert [trace.on] * 2 == wraps
                seen += [step] * all(wraps)
    assert seen == traced
    assert [layer.run for layer in layers] == ["run", "run"]
    files = [str(tmp_path / "profile" / "rank-5.json.gz")] * bool(num_steps)
    assert [each.args[0] for each in running.export_chrome_trace.call_args_list] == files
    assert (running.start.call_count, running.stop.call_count) == (len(files), len(files))
