"""The demonstration, as `make demo` runs it, with fewer steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import launch, main

ROOT = Path(__file__).parents[1]


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.demo", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)


def number(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return [float(group) for group in found.groups()]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_demo_trains_exports_and_agrees_with_transformers(tmp_path: Path) -> None:
    done = demo("--out", tmp_path / "new", "--steps", 6)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (number(rf"step +{step}/6  loss ([\d.]+)", done.stdout)[0] for step in (1, 6))
    assert last < first - 0.3, done.stdout
    assert len(re.findall(r"process (\d), expert (\d)  +\d+", done.stdout)) == 8
    assert "all is well" in done.stdout
    assert "S1   FAILS" in done.stdout
    (difference,) = number(r"largest difference to the logits of transformers \(float32\): (\S+)", done.stdout)
    assert difference < 1e-4
    files = {path.name for path in (tmp_path / "new" / "trained").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    assert "Warning" not in done.stderr, done.stderr  # a newcomer's first impression


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "."], "--out . "),
        (["--out", "file"], "--out file "),
        (["--steps", "0"], "--steps 0"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
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
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_demo_fails_with_the_message_of_its_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        launch(tmp_path, 1)  # where nothing was prepared
    assert re.search(r"\bexit code 1\b", str(stopped.value.code))
    assert f"{tmp_path}/start" in capfd.readouterr().err
