"""`meshwright data`, `--dry-run` and `train` report all mistakes at once, with lines, before any process starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

import meshwright as mw
from meshwright.cli import main
from meshwright.recipe import Lora, Recipe
from meshwright.train import config_file, launch, metrics, preflight, resume_point
from tests import worlds
from tests.runs import chats, file_of, source

COMMANDS = (["data"], ["train", "--dry-run"], ["train"])


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model of 4 heads and 2 kv heads, chats, and what cannot be read."""
    at = tmp_path_factory.mktemp("preflight")
    source(at / "m", "qwen3_tied")
    chats(at / "chats.jsonl", 40)
    chats(at / "held.jsonl", 20)
    (at / "bad.jsonl").write_text('{"prompt": 1}\n')
    return at


def message_of(capsys: pytest.CaptureFixture[str], path: Path, *sets: str, command: list[str]) -> str:
    args = ["--set", *sets] if sets else []
    assert main([command[0], str(path), *command[1:], *args]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_unreadable_files_are_reported_at_once(
    at: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metrics._NEEDS, "tensorboard", "no_such_package")
    path = file_of(at, at / "m", eval={"path": str(at / "no.jsonl")}, log={"tensorboard": True}, mesh={"tp": 3})
    result = message_of(capsys, path, "data.0.template=/dev/zero", "data.1.path=no/where.jsonl", command=command)
    lines = path.read_text().splitlines()
    line_of = {name: 1 + next(n for n, line in enumerate(lines) if line.startswith(name)) for name in ("tp", "tens")}
    for wanted in (
        "has 5 mistakes:",
        "data[0].template (--set data.0.template=/dev/zero): the chat template /dev/zero is not a file",
        "data[1].path (--set data.1.path=no/where.jsonl): no/where.jsonl is neither a file nor a directory",
        f"eval.path (line {1 + lines.index('[eval]') + 1}): {at / 'no.jsonl'} is neither a file nor a directory",
        f"mesh.tp (line {line_of['tp']}): tp=3 does not divide",
        f"log.tensorboard (line {line_of['tens']}): needs the package no_such_package",
    ):
        assert wanted in result, result
    assert "train.length" not in result  # no length is advised for a mesh that cannot be
    wrong_model = message_of(capsys, path, "model=no/where/at/all", command=command)
    assert "model (--set model=no/where/at/all): model = 'no/where/at/all' is neither a directory" in wrong_model
    assert "has 3 mistakes" in wrong_model
    assert "train.length" not in wrong_model  # the mesh waits for the model


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        (["mesh.fsdp=2", "mesh.ep=2"], "mesh.ep (--set mesh.ep=2): ep=2 divides experts, but this model has none"),
        (["mesh.ep=3"], "mesh.ep (--set mesh.ep=3): ep=3 divides experts, but this model has none; leave ep out"),
        (["train.train=no.such.*"], "train='no.such.*' matches no parameter"),
        (["optim.kind=muon", "train.train=*norm*"], "optim.kind (--set optim.kind=muon): Muon updates whole matrices"),
        (
            ["optim.kind=muon", 'optim.exclude=["*.routers"]'],
            """optim.exclude (--set optim.exclude=["*.routers"]): exclude='*.routers' matches no parameter""",
        ),
        (["train.fp8=block"], "train.fp8 (--set train.fp8=block): "),
    ],
)
def test_what_the_model_refuses(at: Path, sets: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = message_of(capsys, file_of(at, at / "m"), *sets, command=["data"])
    assert wanted in result
    assert "has 1 mistake:" in result


def test_bad_rows_of_all_sources_are_reported_at_once(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out data count too, and no rank has started."""
    path = file_of(at, at / "m", eval={"path": str(at / "bad.jsonl")})
    assert "bad.jsonl:1" in message_of(capsys, path, command=["train"])
    (at / "worse.jsonl").write_text("no JSON\n")
    result = message_of(capsys, path, f"data.0.path={at / 'worse.jsonl'}", command=["data"])
    assert "bad.jsonl:1" in result
    assert "worse.jsonl:1" in result


def test_a_longer_run_after_the_fall_of_its_rate_is_refused(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint decides before any rank starts."""
    config = config_file.read(file_of(at, at / "m", optim={"schedule": "wsd", "warmup": 0}, train={"steps": 20}))
    data = launch.prepared(config).data
    state = asdict(resume_point.Position(data.plan.fingerprint, stream=36, num_steps=10))
    monkeypatch.setattr(resume_point, "checkpoints", lambda _: [SimpleNamespace(path=Path("step-000009"))])
    opened = SimpleNamespace(directory=Path("step-000009"), trainer={"state": state, "step": 9})
    monkeypatch.setattr(resume_point, "opened_at", lambda _: opened)
    with pytest.raises(
        mw.ConfigError, match=r"step-000009: .*has decayed since step 8 of 10.*Start from a checkpoint bef"
    ):
        resume_point.check_position(config, data)
    state["num_steps"] = 20
    resume_point.check_position(config, data)
    state["plan"] = "another"
    with pytest.raises(mw.CheckpointError, match="was trained on other data"):
        resume_point.check_position(config, data)


def test_a_dry_run_lists_held_out_data_and_how_often_sources_are_read(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each source has half of the tokens, so the small one is read twice as often."""
    text = file_of(at, at / "m", eval={"path": str(at / "held.jsonl"), "every": 5})
    shares = ["data.0.share=0.5", f"data.1.path={at / 'held.jsonl'}", "data.1.share=0.5", "train.steps=4"]
    assert main(["data", str(text), "--set", *shares]) == 0
    lines = capsys.readouterr().out.splitlines()
    tokens = {line.split()[0]: int(line.split()[3].replace(",", "")) for line in lines[1:3]}
    times = {line.split()[0]: float(line.split()[-2]) for line in lines[1:3]}
    assert lines[0].endswith("in the run")
    assert times["chats.jsonl"] * tokens["chats.jsonl"] == pytest.approx(
        times["held.jsonl"] * tokens["held.jsonl"], 0.02
    )
    assert times["chats.jsonl"] * tokens["chats.jsonl"] == pytest.approx(4 * 512 / 2, rel=0.1)
    assert lines[3].startswith("held out: held-out ")
    assert lines[3].endswith("every 5 steps")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_run_logs_what_has_changed(
    at: Path, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone, before anything is loaded."""
    config = config_file.read(file_of(at, at / "m"), ["optim.lr=0.5"])
    began = config_file.read(file_of(at, at / "m"))
    monkeypatch.setattr(resume_point, "read", lambda _: began)
    (at / "out").mkdir(exist_ok=True)
    (at / "out" / "config.toml").write_text("")
    monkeypatch.setattr(resume_point, "checkpoints", lambda _: [SimpleNamespace(path=at / "step-000009")])
    monkeypatch.setattr(resume_point, "resume", Mock(side_effect=mw.CheckpointError("it is loaded now")))
    mesh = SimpleNamespace(rank=rank, broadcast_object=lambda _: (at, ""))
    engine = SimpleNamespace(model=SimpleNamespace(mesh=mesh))
    with pytest.raises(mw.CheckpointError, match="it is loaded now"):
        resume_point.position_of(config, cast(mw.Engine, engine), cast(Any, None))
    (at / "out" / "config.toml").unlink()
    changes = [each.message for each in caplog.records if "optim.lr" in each.message]
    assert len(changes) == (rank == 0), caplog.text
    assert all("0.01" in each and "0.5" in each for each in changes)


def write_adapter(model: Path, at: Path) -> None:
    mw.export_adapter(mw.load(model, mw.Mesh(), lora=mw.Lora(rank=4, alpha=12.0)), at)


def test_a_run_file_says_what_its_adapter_says(at: Path, tmp_path: Path) -> None:
    """A default counts if it is written down."""
    worlds.run(1, write_adapter, at / "m", tmp_path / "adapter")
    path = file_of(at, at / "m", lora={"path": str(tmp_path / "adapter")})
    for sets, wanted in (
        ([], []), (["lora.rank=4", "lora.alpha=12"], []), (["lora.rank=16"], ["lora.rank=16, but"]),
        (["lora.alpha=32"], [r"lora.alpha=32.0, but"]), (["lora.targets=all-linear"], ["lora.targets="]),
    ):  # fmt: skip
        mistakes = [*preflight.mistakes(config_file.read(path, sets))]
        assert [place for place, _ in mistakes] == [("lora", "path")] * len(wanted), mistakes
        assert all(text in message for text, (_, message) in zip(wanted, mistakes, strict=True)), mistakes


def test_adapters_that_no_class_loads_are_refused_before_the_run(at: Path) -> None:
    path, embedding = file_of(at, at / "m", lora={"rank": 2}), "objective=embedding"
    [(place, message)] = preflight.mistakes(config_file.read(path, [embedding]))
    assert place == ("save", "merged")
    assert "Set merged = true" in message
    for sets in (["save.merged=true"], ["save.export=false"]):
        assert not [*preflight.mistakes(config_file.read(path, [embedding, *sets]))]


def test_prompts_wait_for_the_template_of_the_first_source(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mistake is reported once. Another source does not format them."""
    monkeypatch.setattr(preflight, "prompts_of", Mock(side_effect=mw.DataError("too long")))
    path = file_of(at, at / "m", sample={"prompts": ["x"]})
    other = [f"data.1.path={at / 'held.jsonl'}", "data.1.template=/dev/zero"]
    for sets, first in (([], []), (["data.0.template=/dev/zero"], [("data", 0, "template")]), (other, [])):
        places = {place for place, _ in preflight.mistakes(config_file.read(path, sets))}
        assert (("sample", "prompts") in places) == (not first)
        assert {*first} <= places


def test_other_models_are_opened_without_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference and a teacher are as their files are, and have the tokenizer of the model."""
    opened, compared = list[Any](), Mock()
    monkeypatch.setattr(preflight, "find", lambda name, recipe, **more: opened.append((name, recipe, more["weights"])))
    monkeypatch.setattr(preflight, "model_directory", lambda name: Path(f"at {name}"))
    monkeypatch.setattr(preflight, "check_tokenizers", compared)
    recipe = Recipe(lora=Lora(rank=3), train="layers.*", mtp="all", frozen="nf4", fp8="block")
    config: Any = SimpleNamespace(
        dpo=SimpleNamespace(reference="r"), distill=SimpleNamespace(teacher="t"), recipe=recipe
    )
    plain = Recipe(train=(), mtp="carried", fp8="block")
    assert [*preflight._other_models(config, Path("m"))] == []
    assert opened == [("r", plain, False), ("t", plain, False)]
    assert [each.args for each in compared.call_args_list] == [
        (Path("at r"), Path("m"), "dpo.reference"), (Path("at t"), Path("m"), "distill.teacher"),
    ]  # fmt: skip
    compared.side_effect = mw.DataError("another tokenizer")
    refused = [*preflight._other_models(config, Path("m"))]
    assert refused == [(("dpo", "reference"), "another tokenizer"), (("distill", "teacher"), "another tokenizer")]
    config.dpo, config.distill = None, SimpleNamespace(teacher="")
    assert [*preflight._other_models(config, Path("m"))] == []
