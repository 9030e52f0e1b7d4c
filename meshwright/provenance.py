"""Provenance of results: versions of the package and its dependencies (without importing them), date and command."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement


def versions() -> dict[str, str]:
    """Return the installed version of meshwright, torch, Python, transformers, safetensors and numpy."""
    return {
        "meshwright": _own_version(),
        "torch": version("torch"),  # with its build tag, such as +cpu
        "Python": platform.python_version(),
        **{name: version(name) for name in ("transformers", "safetensors", "numpy")},
    }


def _own_version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:  # of a clone on PYTHONPATH; the package itself is a storey above this module
        return "not installed"


def untried() -> str:
    """Return a sentence about dependencies outside the versions that the tests ran with; "" if there are none."""
    try:
        bounds = [Requirement(text) for text in requires("meshwright") or ()]
    except PackageNotFoundError:  # run from a clone that is not installed
        return ""
    outside = [
        f"{each.name} {version(each.name)} (tested: {each.specifier})"
        for each in bounds
        if each.marker is None and not each.specifier.contains(version(each.name), prereleases=True)
    ]
    return f"not tested with {', '.join(outside)}; if numbers look wrong, try a tested version" if outside else ""


def origin(command: str, seed: int | None = None) -> dict[str, str]:
    """Return versions, date and command of a result. `seed`: the seed of drawn weights and data."""
    drawn = {} if seed is None else {"seed": str(seed)}
    return {"command": command, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **drawn, **versions()}
