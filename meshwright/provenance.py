"""Provenance of results: versions of the package and its dependencies, date and command; imports none of them."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the installed version of meshwright, torch, Python, transformers, safetensors and numpy."""
    return {
        "meshwright": version("meshwright"),
        "torch": version("torch"),  # with its build tag, such as +cpu
        "Python": platform.python_version(),
        **{name: version(name) for name in ("transformers", "safetensors", "numpy")},
    }


def origin(command: str, seed: int | None = None) -> dict[str, str]:
    """Return what made a result, and when. `seed`: that of weights and data that were drawn."""
    drawn = {} if seed is None else {"seed": str(seed)}
    return {"command": command, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), **drawn, **versions()}
