"""A checkpoint for a person at a terminal, and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table as Grid
from rich.text import Text

from ..errors import counted
from .look import Difference, summary
from .restore import Checkpoint

_MOST = 20  # differences that are shown

Wrong = Sequence[str] | None  # None: nobody looked
Apart = Sequence[Difference] | None


def as_json(checkpoint: Checkpoint, wrong: Wrong, apart: Apart) -> dict[str, Any]:
    found = summary(checkpoint)
    if wrong is not None:
        found["wrong"] = list(wrong)
    if apart is not None:
        found["differences"] = [asdict(each) for each in apart]
    return found


def print_checkpoint(checkpoint: Checkpoint, wrong: Wrong, apart: Apart) -> None:
    console, found = Console(), summary(checkpoint)
    console.print(Text(f"{checkpoint.directory}", style="bold"), soft_wrap=True)
    lines = {
        "model": f"{found['model']}, {found['parameters']:,} parameters, {counted(found['trained'], 'tensor')} trained",
        "step": f"{found['step']:,}, {found['tokens']:,} tokens",
        "saved": f"{found['date']} on {found['mesh']} by {counted(found['ranks'], 'rank')}",
        "size": f"{decimal(found['bytes'])} in {counted(found['runs'], 'run')}, each with its checksum",
        "settings": ", ".join(f"{name} {value}" for name, value in found["settings"].items()),
        "state": "none" if found["state"] is None else f"{found['state']!r:.200}",
    }
    for name, text in lines.items():
        console.print(Text(f"  {name:9} {text}"), soft_wrap=True)
    console.print(_planes(found))
    for name in found["strangers"]:
        console.print(Text(f"  {name} is no part of it: the manifest does not list it", style="bold"), soft_wrap=True)
    _print_checks(console, wrong, apart)


def _planes(found: dict[str, Any]) -> Grid:
    grid = Grid(box=box.SIMPLE, show_edge=False)
    for title in ("plane", "tensors", "files", "dtypes", "bytes"):
        grid.add_column(title, justify="right" if title in ("tensors", "files", "bytes") else "left")
    for name, plane in found["planes"].items():
        row = (f"{plane['tensors']:,}", f"{plane['files']:,}", ", ".join(plane["dtypes"]), decimal(plane["bytes"]))
        grid.add_row(name, *row)
    return grid


def _print_checks(console: Console, wrong: Wrong, apart: Apart) -> None:
    if wrong is None:
        console.print(Text("  bytes not read; --verify compares them with their checksums"))
    elif not wrong:
        console.print(Text("  every byte is as it was written", style="bold green"))
    for text in wrong or ():
        console.print(Text(f"  {text}", style="bold red"), soft_wrap=True)
    if apart is not None:
        told = f"{counted(len(apart), 'tensor')} differ" if apart else "no tensor differs"
        console.print(Text(f"  {told}", style="bold"))
        for each in apart[:_MOST]:
            by = f", {each.num:,} elements, by up to {each.largest:.3g}" if each.largest is not None else ""
            console.print(Text(f"  {each.plane} {each.key}: {each.why}{by}"), soft_wrap=True)
        if len(apart) > _MOST:
            console.print(Text(f"  and {len(apart) - _MOST:,} more; --json has them all"))
