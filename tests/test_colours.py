"""The example of a vision-language model, with few pictures, as processes of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.colours", "--out", str(tmp_path / "new"), "--num", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of 20 new pictures are named rightly" in done.stdout
