"""`meshwright verify --plant`: every bug that it offers is found, and nobody can take the result for one without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.verify.planted_bugs import BUGS
from meshwright.verify.report import ROWS
from tests import seeing, tiny, trials
from tests.words import words


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("plants") / "m", "qwen3")


@contextmanager
def planted(name: str) -> Iterator[None]:
    """On a rank, which ends with the trial."""
    BUGS[name].plant()
    yield


FIRST = {
    "sum-left-out": r"G1 \S+: .*a sum over tp is missing",
    "rows-permuted": r"W1 \S+: .*right values in the wrong places",
    "leak": r"D1 layers\.0\.mixer: .*leak",
    "mean-of-means": r"S1 loss: .*its own targets",
    "update-lost": r"U1 \S+: .*no update moved it",
}


@pytest.mark.parametrize("name", FIRST)
def test_found(source: Path, name: str) -> None:
    mesh = {BUGS[name].axes[0]: 2} if BUGS[name].axes else dict(fsdp=2)
    found = trials.findings_in_turn({name: trials.trial(source, mesh)}, planted)[name]
    assert found
    found.sort(key=lambda finding: ROWS.index(finding.oracle))  # as verify prints them
    assert re.match(FIRST[name], str(found[0])), [str(finding) for finding in found[:3]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "oracle"), [("sum-left-out", "G1"), ("leak", "D1")])
def test_told_of_towers(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, oracle: str) -> None:
    at = seeing.directory(tmp_path / "seeing", "qwen3_vl")
    code, out, _ = said(capsys, str(at), "--tower", "--mesh", "tp=2", "--plant", name)
    assert code == 1
    assert re.search(words("^A bug is planted", rf"\({name}\)", f"^{oracle} +FAILS"), out, re.MULTILINE), out


def said(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = main(["verify", *arguments, "--dtypes", "float64", "--against", "none"])
    return code, *capsys.readouterr()


def test_it_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = str(tmp_path / "page.html")
    code, out, _ = said(capsys, "tiny-qwen3", "--mesh", "tp=2", "--plant", "sum-left-out", "--html", page)
    assert code == 1
    assert re.search(words("^A bug is planted", r"\(sum-left-out\)", "^G1 +FAILS"), out, re.MULTILINE), out
    assert "A bug is planted" in Path(page).read_text()
    code, out, _ = said(capsys, "tiny-qwen3", "--mesh", "fsdp=2", "--plant", "leak", "--json")
    assert (code, json.loads(out)["planted"]) == (1, "leak")


@pytest.mark.parametrize("options", [[], ["--weights"]], ids=["shrunk", "weights"])
def test_what_fails_is_not_called_equal(capsys: Any, source: Path, options: list[str]) -> None:
    arguments = [str(source), "--mesh", "fsdp=2", "--plant", "rows-permuted", *options]
    code, out, _ = said(capsys, *arguments)
    assert code == 1
    assert re.search(r"^W1 +FAILS \(\d+\) *$", out, re.MULTILINE), out
    code, out, _ = said(capsys, *arguments, "--json")
    run = json.loads(out)["runs"][0]
    assert (code, run["margins"]["W1"]) == (1, [])
    assert run["oracles"]["W1"]


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (
            ["--mesh", "fsdp=2", "--plant", "sum-left-out"],
            words("sum-left-out", "may change nothing on fsdp=2", "--mesh tp=2"),
        ),
        (["--mesh", "fsdp=2", "--weights", "--plant", "leak"], words("--weights trains nothing", "rows-permuted")),
        (["--mesh", "fsdp=2", "--plant", "nothing"], words("'nothing'", "sum-left-out", "leak")),
    ],
    ids=["not felt", "nothing is trained", "unknown"],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], pattern: str) -> None:
    code, _, err = said(capsys, "tiny-qwen3", *arguments)
    assert code == 2
    assert re.search(pattern, err), err
