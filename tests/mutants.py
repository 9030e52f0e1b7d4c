"""Plant the bugs of tests/mutants.json in copies of the package, one at a time; run verify and tests on each copy.

    python -m tests.mutants                  # all of them: about an hour on two cores
    python -m tests.mutants 10 12 26         # some, by number
    python -m tests.mutants --list own.json  # those of another file

The file holds a list of objects with these fields, of which the first four are needed:

    what              the bug in a few words
    file, old, new    a file below meshwright/, a text that stands in it once, and its replacement
    verify            command lines of `meshwright verify`, tried in turn until one finds something; without --dtypes in
                      float64 first, then in the other dtypes. Paths of *.json begin at the repository
    tests             arguments of pytest, such as ["tests/test_engine.py", "-k", "norm"]
    place             a pattern in the first findings that leads to the file: by the row of docs/tour.md of the first
                      oracle that fails, or by a name
    why               the numbers, files or collectives that it changes there

A mutant with `old` equal to `new` shows what honest code gives. Exit code 1: nothing caught one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_STEPS = ("float64", "float32,bfloat16")  # a bug that float64 shows needs no other dtype


@dataclass(frozen=True)
class Mutant:
    what: str
    file: str
    old: str
    new: str
    verify: Sequence[str] = ()
    tests: Sequence[str] = ()
    place: str = ""
    why: str = ""

    def stands(self) -> int:
        """Return how often the text to replace occurs in its file."""
        return (ROOT / "meshwright" / self.file).read_text("utf-8").count(self.old) if self.old else 0


@dataclass(frozen=True)
class Outcome:
    findings: Sequence[tuple[str, str]]  # oracle and text
    tests: str  # the last line of pytest

    @property
    def oracles(self) -> str:
        return ", ".join(dict.fromkeys(oracle for oracle, _ in self.findings))

    @property
    def caught(self) -> bool:
        return bool(self.findings) or "failed" in self.tests or "error" in self.tests

    def leads(self, mutant: Mutant) -> str:
        """Say whether the first findings lead to the file."""
        if not mutant.place or not self.findings:
            return "-"
        led = any(re.search(mutant.place, text, re.DOTALL) for _, text in self.findings[:6])
        return "yes" if led else "no"


def run(mutant: Mutant) -> Outcome:
    """Plant a mutant in a copy of the package, and run verify and the tests on the copy."""
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        shutil.copytree(ROOT / "meshwright", folder / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / "meshwright" / mutant.file
        path.write_text(path.read_text("utf-8").replace(mutant.old, mutant.new), "utf-8")
        tries = (_verify(folder, words) for line in mutant.verify for words in _commands(line))
        findings = next(filter(None, tries), [])
        return Outcome(findings, _pytest(folder, mutant.tests) if mutant.tests else "")


def _commands(line: str) -> Iterator[list[str]]:
    words = [str(ROOT / word) if word.endswith(".json") else word for word in line.split()]
    yield from [words] if "--dtypes" in words else ([*words, "--dtypes", dtypes] for dtypes in _STEPS)


def _verify(folder: Path, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return what verify finds in the package of a folder: (oracle, text) of all runs, in the order of the oracles."""
    done = _python(folder, 600, "meshwright", "verify", *arguments, "--json")
    if done.returncode not in (0, 1):
        raise SystemExit(f"verify ended with {done.returncode}: {done.stderr[-2000:]}")
    oracles = (oracle for run in json.loads(done.stdout)["runs"] for oracle in run["oracles"].items())
    return [(name, _text(name, row)) for name, rows in oracles for row in rows or ()]


def _text(oracle: str, row: Mapping[str, Any]) -> str:
    guess = f"; likely: {row['guess']}" if row["guess"] else ""
    return f"{oracle} {row['name']}: {row['what']}{guess}"


def _pytest(folder: Path, arguments: Sequence[str]) -> str:
    """Return the last line that pytest prints for the package of a folder."""
    for name in ("tests", "docs", "examples", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "pyproject.toml", *ROOT.glob("*.md")):
        shutil.copy2(file, folder)
    done = _python(folder, 1800, "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments)
    return next(iter(done.stdout.strip().splitlines()[::-1]), f"pytest ended with {done.returncode}")


def _python(folder: Path, timeout: int, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=timeout)


def chosen(path: Path, numbers: Sequence[int]) -> dict[int, Mutant]:
    """Read the mutants of these numbers, or all. Refuse those whose text no longer stands once in its file."""
    every = dict(enumerate((Mutant(**fields) for fields in json.loads(path.read_text("utf-8"))), 1))
    some = {number: every[number] for number in numbers or every}
    stale = [f"{number}: {m.stands()} times in {m.file}" for number, m in some.items() if m.stands() != 1]
    if stale:
        raise SystemExit(f"texts to replace must stand once in their files; mend {path.name}: " + "; ".join(stale))
    return some


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--list", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    mutants = chosen(options.list, options.numbers)
    print("| # | planted in | bug | caught by | leads to the file | tests |\n|---|---|---|---|---|---|")
    num_caught = 0
    for number, mutant in mutants.items():
        began = time.monotonic()
        result = run(mutant)
        num_caught += result.caught
        oracles = result.oracles or ("**nothing**" if mutant.verify else "not tried")
        row = (str(number), f"`{mutant.file}`", mutant.what, oracles, result.leads(mutant), result.tests or "-")
        print(f"| {' | '.join(row)} |", flush=True)
        first = " | ".join(text for _, text in result.findings[:3])
        print(f"      {time.monotonic() - began:.0f} s  {first[:400]}", file=sys.stderr, flush=True)
    print(f"\n{num_caught} of {len(mutants)} caught")
    return int(num_caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
