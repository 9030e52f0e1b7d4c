"""Check what a save refuses, counts and puts on disk, how it ends in the background, and random states of ranks."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.axes import Axes
from meshwright.checkpoint import async_save
from meshwright.checkpoint.async_save import SaveJob
from meshwright.checkpoint.content import RANDOM, Content, Keep, StateSet, random_plane
from meshwright.checkpoint.dcp import sharded
from meshwright.checkpoint.folder import Draft, check_not_in_use, step_name
from meshwright.checkpoint.manifest import LOCK, Manifest, Part, write_part
from meshwright.checkpoint.restore import Checkpoint
from meshwright.checkpoint.save import RankFiles
from meshwright.errors import CheckpointError
from meshwright.log import logger
from meshwright.sharding import Block, Box, Layout, Param, Piece, Rules, Table
from meshwright.weights import Extents, Key, KeyMap, Values
from meshwright.weights.writer import Files, make_files
from tests.test_checkpoint_functions import make

of: Any = SimpleNamespace
save: Any = importlib.import_module("meshwright.checkpoint.save")  # the package has a function of this name


def matrix(name: str, rows: int) -> Param:
    whole = Box.whole((rows, 3))
    return Param({"row": rows}, {"col": 3}, (Layout("", (Block(whole, name, (rows, 3), whole),)),), name=name)


def test_ranks_count_each_value_once() -> None:
    """Two replicas divide the rows: 5 of one matrix, 2 of another, which has optimizer state too."""
    table = Table({"a": matrix("a", 5), "b": matrix("b", 2)})
    keymap = KeyMap({}, {each.name: Key(each.name, "F32", each.shape, "f") for each in table})
    weights, state = (Values({name: torch.zeros(table[name].shape) for name in names}) for names in ("ab", "b"))
    sets = [
        StateSet("weights", keymap),
        StateSet("master", keymap),
        StateSet("exp_avg", KeyMap({}, {"b": keymap.keys["b"]})),
    ]
    values = {"weights": weights, "master": weights, "exp_avg": state}
    content = Content(5, of(table=table, rules=Rules()), sets, values, of(), {}, {}, {})
    assert [content.num_elements(Axes(replicate=2), rank) for rank in range(2)] == [9 + 3 + 3, 6 + 3 + 3]


def test_a_save_looks_for_room_and_for_files_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may be loaded from the step that would be replaced."""
    drafts, asked = list[tuple[Any, ...]](), list[Any]()

    class FakeDraft:
        path = tmp_path

        def __init__(self, *args: Any) -> None:
            drafts.append(args)

        def __enter__(self) -> FakeDraft:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(save, "Draft", FakeDraft)
    monkeypatch.setattr(save, "check_not_in_use", lambda *args: asked.append(args))
    small = of(check=lambda: asked.append("small"), directory=tmp_path / "source")
    content = of(folder=tmp_path, step=7, num_bytes=lambda axes: axes.world * 11, export=of(small=small))
    rank_files = of(mesh=of(rank=0, axes=Axes(fsdp=3)), content=content, _write_small_files=asked.append)
    assert isinstance(RankFiles._create_draft(rank_files), FakeDraft)
    assert drafts == [(tmp_path, 7, 33)]
    assert asked == ["small", (tmp_path / "step-000007", tmp_path / "source"), tmp_path]
    rank_files.mesh.rank = 1
    assert RankFiles._create_draft(rank_files) is None


def test_the_source_of_a_model_is_not_replaced(tmp_path: Path) -> None:
    """It may be gone, or the step may be new."""
    step, other = make(tmp_path, 1), make(tmp_path, 2)
    (tmp_path / "link").symlink_to(step)
    for final, in_use in ((step, other), (step, tmp_path / "gone"), (tmp_path / "step-000009", step)):
        check_not_in_use(final, in_use)
    with pytest.raises(CheckpointError, match=r"the model was loaded from .*step-000001"):
        check_not_in_use(step, tmp_path / "link")


@pytest.mark.parametrize("last", [None, 1])
def test_later_steps_are_named_and_stay(tmp_path: Path, last: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """A plain resume would take them. Earlier ones are removed only with `keep`."""
    for step in (3, 5, 8, 12):
        make(tmp_path, step)
    content = of(folder=tmp_path, step=5, keep=Keep(last=last), export=of(small=of(directory=tmp_path / "none")))
    with caplog.at_level(logging.WARNING, logger.name):
        save._apply_retention(content)
    assert [each.getMessage().split(" would ")[0] for each in caplog.records] == [
        "step-000012, step-000008 is later than step 5 and"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        step_name(n) for n in ((5, 8, 12) if last else (3, 5, 8, 12))
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_keeps_the_failure_of_its_rank(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copies were made before. Rank 0 alone logs it. The interpreter waits for the thread at its exit."""
    error, done = OSError("no room"), list[Any]()

    class FakeFiles:
        path = tmp_path / "draft"

        def __init__(self, *_: object) -> None:
            self.mesh = of(rank=rank)

        def write_actions(self, *, keep: bool) -> list[str]:
            return ["first", "second"] if keep else []

        def complete(self, actions: Any, agreement: str) -> None:
            done.extend([*actions, agreement])
            raise error

    monkeypatch.setattr(async_save, "RankFiles", FakeFiles)
    monkeypatch.setattr(async_save, "StoreAgreement", lambda _, mark: mark)
    with caplog.at_level(logging.ERROR, logger.name):
        job = SaveJob(of(folder=tmp_path, step=7), of())
        job.wait()
    assert (job.failure, job.succeeded, job._thread.daemon) == (error, False, False)
    assert job.directory == tmp_path / "step-000007"
    assert done == ["first", "second", "draft"]
    assert [each.getMessage() for each in caplog.records] == [f"{job.directory} was not saved: no room"] * (rank == 0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_states_are_those_of_as_many_ranks(tmp_path: Path, world: int) -> None:
    """A row for each of three ranks, of two generators."""
    plane = random_plane({"host": 4, "device": 2}, 3)
    make_files(tmp_path, plane.keymap, None, RANDOM)
    with Files(tmp_path, plane.keymap, None, RANDOM) as files:
        files.put("host", bytes(range(12)), 0)
        files.put("device", bytes(range(50, 56)), 0)
    checkpoint = Checkpoint(tmp_path, of(), of(), {}, {})
    rows = checkpoint.random_rows(of(axes=Axes(fsdp=world), rank=1))
    assert {name: row.tolist() for name, row in rows.items()} == (
        {"host": [4, 5, 6, 7], "device": [52, 53]} if world == 3 else {}
    )


def test_one_of_several_copies_is_written() -> None:
    """All of them are read again."""
    made = matrix("w", 4)
    pieces = {"w": Piece(made, Box.whole((4, 3)), 1, 3)}
    values = {"w": torch.arange(6.0).view(2, 3)}
    keymap = KeyMap({}, {"w": Key("w", "F32", (4, 3), "f")})
    for owned in (set[str](), {"w"}):
        held = sharded(values, pieces, owned, keymap)["w"]
        [part] = held.held()
        assert (part.start, part.values.data_ptr(), part.written) == ((1, 0), values["w"].data_ptr(), bool(owned))
        assert len(held.__create_write_items__("w", None)) == len(owned)
        assert len(held.__create_chunk_list__()) == 1


# What is on disk, and when


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the paths of all files and directories that are fsynced, by the names that they have then."""
    paths: list[str] = []

    def fsync(fd: int) -> None:
        paths.append(re.sub(r"\.unfinished-\w{8}", "", os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_a_commit_is_on_disk_before_and_after_its_renames(tmp_path: Path, synced: list[str]) -> None:
    """The names of new folders too. Data first, then the manifest, at last the name of the step."""
    with Draft(tmp_path / "new" / "run", 3) as draft:
        assert synced == [".", "new"]
        synced.clear()
        (draft.path / "master").mkdir()
        draft.commit(Manifest(3, {"weights": ""}, {}, {}, {}))
    hidden = "new/run/.step-000003"
    assert synced == [f"{hidden}/master", hidden, f"{hidden}/.meshwright.json", hidden, "new/run"]
    synced.clear()
    make(tmp_path / "new" / "run", 4)
    assert synced[0] == "new/run/.step-000004", "the folder is there"


def test_small_files_and_lists_are_on_disk(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "write_small", lambda _, path: (path / "tokenizer.json").write_text("{}"))
    extents = Extents()
    (tmp_path / LOCK).touch()
    save.write_beside(of(), tmp_path, {"step": 3}, extents)
    assert synced == [*extents.of_file] == ["tokenizer.json", "trainer.json"]
    assert json.loads((tmp_path / "trainer.json").read_text()) == {"step": 3}
    part = write_part(tmp_path, 12, extents)
    assert (synced[-1], part.name, part.num_bytes) == ("runs/00012.json", "runs/00012.json", extents.num_bytes)


def test_a_rank_ends_its_files_before_it_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a row of random states. Values that are not finite are in its report."""
    done: list[Any] = []
    monkeypatch.setattr(save, "copy_carried", lambda files, rank, world: done.append((files.name, rank, world)))
    monkeypatch.setattr(save, "write_part", lambda *args: done.append(args) or Part("p", 1, 2))
    files = {
        name: of(
            name=name, fsync=lambda name=name: done.append(f"fsync {name}"),
            close=lambda name=name: done.append(f"close {name}"), put=lambda *args: done.append(args),
        )
        for name in ("weights", "random")
    }  # fmt: skip
    rank_files = of(
        files=files, mesh=of(rank=2, axes=Axes(fsdp=3)), content=of(random={"host": b"1234", "device": b"12"}),
        path=tmp_path, extents="extents", _not_finite=5,
    )  # fmt: skip
    RankFiles._finish(rank_files)
    assert done == [
        ("weights", 2, 3), ("host", b"1234", 8), ("device", b"12", 4), "fsync weights", "close weights", "fsync random",
        "close random", (tmp_path, 2, "extents"),
    ]  # fmt: skip
    assert rank_files._part == Part("p", 1, 2, 5)
