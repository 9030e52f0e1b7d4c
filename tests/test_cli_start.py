"""The command line answers before it imports anything that takes long."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import meshwright as mw
from meshwright.cli import main

_HEAVY = ("torch", "numpy", "transformers", "pyarrow", "pydantic", "rich")
_SAYS_WHAT_IT_IMPORTED = f"""
import sys
from meshwright.cli import main
for arguments in (["--help"], ["--version"], ["trian"], ["train", "--help"], []):
    try:
        main(arguments)
    except SystemExit:
        pass
print("imported:", [name for name in {_HEAVY} if name in sys.modules])
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", _SAYS_WHAT_IT_IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("imported: []\n")


def test_a_bare_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "train" in capsys.readouterr().err


def test_public_names_are_loaded_on_first_use() -> None:
    assert {*mw.__all__} <= {*dir(mw)}
    assert mw.Engine is mw.engine.Engine
    with pytest.raises(AttributeError, match="'meshwright' has no attribute 'generate'"):
        mw.generate  # noqa: B018 - it is the attribute that is looked for
    assert not hasattr(mw, "__wrapped__")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for a public name that does not exist."""

    real = importlib.import_module

    def imported(name: str, package: str) -> ModuleType:
        if name == ".api":
            return real(name, package)
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        mw.generate  # noqa: B018 - it is the attribute that is looked for


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"meshwright {mw.__version__}, ")
    assert torch.__version__ in printed
