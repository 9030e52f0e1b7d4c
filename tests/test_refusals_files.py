"""Checkpoints, shared memory and directories of runs that are refused; whole ones pass."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import fsspec
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.checkpoint import copy, manifest
from meshwright.checkpoint.async_save import StoreAgreement
from meshwright.checkpoint.dcp import Part as Held
from meshwright.checkpoint.dcp import Sharded, take
from meshwright.checkpoint.folder import Draft, checkpoints, final_place
from meshwright.checkpoint.inspect import _parts
from meshwright.checkpoint.manifest import MANIFEST, PARTS, Manifest, Part, read_manifest, read_parts, write_part
from meshwright.checkpoint.restore import open_checkpoint, verify_extent
from meshwright.checkpoint.save import commit
from meshwright.errors import BrokenFile, CheckpointError, ConfigError, LoadError, MeshError, RankError
from meshwright.train import config_of
from meshwright.train.config_model import layout_of
from meshwright.train.lock import hold
from meshwright.train.resume_point import CHECKPOINTS, check_position
from meshwright.weight_sync import receive_from_group, receive_from_process
from meshwright.weight_sync.shared_memory import make
from meshwright.weights.checksums import Extent, Extents, checksum
from tests import tiny
from tests.refusals import Refusal

CPU = torch.device("cpu")


def checkpoint(at: Path, step: int = 3, data: bytes = b"abcdef", **changes: Any) -> Manifest:
    """Write a whole checkpoint of one file and one list of extents."""
    (at / PARTS).mkdir(parents=True)
    (at / "a.bin").write_bytes(data)
    extents = Extents()
    extents.add("a.bin", 0, data)
    part = write_part(at, 0, extents)
    made = Manifest(step, {"weights": ""}, {"a.bin": len(data)}, {part.name: part.checksum}, {})
    made = replace(made, **changes)
    manifest.write_manifest(at, made)
    return made


# Manifests


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        (dict(step=-1), True), (dict(step=0), False), (dict(files={"a.bin": -1}), True),
        (dict(files={"a.bin": 0}), False), (dict(files={}), False), (dict(files={"../a": 1}), True),
    ],
)  # fmt: skip
def test_a_manifest_with_impossible_numbers(tmp_path: Path, changes: dict[str, Any], is_refused: bool) -> None:
    made = checkpoint(tmp_path / "c", **changes)
    if is_refused:
        with pytest.raises(BrokenFile, match="malformed"):
            read_manifest(tmp_path / "c")
        return
    assert read_manifest(tmp_path / "c") == made


@pytest.mark.parametrize(
    ("size", "why"), [(5, "has 5 bytes, but 6"), (6, ""), (7, "has 7 bytes, but 6"), (None, "No such")]
)
def test_files_that_shrank_or_grew_are_not_whole(tmp_path: Path, size: int | None, why: str) -> None:
    checkpoint(tmp_path)
    if size is None:
        (tmp_path / "a.bin").unlink()
    else:
        (tmp_path / "a.bin").write_bytes(b"abcdefg"[:size])
    said = manifest.why_not_whole(tmp_path)
    assert why in said
    assert bool(why) is bool(said)


@pytest.mark.parametrize("name", ["FORMAT", "VERSION"])
def test_a_manifest_of_another_format(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, name, 99)
    checkpoint(tmp_path / "c")
    read_manifest(tmp_path / "c")
    monkeypatch.undo()
    with pytest.raises(BrokenFile, match=r"99.* but this meshwright reads .*convert it"):
        read_manifest(tmp_path / "c")


@pytest.mark.parametrize("harm", ["missing", "changed", "malformed", "short", "long"])
def test_lists_of_extents_must_be_whole(tmp_path: Path, harm: str) -> None:
    made = checkpoint(tmp_path)
    (name,) = made.parts
    file = tmp_path / name
    assert read_parts(tmp_path, made).num_bytes == 6
    if harm == "missing":
        file.unlink()
    elif harm == "changed":
        file.write_bytes(file.read_bytes() + b" ")
    elif harm == "malformed":
        file.write_text("[1]")
        made = replace(made, parts={name: checksum(b"[1]")})
    else:
        made = replace(made, files={"a.bin": 7 if harm == "short" else 5})
    words = {
        "missing": f"{name} cannot be read: No such file", "changed": "fails its checksum", "malformed": "is malformed",
        "short": "its extents end at byte 6 of 7", "long": "its extents end at byte 6 of 5",
    }  # fmt: skip
    with pytest.raises(BrokenFile, match=words[harm]):
        read_parts(tmp_path, made)


def test_a_file_of_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error other than damage, such as an unknown dtype, is no reason to take an older checkpoint."""
    for error, wanted in ((LoadError("odd"), CheckpointError), (BrokenFile("torn"), mw.BrokenCheckpointError)):
        refuse = Mock(side_effect=error)
        monkeypatch.setitem(open_checkpoint.__globals__, "read_manifest", refuse)
        with pytest.raises(CheckpointError, match=str(error)) as caught:
            open_checkpoint(tmp_path)
        assert type(caught.value) is wanted


@pytest.mark.parametrize(("file", "start", "key"), [("a", 0, "k"), ("a", 4, "l"), ("b", 4, "m"), ("b", 8, "")])
def test_damaged_bytes_are_named_by_their_file_and_tensor(tmp_path: Path, file: str, start: int, key: str) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(12))
    entries = [("k", "a", 0, 4), ("l", "a", 4, 8), ("m", "b", 0, 8)]
    made = {key: SimpleNamespace(key=key, file=at, start=lo, stop=hi) for key, at, lo, hi in entries}
    opened = cast(Any, SimpleNamespace(directory=tmp_path, planes={"weights": SimpleNamespace(entries=made)}))
    verify_extent(opened, file, Extent(start, start + 4, checksum(bytes(4))))
    named = re.escape(f"{file} ({key}) fail their" if key else f"{file} fail their")
    with pytest.raises(BrokenFile, match=rf"bytes {start} to {start + 4} of .*/{named}"):
        verify_extent(opened, file, Extent(start, start + 4, checksum(b"none")))


@pytest.mark.parametrize(
    ("hidden", "visible", "whole", "counts"),
    [
        ("unfinished", False, True, True), ("replaced", False, True, True), ("removed", False, True, False),
        ("unfinished", True, True, False), ("unfinished", False, False, False),
    ],
)  # fmt: skip
def test_which_hidden_directories_are_candidates(
    tmp_path: Path, hidden: str, visible: bool, whole: bool, counts: bool
) -> None:
    """Only a whole one whose visible name is missing: its process died as it swapped them."""
    at = tmp_path / f".step-000003.{hidden}-0123abcd"
    at.mkdir()
    if whole:
        (at / MANIFEST).touch()
    if visible:
        (tmp_path / "step-000003").mkdir()
    names = [each.path.name for each in checkpoints(tmp_path)]
    assert names == ["step-000003"] * visible + [at.name] * counts
    assert checkpoints(tmp_path / "none") == []


def test_an_unknown_dtype_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(8))
    source = SimpleNamespace(directory=tmp_path)
    entry = SimpleNamespace(key="k", dtype="F32", file="a", start=0, stop=8)
    assert [each.tolist() for each in _parts(cast(Any, source), cast(Any, entry))] == [[0.0, 0.0]]
    entry.dtype = "F24"
    with pytest.raises(CheckpointError, match="k is F24, which torch has no dtype for"):
        next(_parts(cast(Any, source), cast(Any, entry)))


@pytest.mark.parametrize("reported", [5, 6, 7])
def test_ranks_must_have_written_all_bytes(tmp_path: Path, reported: int) -> None:
    with Draft(tmp_path, 3) as draft:
        (draft.path / "a.bin").write_bytes(b"abcdef")
        part = Part(f"{PARTS}/00000.json", 0, reported)
        if reported == 6:
            commit(draft, [], [part], {})
            assert read_manifest(final_place(tmp_path, 3)).files == {"a.bin": 6}
            return
        with pytest.raises(CheckpointError, match=f"the ranks wrote {reported} bytes of 6; this is a bug"):
            commit(draft, [], [part], {})


def test_a_save_waits_for_other_ranks_until_its_deadline() -> None:
    known: dict[str, bytes] = {}
    store = SimpleNamespace(check=lambda names: all(name in known for name in names), get=known.__getitem__)
    agreement = cast(StoreAgreement, SimpleNamespace(timeout_s=0.0, store=store))
    with pytest.raises(CheckpointError, match="timed out after 0 s waiting until rank 1 has written"):
        StoreAgreement._wait(agreement, "1", "rank 1 has written")
    known["1"] = b"yes"
    assert StoreAgreement._wait(agreement, "1", "rank 1 has written") == "yes"


def sharded(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], value: float = 0) -> Sharded:
    return Sharded(shape, torch.float32, [Held(start, torch.full(size, value), True)])


local = sharded((4, 2), (2, 0), (2, 2))
TAKEN: dict[str, Refusal] = {
    "shape": Refusal(lambda loaded: take(local, loaded, "k"), torch.zeros(3, 2), CheckpointError,
        r"k is \(3, 2\) in the state dict, but \(4, 2\) in the model", (torch.zeros(4, 2),)),
    "start": Refusal(lambda loaded: take(local, loaded, "k"), sharded((4, 2), (0, 0), (2, 2)), CheckpointError,
        r"lacks this rank's part at \(2, 0\)", (sharded((4, 2), (2, 0), (2, 2)),)),
    "size": Refusal(lambda loaded: take(local, loaded, "k"), sharded((4, 2), (2, 0), (2, 1)), CheckpointError,
        r"lacks this rank's part at \(2, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_a_state_dict_must_have_the_boxes_of_this_rank(case: str) -> None:
    TAKEN[case].check()


def test_a_state_dict_is_copied_into_its_box() -> None:
    take(local, torch.arange(8.0).view(4, 2), "k")
    assert local.held()[0].values.tolist() == [[4, 5], [6, 7]]
    take(local, sharded((4, 2), (2, 0), (2, 2), 3), "k")
    assert local.held()[0].values.tolist() == [[3, 3], [3, 3]]


# Copies


def test_copies_that_meet_another_checkpoint(tmp_path: Path) -> None:
    for name, data in (("a", b"abcdef"), ("b", b"abcdeg")):
        checkpoint(tmp_path / name / "step-000003", data=data, about={"name": name})
    first, second = (tmp_path / name / "step-000003" for name in "ab")
    for target in (str(tmp_path / "out"), "memory://refused/out"):
        at = mw.copy_checkpoint(first, target)
        assert mw.copy_checkpoint(first, target) == at
        with pytest.raises(CheckpointError, match="is another checkpoint; remove it, or choose another folder"):
            mw.copy_checkpoint(second, target)
    assert (tmp_path / "out" / "step-000003" / "a.bin").read_bytes() == b"abcdef"


def test_a_copy_needs_room_and_puts_all_files_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, synced = checkpoint(tmp_path / "step-000003"), list[str]()
    monkeypatch.setattr(copy, "to_disk", lambda path: synced.append(path.name))
    free = iter([5, 6])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free), total=99))
    with pytest.raises(CheckpointError, match=r"6 bytes are to be written, but .* has room for 5"):
        mw.copy_checkpoint(tmp_path / "step-000003", tmp_path / "out")
    mw.copy_checkpoint(tmp_path / "step-000003", tmp_path / "out")
    assert sorted(synced) == sorted(Path(name).name for name in (*made.files, *made.parts))


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "step-000003")
    monkeypatch.setattr(copy, "_copy", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"out/step-000003 was not written: .*No space left"):
        mw.copy_checkpoint(tmp_path / "step-000003", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_copy_of_an_incomplete_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-000003")
    at = mw.copy_checkpoint(tmp_path / "step-000003", "memory://refused/short")
    assert mw.copy_checkpoint("memory://refused/short", tmp_path / "back") == str(tmp_path / "back" / "step-000003")
    fsspec.filesystem("memory").pipe(f"{at}/a.bin", b"abcde")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*a\.bin has 5 bytes, but 6 were written"):
        mw.copy_checkpoint("memory://refused/short", tmp_path / "other")
    fsspec.filesystem("memory").pipe(f"{at}/a.bin", b"abcdefg")
    with pytest.raises(CheckpointError, match=r"a\.bin has 7 bytes, but 6 were written"):
        mw.copy_checkpoint("memory://refused/short", tmp_path / "other")
    fsspec.filesystem("memory").rm(f"{at}/a.bin")
    with pytest.raises(CheckpointError, match=r"a\.bin has no bytes, but 6 were written"):
        mw.copy_checkpoint("memory://refused/short", tmp_path / "other")
    checkpoint(tmp_path / "step-000002", step=2)
    mw.copy_checkpoint(tmp_path / "step-000002", "memory://refused/short")  # older, and whole
    assert mw.copy_checkpoint("memory://refused/short", tmp_path / "other").endswith("step-000002")


def test_a_store_that_changes_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "step-000003")
    put = copy._put
    monkeypatch.setattr(copy, "_put", lambda target, data: put(target, data.replace(b"weights", b"weighty")))
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is not what was sent; copy again"):
        mw.copy_checkpoint(tmp_path / "step-000003", "memory://refused/lies")


# Weights for other processes


def test_shared_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, made, create = resource.getrlimit(resource.RLIMIT_FSIZE), list[int](), os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: made.append(create(name)) or made[-1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(RankError, match=r"no 1,048,577 bytes of shared memory: .*smaller bucket_bytes="):
            make((1 << 20) + 1, CPU)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(made[0])
        _, _, handle = make(1 << 20, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    os.close(cast(int, handle))


def test_a_path_that_no_socket_can_have(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 30)
    with pytest.raises(ConfigError, match="is not the socket of a sender"):
        dict(receive_from_process(long, timeout_s=5))


class Lost:
    """A group of two whose other process is gone."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def broadcast(self, *_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")


def test_the_loss_of_a_sender_is_named() -> None:
    for src, error, message in ((1, RankError, "the sender is lost.*make a new group: Connection closed"),
                                (0, ConfigError, "src=0 is not another rank"), (2, ConfigError, "src=2"),
                                (-1, ConfigError, "src=-1")):  # fmt: skip
        with pytest.raises(error, match=message):
            dict(receive_from_group(cast(dist.ProcessGroup, Lost()), src))


# Runs


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out: .*choose a directory that this process can write"):
        hold(tmp_path / "file" / "out")
    hold(tmp_path / "out").close()


def test_a_trainer_takes_a_config() -> None:
    with pytest.raises(ConfigError, match=r"takes the config of a run, not a str; pass mw\.train\.read\(file\)"):
        mw.Trainer(cast(Any, "run.toml"))


@pytest.mark.parametrize("tp", [2, 3])
def test_a_mesh_that_does_not_fit_the_model_has_no_layout(tmp_path: Path, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.of("qwen3")))
    config = config_of(
        model=str(tmp_path), out=str(tmp_path / "out"), data=[dict(path="a.jsonl")], mesh=dict(tp=tp),
        train=dict(length=24, tokens_per_step=24, steps=1),
    )  # fmt: skip
    if tp == 2:
        layout_of(config)
        return
    with pytest.raises(MeshError, match="tp=3 does not divide"):
        layout_of(config)


def test_a_run_that_must_not_resume(tmp_path: Path) -> None:
    data, config = cast(Any, None), cast(Any, SimpleNamespace(out=str(tmp_path), resume="never"))
    check_position(config, data)
    checkpoint(tmp_path / CHECKPOINTS / "step-000003")
    with pytest.raises(ConfigError, match='step-000003 exists, and resume = "never"; choose another out'):
        check_position(config, data)
    config.resume = "auto"
    check_position(config, data)  # of a checkpoint that cannot be opened, which `resume` reports
