"""Ranks with different models, or with one name for different files, are refused before any work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.errors import RankError
from tests import tiny, trials, worlds
from tests.trials import feed
from tests.words import words

CALLS: dict[str, Callable[[mw.Model, Path], Any]] = {
    "logprobs": lambda model, out: mw.logprobs(model, tiny.batches(model.mesh.data_rank)[0]),
    "export": lambda model, out: mw.export(model, out / "crossed"),
    "step": lambda model, out: mw.Engine(model, lr=1e-2).step(tiny.batches(model.mesh.data_rank)),
}


def crossed(source: Path, out: Path) -> list[str]:
    mesh = mw.Mesh(fsdp=2, timeout_s=20)
    both = [mw.load(source, mesh, dtype=torch.float64) for _ in range(2)]
    mw.Engine(both[1], lr=1e-1).step(tiny.batches(mesh.data_rank))
    model = both[mesh.rank]
    return [_message_of(partial(call, model, out)) for call in CALLS.values()]


def _message_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except RankError as error:
        return str(error)
    return "nothing"


def test_two_models_of_one_config(source: Path, tmp_path: Path) -> None:
    """All ranks used one of them together, and none the other (a process that forks the ranks may number first)."""
    for texts in worlds.run(2, crossed, source, tmp_path):
        for call, text in zip(CALLS, texts, strict=True):
            assert re.search(words("the model", r" [1-9]\d* on rank 1", " 0 on rank 0"), text), f"{call}: {text}"
    assert list(tmp_path.iterdir()) == []


def elsewhere(sources: list[Path], axes: dict[str, int]) -> str:
    mesh = trials.mesh_of(axes)
    engine = mw.Engine(mw.load(sources[mesh.rank], mesh, dtype=torch.float64), lr=1e-2)
    return _message_of(lambda: engine.step(feed(engine)))


def test_other_weights_under_the_same_config(source: Path, tmp_path: Path) -> None:
    """Each node has a disk of its own, and one of the copies is an older one."""
    same, stale = shutil.copytree(source, tmp_path / "same"), worlds.run(1, trained, source, tmp_path / "stale")[0]
    cases = {
        (axis, there.name): partial(elsewhere, [source, there], {axis: 2})
        for axis in ("replicate", "fsdp", "tp")
        for there in (same, stale)
    }
    for (axis, name), texts in worlds.in_turn(2, cases).items():
        for text in texts:
            wanted = words("checksum", "files", r"\d+ on rank 1", r"\d+ on rank 0") if name == "stale" else "^nothing$"
            assert re.search(wanted, text), f"{axis}, {name}: {text}"


def trained(source: Path, out: Path) -> Path:
    model = mw.load(source, dtype=torch.float32)
    mw.Engine(model, lr=1e-5).step(tiny.batches(0))
    mw.export(model, out)
    return out
