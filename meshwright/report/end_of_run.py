"""Compose the last lines that a run prints: how it ended, what it wrote, and commands to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import newest_whole
from .run_files import METRICS, Run, read_folder
from .summary import experts_warning, figure, outcome

_ENDED_WELL = ("", "early stopping")  # after any other end, `export` is of an earlier run or missing
_EXPORTS = {"export": "the trained weights, a Hugging Face directory", "adapter": "the adapters, a PEFT directory"}
_NAME = 26  # width of the column of names


def last_words(folder: Path, out: str) -> list[str]:
    """Return the last lines; an empty list for a run without a step. `out`: the folder as the user wrote it.

    The verdict is that of the page, so that terminal and report never disagree.
    """
    run = read_folder(folder)
    if not run.of("step"):
        return []
    outputs = [f"  {name:<{_NAME}} {what}" for name, what in _outputs(folder, run)]
    warning = experts_warning(run)
    return [
        _verdict(run),
        *([f"warning: {warning}"] if warning else []),
        f"written to {out}:",
        *outputs,
        "next:",
        *(f"  {command}" for command in _commands(folder, shlex.quote(out), run)),
    ]


def _verdict(run: Run) -> str:
    """Return verdict and losses in one line."""
    text = f"{outcome(run)[0]}; loss {figure(run.last.get('train/loss'))}"
    return text if run.best is None else f"{text}; lowest held-out loss {figure(run.best[0])}, at step {run.best[1]:,}"


def _outputs(folder: Path, run: Run) -> Iterator[tuple[str, str]]:
    """Yield the outputs of the run, each with its meaning.

    Exports are listed only after a run that ended well: after a failure the directory may belong to an earlier run.
    """
    ended = run.of("end")
    if ended and ended[-1].get("why") in _ENDED_WELL:
        yield from ((name, what) for name, what in _EXPORTS.items() if (folder / name).is_dir())
    for subfolder, what in (
        ("checkpoints", "the newest checkpoint"),
        ("best", "the one with the lowest held-out loss"),
    ):
        if newest := newest_whole(folder / subfolder):
            num_checkpoints = len([*newest.parent.glob("step-*")])
            yield f"{subfolder}/{newest.name}", what + (f" of {num_checkpoints}" if num_checkpoints > 1 else "")
    yield METRICS, "every figure of every step"


def _commands(folder: Path, out: str, run: Run) -> Iterator[str]:
    """Yield commands to try next."""
    yield f"meshwright report {out}"
    starts = run.of("start")
    if newest_whole(folder / "checkpoints") and (not starts or starts[-1].get("writes", True)):
        yield f'meshwright sample {out} --prompt "..."'
