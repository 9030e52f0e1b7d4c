"""Traces of some steps by torch's profiler, annotated with phases, layers, doors and collectives.

A trace of bare kernels does not show which layer they belong to. The annotations are switched on for the traced steps
only, since each costs host time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import profile

from ..engine import Model
from ..log import logger
from ..models import Layer
from ..watch import region, trace
from .config import WARM_UP

PROFILE = "profile"


class Profiler:
    """Traces `num_steps` steps after the first two, one file per rank. A run that ends earlier writes what it has."""

    def __init__(self, model: Model, out: Path, num_steps: int) -> None:
        self.model, self.num_steps, self.num_seen = model, num_steps, 0
        self.file = out / PROFILE / f"rank-{model.mesh.rank}.json.gz"
        self._running: profile | None = None
        self._plain: list[tuple[Layer, Callable[..., Tensor]]] = []

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._stop()
        if self.num_steps and self.num_seen <= WARM_UP:
            logger.warning("no step was traced: the run ended before step %d of this start", WARM_UP + 1)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap a step and everything that follows it."""
        self.num_seen += 1
        if self.num_steps and self.num_seen == WARM_UP + 1:
            self._start()
        with region("step"):
            yield
        if self._running is not None and self.num_seen == WARM_UP + self.num_steps:
            self._stop()

    def _start(self) -> None:
        """Wrap the layers, so that each is a named range in the trace, and start the profiler."""
        # torch's profiler knows operators, not modules: without these ranges a kernel cannot be assigned to a layer.
        for name, module in ((name, m) for part in self.model.parts for name, m in part.named_modules()):
            if isinstance(module, Layer):
                self._plain.append((module, module.run))
                module.run = functools.partial(_named, name, module.run)
        self._running = profile()
        trace.on = True
        self._running.start()

    def _stop(self) -> None:
        """Stop the profiler, unwrap the layers and write the trace."""
        assert self._running is not None, "it was started"
        self._running.stop()
        trace.on = False
        for layer, run in self._plain:
            layer.run = run
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self.file))
        self._running = None


def _named(name: str, run: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a layer inside of a named range."""
    with region(name):
        return run(*arguments)
