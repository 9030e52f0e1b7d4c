"""Check what commands pass on, print and return, with stand-ins for the work itself."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from rich.text import Text

import meshwright as mw
from meshwright import checkpoint, plan, report, verify
from meshwright.checkpoint import inspect
from meshwright.cli import main
from meshwright.plan import terminal
from meshwright.train import config_file, config_model, data_sources, dry_run, launch, preflight, resume_point, samples
from meshwright.verify import report as verify_report

MAIN = sys.modules["meshwright.cli.main"]


def raises(error: BaseException) -> Any:
    return MagicMock(side_effect=error)


@pytest.mark.parametrize(("error", "code", "words"), [
    (KeyboardInterrupt(), 130, "meshwright: interrupted\n"), (mw.DataError("no rows"), 2, "meshwright: no rows\n"),
])  # fmt: skip
def test_an_interrupt_and_a_refusal_have_codes_of_their_own(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MAIN, "_copy", raises(error))
    assert main(["copy", "a", "b"]) == code
    assert capsys.readouterr().err == words


def test_the_module_exits_with_the_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = MagicMock(return_value=1)
    monkeypatch.setattr(MAIN, "_copy", seen)
    monkeypatch.setattr(sys, "argv", ["meshwright", "copy", "runs/a b", "c"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("meshwright", run_name="__main__")
    assert ended.value.code == 1
    assert seen.call_args.args[0].command == "meshwright copy 'runs/a b' c"


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_inspect_says_what_was_read_and_compared(
    verified: bool, compared: bool, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = MagicMock(return_value={})
    monkeypatch.setattr(checkpoint, "opened_at", str)
    monkeypatch.setattr(checkpoint, "check_bytes", lambda of: [f"bad {of}"] if as_json else [])
    monkeypatch.setattr(checkpoint, "differences", lambda first, second: iter([(first, second)]))
    monkeypatch.setattr(inspect, "as_json" if as_json else "print_checkpoint", shown)
    flags = ["--verify"] * verified + ["--diff", "b"] * compared + ["--json"] * as_json
    assert main(["inspect", "a", *flags]) == int((verified and as_json) or compared)
    wrong = (["bad a"] if as_json else []) if verified else None
    assert shown.call_args == call("a", wrong, [("a", "b")] if compared else None)
    assert capsys.readouterr().out == ("{}\n" if as_json else "")


@pytest.mark.parametrize(("flags", "target"), [([], "a/report.html"), (["--html", "c.html"], "c.html")])
def test_a_report_lies_in_the_first_run(
    flags: list[str], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = MagicMock()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(report, "write_report", written)
    assert main(["report", "a", "b", *flags]) == 0
    folders, file, origin = written.call_args.args
    assert (folders, file) == ([Path("a"), Path("b")], tmp_path / target)
    assert origin["command"] == " ".join(["meshwright report a b", *flags])
    assert capsys.readouterr().out == f"{file}\n"


CONFIG = SimpleNamespace(out="the out", model="the model", cache="the cache")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-ins for the work of `train` and `data`, which note their calls in order."""
    calls = MagicMock()
    calls.read.return_value, calls.prepared.return_value = CONFIG, SimpleNamespace(data="data", held_out="held out")
    calls.dry_run.return_value, calls.last_words.return_value = "the table", ["last", "words"]
    for module, names in (
        (config_file, {"read": calls.read}),
        (launch, {"prepared": calls.prepared, "refuse_other_world": calls.refuse, "start": calls.start,
                        "what_next": lambda _: "start it again"}),
        (resume_point, {"check_position": calls.check}),
        (config_model, {"layout_of": lambda config: f"layout of {config.model}"}),
        (terminal, {"print_plan": calls.print_plan}),
        (dry_run, {"dry_run": calls.dry_run, "shown": calls.shown}),
        (report, {"last_words": calls.last_words}),
    ):  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    for name in ("WORLD_SIZE", "RANK", launch.LAUNCHER):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    return calls


def test_a_dry_run_makes_all_checks_of_a_start(work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--dry-run", "--nproc", "3"]) == 0
    assert work.mock_calls == [
        call.read("run.toml", [], preflight.mistakes), call.refuse(CONFIG, 3), call.prepared(CONFIG),
        call.check(CONFIG, "data"), call.print_plan("layout of the model"), call.dry_run(CONFIG, "data", "held out"),
    ]  # fmt: skip
    assert capsys.readouterr().out == "the table\n"


@pytest.mark.parametrize(
    ("rank", "why", "code"),
    [(None, "", 0), (None, "signal 15", 143), (None, "early stopping", 0), ("0", "signal 2", 130), ("1", "", 0)],
)
def test_a_run_is_started_with_what_replaces_fields(
    rank: str | None, why: str, code: int, work: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A rank makes no checks before the start. Rank 0 of torchrun writes the last words, and no other rank."""
    for name in ("WORLD_SIZE", "RANK") if rank else ():
        monkeypatch.setenv(name, str(rank))
    work.start.return_value = why
    assert main(["train", "run.toml", "--set", "a=1", "b=2", "--plain"]) == code
    sets = ["a=1", "b=2", "log.plain=true"]
    assert work.read.call_args == call("run.toml", sets, *([] if rank else [preflight.mistakes]))
    assert work.refuse.call_args == call(CONFIG, None)
    assert work.start.call_args == call(CONFIG, ["train", "run.toml", "--set", *sets])
    out, err = capsys.readouterr()
    assert out == ("" if rank == "1" else "last\nwords\n")
    assert err == (f"meshwright: ended by {why}; start it again\n" if why and not rank else "")
    if rank != "1":
        assert work.last_words.call_args == call(Path("the out"), "the out")
    main(["train", "run.toml"])
    assert work.start.call_args == call(CONFIG, ["train", "run.toml"])


def test_documents_are_shown_with_the_names_of_their_classes(
    work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = MagicMock()
    reader.of.return_value.names_of_classes = {0: "no", 1: "yes"}
    monkeypatch.setattr(data_sources, "RowReader", reader)
    monkeypatch.setattr(data_sources, "model_directory", lambda model: f"files of {model}")
    work.shown.return_value = [Text("one [document]"), Text("another")]
    assert main(["data", "run.toml", "--show", "2", "--set", "a=1"]) == 0
    assert work.read.call_args == call("run.toml", ["a=1"], preflight.mistakes)
    assert work.dry_run.call_args == call(CONFIG, "data", "held out")
    assert reader.of.call_args == call(CONFIG, "files of the model", Path("the cache"))
    assert work.shown.call_args == call("data", "files of the model", 2, {0: "no", 1: "yes"})
    assert capsys.readouterr().out.splitlines() == ["the table", "one [document]", "another"]


@pytest.mark.parametrize("flags", ["--mesh fsdp=2", "--search 2 --device 80GB"])
def test_a_plan_refuses_an_optimizer_that_cannot_train_the_model(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "tiny-qwen3", *flags.split(), "--optimizer", "muon", "--lora"]) == 2
    assert "Muon updates whole matrices" in capsys.readouterr().err


@pytest.mark.parametrize("findings", [[[], []], [[], ["a finding"]]])
def test_verify_passes_its_options_on(
    findings: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, written = MagicMock(), MagicMock(return_value={})
    monkeypatch.setattr(verify, "plan", planned)
    monkeypatch.setattr(verify, "inspect", lambda *_: [SimpleNamespace(findings=each) for each in findings])
    monkeypatch.setattr(verify_report, "report_json", written)
    flags = "--dtypes float64,bfloat16 --full --device cuda --seconds 7 --against none --seed 5 --plant leak --json"
    more = "--ranks-per-device 3 --state-dtype bfloat16 --mesh tp=2"
    assert main(["verify", "tiny-qwen3", *flags.split(), *more.split()]) == int(any(findings))
    model, axes, asked, _ = planned.call_args.args
    assert (model, axes.tp, asked.dtypes, asked.kind, asked.device) == (
        "tiny-qwen3", 2, ["float64", "bfloat16"], "full", "cuda")  # fmt: skip
    assert (asked.seconds, asked.against, asked.seed, asked.plant) == (7.0, "none", 5, "leak")
    assert asked.ranks_per_device == 3
    assert asked.optimizer == plan.optimizer_of({"optimizer": None, "state_dtype": "bfloat16"})
    assert written.call_args.args[3]["seed"] == "5"
    assert capsys.readouterr().out == "{}\n"


def test_sample_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = MagicMock(return_value=[("a", "b"), ("c", "d")])
    monkeypatch.setattr(samples, "sample_at", made)
    flags = "--prompt a --prompt c --tokens 7 --top-p 0.5 --temperature 0.25 --seed 3"
    for text in (False, True):
        assert main(["sample", "m", *flags.split(), *["--text"] * text]) == 0
        model, section = made.call_args.args
        assert (model, section.prompts, section.tokens, section.top_p, section.temperature) == (
            "m", ["a", "c"], 7, 0.5, 0.25)  # fmt: skip
        assert made.call_args.kwargs == {"seed": 3, "text": text}
        assert capsys.readouterr().out == "> a\nb\n\n> c\nd\n"


def test_a_reader_that_stops_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        sys.modules["meshwright.cli.options"].print_json({"a": 1})
        print("and the rest is dropped")
