"""The post of a pipeline: what neighbouring stages send each other in a step, and what waits until it is taken."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import StateError
from ..mesh import Mesh
from ..sharding import transfer_name
from ..sharding.schedules import BACK, Transfer
from ..watch import waiting_at

Name = tuple[str, int, int]  # way, the stage that takes it, micro-batch


class Post:
    """Results by their names. Both sides know the shape and dtype of what travels, and nobody waits before he must: a
    receive is begun where the program says so, and waited for where its result is taken.

    `with post:` around a pass. If it ends early, transfers stay under way, and what the next pass receives could be
    theirs. So there is no next pass. The mesh keeps the post: a neighbour may still wait for what was sent here, and
    gloo reads nothing more from a rank whose bytes come in for a tensor that is gone.
    """

    def __init__(self, mesh: Mesh, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.mesh, self.shape, self.dtype = mesh, tuple(shape), dtype
        self._here: dict[Name, Tensor] = {}
        self._coming: dict[Name, dist.Work] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it is sent

    def __enter__(self) -> None:
        if self.mesh.cut_off:
            raise StateError(
                f"a pass through the stages of the pipeline ended early ({self.mesh.cut_off}), and what they then sent "
                "each other is still under way; start all ranks again"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self._finish()
        elif self.mesh.axes.pp > 1:
            self.mesh.cut_off = ": ".join(filter(None, (kind.__name__, str(error))))[:200]
            self.mesh.under_way = self

    def put(self, way: str, stage: int, batch: int, x: Tensor) -> None:
        self._here[way, stage, batch] = x

    def take(self, way: str, stage: int, batch: int) -> Tensor:
        name = (way, stage, batch)
        if name in self._coming:
            with waiting_at(transfer_name(way, stage), f"micro-batch {batch + 1}"):
                self._coming[name].wait()
            del self._coming[name]  # not before: an interrupt in the wait would lose it
        return self._here.pop(name)

    def send(self, step: Transfer) -> None:
        x = self.take(step.way, step.stage, step.batch).contiguous()
        self._sent = [(work, sent) for work, sent in self._sent if not work.is_completed()]
        with waiting_at(transfer_name(step.way, step.stage), f"micro-batch {step.batch + 1}"):
            work = dist.isend(x, self._rank(step.target), group=self._group, tag=_tag(step))
        assert work is not None, "this rank is one of the group"
        self._sent.append((work, x))

    def receive(self, step: Transfer) -> None:
        x = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
        with waiting_at(transfer_name(step.way, step.stage), f"micro-batch {step.batch + 1}"):
            work = dist.irecv(x, self._rank(step.source), group=self._group, tag=_tag(step))
        assert work is not None, "this rank is one of the group"
        self._coming[step.way, step.stage, step.batch] = work
        self.put(step.way, step.stage, step.batch, x)

    def _finish(self) -> None:
        """Until all is sent."""
        for work, _ in self._sent:
            with waiting_at("the last transfers of a step"):
                work.wait()
        self._sent.clear()

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.mesh.process_group(("pp",))

    def _rank(self, place: int) -> int:
        return self.mesh.axes.group(self.mesh.rank, ("pp",))[place]


def _tag(step: Transfer) -> int:
    """Two ranks of a V have two transfers under way at once."""
    return 2 * (step.batch << 10 | step.stage) + (step.way == BACK)
