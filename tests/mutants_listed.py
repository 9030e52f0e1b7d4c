"""Run `meshwright verify` and tests on a list of patches, each planted alone in a copy of the package; print a table.

    python -m tests.mutants_listed patches.json

The file holds a list of objects with these fields, of which the first three are needed:

    file, old, new    a file below meshwright/, a text that stands in it once, and what stands in its place
    what              the bug in a few words
    verify            command lines of `meshwright verify`, tried in turn until one finds something
                      (default: "tiny-qwen3-moe --mesh fsdp=2,tp=2,ep=2"); paths of *.json begin at the repository
    tests             arguments of pytest, such as ["tests/test_engine.py", "-k", "norm"] (default: none are run)

A patch without a change (`old` equal to `new`) shows what honest code gives. Exit code 1: a patch was found by nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import ROOT, copied, findings, plant_text, verified

_DEFAULT = ("tiny-qwen3-moe --mesh fsdp=2,tp=2,ep=2",)


@dataclass(frozen=True)
class Patch:
    file: str
    old: str
    new: str
    what: str = ""
    verify: Sequence[str] = _DEFAULT
    tests: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    patch: Patch
    oracles: str  # that found something
    first: str  # what the first of them says
    tests: str  # the last line of pytest
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.oracles) or "failed" in self.tests or "error" in self.tests


def tried(patch: Patch, number: int) -> Row:
    """Plant a patch in a copy of the package, and ask verify and the tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        plant_text(f"patch {number}", copied(folder) / patch.file, patch.old, patch.new)
        found: list[tuple[str, str]] = []
        for line in patch.verify:
            words = [str(ROOT / word) if word.endswith(".json") else word for word in line.split()]
            found = found or findings(verified(folder, *words))
        said = _tested(folder, patch.tests) if patch.tests else ""
    oracles = ", ".join(dict.fromkeys(oracle for oracle, _ in found))
    return Row(patch, oracles, next((text for _, text in found), ""), said, time.monotonic() - began)


def _tested(folder: Path, arguments: Sequence[str]) -> str:
    """The last line that pytest prints, run on the copy."""
    for name in ("tests", "docs", "examples", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder / name)
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=1800)
    return next(iter(done.stdout.strip().splitlines()[::-1]), f"pytest ended with {done.returncode}")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__)
        return 2
    rows = []
    print("| # | planted in | bug | found by | tests |\n|---|---|---|---|---|")
    for number, fields in enumerate(json.loads(Path(arguments[0]).read_text("utf-8")), 1):
        row = tried(Patch(**fields), number)
        rows.append(row)
        print(f"| {number} | `{row.patch.file}` | {row.patch.what} | {row.oracles or '**nothing**'} | {row.tests} |")
        print(f"      {row.seconds:.0f} s  {row.first[:400]}", file=sys.stderr, flush=True)
    print(f"\n{sum(row.caught for row in rows)} of {len(rows)} caught")
    return int(not all(row.caught for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
