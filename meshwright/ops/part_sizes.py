"""Part sizes: constants at which work is cut into chunks, slices, buffers and files, shrunk in tests.

A tiny model fits into one part of each, so a bug at the seam between two parts would show up only in large models.
`verify` and the tests therefore run with `shrunk_part_sizes`. A module declares such a constant with `part_size` and
reads it by its global name where it cuts: not in a default argument, and not through an import into another module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class PartSize:
    """A constant of a module. `small`: a size that cuts the work of a tiny model too."""

    module: str
    name: str
    size: int
    small: int


_SIZES: list[PartSize] = []


def part_size(module: str, name: str, size: int, small: int) -> int:
    """Return `size`, the value of the constant `name` of `module`, and register the constant."""
    _SIZES.append(PartSize(module, name, size, small))
    return size


def part_sizes() -> Sequence[PartSize]:
    """Return the constants of all modules that have been imported."""
    return tuple(_SIZES)


@contextmanager
def shrunk_part_sizes(times: int = 1) -> Iterator[None]:
    """Set each constant to its small size, or to `times` that size for a model larger than a tiny one."""
    modules = {each.module: sys.modules[each.module] for each in _SIZES}
    originals = [(modules[each.module], each.name, vars(modules[each.module])[each.name]) for each in _SIZES]
    for each in _SIZES:
        setattr(modules[each.module], each.name, min(each.size, times * each.small))
    try:
        yield
    finally:
        for module, name, size in originals:
            setattr(module, name, size)
