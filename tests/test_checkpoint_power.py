"""A power cut at any moment of a save leaves a whole checkpoint. The test catches each omission that would lose one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.checkpoint import check_bytes, folder, opened_at
from meshwright.log import quiet
from meshwright.weights import to_disk, writer
from tests import parts, power, tiny, worlds
from tests.test_checkpoint import engine_of, train

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=131)
    return tiny.directory(tmp_path_factory.mktemp("m"), "qwen3_tied", **sizes)


def lost(source: Path, at: Path, plant: Plant, steps: tuple[int, ...]) -> tuple[list[str], int]:
    """Return the first loss that a cut would cause, and the number of states checked. Two steps are kept."""
    root, out = at / "disk", at / "disk" / "run"
    root.mkdir(parents=True)
    patch, disk = pytest.MonkeyPatch(), power.Disk(root)
    engine = engine_of(source, {})
    with patch.context() as patched:
        disk.watch(patched)
        plant(patched)
        for step in steps:
            engine.steps = engine.optimizer.steps = step - 1
            train(engine, 1)
            mw.save(engine, out, keep=2)
            disk.promised = step
        disk.note("at the end")
    result, num = [], 0
    with quiet():
        for what, newest, left in disk.after_a_cut(at):
            num += 1
            if why := _lost(left / "run", newest):
                result.append(f"{what}: {why}")
            shutil.rmtree(left)
            if result:
                break
    disk.close()
    return result, num


def _lost(run: Path, newest: int) -> str:
    if not newest:
        return ""
    try:
        result = opened_at(run)
    except mw.MeshwrightError as error:
        return str(error)
    wrong = check_bytes(result)
    step = result.manifest.step
    return str(wrong) if wrong else "" if step >= newest else f"step {step}, and {newest} was saved"


def nothing(_patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Path]:
    """Use memory where the machine has a folder for it: the test writes and removes hundreds of trees."""
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if os.access(in_memory, os.W_OK) else tmp_path) as made:
        yield Path(made)


@pytest.mark.slow
def test_a_power_cut_loses_nothing(source: Path, at: Path) -> None:
    [(result, num)] = worlds.run(1, lost, source, at, nothing, (1, 2, 2, 3) if parts.ALL else (1, 2))
    assert result == []
    assert num > (1000 if parts.ALL else 300)


def no_fsync_of(which: Callable[[Path], bool]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = os.fsync
        patch.setattr(os, "fsync", lambda fd: None if which(Path(os.readlink(f"/proc/self/fd/{fd}"))) else real(fd))

    return plant


def manifest_before_data(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait for what is written to be on the disk."""
    real = folder.Draft.commit

    def commit(self: Any, made: Any) -> None:
        real(self, made)
        for path in self.final.rglob("*.safetensors"):
            to_disk(path)

    patch.setattr(writer.Files, "fsync", lambda self: None)
    patch.setattr(folder.Draft, "commit", commit)


def earlier_one_removed_first(patch: pytest.MonkeyPatch) -> None:
    real = folder.Draft.commit

    def commit(self: Any, made: Any) -> None:
        shutil.rmtree(self.final, ignore_errors=True)
        real(self, made)

    patch.setattr(folder.Draft, "commit", commit)


# `make test` has every second one.
PLANTED: dict[str, Plant] = {
    "the files of tensors": no_fsync_of(lambda path: path.suffix == ".safetensors"),
    "manifest before data": manifest_before_data,
    "the small files": no_fsync_of(lambda path: path.name == "config.json"),
    "the earlier one removed first": earlier_one_removed_first,
    "the directory": no_fsync_of(lambda path: "unfinished" in path.name),
    "the lists of runs": no_fsync_of(lambda path: path.parent.name == "runs"),
    "the folder": no_fsync_of(lambda path: path.name == "run"),
    "the manifest": no_fsync_of(lambda path: "meshwright.json" in path.name),
    "a directory in it": no_fsync_of(lambda path: path.name == "exp_avg"),
    "what holds the folder": no_fsync_of(lambda path: path.name == "disk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", parts.every(2, PLANTED))
def test_an_omission_is_caught(source: Path, at: Path, plant: str) -> None:
    [(result, _)] = worlds.run(1, lost, source, at, PLANTED[plant], (1, 1))
    assert result, "no cut loses anything"
