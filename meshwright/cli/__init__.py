"""The command line: `meshwright train`, `plan`, `verify` and the others."""

from .main import main

__all__ = ["main"]
