"""Named regions for profiler traces: each door under its name, and any other block. They are free while no trace
runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function


class _Trace:
    """A switch: whether this process traces."""

    on = False


trace = _Trace()


def region(name: str) -> AbstractContextManager[Any]:
    """Name the block in a trace, as in `with region("update"):`."""
    return record_function(name) if trace.on else nullcontext()
