"""`meshwright verify --plant`: oracles detect every bug it offers, and its output says that a bug is planted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import parallel
from meshwright.cli import main
from meshwright.engine import Engine
from meshwright.models import Decoder
from meshwright.optim import LocalOptimizer
from meshwright.verify import session
from meshwright.verify.planted_bugs import BUGS
from meshwright.verify.report import ROWS
from meshwright.weights.reader import Reader
from tests import parts, seeing, tiny, trials, worlds
from tests.pages import Read
from tests.test_vision_meshes import seeing_trial
from tests.words import words

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("plants") / "m", "qwen3")


OWNERS: tuple[Any, ...] = (parallel, Reader, Decoder, Engine, LocalOptimizer)  # of what the bugs replace


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for a trial. A run of verify keeps it for the life of its ranks."""
    before = [dict(vars(owner)) for owner in OWNERS]
    BUGS[name.partition(" ")[0]].plant()
    try:
        yield
    finally:
        for owner, kept in zip(OWNERS, before, strict=True):
            for attribute, value in kept.items():
                if vars(owner)[attribute] is not value:
                    setattr(owner, attribute, value)


FIRST = {
    "sum-left-out": r"G1 \S+: .*a sum over tp is missing",
    "rows-permuted": r"W1 \S+: .*right values in the wrong places",
    "leak": r"D1 layers\.0\.mixer: .*leak",
    "mean-of-means": r"S1 loss: .*its own targets",
    "update-lost": r"U1 \S+: .*no update moved it",
    "leak with a tower": r"D1 ",
}


@pytest.fixture(scope="module")
def lines(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Return what verify prints for a bug, by its name. All share a world."""
    sees = seeing.directory(tmp_path_factory.mktemp("seeing") / "m", "qwen3_vl")

    def of(group: Sequence[str]) -> dict[str, list[str]]:
        plain, seen = replace(trials.trial(source, dict(tp=2)), steps=1), seeing_trial("qwen3_vl", sees, dict(tp=2))
        tried = {name: seen if "tower" in name else plain for name in group}
        findings = trials.findings_in_turn(tried, planted)
        return {name: [str(f) for row in ROWS for f in of if f.oracle == row] for name, of in findings.items()}

    return worlds.Shared([list(FIRST)], of)


@pytest.mark.parametrize("name", FIRST)
def test_first_finding_names_the_bug(lines: Callable[[str], list[str]], name: str) -> None:
    assert re.match(FIRST[name], lines(name)[0]), lines(name)[:3]


ALONE = ["--dtypes", "float64", "--against", "none"]


def verify(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(["verify", *arguments, *ALONE])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("options", [[], ["--weights"]], ids=["shrunk", "weights"])
def test_output_states_the_planted_bug(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path, options: list[str]
) -> None:
    """A failed oracle has no margin, in text or in JSON. A page is written whole."""
    monkeypatch.setitem(session._STEPS, "float64", 1)
    target = tmp_path / "page.html"
    target.write_text("of yesterday")
    arguments = [str(source), "--mesh", "fsdp=2", "--plant", "rows-permuted", *options]
    code = main(["verify", *arguments, *ALONE, "--html", str(target)])
    out = capsys.readouterr().out
    assert code == 1
    assert re.search(words("^A bug is planted", r"\(rows-permuted\)", r"^W1 +FAILS \(\d+\) *$"), out, re.MULTILINE), out
    page = Read(target.read_text())
    assert "A bug is planted" in page.text
    assert "right values in the wrong places" in page.text
    assert next(row for row in page.table("oracle") if row["oracle"] == "W1")["holds if"].startswith("Every")
    assert f"meshwright verify {' '.join([*arguments, *ALONE])} --html {target}" in page.text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    if options or parts.ALL:
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
