"""Named regions of a trace: each door by its name, and what else asks for one. Nothing is named while nobody traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.profiler import record_function


class _Trace:
    """The state of this process."""

    on = False


trace = _Trace()


def region(name: str) -> AbstractContextManager[Any]:
    """`with region("update"):` around what a trace is to show by that name."""
    return record_function(name) if trace.on else nullcontext()
