"""`meshwright verify --plant`: oracles detect every bug it offers, and its output says that a bug is planted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.verify.planted_bugs import BUGS
from meshwright.verify.report import ROWS
from tests import parts, seeing, tiny, trials
from tests.words import words

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("plants") / "m", "qwen3")


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for the life of a rank, which ends with the trial."""
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
def test_first_finding_names_the_bug(source: Path, name: str) -> None:
    mesh = {BUGS[name].axes[0]: 2} if BUGS[name].axes else dict(fsdp=2)
    findings = trials.findings_in_turn({name: replace(trials.trial(source, mesh), steps=1)}, planted)[name]
    assert findings
    findings.sort(key=lambda finding: ROWS.index(finding.oracle))  # as verify prints them
    assert re.match(FIRST[name], str(findings[0])), [str(finding) for finding in findings[:3]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "oracle"), parts.every(2, [("leak", "D1"), ("sum-left-out", "G1")]))
def test_a_bug_planted_with_a_tower(capsys: Capture, tmp_path: Path, name: str, oracle: str) -> None:
    at = seeing.directory(tmp_path / "seeing", "qwen3_vl")
    code, out, _ = verify(capsys, str(at), "--tower", "--mesh", "tp=2", "--plant", name)
    assert code == 1
    assert re.search(words("^A bug is planted", rf"\({name}\)", f"^{oracle} +FAILS"), out, re.MULTILINE), out


def verify(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["verify", *arguments, "--dtypes", "float64", "--against", "none"])
    return code, *capsys.readouterr()


def test_output_states_the_planted_bug(capsys: Capture, tmp_path: Path) -> None:
    page = str(tmp_path / "page.html")
    code, out, _ = verify(capsys, "tiny-qwen3", "--mesh", "tp=2", "--plant", "sum-left-out", "--html", page)
    assert code == 1
    assert re.search(words("^A bug is planted", r"\(sum-left-out\)", "^G1 +FAILS"), out, re.MULTILINE), out
    assert "A bug is planted" in Path(page).read_text()


@pytest.mark.parametrize("options", [[], ["--weights"]], ids=["shrunk", "weights"])
def test_a_failed_oracle_has_no_margin(capsys: Capture, source: Path, options: list[str]) -> None:
    arguments = [str(source), "--mesh", "fsdp=2", "--plant", "rows-permuted", *options]
    if options or parts.ALL:
        code, out, _ = verify(capsys, *arguments)
        assert code == 1
        assert re.search(r"^W1 +FAILS \(\d+\) *$", out, re.MULTILINE), out
    code, out, _ = verify(capsys, *arguments, "--json")
    report = json.loads(out)
    run = report["runs"][0]
    assert (code, report["planted"], run["margins"]["W1"]) == (1, "rows-permuted", [])
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
    ids=["no effect", "nothing is trained", "unknown"],
)
def test_wrong_plants_are_refused(capsys: Capture, arguments: list[str], pattern: str) -> None:
    code, _, err = verify(capsys, "tiny-qwen3", *arguments)
    assert code == 2
    assert re.search(pattern, err), err
