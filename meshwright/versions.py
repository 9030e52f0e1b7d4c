"""Versions of the package and of what its numbers depend on, read without importing any of it."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the installed version of meshwright, torch, Python, transformers, safetensors and numpy."""
    return {
        "meshwright": version("meshwright"),
        "torch": version("torch"),  # with its build tag, such as +cpu
        "Python": platform.python_version(),
        **{name: version(name) for name in ("transformers", "safetensors", "numpy")},
    }
