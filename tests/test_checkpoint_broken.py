"""A checkpoint that is not as it was saved, and saves that cannot be made: named, and nothing lost."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.checkpoint import check_bytes, folder, manifest, opened_at
from meshwright.checkpoint.inspect import unlisted_files
from meshwright.checkpoint.restore import Checkpoint
from meshwright.checkpoint.save import RankFiles
from meshwright.cli import main
from meshwright.log import logger
from meshwright.weights import extents_of_json
from tests import parts, tiny, worlds
from tests.test_checkpoint import engine_of, same, state_of, train
from tests.trials import error_of
from tests.words import words

FLIPS = 300 if parts.ALL else 40


def two_steps(source: Path, out: Path, mesh: Mapping[str, int]) -> None:
    engine = engine_of(source, mesh)
    for _ in range(2):
        train(engine, 1)
        mw.save(engine, out)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with a tensor that is not trained, and a run with steps 1 and 2, of two ranks."""
    at = tmp_path_factory.mktemp("saved")
    source = tiny.directory(at / "source", "qwen3_tied", dtype=torch.bfloat16)
    worlds.run(2, two_steps, source, at / "run", dict(tp=2))
    return source, at / "run"


@pytest.fixture
def run(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(saved[1], tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1 << at % 8]))


def places(step: Path, num: int) -> list[tuple[Path, int]]:
    """Bytes of all files, evenly over their sizes; each file at least once."""
    files = sorted(path for path in step.rglob("*") if path.is_file())
    drawn = random.Random(7)
    ends = [path.stat().st_size for path in files]
    anywhere = [drawn.choices(range(len(files)), ends)[0] for _ in range(num - len(files))]
    return [(files[n], drawn.randrange(ends[n])) for n in (*range(len(files)), *anywhere)]


def test_no_byte_can_change_unnoticed(run: Path) -> None:
    step = run / "step-000002"
    assert check_bytes(opened_at(step)) == []
    for path, at in places(step, FLIPS):
        flip(path, at)
        result = error_of(lambda: opened_at(step)) or check_bytes(opened_at(step))
        assert result, f"byte {at} of {path.name}"
        assert path.name in str(result)
        flip(path, at)
    assert check_bytes(opened_at(step)) == []


def resuming(source: Path, step: Path, num: int) -> list[tuple[str, str]]:
    """Return the errors of `resume` for flipped bytes. All engines but the last see one each, and go on."""
    engine, out = engine_of(source, {}), []
    for path, at in places(step, num):
        flip(path, at)
        out.append((path.name, error_of(lambda: mw.resume(engine, step))))
        refused = error_of(lambda: train(engine, 1))
        assert "resum" in refused or "checksum" in out[-1][1] or path.name in out[-1][1], refused
        flip(path, at)
    mw.resume(engine, step)
    train(engine, 1)
    return out


def test_resume_reads_nothing_that_is_broken(saved: tuple[Path, Path], run: Path) -> None:
    [result] = worlds.run(1, resuming, saved[0], run / "step-000002", FLIPS // 2)
    for name, text in result:
        assert re.search(words(re.escape(name), "step-000001 has all"), text), f"{name}: {text}"


def resuming_together(source: Path, step: Path) -> list[str]:
    """Flip a byte of some weights that no rank needs (rounded masters), and return the errors of two ranks."""
    engine, file, message = engine_of(source, dict(fsdp=2)), step / "model.safetensors", list[str]()
    size = int.from_bytes(file.read_bytes()[:8], "little")
    head = json.loads(file.read_bytes()[8 : 8 + size])
    for begin in sorted(each["data_offsets"][0] for name, each in head.items() if name != "__metadata__")[:6]:
        for again in (False, True):
            dist.barrier()
            if dist.get_rank() == 0:
                flip(file, 8 + size + begin + 1)
            dist.barrier()
            if not again:
                message.append(error_of(lambda: mw.resume(engine, step)))
    return message


def test_ranks_share_out_what_none_of_them_needs(saved: tuple[Path, Path], run: Path) -> None:
    for message in worlds.run(2, resuming_together, saved[0], run / "step-000002"):
        assert len(message) == 6
        assert all("model.safetensors" in text for text in message), message


def test_the_tensor_is_named_on_all_ranks(saved: tuple[Path, Path], run: Path) -> None:
    pattern = words(
        "CheckpointError", r"exp_avg/model\.safetensors", r"layers\.1\.mlp\.down_proj\.weight", "step-000001"
    )
    for text in worlds.run(2, flip_once, saved[0], run / "step-000002"):
        assert re.search(pattern, text), text


def flip_once(source: Path, step: Path) -> str:
    engine = engine_of(source, dict(fsdp=2))
    if engine.model.mesh.rank == 0:
        tensor_at(step)
    dist.barrier()
    return error_of(lambda: mw.resume(engine, step))


def tensor_at(step: Path) -> None:
    file = step / "exp_avg" / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    flip(file, 8 + size + header["model.layers.1.mlp.down_proj.weight"]["data_offsets"][0] + 40)


Change = Callable[[Path], object]
BROKEN: dict[str, tuple[Change, str]] = {
    "a file is missing": (lambda at: (at / "exp_avg" / "model.safetensors").unlink(),
        words(r"exp_avg/model\.safetensors", "No such file")),
    "a file is short": (lambda at: os.truncate(at / "master" / "model.safetensors", 999),
        words(r"master/model\.safetensors", "999 bytes")),
    "a list of runs is missing": (lambda at: (at / "runs" / "00001.json").unlink(),
        words(r"runs/00001\.json", "missing")),
    "the manifest of another step": (lambda at: shutil.copy(at.parent / "step-000001" / "meshwright.json", at),
        words("step-000002", "runs|bytes")),
    "a list of another step": (lambda at: shutil.copy(at.parent / "step-000001" / "runs" / "00000.json", at / "runs"),
        words("00000", "checksum")),
    "data of another step": (lambda at: shutil.copy(at.parent / "step-000001" / "master" / "model.safetensors",
        at / "master"), words(r"master/model\.safetensors", "checksum")),
    "the config is another": (
        lambda at: (at / "config.json").write_text((at / "config.json").read_text().replace("qwen3", "qwen2")),
        words(r"config\.json", "checksum"),
    ),
}  # fmt: skip


def broken(source: Path, run: Path, to: Path, change: Change) -> str:
    step = shutil.copytree(run, to) / "step-000002"
    change(step)
    return error_of(lambda: mw.resume(engine_of(source, {}), step))


def test_a_broken_checkpoint(saved: tuple[Path, Path], tmp_path: Path) -> None:
    acts = {case: partial(broken, *saved, tmp_path / case, change) for case, (change, _) in BROKEN.items()}
    for case, [text] in worlds.in_turn(1, acts).items():
        assert re.search(BROKEN[case][1], text), text
        assert re.search(words("step-000001"), text) or "cannot be resumed" in text


def test_the_folder_gives_the_newest_whole_one(saved: tuple[Path, Path], run: Path) -> None:
    (run / "step-000002" / "exp_avg" / "model.safetensors").unlink()
    (run / "step-000009").mkdir()
    assert folder.find(run) == run / "step-000001"
    (run / "step-000001" / "meshwright.json").unlink()
    with pytest.raises(mw.CheckpointError, match=words("no complete checkpoint", "step-000200")):
        folder.find(run)


def test_what_a_process_left_under_a_hidden_name(run: Path) -> None:
    """Ignore a directory that was being removed, however whole; take one that was about to appear."""
    hidden = {kind: run / f".step-000002.{kind}-0123abcd" for kind in ("removed", "replaced", "unfinished")}
    (run / "step-000002").rename(hidden["removed"])
    assert folder.find(run) == run / "step-000001"
    shutil.copytree(hidden["removed"], hidden["replaced"])
    assert folder.find(run) == hidden["replaced"]
    hidden["removed"].rename(hidden["unfinished"])
    assert folder.find(run) == hidden["unfinished"]


FULL = OSError(errno.ENOSPC, "No space left on device")


def fails_once(monkeypatch: pytest.MonkeyPatch, rank: int, name: str) -> None:
    """A call of `os` that fails on one rank."""
    real = getattr(os, name)

    def fake(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            raise FULL
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fake)


def fails_and_goes_on(source: Path, out: Path, wait: bool, rank: int, name: str) -> tuple[list[str], float]:
    engine = engine_of(source, dict(tp=2))
    mw.save(engine, out)
    train(engine, 1)
    with pytest.MonkeyPatch.context() as patch:
        fails_once(patch, rank, name)
        message = [error_of(lambda: mw.save(engine, out, wait=wait))]
        if not wait:
            while engine.saving is not None and engine.saving.is_running:
                pass
            message += [error_of(lambda: train(engine, 1)), error_of(engine.wait)]
    [loss] = train(engine, 1)
    assert mw.save(engine, out) == out / "step-000002"
    return message, loss


@pytest.mark.parametrize(("name", "wait"), parts.every(3, product(["pwrite", "fsync", "rename"], [True, False])))
def test_a_full_disk_on_one_rank(saved: tuple[Path, Path], tmp_path: Path, name: str, wait: bool) -> None:
    rank = 0 if name == "rename" else 1
    ranks = worlds.run(2, fails_and_goes_on, saved[0], tmp_path / "run", wait, rank, name)
    message = [text for texts, _ in ranks for text in texts if text]
    assert len(message) >= 2, message
    assert all("No space left" in text for text in message)
    at = words(f"rank {rank}", re.escape(str(tmp_path / "run" / "step-000001")))
    file = "" if name == "rename" else r"unfinished-[0-9a-f]+/[\w/]*\w+\.(safetensors|json)"
    assert all(re.search(at, text) and re.search(file, text) for text in message), message
    assert ranks[0][1] == ranks[1][1]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-000000", "step-000002"]


REFUSED: dict[str, tuple[Callable[[mw.Engine, Path], object], str]] = {
    "no engine": (lambda engine, at: mw.save(engine.model, at), words("takes an engine", "Model")),
    "no path": (lambda engine, at: mw.save(engine, 7), words("7 is not a path")),
    "a state that is not JSON": (lambda engine, at: mw.save(engine, at, state={"a": torch.ones(1)}), "not JSON"),
    "keep_every alone": (lambda engine, at: mw.save(engine, at, keep_every=5), words("keep_every=5", "keep=")),
    "a file in the way": (lambda engine, at: at.write_text("") or mw.save(engine, at), words("is a file")),
    "something else in the way": (lambda engine, at: (at / "step-000000").mkdir(parents=True) or mw.save(engine, at),
        words("not a checkpoint", "move")),
    "an empty folder": (lambda engine, at: at.mkdir() or mw.resume(engine, at), words("no complete checkpoint")),
}  # fmt: skip


def test_nothing_more_is_written_after_a_failure() -> None:
    """The first failure counts. A later write that succeeds would hide it, and the checkpoint would be kept."""
    failure, written = OSError("no space left"), list[str]()
    content = SimpleNamespace(num_elements=lambda *_: 3, step=1, folder="out")
    rank_files: Any = SimpleNamespace(content=content, mesh=SimpleNamespace(axes=None, rank=1))
    rank_files._failure_of = lambda act: act()
    acts = [lambda: written.append("first"), lambda: failure, lambda: written.append("third")]
    assert RankFiles._write_all(rank_files, acts, []) is failure
    assert written == ["first"]
    assert isinstance(RankFiles._write_all(rank_files, acts, [2]), KeyboardInterrupt)
    assert written == ["first"]


def refusals(source: Path, at: Path) -> dict[str, str]:
    engine = engine_of(source, {})
    result = {case: error_of(lambda act=act, case=case: act(engine, at / case)) for case, (act, _) in REFUSED.items()}
    engine.backward(tiny.batches(0))
    result["gradients wait"] = error_of(lambda: mw.save(engine, at / "waiting"))
    return result


def test_what_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    [result] = worlds.run(1, refusals, saved[0], tmp_path)
    for case, (_, pattern) in REFUSED.items():
        assert re.search(pattern, result[case]), f"{case}: {result[case]}"
    assert re.search(words("StateError", "update"), result["gradients wait"])


def resumes_another(sources: Mapping[str, Path], at: Path) -> dict[str, str]:
    made: dict[str, Callable[[], mw.Engine]] = {
        "family": lambda: engine_of(sources["qwen3_moe"], {}),
        "sizes": lambda: engine_of(sources["wide"], {}),
        "head": lambda: mw.Engine(
            mw.load(sources["qwen3"], head="value", dtype=torch.float32), lr=1e-3, loss=mw.losses.squared_error
        ),
        "trained": lambda: mw.Engine(mw.load(sources["qwen3"], train="layers.*", dtype=torch.float32), lr=1e-3),
    }
    message = {name: error_of(lambda make=make: mw.resume(make(), at)) for name, make in made.items()}
    for name in ("rope_theta", "rms_norm_eps"):
        config = json.loads((sources["qwen3"] / "config.json").read_text())
        (sources["qwen3"] / "config.json").write_text(json.dumps({**config, name: 2.0, "eos_token_id": 5}))
        engine = engine_of(sources["qwen3"], {})
        message[name] = error_of(lambda engine=engine: mw.resume(engine, at))
        assert mw.resume(engine, at, new_config=[name]).step == 2
        (sources["qwen3"] / "config.json").write_text(json.dumps(config))
    return message


def test_another_model_is_refused(tmp_path: Path) -> None:
    changes = {"qwen3": ("qwen3", {}), "wide": ("qwen3", {"hidden_size": 40}), "qwen3_moe": ("qwen3_moe", {})}
    sources = {name: tiny.directory(tmp_path / name, base, **more) for name, (base, more) in changes.items()}
    worlds.run(1, two_steps, sources["qwen3"], tmp_path / "run", {})
    [result] = worlds.run(1, resumes_another, sources, tmp_path / "run")
    assert re.search(words("qwen3", "qwen3_moe"), result["family"])
    assert re.search(words("36", "40", "embed"), result["sizes"])
    assert re.search(words("head='lm'", "head='value'"), result["head"])
    assert re.search(words("trained", "embed.weight", "train="), result["trained"])
    for name in ("rope_theta", "rms_norm_eps"):
        expected = words(f"{name} of config.json was None", r"is 2\.0 now", "step-000002", f"new_config=.'{name}'")
        assert re.search(expected, result[name]), result[name]
    assert all(text.startswith("CheckpointError") for text in result.values()), result


def message_of(*acts: Callable[[], object]) -> list[str]:
    """Collect the lines that are logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for act in acts:
        act()
    logger.removeHandler(handler)
    return lines


def message_text(source: Path, at: Path) -> str:
    fresh, again, result = engine_of(source, dict(fsdp=2)), engine_of(source, dict(fsdp=2)), list[mw.Resumed]()
    train(again, 1)
    lines = message_of(
        lambda: mw.resume(engine_of(source, dict(fsdp=2), optimizer=mw.AdamW(betas=(0.9, 0.99))), at),
        lambda: result.append(mw.resume(again, source)),
    )
    assert (result[0].step, again.steps, again.optimizer.state) == (0, 0, {})
    assert train(again, 1) == train(fresh, 1)
    assert same(state_of(again), state_of(fresh))
    return "\n".join(lines)


def test_allowed_differences_are_logged(saved: tuple[Path, Path]) -> None:
    message, silent = worlds.run(2, message_text, *saved)
    assert re.search(words(r"betas was \[0\.9, 0\.95\]", r"is \[0\.9, 0\.99\]"), message)
    assert re.search(words("weights alone", "optimizer state begins at zero"), message)
    assert not silent


def test_weights_that_are_not_finite_replace_no_good_ones(saved: tuple[Path, Path], tmp_path: Path) -> None:
    message, _ = worlds.run(2, keeps_the_good_ones, saved[0], tmp_path / "run")
    assert re.search(words(r"layers\.1\.mlp\.down\.weight", "NaN or infinite", "step 2", "keep="), message), message
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-000001", "step-000002"]


def keeps_the_good_ones(source: Path, out: Path) -> str:
    """Save rows of the last rank that are not finite."""
    engine = engine_of(source, {"fsdp": 2})
    train(engine, 1)
    mw.save(engine, out, keep=1)
    train(engine, 1)
    if engine.model.mesh.rank == 1:
        engine.model.stored()["layers.1.mlp.down.weight"][3] = float("nan")
    return "\n".join(message_of(lambda: mw.save(engine, out, keep=1, wait=False), engine.wait))


def goes_on_from_its_own(source: Path, out: Path) -> str:
    """The source is gone: the model comes from the checkpoint that is resumed."""
    engine = engine_of(out / "step-000002", {})
    mw.resume(engine, out)
    message = error_of(lambda: mw.save(engine, out))
    for _ in range(3):
        train(engine, 1)
        mw.save(engine, out, keep=1, keep_every=3)
    return message


def test_a_checkpoint_that_the_model_was_loaded_from_stays(saved: tuple[Path, Path], run: Path) -> None:
    """So do the last one, and multiples of `keep_every`."""
    [message] = worlds.run(1, goes_on_from_its_own, saved[0], run)
    assert re.search(words("loaded from", "step-000002", "another folder"), message)
    assert sorted(path.name for path in run.iterdir()) == ["step-000002", "step-000003", "step-000005"]


HOSTILE = ["../outside", "/etc/hostname", "a/../../outside", "a//b", "./a", "a\\b", "a\0b", ""]


@pytest.mark.parametrize("field", ["files", "parts", "planes"])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_path_leaves_the_directory(tmp_path: Path, field: str, name: str) -> None:
    if field == "planes" and not name:
        return  # the weights' own folder
    for path, is_refused in (("more", False), (name, True)):
        fields: dict[str, Any] = {field: {"a": path} if field == "planes" else {path: 3}}
        made = manifest.Manifest(2, {"weights": ""}, {}, {}, {})
        manifest.write_manifest(tmp_path, replace(made, **fields))
        with pytest.raises(mw.BrokenFile, match="malformed") if is_refused else contextlib.nullcontext():
            manifest.read_manifest(tmp_path)


@settings(
    max_examples=200 if parts.ALL else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode()))
def test_any_text_as_a_manifest(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "meshwright.json").write_bytes(text)
    with pytest.raises(mw.BrokenFile):
        manifest.read_manifest(tmp_path)
    with contextlib.suppress(ValueError):
        extents_of_json(text)


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(run), "--verify", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["wrong"], result["unlisted_files"], result["ranks"]) == (2, [], [], 2)
    assert result["planes"]["exp_avg"]["dtypes"] == ["F32"]
    assert main(["inspect", str(run / "step-000001"), "--diff", str(run), "--json"]) == 1
    apart = json.loads(capsys.readouterr().out)["differences"]
    assert {each["plane"] for each in apart} == {"weights", "master", "exp_avg", "exp_avg_sq"}
    flip(run / "step-000002" / "model.safetensors", 40000)
    (run / "step-000002" / "notes").write_text("notes")
    assert main(["inspect", str(run), "--verify"]) == 1
    out = capsys.readouterr().out
    assert re.search(words(r"model\.safetensors", "checksum", "notes is not part"), out)
    assert main(["inspect", str(run / "nowhere")]) == 2


def test_files_that_no_manifest_lists_are_sorted(tmp_path: Path) -> None:
    names = [f"{number:02d}.txt" for number in range(20)]
    for name in random.Random(1).sample(names, len(names)):
        (tmp_path / name).write_text("")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    listed = SimpleNamespace(files={"03.txt": 0}, parts={"a/b": 0})
    checkpoint = cast(Checkpoint, SimpleNamespace(directory=tmp_path, manifest=listed))
    assert unlisted_files(checkpoint) == [name for name in names if name != "03.txt"]
