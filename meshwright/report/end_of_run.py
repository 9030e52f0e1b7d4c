"""The last words of a run at the terminal: how it went, what it wrote, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import newest_whole
from .run_files import METRICS, Run, read_folder
from .summary import experts_warning, figure, outcome

_ENDED_WELL = ("", "early stopping")  # only then is there an export of this run
_NAME = 26  # columns of a name that was written


def last_words(folder: Path, out: str) -> list[str]:
    """Return lines for the terminal; none for a run that has made no step. `out`: the folder as the person wrote it."""
    run = read_folder(folder)
    if not run.of("step"):
        return []
    written = [f"  {name:<{_NAME}} {what}" for name, what in _written(folder, run)]
    warning = experts_warning(run)
    return [
        _how(run),
        *([f"warning: {warning}"] if warning else []),
        f"written to {out}:",
        *written,
        "next:",
        *(f"  {command}" for command in _commands(folder, shlex.quote(out))),
    ]


def _how(run: Run) -> str:
    said = f"{outcome(run)[0]}; loss {figure(run.last.get('train/loss'))}"
    return said if run.best is None else f"{said}; lowest held-out loss {figure(run.best[0])}, at step {run.best[1]:,}"


def _written(folder: Path, run: Run) -> Iterator[tuple[str, str]]:
    ended = run.of("end")
    if ended and ended[-1].get("why") in _ENDED_WELL and (folder / "export").is_dir():
        yield "export", "the trained weights, a Hugging Face directory"
    for place, what in (("checkpoints", "the newest checkpoint"), ("best", "the one with the lowest held-out loss")):
        if newest := newest_whole(folder / place):
            num = len([*newest.parent.glob("step-*")])
            yield f"{place}/{newest.name}", what + (f" of {num}" if num > 1 else "")
    yield METRICS, "every figure of every step"


def _commands(folder: Path, out: str) -> Iterator[str]:
    yield f"meshwright report {out}"
    if newest_whole(folder / "checkpoints"):
        yield f'meshwright sample {out} --prompt "..."'
