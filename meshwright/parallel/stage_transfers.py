"""Point-to-point transfers of a pipeline: asynchronous isend and irecv of activations and their gradients."""

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

Name = tuple[str, int, int]  # direction, stage that takes it, micro-batch


class StageTransfers:
    """Results of this rank's stages by name, with their sends and receives.

    Both sides derive shape and dtype from the batch, so nothing is negotiated. A receive is posted where the schedule
    says so and waited for only where its result is used, which overlaps transfers with compute. Batched send/recv pairs
    would wait for both.

    Use it as a context around a pass. If a pass ends early, its transfers stay in flight and the next pass could
    receive them, so the mesh refuses another pass. The mesh also keeps this object alive: gloo stops reading from a
    peer once bytes arrive for a tensor that is gone, which would hang a neighbour that still waits for our earlier
    sends.
    """

    def __init__(self, mesh: Mesh, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.mesh, self.shape, self.dtype = mesh, tuple(shape), dtype
        self._results: dict[Name, Tensor] = {}
        self._receives: dict[Name, dist.Work] = {}
        self._sends: list[tuple[dist.Work, Tensor]] = []  # a tensor must stay alive until it is sent

    def __enter__(self) -> None:
        if self.mesh.cut_off:
            raise StateError(
                f"an earlier pass through the pipeline ended early ({self.mesh.cut_off}), and its sends and receives "
                "are still in flight, so the next pass would receive them; start all ranks again"
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self._finish()
        elif self.mesh.axes.pp > 1:
            self.mesh.cut_off = ": ".join(filter(None, (kind.__name__, str(error))))[:200]
            self.mesh.under_way = self

    def put(self, direction: str, stage: int, batch: int, x: Tensor) -> None:
        """Store a result for a later `send` or `take`."""
        self._results[direction, stage, batch] = x

    def take(self, direction: str, stage: int, batch: int) -> Tensor:
        """Remove and return a result; wait for it first if it is being received."""
        name = (direction, stage, batch)
        if name in self._receives:
            with waiting_at(transfer_name(direction, stage), f"micro-batch {batch + 1}"):
                self._receives[name].wait()
            del self._receives[name]  # only after the wait, which an interrupt may end: __exit__ must still find it
        return self._results.pop(name)

    def send(self, step: Transfer) -> None:
        """Start sending a result to the rank of the other stage."""
        x = self.take(step.way, step.stage, step.batch).contiguous()
        self._sends = [(work, sent) for work, sent in self._sends if not work.is_completed()]
        with waiting_at(transfer_name(step.way, step.stage), f"micro-batch {step.batch + 1}"):
            work = dist.isend(x, group=self._group, group_dst=step.target, tag=_tag(step))
        assert work is not None, "this rank is a member of the group"
        self._sends.append((work, x))

    def receive(self, step: Transfer) -> None:
        """Start receiving a result from the rank of the other stage."""
        x = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
        with waiting_at(transfer_name(step.way, step.stage), f"micro-batch {step.batch + 1}"):
            work = dist.irecv(x, group=self._group, group_src=step.source, tag=_tag(step))
        assert work is not None, "this rank is a member of the group"
        self._receives[step.way, step.stage, step.batch] = work
        self.put(step.way, step.stage, step.batch, x)

    def _finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sends:
            with waiting_at("the last transfers of a step"):
                work.wait()
        self._sends.clear()

    @property
    def _group(self) -> dist.ProcessGroup:
        """Return the group of this pipeline, whose ranks are numbered by their position on the axis pp."""
        return self.mesh.process_group(("pp",))


def _tag(step: Transfer) -> int:
    """Return a tag that is unique among transfers in flight: in a V schedule two ranks have two of them at a time."""
    return 2 * (step.batch << 10 | step.stage) + (step.way == BACK)
