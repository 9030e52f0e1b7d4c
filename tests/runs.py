"""Run the trainer on tiny models."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from meshwright.train import config_file
from meshwright.train.run import run
from tests import tiny, worlds
from tests.templates import GOOD, tokenizer

STEPS = 12


def chats(path: Path, num: int = 150) -> Path:
    dice = random.Random(0)
    with path.open("w") as out:
        for _ in range(num):
            row = {"prompt": f"{dice.randint(0, 9)}?", "completion": "x" * dice.randint(1, 30)}
            out.write(json.dumps(row) + "\n")
    return path


def source(at: Path, name: str, **changes: Any) -> Path:
    changes |= dict(output_router_logits=True, router_aux_loss_coef=0.1) if "moe" in name else {}
    at = tiny.directory(at, name, vocab_size=400, **changes)
    saved = copy.deepcopy(tokenizer())  # other tests share the original
    saved.chat_template = GOOD["hybrid"]
    saved.save_pretrained(at)
    return at


def file_of(at: Path, model: Path, **sections: Mapping[str, Any]) -> Path:
    """Write the config of a run of a few steps, with changed `sections`."""
    config: dict[str, Any] = {
        "model": str(model), "out": str(at / "out"), "cache": str(at / "cache"),
        "data": [{"path": str(at / "chats.jsonl")}],
        "train": {"length": 128, "tokens_per_step": 512, "steps": STEPS, "dtype": "float64", "router_aux": "previous"},
        "optim": {"lr": 1e-2, "weight_decay": 0.0}, "save": {"every": 100},
    }  # fmt: skip
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    plain = {k: v for k, v in config.items() if not isinstance(v, dict | list)}
    text = config_file._table(plain) + "".join(f"[[data]]\n{config_file._table(each)}" for each in config["data"])
    text += "".join(f"[{name}]\n{config_file._table(v)}" for name, v in config.items() if isinstance(v, dict))
    (at / "run.toml").write_text(text)
    return at / "run.toml"


def lines(at: Path, kind: str = "step") -> list[dict[str, Any]]:
    rows = map(json.loads, (at / "out" / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def losses(at: Path) -> list[float]:
    """Return the losses of the last line of each step."""
    return [loss for _, loss in sorted({line["step"]: line["train/loss"] for line in lines(at)}.items())]


def trained(path: Path, *sets: str) -> str:
    return run(config_file.read(path, sets))


def on_mesh(path: Path, mesh: Mapping[str, int], *sets: str) -> None:
    size = prod(n for axis, n in mesh.items() if axis != "ep")
    axes = [f"mesh.{axis}={n}" for axis, n in mesh.items()]
    worlds.run(size, functools.partial(trained, path, *axes, *sets))
