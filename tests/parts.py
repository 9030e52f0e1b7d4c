"""`make test` runs a part of long lists; `make matrix` sets MESHWRIGHT_ALL=1 and runs them whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

ALL = bool(os.environ.get("MESHWRIGHT_ALL"))
IN_MATRIX = pytest.mark.skipif(not ALL, reason="in `make matrix`")


def every(step: int, cases: Iterable[T], first: int = 0) -> list[T]:
    """Return every second, third, ... case. `first`: where to begin, such as the number of a mesh."""
    listed = list(cases)
    return listed if ALL else listed[first % step :: step]
