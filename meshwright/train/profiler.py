"""A trace of some steps, by torch's profiler: phases, layers, doors and every other place where ranks meet."""

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
    """Traces the steps that come after the first two. One that is ended early writes what it has."""

    def __init__(self, model: Model, out: Path, num_steps: int) -> None:
        self.model, self.num_steps, self.seen = model, num_steps, 0
        self.file = out / PROFILE / f"rank-{model.mesh.rank}.json.gz"
        self._running: profile | None = None
        self._plain: list[tuple[Layer, Callable[..., Tensor]]] = []

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._stop()
        if self.num_steps and self.seen <= WARM_UP:
            logger.warning("no step was traced: the run ended before step %d of this start", WARM_UP + 1)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step and all that is due after it."""
        self.seen += 1
        if self.num_steps and self.seen == WARM_UP + 1:
            self._start()
        with region("step"):
            yield
        if self._running is not None and self.seen == WARM_UP + self.num_steps:
            self._stop()

    def _start(self) -> None:
        for name, module in ((name, m) for part in self.model.parts for name, m in part.named_modules()):
            if isinstance(module, Layer):
                self._plain.append((module, module.run))
                module.run = functools.partial(_named, name, module.run)
        self._running = profile()
        trace.on = True
        self._running.start()

    def _stop(self) -> None:
        assert self._running is not None, "it was started"
        self._running.stop()
        trace.on = False
        for layer, run in self._plain:
            layer.run = run
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self.file))
        self._running = None


def _named(name: str, run: Callable[..., Tensor], *given: Any) -> Tensor:
    with region(name):
        return run(*given)
