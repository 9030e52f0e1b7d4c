"""A checkpoint as the model of a run: its bytes are compared as `resume` compares them, and one that was copied in part
is no model."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright as mw
from meshwright import weights
from meshwright.checkpoint import Keep, folder, inspect, newest_whole, open_newest, opened_at
from meshwright.checkpoint.manifest import Manifest, write_manifest
from meshwright.checkpoint.restore import Checkpoint, broken
from meshwright.engine.convert import convert
from meshwright.engine.resume_checks import check_same_config, settings_of
from meshwright.train import resume_point
from meshwright.train.data_sources import model_directory
from meshwright.weights import Entry
from tests import tiny, worlds
from tests.test_checkpoint_broken import error_of, flip
from tests.test_checkpoint_functions import make
from tests.words import words

CARRIED = "mtp.fc.weight"


def engine_of(source: Path) -> mw.Engine:
    return mw.Engine(mw.load(source, mw.Mesh(device="cpu")), lr=1e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps 1 and 2 of a model with a tokenizer and a tensor that is not trained."""
    at = tmp_path_factory.mktemp("saved")
    source = tiny.directory(at / "source", "qwen3_5", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors") | {CARRIED: torch.ones(300)}
    save_file(tensors, source / "model.safetensors")
    (source / "tokenizer.json").write_text('{"a": 1}')
    worlds.run(1, two_steps, source, at / "run")
    return at / "run"


def two_steps(source: Path, out: Path) -> None:
    engine = engine_of(source)
    for _ in range(2):
        engine.step(tiny.batches(engine.steps))
        mw.save(engine, out)


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run" / "step-000002"


def middle_of(step: Path, key: str) -> int:
    entry = weights.open_source(step).entries[key]
    return (entry.start + entry.stop) // 2


DAMAGED: dict[str, Callable[[Path], int]] = {
    "model.safetensors": lambda step: middle_of(step, "model.layers.1.mlp.down_proj.weight"),
    "tokenizer.json": lambda step: 3,
    "config.json": lambda step: 9,
}


@worlds.world(1)
def test_a_model_that_is_a_checkpoint_is_compared_with_its_checksums(step: Path) -> None:
    for name, at in DAMAGED.items():
        mw.load(step, mw.Mesh(device="cpu"))
        flip(step / name, at(step))
        expected = words("BrokenFile", re.escape(str(step / name)), "checksum", "use another|use that")
        assert re.search(expected, error_of(lambda: mw.load(step, mw.Mesh(device="cpu"))))
        small: list[Callable[[], object]] = [lambda: mw.init(step, mw.Mesh(device="cpu"))]
        small.append(lambda: model_directory(str(step)))  # what a run reads its tokenizer from
        for read in small if name != "model.safetensors" else []:
            assert re.search(expected, error_of(read))
        flip(step / name, at(step))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        shutil.rmtree(step / name)
    mw.load(step, mw.Mesh(device="cpu"))  # its weights are whole


@worlds.world(1)
def test_what_is_copied_from_a_checkpoint_is_compared_too(step: Path, tmp_path: Path) -> None:
    flip(step / "model.safetensors", middle_of(step, CARRIED))
    model = mw.load(step, mw.Mesh(device="cpu"))  # which does not read it
    message = error_of(lambda: mw.export(model, tmp_path / "out"))
    assert re.search(words("ExportError", re.escape(CARRIED), "checksum"), message)
    assert not (tmp_path / "out").exists()


READERS: dict[str, Callable[[Path], object]] = {
    "mw.load": lambda step: mw.load(step, mw.Mesh(device="cpu")),
    "mw.resume": lambda step: mw.resume(engine_of(step.parent / "step-000001"), step),
    "model =": lambda step: model_directory(str(step)),
    "convert": lambda step: convert(step, step.parent / "out", "hf"),
    "inspect": opened_at,
}


def without_a_manifest(step: Path) -> None:
    (step / weights.MANIFEST).unlink()


def a_device(step: Path) -> None:
    (step / weights.MANIFEST).unlink()
    (step / weights.MANIFEST).symlink_to("/dev/zero")


def too_large(step: Path) -> None:
    os.truncate(step / weights.MANIFEST, 10**9)


NO_CHECKPOINT: dict[Callable[[Path], object], str] = {
    without_a_manifest: words(r"run/step-000002", r"no meshwright\.json", "copy it again", "remove"),
    a_device: words(r"step-000002/meshwright\.json", "not a regular file"),
    too_large: words(r"step-000002/meshwright\.json", "1000000000 bytes are too many"),
}


@pytest.mark.parametrize("change", NO_CHECKPOINT, ids=lambda change: change.__name__)
def test_a_checkpoint_without_its_manifest_is_no_model(step: Path, change: Callable[[Path], object]) -> None:
    change(step)
    [result] = worlds.run(1, what_readers_say, step)
    for reader, message in result.items():
        assert re.search(NO_CHECKPOINT[change], message), f"{reader}: {message}"


def test_a_step_under_the_name_of_another(step: Path) -> None:
    [result] = worlds.run(1, what_readers_say, step.rename(step.parent / "step-000009"))
    for reader, message in result.items():
        expected = words("step-000009 is named as step 9", "step 2", "rename it to step-000002")
        assert re.search(expected, message), f"{reader}: {message}"
    assert newest_whole(step.parent) == step.parent / "step-000001"


def what_readers_say(step: Path) -> dict[str, str]:
    return {name: error_of(lambda read=read: read(step)) for name, read in READERS.items()}


@worlds.world(1)
def test_a_folder_gives_an_older_one_where_the_newest_is_damaged(step: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = step.parent.rename(step.parent.with_name("checkpoints"))
    run, step, older = folder.parent, folder / step.name, folder / "step-000001"
    (run / "config.toml").touch()
    engine = engine_of(older)
    for file, place in (("exp_avg/model.safetensors", folder), ("trainer.json", run), ("runs/00000.json", folder)):
        flip(step / file, (step / file).stat().st_size // 2)
        damaged = (step / file).read_bytes()
        assert mw.resume(engine, place).directory == older
        assert re.search(words("step-000002 is damaged", "left as it is", re.escape(file)), caplog.text)
        assert (step / file).read_bytes() == damaged
        engine.step(tiny.batches(1))
        assert re.search(words("^BrokenCheckpointError", re.escape(file)), error_of(lambda: mw.resume(engine, step)))
        flip(step / file, (step / file).stat().st_size // 2)
        caplog.clear()
    for each in (step, older):
        flip(each / "master" / "model.safetensors", 30_000)
    for place in (folder, run):
        message = error_of(lambda place=place: mw.resume(engine, place))
        assert "no complete checkpoint (step-000002, step-000001: damaged)" in message


def test_a_run_goes_on_from_its_folder_or_not_at_all(step: Path, tmp_path: Path) -> None:
    """It gives an older checkpoint where the newest is damaged. Where all are, no run begins anew."""
    folder = step.parent.rename(tmp_path / "checkpoints")
    config = mw.train.config_of(model="m", out=str(tmp_path), data=[{"path": "x"}])
    assert resume_point._resume_source(config, tmp_path) == (folder, "")
    for each in folder.iterdir():
        (each / weights.MANIFEST).unlink()
    assert resume_point._resume_source(config, tmp_path) == (folder, "")
    with pytest.raises(mw.CheckpointError, match="no complete checkpoint"):
        open_newest(folder, [])


def test_a_save_keeps_no_file_open_and_removes_no_later_step(tmp_path: Path) -> None:
    """A run of thousands of saves has no more descriptors than one. Later steps are of another run."""
    opened = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731 - short
    before = opened()
    one, two, three, four, later = (make(tmp_path, step) for step in (1, 2, 3, 4, 8))
    folder.Draft(tmp_path, 9).abandon()
    assert opened() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    folder.remove_earlier(tmp_path, 4, Keep(last=1, every=3), in_use=two)
    assert sorted(tmp_path.iterdir()) == [two, three, four, later]
    assert folder.later_than(tmp_path, 4) == [later]
    assert not one.exists()
    assert (newest_whole(tmp_path), newest_whole(tmp_path, exclude=later)) == (later, four)
    assert f"({four} has all its files: use that)" in broken(later)


def test_a_new_best_removes_the_later_steps_alone(tmp_path: Path) -> None:
    """But not the one that the model was loaded from, nor what has no manifest."""
    first, best, used, undone = (make(tmp_path, step) for step in (2, 5, 7, 9))
    (other := tmp_path / "step-000011").mkdir()
    folder.remove_later(tmp_path / "step-000001", in_use=used)  # there is no such step
    assert sorted(tmp_path.iterdir()) == [first, best, used, undone, other]
    folder.remove_later(best, in_use=used)
    assert sorted(tmp_path.iterdir()) == [first, best, used, other]


def test_a_step_that_is_being_removed_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may die meanwhile, and leave half of the files."""
    last, _ = make(tmp_path, 1), make(tmp_path, 2)
    monkeypatch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
    folder.remove_later(last, in_use=tmp_path / "none")
    [hidden] = (path for path in tmp_path.iterdir() if path != last)
    assert re.fullmatch(r"\.step-000002\.removed-[0-9a-f]{8}", hidden.name)
    assert [each.path for each in folder.checkpoints(tmp_path)] == [last]


def test_a_draft_of_a_live_job_stays(tmp_path: Path) -> None:
    """Several jobs may share a folder. A checkpoint holds no lock, nor does a process that died."""
    live = folder.Draft(tmp_path, 3)
    os.utime(live.path, (0, 0))
    assert [path.name for path in make(tmp_path, 4).iterdir()] == [weights.MANIFEST]
    assert live.path.is_dir()
    os.close(cast(int, live._lock))
    make(tmp_path, 5)
    assert not live.path.exists()


def test_a_torn_leftover_gets_no_name(tmp_path: Path) -> None:
    """It has a manifest, and lacks a file that this lists."""
    torn = make(tmp_path, 3)
    write_manifest(torn, Manifest(3, {"weights": ""}, {"a": 4}, {}, {}))
    (torn / "a").write_bytes(b"1234")
    whole = shutil.copytree(torn, tmp_path / ".step-000004.unfinished-01234567")
    write_manifest(whole, Manifest(4, {"weights": ""}, {"a": 4}, {}, {}))
    (torn / "a").unlink()
    torn.rename(tmp_path / ".step-000003.replaced-01234567")
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    make(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


def test_a_run_of_damaged_checkpoints_is_not_new(tmp_path: Path) -> None:
    (tmp_path / folder.RUN).touch()
    (tmp_path / folder.CHECKPOINTS).mkdir()
    with pytest.raises(mw.CheckpointError, match="is a run without a complete checkpoint so far"):
        folder.find(tmp_path)
    damaged = [make(tmp_path / folder.CHECKPOINTS, step) for step in (1, 2)]
    assert folder.find(tmp_path, damaged[1:]) == damaged[0]
    with pytest.raises(mw.CheckpointError, match=r"no complete checkpoint \(step-000001, step-000002: damaged\)"):
        folder.find(tmp_path, damaged)


def test_a_draft_without_a_lock_is_left_for_an_hour(tmp_path: Path) -> None:
    """Another job may have made its directory, and not yet its lock."""
    young, old = (tmp_path / f".step-00000{step}.unfinished-01234567" for step in (1, 2))
    for path, age in ((young, 3000), (old, 4000)):
        path.mkdir()
        os.utime(path, (time.time() - age,) * 2)
    make(tmp_path, 3)
    assert (young.exists(), old.exists()) == (True, False)


def test_what_inspect_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of the checkpoint: tensors that are trained, not those that exist; bytes of all files, not of tensors."""
    entries = {name: Entry(name, "m", "BF16", (3,), 100, 106) for name in "abc"}
    about = {"model": "qwen3", "parameters": 12_345, "date": "today", "mesh": "fsdp=2"}
    trainer = {"step": 1200, "tokens": 34_000, "head": "lm", "settings": {"max_norm": 2.0}, "state": None}
    checkpoint = Checkpoint(
        tmp_path, Manifest(1200, {}, {"m": 106, "x": 2_000}, {"runs/0": 1, "runs/1": 2}, about),
        cast(Any, SimpleNamespace(of_file={"m": [0, 1], "x": [2]})),
        {"weights": cast(Any, SimpleNamespace(entries=entries, files=["m"]))}, {**trainer, "trained": ["a", "b"]},
    )  # fmt: skip
    differences = [inspect.Difference("weights", f"k{n}", "values", 0.25, 1_000 + n) for n in range(23)]
    inspect.print_checkpoint(checkpoint, None, differences)
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "qwen3, 12,345 parameters, 2 tensors trained", "step 1,200, 34,000 tokens", "today on fsdp=2 by 2 ranks",
        "2.1 kB in 3 runs", "max_norm 2.0", "state none", "weights 3 1 BF16 18 bytes", "bytes not read",
        "23 tensors differ", "weights k19: values, 1,019 elements, by up to 0.25 and 3 more",
    ):  # fmt: skip
        assert text in said, (text, said)
    inspect.print_checkpoint(checkpoint, [], [])
    said = capsys.readouterr().out
    assert "every byte is as it was written" in said
    assert "no tensor differs" in said
    inspect.print_checkpoint(checkpoint, ["bytes 3 to 4"], None)
    said = capsys.readouterr().out
    assert "bytes 3 to 4" in said
    assert "every byte" not in said
    assert "differ" not in said


def differs(now: dict[str, object], then: dict[str, object], *new_config: str) -> str:
    """Return why a config refuses a resume."""
    model, saved = (SimpleNamespace(config=each, mesh=SimpleNamespace(rank=0)) for each in (now, then))
    return error_of(lambda: check_same_config(cast(Any, model), cast(Any, saved), Path("step-000001"), new_config))


def test_fields_of_config_that_a_resume_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """By name wherever they stand: what computes other values is refused unless it is confirmed, what changes text or
    loss is logged, what only says how files are stored is ignored."""
    old = {"text_config": {"rope_theta": 1e4, "bos_token_id": 3, "quantization_config": {"bits": 8}}, "eps": 1e-6}
    new = {"text_config": {"rope_theta": 1e6, "bos_token_id": 3, "quantization_config": {"bits": 4}}, "eps": 1e-6}
    refused = differs(new, old)
    assert "text_config.rope_theta of config.json was 10000.0 in step-000001, and is 1000000.0 now" in refused
    assert "new_config=['text_config.rope_theta']" in refused
    assert not caplog.records
    for name in ("rope_theta", "text_config.rope_theta"):
        caplog.clear()
        assert differs(new, old, name) == ""
        assert [each.getMessage() for each in caplog.records] == [
            "text_config.rope_theta of config.json was 10000.0 in step-000001, and is 1000000.0 now"
        ]
    caplog.clear()
    assert differs({"eos_token_id": 4}, {"eos_token_id": [4, 5], "dtype": "float32"}) == ""
    assert [each.getMessage().split(" of ")[0] for each in caplog.records] == ["eos_token_id"]
    assert differs({"text_config": {"bos_token_id": 3}}, {"text_config": {"bos_token_id": 4}}) == ""
    assert "eps of config.json was 1e-06 in step-000001, and is None now" in differs({}, {"eps": 1e-6})
    assert "eps of config.json was 2" in differs({"eps": 1, "rope_theta": 3}, {"eps": 2, "rope_theta": 4}, "rope_theta")
    for name in (
        "rms_norm_eps", "rope_scaling", "rope_parameters", "tie_word_embeddings", "hidden_act", "sliding_window",
        "num_experts_per_tok", "norm_topk_prob", "attention_bias", "layer_types", "max_position_embeddings",
    ):  # fmt: skip
        assert f"{name} of config.json was 1" in differs({name: 2}, {name: 1})


def test_settings_that_a_checkpoint_records() -> None:
    """A resume warns where one of them changes. Those of an MTP head count where the engine trains one."""
    options = mw.AdamW(betas=(0.8, 0.9), state_dtype=torch.bfloat16)
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(options=options), max_norm=2.0, router=SimpleNamespace(mode="previous"), mtp=None,
        temperature=0.5, model=SimpleNamespace(recipe=SimpleNamespace(mtp="head", mtp_weight=0.25)),
    )  # fmt: skip
    made = settings_of(cast(Any, engine))
    assert made.items() >= {"betas": [0.8, 0.9], "max_norm": 2.0, "router_aux": "previous", "temperature": 0.5}.items()
    assert made["state"] == "torch.bfloat16"
    assert "mtp" not in made
    engine.mtp = object()
    assert settings_of(cast(Any, engine)) == {**made, "mtp": "head", "mtp_weight": 0.25}
