"""An export in the place of an earlier one, the check of its place before the training, and Ctrl-C on one rank."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright.weights import directory, output_dir, writer
from meshwright.weights.output_dir import Target, atomic_directory, check_target
from meshwright.weights.writer import Files
from tests import parts, tiny, trials, worlds
from tests.trials import error_of
from tests.words import words

Change = Callable[[Path], object]


def bytes_of(at: Path) -> dict[str, bytes]:
    return {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tiny.directory(tmp_path_factory.mktemp("made") / "m", "qwen3", dtype=torch.bfloat16)
    (at / "tokenizer.json").write_text("{}")
    (at / "additional_chat_templates").mkdir()
    (at / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return at


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "m")


def twice(source: Path, out: Path, mesh: dict[str, int]) -> None:
    model = mw.load(source, mw.Mesh(**mesh))
    mw.export(model, out, overwrite=True)  # nothing is there yet
    for tensor in model.stored().values():
        tensor.add_(1)
    mw.export(model, out, overwrite=True)


@pytest.mark.parametrize("mesh", parts.every(2, [dict(fsdp=2), {}]), ids=str)
def test_an_earlier_export_is_replaced(source: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    worlds.run(max(1, *mesh.values(), 1), twice, source, tmp_path / "link", mesh)
    before, after = (load_file(at / "model.safetensors") for at in (source, tmp_path / "out"))
    assert all(torch.equal((before[key].float() + 1).bfloat16(), after[key]) for key in before)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "out", "link"}
    assert bytes_of(tmp_path / "out").keys() == bytes_of(source).keys()
    assert (tmp_path / "link").is_symlink()


def test_files_that_the_next_export_lacks_are_gone(source: Path, tmp_path: Path) -> None:
    """An earlier one in two files with an index."""
    shutil.copytree(source, tmp_path / "out")
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "out" / "model.safetensors").unlink()
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(tensors)}
    for file in set(names.values()):
        save_file({k: t for k, t in tensors.items() if names[k] == file}, tmp_path / "out" / file)
    (tmp_path / "out" / "model.safetensors.index.json").write_text(f'{{"weight_map": {names}}}'.replace("'", '"'))
    worlds.run(1, lambda: mw.export(mw.load(source), tmp_path / "out", overwrite=True))
    assert bytes_of(tmp_path / "out") == bytes_of(source)


def of_another(name: str) -> Change:
    return lambda out: (out / name).parent.mkdir(exist_ok=True) or (out / name).write_text("precious")


KEPT: dict[str, tuple[Change, str]] = {
    "notes": (of_another("notes.txt"), words(r"/out holds notes\.txt", "move", "another directory")),
    "an optimizer's file": (of_another("optimizer.safetensors"), r"holds optimizer\.safetensors"),
    "a hidden file": (of_another(".gitignore"), r"holds \.gitignore"),
    "a folder": (lambda out: (out / "runs").mkdir(), r"holds runs"),
    "a file in a folder": (of_another("additional_chat_templates/own.jinja"), r"holds additional_\w+/own\.jinja"),
    "a link": (lambda out: (out / "tokenizer.json").unlink() or (out / "tokenizer.json").symlink_to("config.json"),
        r"holds tokenizer\.json"),
    "no config.json": (lambda out: (out / "config.json").unlink(), words("not a model directory", r"config\.json")),
    "no weights": (lambda out: (out / "model.safetensors").unlink(), words("not a model directory", "safetensors")),
    "a file": (lambda out: shutil.rmtree(out) or out.write_text("precious"), words(r"/out\b", "not a directory")),
}  # fmt: skip


def target_of(at: Path, name: str = "out", overwrite: bool = True) -> Target:
    """Return the target of an export of `m` in a directory, and make an earlier export of the same files."""
    names = {"config.json", "tokenizer.json", "additional_chat_templates/tools.jinja", "model.safetensors"}
    for folder in ("m", "out"):
        for file in names:
            (at / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (at / folder / file).write_text(file)
    return Target(at / name, 10, frozenset(names), at / "m", overwrite)


@pytest.mark.parametrize("case", KEPT)
def test_only_an_export_is_replaced(tmp_path: Path, case: str) -> None:
    change, pattern = KEPT[case]
    target = target_of(tmp_path)
    check_target(replace(target, source=tmp_path / "gone"))
    change(tmp_path / "out")
    before = bytes_of(tmp_path)
    with pytest.raises(FileExistsError, match=pattern), atomic_directory(target):
        pass
    assert bytes_of(tmp_path) == before


def test_the_source_and_the_working_directory_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tmp_path, "link")
    (tmp_path / "link").symlink_to("m")
    for source in ("m", "link"):
        with pytest.raises(FileExistsError, match=words(r"/m\b", "loaded from", "choose another")):
            check_target(replace(target, source=tmp_path / source))
    (tmp_path / "work").mkdir()
    for name, at in (("work", "work"), ("out", "out/additional_chat_templates")):
        monkeypatch.chdir(tmp_path / at)
        with pytest.raises(FileExistsError, match=words(rf"/{at}\b", "working directory")):
            check_target(replace(target, directory=tmp_path / name))


def overwritten(source: Path, out: Path) -> str:
    return error_of(lambda: mw.export(mw.load(source), out, overwrite=True))


def test_the_earlier_one_is_put_back(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rename fails."""
    shutil.copytree(source, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("earlier")
    before, rename = bytes_of(tmp_path), Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.name.startswith(".out.finished-"):
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    [text] = worlds.run(1, overwritten, source, tmp_path / "out")
    assert re.search(words("ExportError", "Input/output error", r"finished export .* \S+/\.out\.finished-"), text), text
    [kept] = tmp_path.glob(".out.finished-*")
    assert bytes_of(kept) == bytes_of(source)
    shutil.rmtree(kept)
    assert bytes_of(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"m", "out"}


def test_a_file_that_appears_meanwhile_stays(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(source, tmp_path / "out")
    write = directory._write_all

    def and_a_note(*args: Any) -> None:
        write(*args)
        (tmp_path / "out" / "note.md").write_text("precious")

    monkeypatch.setattr(directory, "_write_all", and_a_note)
    [text] = worlds.run(1, overwritten, source, tmp_path / "out")
    assert re.search(words(r"holds note\.md", r"finished export .* \S+/\.out\.finished-"), text), text
    assert (tmp_path / "out" / "note.md").read_text() == "precious"
    [kept] = tmp_path.glob(".out.finished-*")
    assert bytes_of(kept) == bytes_of(source), "the work of hours may be in it"


def test_a_disk_that_is_full_with_it_has_had_room(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10**6, 0, 0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free), total=10**9))
    assert worlds.run(1, overwritten, source, tmp_path / "out") == [""]


@pytest.mark.parametrize(
    ("last", "left"), [("out", {"finished", "replaced"}), (".out.finished", {"unfinished"}), ("", {"replaced"})]
)
def test_after_a_kill_nothing_is_lost(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, left: set[str]
) -> None:
    """Killed behind the first rename, before it, or before the earlier export is removed."""
    shutil.copytree(source, tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("earlier")
    rename = Path.rename

    def dies(self: Path, to: Path) -> Path:
        if last.startswith(".") and to.name.startswith(last):
            os._exit(9)
        rename(self, to)
        if last and self.name == last:
            os._exit(9)
        return to

    monkeypatch.setattr(Path, "rename", dies)
    if not last:
        monkeypatch.setattr(output_dir.shutil, "rmtree", lambda *_, **__: os._exit(9))
    pid = os.fork()
    if not pid:
        overwritten(source, tmp_path / "out")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] >> 8 == 9
    result = {p.name.split(".")[2].split("-")[0]: p for p in tmp_path.iterdir() if p.name.startswith(".out.")}
    assert set(result) == left
    earlier = result.get("replaced", tmp_path / "out")
    assert (earlier / "tokenizer.json").read_text() == "earlier"
    for whole in (result.get("finished"), None if last else tmp_path / "out"):
        assert whole is None or bytes_of(whole) == bytes_of(source)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tmp_path, "new/out")
    for name, message in (("m", "not empty.*overwrite=True"), ("m/config.json/out", "is a file")):
        with pytest.raises(OSError, match=message):
            check_target(replace(target, directory=tmp_path / name, overwrite=False))
    disk = lambda free, total: lambda _: SimpleNamespace(free=free, total=total)  # noqa: E731 - short
    fakes: tuple[tuple[Any, str, Any, str], ...] = (
        (shutil, "disk_usage", disk(9, 99), "^10 bytes.* has room for 9;"), (shutil, "disk_usage", disk(10, 99), ""),
        (shutil, "disk_usage", disk(0, 0), ""),  # a file system that does not report its size is not judged
        (os, "access", lambda path, mode: False, "no permission"),  # root has it everywhere
        (Path, "is_mount", lambda path: path.name == "out", "is a mount point"),
    )  # fmt: skip
    for owner, name, fake, message in fakes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fake)
            with pytest.raises(OSError, match=message) if message else contextlib.nullcontext():
                check_target(target)


def test_a_failed_fsync_counts_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems cannot fsync a directory."""

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    output_dir.to_disk(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Input/output error"):
        output_dir.to_disk(tmp_path / "file")


def test_all_is_on_disk_before_its_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name before the earlier export is removed, whose mode stays (that of a group, too)."""
    target, seen = target_of(tmp_path), list[tuple[str, bool]]()
    (tmp_path / "out").chmod(0o2750)
    (tmp_path / "out" / "config.json").write_text("earlier")
    is_new = lambda: (tmp_path / "out" / "config.json").read_text() == "new"  # noqa: E731 - short
    monkeypatch.setattr(output_dir, "to_disk", lambda path: seen.append((path.name, is_new())))
    with atomic_directory(target) as draft:
        (draft / "more").mkdir()
        (draft / "more" / "a.txt").touch()
        (draft / "config.json").write_text("new")
    assert sorted(seen[:-1]) == [(name, False) for name in sorted((draft.name, "a.txt", "config.json", "more"))]
    assert seen[-1] == (tmp_path.name, True)
    assert (tmp_path / "out").stat().st_mode & 0o7777 == 0o2750
    assert {path.name for path in tmp_path.iterdir()} == {"m", "out"}


def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "config.json" and access(path, mode))


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


PLACES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any], str]] = {
    "in use": ("m", nothing, {}, words(r"/m\b", "not empty", "overwrite=True")),
    "another's": ("m", nothing, dict(overwrite=True), words("ExportError: nothing", "loaded from")),
    "a small file": ("out", unreadable, {}, words(r"config\.json", "cannot be read", "mode")),
    "no dtype of weights": ("out", nothing, dict(dtype=torch.int8), words("ConfigError", r"torch\.int8")),
    "a value": ("out", nothing, dict(dtype=torch.float16), words(r"\b1e\+30\b", r"torch\.float16")),
}


def checked(source: Path, out: Path, case: str) -> list[str]:
    place, change, options, _ = PLACES[case]
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        model = mw.load(source, mw.Mesh(fsdp=2))
        if case == "a value":
            model.stored()["head.norm.weight"].fill_(1e30)
        # an export as root would read the small file
        calls = (mw.check_export, mw.export if case != "a small file" else mw.check_export)
        return [error_of(functools.partial(call, model, out / place, **options)) for call in calls]


def test_what_export_would_refuse_is_refused_before_the_training(source: Path, tmp_path: Path) -> None:
    """All ranks refuse, and write nothing."""
    before = bytes_of(tmp_path)
    cases = {case: functools.partial(checked, source, tmp_path, case) for case in PLACES}
    for case, ranks in worlds.in_turn(2, cases).items():
        for text in ranks[0]:
            assert re.search(PLACES[case][3], text), text
        assert all(ranks[1]), "the other rank raises too"
    assert bytes_of(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_check_that_passes_writes_nothing(source: Path, tmp_path: Path) -> None:
    worlds.run(2, lambda: mw.check_export(mw.load(source, mw.Mesh(fsdp=2)), tmp_path / "a" / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_small_file_that_was_not_there_is_missed_before_the_training(source: Path, tmp_path: Path) -> None:
    def gone() -> list[str]:
        (source / "tokenizer.json").unlink()
        (source / "tokenizer.json").symlink_to("nowhere")
        model = mw.load(source)
        return [error_of(lambda call=call: call(model, tmp_path / "out")) for call in (mw.check_export, mw.export)]

    for text in worlds.run(1, gone)[0]:
        assert re.search(words("ExportError", r"tokenizer\.json", r"\blink\b"), text), text
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def interrupted(source: Path, out: Path, where: str) -> tuple[str, int]:
    """Ctrl-C on rank 0 alone, which catches it and goes on, as the others do."""
    model = mw.load(source, mw.Mesh(tp=2, timeout_s=20))
    at, name = (writer, "all_to_all") if where == "all_to_all" else (Files, "write")
    real = getattr(at, name)

    def and_then(*args: Any) -> Any:
        setattr(at, name, real)  # once, where much is still to come
        result = real(*args)
        if not model.mesh.rank:
            signal.raise_signal(signal.SIGINT)
        return result

    setattr(at, name, and_then)
    text = "exported"
    try:
        mw.export(model, out)
    except KeyboardInterrupt:
        text = "KeyboardInterrupt"
    except mw.ExportError as error:
        text = str(error)
    return text, len(mw.gather(model))


def test_an_interrupt_on_rank_0_reaches_all(source: Path, tmp_path: Path) -> None:
    """Nobody waits for rows of rank 0, and the next call finds all ranks in their places."""
    cases = {at: functools.partial(interrupted, source, tmp_path / "out", at) for at in ("all_to_all", "write")}
    for first, second in worlds.in_turn(2, cases, seconds=30).values():
        assert first == ("KeyboardInterrupt", len(load_file(source / "model.safetensors")))
        assert re.search(words(r"\brank 0\b", "KeyboardInterrupt", r"/out\b"), second[0]), second
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def written_bit_by_bit(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    model = mw.load(source, mw.Mesh(fsdp=2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:101], at))
        mw.export(model, out)


def test_a_system_that_writes_less_than_requested(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux does so above 2 GB, and a network file system below it."""
    worlds.run(2, written_bit_by_bit, source, tmp_path / "out", monkeypatch)
    assert bytes_of(tmp_path / "out") == bytes_of(source)


def full_disk(source: Path, out: Path) -> tuple[str, int]:
    """Fail on rank 1 alone, in the middle of its work. Afterwards all ranks go on."""
    model = mw.load(source, mw.Mesh(fsdp=2, tp=2, timeout_s=20))
    write, calls = os.pwrite, iter(range(1000))

    def no_room(*args: Any) -> int:
        if model.mesh.rank == 1 and next(calls) == 9:
            raise OSError(28, "No space left on device")
        return write(*args)

    os.pwrite = no_room
    text = error_of(lambda: mw.export(model, out))
    os.pwrite = write
    mw.export(model, out)
    return text, len(load_file(out / "model.safetensors"))


def test_a_disk_that_is_full_on_one_rank(source: Path, tmp_path: Path) -> None:
    ranks = worlds.run(4, full_disk, source, tmp_path / "out", seconds=30)
    assert all(re.search(words("ExportError", "No space left on device"), text) for text, _ in ranks), ranks
    assert all(re.search(r"\brank 1\b", text) for text, _ in (ranks[0], *ranks[2:])), ranks
    assert {p.name for p in tmp_path.iterdir()} == {"m", "out"}
    assert bytes_of(tmp_path / "out") == bytes_of(source)


def not_shared(source: Path, out: Path) -> str:
    """Rank 1 is on a machine that does not see what rank 0 makes."""
    model = mw.load(source, mw.Mesh(fsdp=2, timeout_s=20))
    if model.mesh.rank == 1:
        opened = os.open
        os.open = lambda path, *more: opened(str(path).replace("out", "elsewhere"), *more)
    return error_of(lambda: mw.export(model, out))


def test_a_directory_that_not_all_see(source: Path, tmp_path: Path) -> None:
    for text in worlds.run(2, not_shared, source, tmp_path / "out", seconds=30):
        assert re.search(words("ExportError", "not visible", "machines share"), text), text
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


WINDOWS: list[tuple[str, dict[str, int]]] = [("qwen3_5_moe", dict(fsdp=2, tp=2)), ("qwen3", dict(fsdp=3))]
if parts.ALL:
    WINDOWS += [("qwen3", dict(replicate=2, tp=2)), ("qwen3", dict(fsdp=2, tp=2)), ("qwen3_5_moe", dict(fsdp=3))]


@pytest.mark.parametrize(("family", "mesh"), WINDOWS, ids=str)
def test_columns_are_exchanged_in_windows(
    tmp_path: Path, family: str, mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller than a row, on a mesh that divides nothing evenly."""
    monkeypatch.setattr(writer, "_WINDOW_BYTES", 100)
    few = {**tiny.TWO_LAYERS, "num_experts": 4} if family == "qwen3_5_moe" else {}
    source, out = tiny.directory(tmp_path / "m", family, **few), tmp_path / "out"
    worlds.run(trials.world_of(mesh), lambda: mw.export(mw.load(source, trials.mesh_of(mesh)), out))
    assert bytes_of(out) == bytes_of(source)
