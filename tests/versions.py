"""Run the core tests with the oldest and the newest torch and transformers that pyproject.toml allows.

    python -m tests.versions                 # both, each in an environment of its own; about 15 minutes on two cores
    python -m tests.versions newest --keep /tmp/environments

Before a bound in pyproject.toml moves, this must pass. `make test` runs with the versions of the constraints file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PINNED = ("torch", "transformers")
CORE = (
    "tests/ops", "tests/sharding", "tests/test_transformers.py", "tests/test_engine.py", "tests/test_weights.py",
    "tests/test_meshes.py", "tests/test_pipeline.py", "tests/test_frozen.py",
)  # fmt: skip


def requirements(which: str) -> list[str]:
    """Return what pip installs: within the bounds for the newest, the lower bound's minor version for the oldest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = {each.name: each for each in map(Requirement, project["dependencies"]) if each.name in PINNED}
    if which == "newest":
        return [str(bounds[name]) for name in PINNED]
    lowest = {name: next(each.version for each in bounds[name].specifier if each.operator == ">=") for name in PINNED}
    return [f"{name}=={version}.*" for name, version in lowest.items()]


def environment(folder: Path, which: str) -> Path:
    """Return the Python of an environment with these versions; made if it is not there."""
    python = folder / which / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / which)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *requirements(which), "-e", f"{ROOT}[dev]"]
        # A constraints file of the user's would pin the versions of `make setup`.
        subprocess.run(install, check=True, env={**os.environ, "PIP_CONSTRAINT": os.devnull})
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="oldest, newest (default: both)")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the environments for the next time")
    options = parser.parse_args()
    unknown = {*options.which} - {"oldest", "newest"}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: choose from oldest, newest")
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        for which in options.which or ("oldest", "newest"):
            python = str(environment(options.keep or Path(temporary), which))
            show = "import torch, transformers; print(torch.__version__, transformers.__version__)"
            print(
                which, subprocess.run([python, "-c", show], check=True, capture_output=True, text=True).stdout.strip()
            )
            tests = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CORE]
            if subprocess.run(tests, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode:
                failed.append(which)
    print("failed with " + ", ".join(failed) if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
