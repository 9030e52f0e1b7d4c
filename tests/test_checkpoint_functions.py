"""Functions of checkpoints, called with small inputs: state sets, reports of ranks, folders and comparisons."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.axes import Axes
from meshwright.checkpoint import copy, folder, inspect
from meshwright.checkpoint.async_save import SaveJob, StoreAgreement
from meshwright.checkpoint.content import Content, Keep, StateSet, planes_of, random_plane, with_zeros
from meshwright.checkpoint.manifest import MANIFEST, Manifest, Part, read_manifest, write_manifest, write_part
from meshwright.checkpoint.restore import RestoreTarget, _filled, _unread, extents_of_model, together
from meshwright.checkpoint.save import RankFiles, _is_finite
from meshwright.errors import BrokenCheckpointError, BrokenFile, CheckpointError
from meshwright.ops.part_sizes import shrunk_part_sizes
from meshwright.optim import SCALES
from meshwright.sharding import Block, Box, Layout, Param, Table
from meshwright.weights import Key, KeyMap, Values, make_files, open_source
from meshwright.weights.checksums import Extent, Extents

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8


def param(name: str, blocks: Sequence[tuple[str, int, int]]) -> Param:
    """Declare a `[2, 3]` parameter. `blocks`: the keys that hold it, the first row in each, and the rows of each."""
    whole = Box.whole((2, 3))
    made = tuple(Block(whole, key, (rows, 3), Box((first, 0), (first + 2, 3))) for key, first, rows in blocks)
    return Param({"row": 2}, {"col": 3}, (Layout("", made[:1], made[1:]),), name=name)


# q and k share a key; the head is stored twice
TABLE = Table({
    "q": param("q", [("qk", 0, 4)]), "k": param("k", [("qk", 2, 4)]), "v": param("v", [("v", 0, 2)]),
    "head": param("head", [("embed", 0, 2), ("head", 0, 2)]),
    f"v{SCALES}": param(f"v{SCALES}", [("v_scales", 0, 2)]),
})  # fmt: skip


def keymap(**dtypes: str) -> KeyMap:
    """Return a key map; each key has a file of its own."""
    return KeyMap({}, {name: Key(name, dtype, (4 if name == "qk" else 2, 3), f"of_{name}")
                       for name, dtype in dtypes.items()})  # fmt: skip


FILES = keymap(qk="BF16", v="F32", embed="F32", head="BF16")


def dtypes_of(state_sets: Sequence[StateSet]) -> dict[str, dict[str, str]]:
    return {each.name: {key.name: key.dtype for key in each.keymap.keys.values()} for each in state_sets}


@pytest.mark.parametrize(
    ("stored", "master"),
    [
        ({"q": F32, "k": BF16, "v": F32}, {"qk": "F32"}),  # only what the files would round
        ({"q": BF16, "k": BF16, "v": torch.float64}, {"v": "F64"}),
        ({"q": torch.float16}, {"qk": "F16"}),
        ({"head": F32}, {"embed": "F32", "head": "F32"}),  # one of its two keys would round it
        ({"head": BF16, "v": F32}, None),
    ],
)
def test_masters_are_kept_of_what_files_round(stored: dict[str, torch.dtype], master: Any) -> None:
    if "head" in stored:  # a layout of two keys, neither of them a copy
        both = replace(TABLE["head"].layouts[0], blocks=TABLE["head"].layouts[0].blocks * 2, copies=())
        both = replace(both, blocks=(both.blocks[0], both.blocks[0]._replace(key="head")))
        table = Table({**TABLE.params, "head": replace(TABLE["head"], layouts=(both,))})
    else:
        table = TABLE
    actual = dtypes_of(planes_of(table, FILES, stored, {}))
    assert actual.pop("weights") == {name: key.dtype for name, key in FILES.keys.items()}
    assert actual == ({} if master is None else {"master": master})


def test_every_state_set_has_its_own_dtypes() -> None:
    """Parameters that share a key get the widest dtype. A second copy of a head has no state."""
    state = {"a": {"q": BF16}, "b": {"q": F32}, "c": {"q": BF16, "k": F32}, "none": {}, "d": {"head": F32}}
    sets = planes_of(TABLE, FILES, {"q": F32}, state)
    assert dtypes_of(sets[1:]) == {
        "master": {"qk": "F32"}, "a": {"qk": "BF16"}, "b": {"qk": "F32"}, "c": {"qk": "F32"}, "d": {"embed": "F32"}
    }  # fmt: skip
    assert [each.folder for each in sets] == ["", "master", "a", "b", "c", "d"]
    assert sets[1].keymap.keys["qk"] == Key("qk", "F32", (4, 3), "of_qk")


def test_scales_of_state_follow_in_the_file_of_their_matrix() -> None:
    [_, coded] = planes_of(TABLE, FILES, {}, {"exp_avg": {"v": U8, f"v{SCALES}": F32}})
    assert [*coded.keymap.keys.values()] == [Key("v", "U8", (2, 3), "of_v"), Key("v_scales", "F32", (2, 3), "of_v")]


def test_untrained_parts_of_a_key_are_zeros() -> None:
    stored = Values({name: torch.ones(2, 3, dtype=BF16) for name in ("q", "k", "v", "head")})
    filled = with_zeros(Values({"q": torch.full((2, 3), 7.0)}), StateSet("a", keymap(qk="F32")), TABLE, stored)
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in filled.items()} == {
        "q": (F32, [[7.0] * 3] * 2), "k": (F32, [[0.0] * 3] * 2)
    }  # fmt: skip


def content(tmp_path: Path, values: Mapping[str, Values], **random: bytes) -> Content:
    sets = [StateSet(name, FILES if name == "weights" else keymap(qk="F32")) for name in values]
    export: Any = SimpleNamespace(directory=tmp_path)
    return Content(5, cast(Any, SimpleNamespace(table=TABLE)), sets, values, export, {}, random, {})


def test_the_size_of_a_checkpoint_is_that_of_all_its_files(tmp_path: Path) -> None:
    """Generator states have a row for each rank."""
    empty, axes = Values({}), Axes(fsdp=3)
    made = content(tmp_path, {"weights": empty, "master": empty}, cpu=b"12345", cuda=b"123")
    for each in made.all_planes(axes):
        make_files(tmp_path, each.keymap, None, each.folder)
    assert made.num_bytes(axes) == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert {name: key.shape for name, key in random_plane({"cpu": 5}, 3).keymap.keys.items()} == {"cpu": (3, 5)}


def test_values_are_exchanged_once_for_all_their_state_sets(tmp_path: Path) -> None:
    weights, moments = (Values({"q": torch.ones(2, 3), "k": torch.ones(2, 3)}) for _ in range(2))
    only_q = moments.only(lambda name: name == "q")
    made = content(tmp_path, {"weights": weights, "a": moments, "b": only_q, "master": weights})
    assert [([*values], [each.name for each in sets]) for values, sets in made.by_values()] == [
        (["q", "k"], ["weights", "master"]), (["q", "k"], ["a"]), (["q", "k"], ["b"])
    ]  # fmt: skip


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "finite"),
    [([1.0, -3e38], True), ([], True), ([-INF, 1.0], False), ([1.0, INF], False), ([0.0, NAN, 1.0], False)],
)
def test_values_that_are_finite(values: list[float], finite: bool) -> None:
    assert _is_finite(torch.tensor(values)) is finite


@pytest.mark.parametrize(
    ("name", "sets", "value", "noted"),
    [("v", ["weights"], NAN, 2), ("v", ["weights", "master"], INF, 2), ("v", ["exp_avg"], NAN, -1),
     ("v", ["weights"], 1.0, -1), ("k", ["weights"], NAN, -1)],
)  # fmt: skip
def test_trained_weights_that_are_not_finite_are_noted(name: str, sets: list[str], value: float, noted: int) -> None:
    """The parameter k is frozen: it may have been loaded as it is."""
    written, advanced = list[str](), list[int]()
    files = {each: SimpleNamespace(write=lambda *_, each=each: written.append(each)) for each in sets}
    rank_files: Any = SimpleNamespace(
        files=files, _trained=frozenset({"q", "v"}), _not_finite=-1, _advance=advanced.append,
        content=SimpleNamespace(spec=SimpleNamespace(table=TABLE)),
    )  # fmt: skip
    piece: Any = SimpleNamespace(param=TABLE[name], numel=6)
    state_sets: Any = [SimpleNamespace(name=each) for each in sets]
    RankFiles._write(rank_files, state_sets, piece, torch.tensor([0.0, value]))
    assert (rank_files._not_finite, written, advanced) == (noted, sets, [6])


def test_reports_of_ranks_pass_as_floats() -> None:
    part = Part("runs/00012.json", 0xFEDCBA98F6543210, (1 << 40) + 1, 7)
    assert Part.from_floats(12, torch.tensor(part.to_floats(), dtype=torch.float64).tolist()) == part
    assert Part.from_floats(0, Part("runs/00000.json", 0xFFFFFFFF, 0).to_floats()).not_finite == -1


# Folders


def make(at: Path, step: int, **about: Any) -> Path:
    with folder.Draft(at, step) as draft:
        draft.commit(Manifest(step, {"weights": ""}, {}, {}, about))
    return draft.final


def test_the_newest_is_found_in_runs_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    make(run / folder.CHECKPOINTS, 999_999)
    newest = make(run / folder.CHECKPOINTS, 1_000_000)
    assert folder.newest_of(run / folder.CHECKPOINTS) == newest
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        folder.find(run)
    (run / folder.RUN).touch()
    assert folder.newest_of(run) == newest
    (plain := tmp_path / "plain").mkdir()
    assert folder.newest_of(plain) == plain
    assert folder.run_of(newest) == run
    assert folder.run_of(make(plain, 1)) is None
    monkeypatch.chdir(newest.parent)
    assert folder.run_of(Path(newest.name)) == run


def test_unreadable_and_diverged_checkpoints_are_not_among_the_last(tmp_path: Path) -> None:
    good, lost, older = (make(tmp_path, step) for step in (3, 2, 1))
    diverged, unreadable = make(tmp_path, 4, not_finite="w"), make(tmp_path, 5)
    (unreadable / MANIFEST).write_text("{}")
    folder.remove_earlier(tmp_path, 6, Keep(last=1, every=None), in_use=older)
    assert sorted(tmp_path.iterdir()) == [older, good, diverged, unreadable]
    assert not lost.exists()


def test_the_newer_of_two_complete_directories_gets_the_name(tmp_path: Path) -> None:
    """A process died between the two renames of a swap, more than an hour ago."""
    for state in ("replaced", "unfinished"):
        (at := tmp_path / f".step-000003.{state}-01234567").mkdir()
        write_manifest(at, Manifest(3, {"weights": ""}, {}, {}, {"was": state}))
        os.utime(at, (0, 0))
    make(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]
    assert read_manifest(tmp_path / "step-000003").about == {"was": "unfinished"}


STATE_FILES = [
    "trainer.json", "master/model.safetensors", "exp_avg/a.safetensors", "exp_avg_sq/a.safetensors",
    "random/states.safetensors", "runs/00003.json",
]  # fmt: skip


@pytest.mark.parametrize("name", STATE_FILES)
def test_each_file_of_a_checkpoint_reveals_that_its_manifest_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").touch()
    assert not folder.is_checkpoint(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"holds {name} of a checkpoint but no {MANIFEST}"):
        folder.is_checkpoint(tmp_path)
    (tmp_path / MANIFEST).symlink_to("gone")
    assert folder.is_checkpoint(tmp_path)


# Comparison


def opened(at: Path, **sets: dict[str, Tensor]) -> Any:
    planes = {}
    for name, tensors in sets.items():
        (at / name).mkdir(parents=True)
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, at / name / "model.safetensors")
        planes[name] = open_source(at / name)
    return SimpleNamespace(directory=at, planes=planes)


def test_checkpoints_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    long = torch.zeros(1500)  # in several parts, and the same ones for each dtype
    other = long.clone()
    other[[3, 700, 1400]] = torch.tensor([0.5, -4.0, 1.0])
    one = opened(tmp_path / "a", weights={"w": long, "ids": torch.arange(5), "n": long[:300], "s": long[:6]},
                 master={"w": long[:2]})  # fmt: skip
    two = opened(
        tmp_path / "b", weights={"w": other, "ids": torch.tensor([0, 9, 2, 3, 9]), "n": long[:300].to(BF16),
                                 "s": long[:6].view(2, 3), "extra": long[:1]},
        exp_avg={"w": long[:2]},
    )  # fmt: skip
    with shrunk_part_sizes():
        actual = {(each.plane, each.key): (each.why, each.largest, each.num) for each in inspect.differences(one, two)}
        assert list(inspect.differences(one, one)) == []
    assert actual == {
        ("weights", "ids"): ("values", 1.0, 2),
        ("weights", "n"): ("F32 and BF16", 0.0, 0),
        ("weights", "s"): ("shape (6,) and (2, 3)", None, 0),
        ("weights", "w"): ("values", 4.0, 3),
        ("weights", "extra"): (f"only in {two.directory}", None, 0),
        ("master", "w"): (f"only in {one.directory}", None, 0),
        ("exp_avg", "w"): (f"only in {two.directory}", None, 0),
    }


def test_the_summary_counts_what_is_stored(tmp_path: Path) -> None:
    checkpoint = opened(
        tmp_path, weights={"w": torch.zeros(5), "n": torch.zeros(3, dtype=BF16)}, master={"w": torch.zeros(7)}
    )
    (tmp_path / "runs").mkdir()
    for name in ("runs/00000.json", "c.json"):
        (tmp_path / name).touch()
    trainer = dict(step=4, tokens=9, head="lm", settings={"a": 1}, state=None, trained=["w", "n", "x"])
    files = {"weights/model.safetensors": 100, "master/model.safetensors": 30}
    checkpoint.trainer = trainer
    checkpoint.manifest = Manifest(4, {}, files, {"runs/00000.json": 1, "runs/00001.json": 2}, {"mesh": "fsdp 2"})
    checkpoint.extents = Extents({"a": [Extent(0, 4, 1), Extent(4, 9, 1)], "b": [Extent(0, 3, 1)], "c": []})
    assert inspect.summary(checkpoint) == {
        **trainer, "directory": str(tmp_path), "trained": 3, "mesh": "fsdp 2", "bytes": 130, "ranks": 2, "runs": 3,
        "unlisted_files": ["c.json"],
        "planes": {
            "weights": {"tensors": 2, "bytes": 26, "dtypes": ["BF16", "F32"], "files": 1},
            "master": {"tensors": 1, "bytes": 28, "dtypes": ["F32"], "files": 1},
        },
    }  # fmt: skip


# Restoring


def test_each_extent_that_no_rank_reads_in_full_is_verified(tmp_path: Path) -> None:
    """Extents of a fused key with a frozen part are verified apart, and so are headers and small files."""
    checkpoint = opened(tmp_path, weights={"qk": torch.zeros(4, 3), "v": torch.zeros(2, 3)})
    source = checkpoint.planes["weights"]
    starts = {key: entry.start for key, entry in source.entries.items()}
    extents = Extents()
    extents.add("config.json", 0, b"x" * 300)
    for start, num in ((0, min(starts.values())), (starts["v"], 12), (starts["v"] + 12, 12), (starts["qk"], 48)):
        extents.add("model.safetensors", start, b"x" * num)

    checkpoint.extents = extents

    def unread(*names: str) -> list[tuple[str, int]]:
        filled = _filled([RestoreTarget(source, {}, frozenset(names))], TABLE, {})
        return [(file, extent.start) for file, extent in _unread(checkpoint, filled)]

    header = [("config.json", 0), ("model.safetensors", 0)]
    of_v = [("model.safetensors", starts["v"]), ("model.safetensors", starts["v"] + 12)]
    of_qk = [("model.safetensors", starts["qk"])]
    assert unread("q", "k", "v") == header
    assert unread("q", "v") == [*header, *of_qk]
    assert unread("k", "q") == [*header, *of_v]
    assert unread() == [*header, *of_v, *of_qk]


def without_state(at: Path) -> tuple[Extents, tuple[str, ...]]:
    """Write a checkpoint, and remove its masters and generator states. Each file has two extents."""
    extents, names = Extents(), ("a.safetensors", "masterpiece.txt", "master/m.bin", "random/r.bin")
    for name in names:
        (at / name).parent.mkdir(exist_ok=True, parents=True)
        (at / name).write_bytes(data := name.encode())
        extents.add(name, 4, data[4:])
        extents.add(name, 0, data[:4])
    (at / "runs").mkdir()
    part = write_part(at, 0, extents)
    sizes = {name: len(name) for name in names}
    write_manifest(at, Manifest(1, {"weights": "", "master": "master"}, sizes, {part.name: part.checksum}, {}))
    for gone in ("master", "random"):
        shutil.rmtree(at / gone)
    return extents, names[:2]


def test_weights_are_verified_without_the_other_state(tmp_path: Path) -> None:
    extents, names = without_state(tmp_path)
    assert extents_of_model(tmp_path) == {name: sorted(extents.of_file[name]) for name in names}
    assert extents_of_model(tmp_path / "runs") == {}


@pytest.mark.parametrize(
    ("file", "at", "refused"),
    [
        ("a.safetensors", 3, True), ("a.safetensors", 4, False), ("masterpiece.txt", 0, True),
        ("masterpiece.txt", 9, True),
    ],
)  # fmt: skip
def test_headers_and_small_files_are_verified_at_once(tmp_path: Path, file: str, at: int, refused: bool) -> None:
    """Tensors are verified as they are read."""
    without_state(tmp_path)
    data = bytearray((tmp_path / file).read_bytes())
    data[at] ^= 1
    (tmp_path / file).write_bytes(data)
    with pytest.raises(BrokenFile, match=f"{file} fail") if refused else contextlib.nullcontext():
        extents_of_model(tmp_path)


@pytest.mark.parametrize(
    ("error", "rounds"),
    [(BrokenFile("torn"), [None, BrokenCheckpointError]), (BrokenCheckpointError("x"), [None, BrokenCheckpointError]),
     (MemoryError("no"), [CheckpointError, None]), (None, [None, None])],
)  # fmt: skip
def test_only_damage_lets_ranks_try_an_older_checkpoint(error: Exception | None, rounds: list[Any]) -> None:
    """All ranks take part in both rounds, whatever their files hold."""
    seen = list[Any]()

    def act() -> int:
        if error is not None:
            raise error
        return 7

    def all_or_none(failure: BaseException | None, _at: str, kind: type) -> None:
        assert kind is [CheckpointError, BrokenCheckpointError][len(seen)]
        seen.append(None if failure is None else type(failure))

    mesh: Any = SimpleNamespace(all_or_none=all_or_none)
    if error is None:
        assert together(act, "it", mesh, "what") == 7
    else:
        with pytest.raises(IndexError):  # the fake mesh lets it pass
            together(act, "it", mesh, "what")
    assert seen == rounds


# Agreements of asynchronous saves


def agreements(num: int) -> list[StoreAgreement]:
    """Return the agreements of some ranks that share a store."""
    known: dict[str, bytes] = {}
    store = SimpleNamespace(
        check=lambda names: all(name in known for name in names), get=known.__getitem__,
        set=lambda name, text: known.update({name: text.encode()}),
    )  # fmt: skip
    mesh = lambda rank: SimpleNamespace(  # noqa: E731 - short
        rank=rank, axes=SimpleNamespace(world=num), timeout=SimpleNamespace(total_seconds=lambda: 0.0),
        store=lambda name: {"save/mark": store}[name],
    )  # fmt: skip
    return [StoreAgreement(cast(Any, mesh(rank)), "mark") for rank in range(num)]


def test_rank_0_gets_the_reports_of_all_ranks() -> None:
    zero, one, two = agreements(3)
    reports = [Part(f"runs/{rank:05d}.json", 3 << 62 | rank, 10 + rank, rank - 1) for rank in range(3)]
    assert (one.parts(None, reports[1]), two.parts(None, reports[2])) == ([], [])
    assert zero.parts(None, reports[0]) == reports
    zero.end(None)
    one.end(None)
    with pytest.raises(OSError, match="of this rank"):
        two.end(OSError("of this rank"))


def test_a_failure_of_one_rank_reaches_all() -> None:
    zero, one, two = agreements(3)
    part = Part("p", 1, 2)
    one.parts(None, part)
    two.parts(OSError("full"), part)
    with pytest.raises(CheckpointError, match="rank 2 failed to save: OSError: full"):
        zero.parts(None, part)
    for rank in (one, two):
        with pytest.raises(CheckpointError, match="rank 2 failed to save: OSError: full"):
            rank.end(None)


def test_a_failed_commit_reaches_all() -> None:
    zero, one = agreements(2)
    with pytest.raises(CheckpointError, match="no room"):
        zero.end(CheckpointError("no room"))
    with pytest.raises(CheckpointError, match="no room"):
        one.end(None)


@pytest.mark.parametrize(
    ("running", "failure", "succeeded"),
    [(True, None, False), (False, None, True), (False, OSError(), False), (True, OSError(), False)],
)
def test_a_save_has_succeeded_when_it_has_ended(running: bool, failure: Exception | None, succeeded: bool) -> None:
    job = SaveJob.__new__(SaveJob)
    job._thread, job.failure = cast(Any, SimpleNamespace(is_alive=lambda: running)), failure
    assert (job.is_running, job.succeeded) == (running, succeeded)


# Places of copies


class Listing:
    """A file system with a stale listing until it is asked to forget it."""

    stale = True

    def invalidate_cache(self) -> None:
        self.stale = False

    def exists(self, _path: str) -> bool:
        return True

    def find(self, path: str, detail: bool) -> Mapping[str, Any]:
        assert (path, detail) == ("/bucket/run/", True)
        return {} if self.stale else {"bucket/run/a/b": {"size": 3}, "/bucket/run/c": {"size": "4"}}

    def info(self, _path: str) -> Mapping[str, Any]:
        return {"size": 0 if self.stale else 5}


def test_places_name_and_list_their_files_anew() -> None:
    place = copy.Place(Listing(), "/bucket/run/", "s3://bucket/run/")
    assert ((place / "a/b").path, (place / "a/b").url) == ("/bucket/run/a/b", "s3://bucket/run/a/b")
    assert place.sizes() == {"a/b": 3, "c": 4}
    copy._check_size(copy.Place(Listing(), "x", "x"), 5)
    with pytest.raises(OSError, match="x has 5 bytes, but 6 were sent"):
        copy._check_size(copy.Place(Listing(), "x", "x"), 6)
