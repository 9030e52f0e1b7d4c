"""One page of what runs did, and how they compare: `meshwright report`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..plan import write_page
from .ending import last_words as last_words
from .page import report_page
from .reading import Run, read_run


def write_report(folders: Sequence[Path], file: Path, origin: Mapping[str, str]) -> None:
    """`origin`: what made it, when, and by which command."""
    write_page(file, report_page([read_run(folder) for folder in folders], origin))
