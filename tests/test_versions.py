"""The bounds of dependencies: what the script installs, and one sentence about versions outside of them."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(("torch", "outside"), [
    ("2.13.0+cpu", False), ("2.10.1", True), ("3.0.0", True), ("2.14.0.dev20260101+cu130", False),
    ("2.16.0.dev20260101", True),
])  # fmt: skip
def test_an_untried_version_is_named(torch: str, outside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "requires", lambda _: ["torch<2.16,>=2.11", "numpy", 'av; extra == "vision"'])
    monkeypatch.setattr(provenance, "version", {"torch": torch, "numpy": "2.4.6"}.__getitem__)
    assert provenance.untried().startswith(f"not tested with torch {torch} (tested: <2.16,>=2.11)") == outside
    assert bool(provenance.untried()) == outside


@pytest.mark.parametrize(("seed", "more"), [(None, {}), (0, {"seed": "0"})])
def test_an_origin_has_a_date_in_utc(seed: int | None, more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def now(zone: Any = None) -> datetime:
        asked.append(zone)
        return datetime(2026, 3, 4, 5, 6, 7)

    monkeypatch.setattr(provenance, "datetime", SimpleNamespace(now=now))
    monkeypatch.setattr(provenance, "versions", lambda: {"torch": "2"})
    assert provenance.origin("it", seed) == {"command": "it", "date": "2026-03-04 05:06 UTC", **more, "torch": "2"}
    assert asked == [UTC]


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "meshwright":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(provenance, "version", version)
    assert provenance.origin("meshwright plan")["meshwright"] == "not installed"
