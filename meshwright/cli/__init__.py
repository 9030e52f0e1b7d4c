"""The command line: `meshwright train`, `plan`, `verify`, `chat` and the other commands."""

from .main import main

__all__ = ["main"]
