"""Curves with fewer points that look the same: of each stretch the first, the last, the lowest and the highest stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Which points stay. A gap (None) stays a gap where it is the first or the last of its stretch."""
    if len(values) <= most:
        return [*range(len(values))]
    kept: set[int] = set()
    stretches = max(1, most // 4)
    bounds = [len(values) * n // stretches for n in range(stretches + 1)]
    for begin, end in pairwise(bounds):
        there = [at for at in range(begin, end) if values[at] is not None]
        kept |= {begin, end - 1}
        if there:
            kept |= {min(there, key=lambda at: values[at] or 0.0), max(there, key=lambda at: values[at] or 0.0)}
    return sorted(kept)


def rounded(value: float | None, digits: int = 5) -> float | None:
    """To so many significant digits: what a curve shows, and no more bytes."""
    return None if value is None else float(f"{value:.{digits}g}")
