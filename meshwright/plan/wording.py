"""Format numbers and recurring sentences for people. A GB is 10^9 bytes, as vendors count the memory of devices."""

from __future__ import annotations

from dataclasses import asdict

import torch

from ..errors import counted
from ..recipe import MemoryOptions
from ..sharding import GRADIENTS, STATE
from .communicators import SOURCE, communicators
from .devices import GB
from .figures import ON_HOST, Figures

Unit = tuple[str, int]  # name and bytes
_UNITS = {"TB": 10**12, "GB": GB, "MB": 10**6, "kB": 10**3, "bytes": 1}
_NAMES = {
    "parameters": "parameters, float32",
    "gradients": "gradients, float32",
}


def unit_of(num_bytes: int) -> Unit:
    """Return the largest unit in which a number of bytes is at least 1.

    The next unit begins at 0.99995, because four digits show that as 1.000.
    """
    return next((name, unit) for name, unit in _UNITS.items() if num_bytes >= 0.99995 * unit or unit == 1)


def in_unit(num_bytes: int, unit: Unit) -> str:
    """Format bytes in a fixed unit, so that the numbers of a column can be compared."""
    return f"{num_bytes / unit[1]:,.3f} {unit[0]}" if unit[1] > 1 else counted(num_bytes, "byte")


def size(num_bytes: int) -> str:
    """Format bytes with four digits: 1.908 GB, 387.1 MB, 512 bytes."""
    name, unit = unit_of(num_bytes)
    if unit == 1:
        return counted(num_bytes, "byte")
    whole = f"{num_bytes // unit:,}"
    return f"{num_bytes / unit:,.{max(0, 4 - len(whole))}f} {name}"


def nominal(num_bytes: int) -> str:
    """Format the memory of a device as its vendor does: 80 GB."""
    name, unit = unit_of(num_bytes)
    return f"{num_bytes / unit:.4g} {name}"


def duration(seconds: float) -> str:
    """Format a time with three digits: 1.25 s, 45.6 ms, 12.0 us."""
    name, unit = next(
        ((n, u) for n, u in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if seconds >= 0.9995 * u), ("us", 1e-6)
    )
    value = seconds / unit
    before_point = len(str(int(float(f"{value:.3g}"))))
    return f"{value:,.{max(0, 3 - before_point)}f} {name}" if seconds else "0 s"


def span(least: int, most: int, to: str = " to ") -> str:
    """Format the least and the most bytes; one number if they are equal."""
    return size(most) if least == most else f"{size(least)}{to}{size(most)}"


def large(number: int) -> str:
    """Format a count in words: 30.53 billion."""
    for name, unit in {"trillion": 10**12, "billion": 10**9, "million": 10**6}.items():
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:,}"


def kind(what: str, figures: Figures) -> str:
    """Name a kind of stored bytes with its dtype, or the optimizer whose state it is."""
    bare = what.removesuffix(ON_HOST)
    return {**_NAMES, STATE: figures.optimizer.label}.get(bare, bare) + what.removeprefix(bare)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as options spell it: bfloat16."""
    return str(dtype).removeprefix("torch.")


def saved(figures: Figures) -> list[str]:
    """List the memory options that differ from their defaults, under their names in `mw.MemoryOptions`."""
    default, chosen = asdict(MemoryOptions()), asdict(figures.memory)
    changed = [f"{name}={value}" for name, value in chosen.items() if value != default[name]]
    state = figures.optimizer.state_dtype
    return changed + ([] if state is None else [f"state_dtype={name_of(state)}"])


def not_counted(figures: Figures) -> str:
    """Say which memory a plan leaves out."""
    tower = ", nor is the vision encoder" if figures.blueprint.module.tower is not None else ""
    return (
        f"Buffers of collectives, of the update and of the allocator are not counted{tower}: they come on top."
        f"{_of_nccl(figures)}"
    )


def _of_nccl(figures: Figures) -> str:
    """Say how much uncounted memory NCCL is expected to take; "" for one process."""
    nccl = communicators(figures)
    if not nccl.count:
        return ""
    return f" On CUDA devices {communicators_name(nccl.count)} take {roughly(nccl.num_bytes)} of that, {SOURCE}."


def roughly(num_bytes: int) -> str:
    """Format bytes that are an estimate, with one digit: about 2.1 GB."""
    return f"about {num_bytes / GB:.1f} GB"


def communicators_name(count: int) -> str:
    """Name the communicators of a rank with their number."""
    return f"NCCL's {counted(count, 'communicator')}"


def peak_note(figures: Figures) -> str | None:
    """Explain why a rank stores fewer gradients than parameters, if it does at its peak."""
    at_peak = sum(each.num_bytes for each in figures.most.stored if each.what == GRADIENTS and not each.host)
    if at_peak == figures.gradients:
        return None
    return (
        f"This is the peak of a step, with {size(at_peak)} of {size(figures.gradients)} of gradients: in the first "
        "micro-batch they appear while activations are freed. From the second micro-batch on all of them exist."
    )
