"""The docs tell the truth: the tests that they name exist, their code compiles and uses what there is."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

import pytest

import meshwright as mw

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_named_tests_exist() -> None:
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)(?:::(test_\w+))?", (ROOT / "docs" / "bugs.md").read_text())
    assert len(named) > 40
    for file, test in named:
        path = next((p for p in (ROOT / "tests" / file, ROOT / "bench" / Path(file).name) if p.is_file()), ROOT / file)
        assert path.is_file(), f"docs/bugs.md names {file}, which is not there"
        assert not test or f"def {test}(" in path.read_text(), f"docs/bugs.md names {file}::{test}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_of_the_docs(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw":
                assert node.attr in mw.__all__ or node.attr == "losses", f"{page.name} uses mw.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_files_of_the_docs(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}, which is not there"
    for path in re.findall(r"`((?:layout|models|parallel|engine|weights|verify)/\w+\.py)`", text):
        there = [(ROOT / room / path).is_file() for room in ("meshwright", "tests")]
        assert any(there), f"{page.name} speaks of {path}, which is not there"


def test_example_of_pack() -> None:
    found = doctest.DocTestFinder().find(mw.pack, "pack", globs={"pack": mw.pack})
    results = [doctest.DocTestRunner().run(test) for test in found]
    assert sum(r.attempted for r in results) == 2
    assert sum(r.failed for r in results) == 0
