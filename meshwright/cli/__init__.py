"""The command line: `meshwright train`, `data`, `plan`, `verify`, `chat`, `sample` and the commands for checkpoints."""

from .main import main

__all__ = ["main"]
