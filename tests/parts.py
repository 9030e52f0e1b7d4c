"""What `make test` leaves to `make matrix`: long lists are tried in part, whole with MESHWRIGHT_ALL=1."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

ALL = bool(os.environ.get("MESHWRIGHT_ALL"))


def every(step: int, cases: Iterable[T], first: int = 0) -> list[T]:
    """Every second or third of them, in turn where `first` is the number of a mesh."""
    listed = list(cases)
    return listed if ALL else listed[first % step :: step]
