"""Versions of what decides how fast a machine runs a model. Imports no torch, so that it costs no seconds."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

_BROKEN = (
    (3, 4),
    (3, 7, 1),
)  # from, before: releases of triton that miscompile flash-linear-attention on Hopper (#640)
_PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "liger-kernel")


def version_of(package: str) -> str:
    """Return the version of a package, empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions() -> str:
    installed = [f"{name} {number}" for name in _PACKAGES if (number := version_of(name))]
    return ", ".join([*installed, f"Python {platform.python_version()}"])


def driver() -> str:
    """Return the name, driver and memory of each GPU, as nvidia-smi prints them; the processor if there is none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return f"no GPU, {platform.machine()}"
    return "; ".join(done.stdout.strip().splitlines()) or f"nvidia-smi fails, {platform.machine()}"


def triton_suits_fla() -> bool:
    """Tell whether flash-linear-attention may be tried with the installed triton.

    With some releases it tunes its kernels for minutes before it refuses Hopper.
    """
    release = version_of("triton").split("+")[0].split(".")
    numbers = tuple(int(part) for part in release[:3] if part.isdecimal())
    return bool(numbers) and not _BROKEN[0] <= numbers < _BROKEN[1]


def fla_runs() -> bool:
    return bool(version_of("flash-linear-attention")) and triton_suits_fla()


if __name__ == "__main__":
    print(driver(), versions(), sep=". ")
