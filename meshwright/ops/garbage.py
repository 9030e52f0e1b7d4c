"""A pause of Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while hundreds of thousands of objects are made that all stay.

    It would walk through all of them each time that they have become a quarter more, in vain: a quarter of the time of
    a load.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()
