"""The bounds of dependencies: what the script installs, and one sentence about versions outside of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from packaging.requirements import Requirement

from meshwright import provenance
from tests import versions


def test_oldest_and_newest_are_within_the_bounds() -> None:
    newest = [Requirement(text) for text in versions.requirements("newest")]
    oldest = [Requirement(text) for text in versions.requirements("oldest")]
    assert [each.name for each in newest] == [each.name for each in oldest] == ["torch", "transformers"]
    for high, low in zip(newest, oldest, strict=True):
        lowest = str(low.specifier).removeprefix("==").replace("*", "0")
        assert high.specifier.contains(lowest), (high, low)


@pytest.mark.parametrize(("torch", "outside"), [("2.13.0+cpu", False), ("2.10.1", True), ("3.0.0", True)])
def test_an_untried_version_is_named(torch: str, outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "requires", lambda _: ["torch<2.16,>=2.11", "numpy", 'av; extra == "vision"'])
    monkeypatch.setattr(provenance, "version", {"torch": torch, "numpy": "2.4.6"}.__getitem__)
    assert provenance.untried().startswith(f"not tested with torch {torch} (tested: <2.16,>=2.11)") == outside
    assert bool(provenance.untried()) == outside


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "meshwright":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(provenance, "version", version)
    assert provenance.origin("meshwright plan")["meshwright"] == "not installed"
