"""What stands below a result, so that it can be made again: versions, date, command."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

PACKAGES = ("transformers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Of meshwright, and of what its numbers depend on."""
    ours = {"meshwright": version("meshwright"), "torch": torch.__version__, "Python": platform.python_version()}
    return {**ours, **{name: version(name) for name in PACKAGES}}
