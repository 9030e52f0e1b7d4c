"""What stands below a result, so that it can be made again: versions, date, command."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("transformers", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Of meshwright, and of what its numbers depend on."""
    ours = {"meshwright": version("meshwright"), "torch": torch.__version__, "Python": platform.python_version()}
    return {**ours, **{name: version(name) for name in PACKAGES}}


def about(seed: int | None = None) -> dict[str, Any]:
    """With date and command. The seed is that of weights and data that were drawn."""
    name = "meshwright" if Path(sys.argv[0]).name in ("__main__.py", "meshwright") else Path(sys.argv[0]).name
    return {
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([name, *sys.argv[1:]]),
        **({} if seed is None else {"seed": seed}),
    }
