"""Triton kernels run by Triton's interpreter on the CPU, and bugs planted in copies of their files.

The interpreter is chosen before triton is first imported in a process, which torch does: see `tests/conftest.py`.
"""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOM = "meshwright.ops.kernels"


def kernels_of(name):
    """The module of kernels of this name; without triton the test is skipped."""
    pytest.importorskip("triton", reason="triton is not installed: no kernel can be interpreted")
    return import_module(f"{ROOM}.{name}")


def planted(name, old, new, folder):
    """A copy of a module of kernels in which `new` stands for `old`, which must stand there once."""
    text = Path(kernels_of(name).__file__).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}.py"
    path = folder / f"{name}_planted.py"  # a file: triton reads the source of a kernel from it
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"{ROOM}.{name}_planted", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def assert_close(got, want, tolerance=1e-5):
    """Compare shapes, values that are not finite, and errors with `tolerance` of the largest value."""
    assert got.shape == want.shape
    a, b = got.double(), want.double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite), "other elements are finite"
    assert torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()), "infinite in another direction"
    if finite.any():
        error = (a - b)[finite].abs().max().item()
        assert error <= tolerance * max(1.0, b[finite].abs().max().item()), f"off by {error}"
