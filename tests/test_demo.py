"""The demonstration with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples import demo
from tests import worlds
from tests.started import Command, Started, forked_ranks


def demonstrate(arguments: list[str]) -> int:
    """Run the demonstration with forks for its commands: starts of Python took most of the time of this test."""
    sys.argv, make_directory = ["demo", *arguments], demo.make_directory
    demo.make_directory = lambda out: worlds.run(1, make_directory, out)  # forks would inherit its process group
    demo.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": Command})
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # torch may refuse new threads after a fork
    with forked_ranks():
        demo.main()
    return 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    sets = ["--set", "train.steps=12", "save.every=4", "log.every=1"]
    with Started(["--out", str(tmp_path / "new"), *sets], main=demonstrate) as started:
        code = started.end(220)
    output = started.output.replace("\r", "")
    assert code == 0, output
    first, last = (float(re.findall(rf"step +{step}/12  loss ([\d.]+)", output)[-1]) for step in (1, 12))
    assert last < first - 1, output
    assert "rank 1 of 2 was killed (SIGKILL)" in output
    assert re.search(r"resuming from \S*runs/demo/checkpoints/step-0000", output)
    assert "mesh.tp: 1 before, 2 now" in output
    assert "all is well" in output
    assert "S1   FAILS" in output
    assert "Traceback" not in output
    assert "Warning" not in output, output  # a newcomer's first impression
    run = tmp_path / "new" / "runs" / "demo"
    files = {path.name for path in (run / "export").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "."], "--out . "),
        (["--out", "file"], "--out file "),
        (["--set", "train.step=3"], "did you mean steps?"),
    ],
)
def test_demo_refuses_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as stopped:
        demo.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_demo_ends_with_a_command_that_fails(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "exit(3)"], text=True) as command:
        with pytest.raises(SystemExit, match="exit code 3 before it made none"):
            demo.wait(command, tmp_path / "none")
        with pytest.raises(SystemExit, match="exit code 3"):
            demo.finish(command)
