"""`meshwright report`: one self-contained HTML page with the curves of a run, or of several runs side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..plan import write_page
from .end_of_run import last_words as last_words
from .run_files import Run, read_run
from .run_page import report_page


def write_report(folders: Sequence[Path], file: Path, origin: Mapping[str, str]) -> None:
    """Write the report of some runs. `origin`: versions, date and command."""
    write_page(file, report_page([read_run(folder) for folder in folders], origin))
