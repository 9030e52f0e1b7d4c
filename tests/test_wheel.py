"""The wheel holds all that the package needs, and runs where no checkout is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ran(at: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=at, env={**os.environ, **environment}, check=False, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_installs_and_runs(tmp_path: Path) -> None:
    """It is built offline, installed alone, and finds its dependencies as an installed package does."""
    pip, source = ("-m", "pip", "--disable-pip-version-check", "--quiet"), tmp_path / "source"
    shutil.copytree(ROOT / "meshwright", source / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.parent != source}
    ran(source, *pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("meshwright-*.whl")
    ran(tmp_path, *pip, "install", "--no-deps", "--no-index", "--target", str(tmp_path / "installed"), str(wheel))
    places = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "installed"), sysconfig.get_path("purelib")])}
    plan = "'plan', 'tiny-qwen3', '--mesh', 'fsdp=2,tp=2', '--html', 'plan.html'"
    code = f"import meshwright as m; print(m.__file__, m.__version__); from meshwright.cli import main; main([{plan}])"
    file, version, *message = ran(tmp_path, "-P", "-c", code, **places).split()
    assert Path(file).parent == tmp_path / "installed" / "meshwright"
    assert wheel.name.startswith(f"meshwright-{version}-")
    assert "fsdp=2" in " ".join(message)
    assert "<style>" in (tmp_path / "plan.html").read_text()
    assert [str(path) for path in sorted(files) if not (tmp_path / "installed" / path).is_file()] == []
