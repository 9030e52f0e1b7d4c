"""The docs tell the truth: tests that they name exist, their code runs, and the reference holds all that is public."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import meshwright as mw
from tests import parts, quantised, seeing, tiny, worlds
from tests.test_causes import PLANTS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
REFERENCE, INDEX = DOCS / "reference.md", DOCS / "README.md"
WIDTH = 120  # of a line of prose; a row of a table cannot be broken
# Directories that examples load: a tiny model of the same family.
SOURCES = {"Qwen3-8B": "qwen3", "Qwen3-30B-A3B": "qwen3_moe", "phi-4": "phi3", "Qwen3.8-Flash-Next": "qwen4_exp"}


def name_of(page: Path) -> str:
    """`README.md` and `docs/README.md` are two pages."""
    return page.relative_to(ROOT).as_posix()


def test_named_tests_exist() -> None:
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)(?:::(test_\w+))?", (DOCS / "bugs.md").read_text())
    assert len(named) > 40
    for file, test in named:
        path = next((p for p in (ROOT / "tests" / file, ROOT / "bench" / Path(file).name) if p.is_file()), ROOT / file)
        assert path.is_file(), f"docs/bugs.md names {file}, which is not there"
        assert not test or f"def {test}(" in path.read_text(), f"docs/bugs.md names {file}::{test}, which is not there"


def test_named_plants_exist() -> None:
    named = re.findall(r"planted: (.+?)(?=;| \(| \|)", (DOCS / "bugs.md").read_text())
    assert set(named) == set(PLANTS), f"docs/bugs.md and PLANTS differ in {set(named) ^ set(PLANTS)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_the_docs(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mw":
                assert node.attr in mw.__all__, f"{name_of(page)} uses mw.{node.attr}"


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """The python blocks of a page, each with the number of lines before it."""
    text = page.read_text("utf-8")
    result = re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in result]


def ranks_of(block: tuple[int, str]) -> int:
    """A block that begins with `# on 2 processes` runs on so many; the others one after the other in one."""
    result = re.match(r"# on (\d+) processes\n", block[1])
    return int(result[1]) if result else 1


def _execute(name: str, blocks: list[tuple[int, str]], folder: Path) -> None:
    os.chdir(folder)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for num_lines, code in blocks:
        few = code if parts.ALL else code.replace("in range(20):", "in range(2):")  # steps
        exec(compile("\n" * num_lines + few, name, "exec"), namespace)  # an error names the line of the page


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds what a reader has: this README, and the models that pages name."""
    at = tmp_path_factory.mktemp("models")
    for directory, name in SOURCES.items():
        tiny.directory(at / directory, name, dtype=torch.bfloat16)
    tiny.directory(at / "Qwen3-4B", "qwen3", dtype=torch.bfloat16, **tiny.ALIGNED["qwen3"])
    quantised.directory(at / "Qwen3-8B", at / "Qwen3-8B-FP8", quantised.FORMATS["bfloat16"])
    wide = tiny.directory(at / "wide", "qwen3", **quantised.SIZES)
    quantised.in_groups(wide, at / "Qwen3-8B-NVFP4", "NVFP4")
    seeing.directory(at / "Qwen3-VL-4B", "qwen3_vl", dtype=torch.bfloat16)
    tiny.classifier(at / "my-classifier", "qwen3", "Sequence", num_labels=3)
    (at / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    return at


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_examples_of_the_docs_run(page: Path, models: Path, tmp_path: Path) -> None:
    """Blocks run in the order of the page."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    for ranks, blocks in groupby(blocks_of(page), ranks_of):
        worlds.run(ranks, _execute, name_of(page), list(blocks), tmp_path)


def shown(default: object) -> str:
    if isinstance(default, FunctionType):
        return f"mw.losses.{default.__name__}"
    for made in (mw.MemoryOptions(), mw.Pipeline(), mw.ContextParallel(), mw.AdamW()):
        if default == made:
            return f"mw.{type(made).__name__}()"
    return f'"{default}"' if isinstance(default, str) else repr(default)


def signature(function: Callable[..., Any]) -> str:
    """Return the names and defaults that a caller sees."""
    out: list[str] = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in out:
            out.append("*")
        if p.name != "self":
            stars = "**" if p.kind is p.VAR_KEYWORD else ""
            out.append(stars + p.name.lstrip("_") + ("" if p.default is p.empty else f"={shown(p.default)}"))
    return f"({', '.join(out)})"


def made_by_users(public: type) -> bool:
    """A dataclass that needs no argument is made by users; the others are only handed to them."""
    return all(field.default is not MISSING for field in fields(public))


def expected_of(name: str) -> Iterator[str]:
    """Return the entries of the section of a public name: its signature, its arguments, its fields and methods."""
    public = getattr(mw, name)
    if isinstance(public, ModuleType):
        functions = {k: v for k, v in vars(public).items() if isinstance(v, FunctionType)}
        yield from (f"`mw.{name}.{k}{signature(v)}`" for k, v in functions.items())
    elif isinstance(public, FunctionType) or not is_dataclass(public) or made_by_users(public):
        yield f"### `mw.{name}{signature(public)}`\n"
        spelled = set(inspect.signature(mw.load).parameters) if name == "init" else set()  # in the section of mw.load
        arguments = [k for k in inspect.signature(public).parameters if k not in spelled]
        yield from (f"`{k}`" for k in arguments if len(arguments) > 2)  # two speak for themselves
    if isinstance(public, type):
        yield from (f"`{field.name}`" for field in (fields(public) if is_dataclass(public) else ()))
        members = {k: v for k, v in vars(public).items() if not k.startswith("_")}
        yield from (f"{k}{signature(v)}`" if isinstance(v, FunctionType) else f"{k}`" for k, v in members.items())


def section(name: str) -> str:
    """Return the text from the heading of a name to the next one."""
    result = re.search(rf"^### `mw\.{name}\b.*?(?=^##)", REFERENCE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert result, f"{REFERENCE.name} has no section '### `mw.{name}...`'"
    return result[0]


@pytest.mark.parametrize("name", mw.__all__)
def test_all_that_is_public_is_in_the_reference(name: str) -> None:
    public = getattr(mw, name)
    if isinstance(public, type) and issubclass(public, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in public.__bases__)
        assert f"| `mw.{name}` | {bases} |" in REFERENCE.read_text("utf-8")
        return
    text = section(name)
    lacking = [what for what in expected_of(name) if what not in text]
    assert not lacking, f"the section of mw.{name} in {REFERENCE.name} lacks {lacking}"


def test_the_reference_speaks_of_nothing_else() -> None:
    named = set(re.findall(r"^(?:### |\| )`mw\.(\w+)", REFERENCE.read_text("utf-8"), re.MULTILINE))
    assert named == set(mw.__all__)


def test_a_missing_argument_is_reported() -> None:
    def load(source: str, *, head: str = "lm", new: int | None = None) -> None: ...

    assert signature(load) == '(source, *, head="lm", new=None)'
    assert f"mw.load{signature(load)}" not in REFERENCE.read_text("utf-8")


@pytest.mark.slow
@parts.IN_MATRIX
def test_quotes_of_peers(tmp_path: Path) -> None:
    """docs/peers.md quotes what our scripts print on the release that it names: words and whole numbers."""
    import transformers

    page = (DOCS / "peers.md").read_text("utf-8")
    quoted = re.findall(r"^    \S+python (bench/peers/\S+)\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert {script for script, _ in quoted} == {f"bench/peers/{p.name}" for p in (ROOT / "bench/peers").glob("*.py")}
    for script, text in quoted:
        if f"transformers {transformers.__version__}," not in text:
            pytest.skip(f"docs/peers.md speaks of another release than {transformers.__version__}")
        done = subprocess.run([sys.executable, ROOT / script], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert _coarse(done.stdout) == _coarse(text)


def _coarse(text: str) -> list[str]:
    """Drop the digits that rounding decides, and the first line, which names versions."""
    return [re.sub(r"\d(e[+-]\d)\d", r"\1", line) for line in text.splitlines()[1:]]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_of_the_docs(page: Path) -> None:
    text = page.read_text("utf-8")
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text) + re.findall(r'src="(.*?)"()', text):
        target = page.parent / link if link else page
        assert target.exists(), f"{name_of(page)} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}#{anchor}, no such heading"
    for path in set(re.findall(r"`(\w+/\w+\.py)`", text)):
        there = [(ROOT / folder / path).is_file() for folder in ("", "meshwright", "tests")]
        assert any(there), f"{name_of(page)} speaks of {path}, which is not there"


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub names them in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-").lower() for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_of_runs_in_the_docs(page: Path, tmp_path: Path) -> None:
    """`meshwright train` would take them."""
    for block in re.findall(r"^```toml\n(.*?)```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        (tmp_path / "run.toml").write_text(block)
        mw.train.read(tmp_path / "run.toml")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_prose_are_short(page: Path) -> None:
    outside = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text("utf-8"), flags=re.DOTALL)
    long = [
        i for i, line in enumerate(outside.splitlines(), 1) if len(line) > WIDTH and not line.startswith(("|", "#"))
    ]
    assert not long, f"{name_of(page)} has more than {WIDTH} characters in the lines {long}"


def test_the_index_names_every_page() -> None:
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", INDEX.read_text("utf-8"))}
    assert {*PAGES} - linked == {INDEX}


@pytest.mark.parametrize(("function", "num"), [(mw.pack, 3), (mw.over_tokens, 2)], ids=["pack", "over_tokens"])
def test_examples_of_docstrings(function: Any, num: int) -> None:
    globs = {"pack": mw.pack, "over_tokens": mw.over_tokens}
    result = doctest.DocTestFinder().find(function, function.__name__, globs=globs)
    results = [doctest.DocTestRunner().run(test) for test in result]
    assert (sum(r.attempted for r in results), sum(r.failed for r in results)) == (num, 0)
    assert sum(r.failed for r in results) == 0
