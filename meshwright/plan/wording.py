"""Numbers and verdicts as a person reads them. A GB is 10^9 bytes."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ..errors import counted
from ..recipe import MemoryOptions
from ..sharding import GRADIENTS, STATE
from .devices import GB
from .figures import ON_HOST, Figures

Unit = tuple[str, int]  # its name, and how many bytes it has
_UNITS = {"TB": 10**12, "GB": GB, "MB": 10**6, "kB": 10**3, "bytes": 1}
_NAMES = {
    "parameters": "parameters, float32",
    "gradients": "gradients, float32",
}


def unit_of(num_bytes: int) -> Unit:
    """The unit in which a number of bytes is at least 1, or 0.99995, which is shown as 1.000."""
    return next((name, unit) for name, unit in _UNITS.items() if num_bytes >= 0.99995 * unit or unit == 1)


def in_unit(num_bytes: int, unit: Unit) -> str:
    return f"{num_bytes / unit[1]:,.3f} {unit[0]}" if unit[1] > 1 else counted(num_bytes, "byte")


def size(num_bytes: int) -> str:
    """In four digits: 1.908 GB, 387.1 MB, 512 bytes."""
    name, unit = unit_of(num_bytes)
    if unit == 1:
        return counted(num_bytes, "byte")
    whole = f"{num_bytes // unit:,}"
    return f"{num_bytes / unit:,.{max(0, 4 - len(whole))}f} {name}"


def nominal(num_bytes: int) -> str:
    """Of a device, as its maker writes it: 80 GB."""
    name, unit = unit_of(num_bytes)
    return f"{num_bytes / unit:.4g} {name}"


def duration(seconds: float) -> str:
    """In three digits: 1.25 s, 45.6 ms, 12.0 us."""
    name, unit = next(
        ((n, u) for n, u in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if seconds >= 0.9995 * u), ("us", 1e-6)
    )
    number = seconds / unit
    return f"{number:,.{max(0, 3 - len(f'{number:.0f}'))}f} {name}" if seconds else "0 s"


def span(least: int, most: int, to: str = " to ") -> str:
    return size(most) if least == most else f"{size(least)}{to}{size(most)}"


def large(number: int) -> str:
    """30.53 billion."""
    for name, unit in {"trillion": 10**12, "billion": 10**9, "million": 10**6}.items():
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:,}"


def kind(what: str, figures: Figures) -> str:
    bare = what.removesuffix(ON_HOST)
    return {**_NAMES, STATE: figures.optimizer.label}.get(bare, bare) + what.removeprefix(bare)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def saved(figures: Figures) -> list[str]:
    """List the options that save memory or time, as `mw.MemoryOptions` and `mw.Engine` call it."""
    usual, asked = asdict(MemoryOptions()), asdict(figures.memory)
    given = [f"{name}={value}" for name, value in asked.items() if value != usual[name]]
    state = figures.optimizer.state_dtype
    return given + ([] if state is None else [f"state_dtype={name_of(state)}"])


def not_counted(figures: Figures) -> str:
    tower = ", nor what the tower holds" if figures.blueprint.module.tower is not None else ""
    return f"Buffers of collectives, of the update and of the allocator are not counted{tower}: they come on top."


def at_the_fullest(figures: Figures) -> str | None:
    """Where gradients are missed in what a rank stores."""
    there = sum(each.num_bytes for each in figures.most.stored if each.what == GRADIENTS and not each.host)
    if there == figures.gradients:
        return None
    return (
        f"This is the fullest moment of a step. Of {size(figures.gradients)} of gradients {size(there)} are there: "
        "others come while activations go. From the second micro-batch on all are there."
    )
