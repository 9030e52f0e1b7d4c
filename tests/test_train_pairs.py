"""Preference pairs in `meshwright train`: the same numbers on every mesh, pairs kept together, scores kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests import runs


def pairs(path: Path, num: int = 60) -> Path:
    """Write preferences of very unequal length, in several formats."""
    dice = random.Random(1)
    with path.open("w") as out:
        for number in range(num):
            question = f"{dice.randint(0, 99)}?"
            good, bad = "x" * dice.randint(1, 30), "y" * dice.randint(1, 12)
            row: dict[str, Any] = {"prompt": question, "chosen": good, "rejected": bad}
            if number % 3 == 1:
                asked = [{"role": "user", "content": question}]
                answers = {"chosen": good, "rejected": bad}
                row = {k: [*asked, {"role": "assistant", "content": v}] for k, v in answers.items()}
            out.write(json.dumps(row) + "\n")
    return path


def file_of(at: Path, objective: str = "dpo", model: str = "qwen3", **sections: Any) -> Path:
    at.mkdir(exist_ok=True)
    pairs(at / "chats.jsonl")
    source = at.parent / model
    if not source.exists():
        runs.source(source, model)
    path = runs.file_of(at, source, **sections)
    path.write_text(f'objective = "{objective}"\n' + path.read_text())
    return path


def figures(at: Path) -> list[dict[str, float]]:
    names = ("train/loss", "train/accuracy", "train/margins", "train/rewards_chosen", "train/grad_norm")
    by_step = {line["step"]: line for line in runs.lines(at)}
    return [{name: line[name] for name in names} for _, line in sorted(by_step.items())]


def test_smoke(tmp_path: Path) -> None:
    path = file_of(tmp_path / "one")
    runs.on_mesh(path, {})
    one = figures(tmp_path / "one")
    print(one[0], one[-1])
    path = file_of(tmp_path / "two")
    runs.on_mesh(path, dict(fsdp=2))
    two = figures(tmp_path / "two")
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-8, abs=1e-12)
