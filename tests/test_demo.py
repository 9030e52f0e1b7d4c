"""The demonstration, as `make demo` runs it, with fewer steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.demo", "--out", str(tmp_path / "new")]
    command += ["--set", "train.steps=12", "save.every=4", "log.every=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    first, last = (float(re.findall(rf"step +{step}/12  loss ([\d.]+)", done.stdout)[-1]) for step in (1, 12))
    assert last < first - 1, said
    assert "rank 1 of 2 was killed (SIGKILL)" in said
    assert re.search(r"resuming from \S*runs/demo/checkpoints/step-0000", said)
    assert "mesh.tp: 1 before, 2 now" in said
    assert "all is well" in said
    assert "S1   FAILS" in said
    assert "Traceback" not in said
    assert "Warning" not in done.stderr, done.stderr  # a newcomer's first impression
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
