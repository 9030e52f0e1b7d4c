"""Save beside the training: what is saved is copied first, and written by a thread that takes part in no collective.

The threads of a save tell each other what they have done through the store of the run, which no step uses. So a
checkpoint is made as soon as all have written, whatever the training does meanwhile; a failure is kept until the next
call that asks for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import asdict

from ..errors import CheckpointError
from ..log import logger, quiet
from ..mesh import Mesh
from .content import Content
from .folder import final_place
from .manifest import Part
from .save import Act, RankFiles

_LOOK_S = 0.05
_DONE = "done"


class StoreAgreement:
    """An agreement through the store of the run."""

    def __init__(self, mesh: Mesh, mark: str) -> None:
        self.mesh, self.world, self.timeout_s = mesh, mesh.axes.world, mesh.timeout.total_seconds()
        self.store = mesh.store(f"save/{mark}")

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        told = {"failure": f"{type(failure).__name__}: {failure}" if failure else "", "part": asdict(part)}
        self.store.set(str(self.mesh.rank), json.dumps(told))
        if self.mesh.rank:
            return []  # rank 0 alone makes a checkpoint of them
        try:
            return [self._part(rank) for rank in range(self.world)]
        except CheckpointError as error:
            self.store.set(_DONE, str(error))
            raise

    def _part(self, rank: int) -> Part:
        told = json.loads(self._wait(str(rank), f"rank {rank} has written"))
        if told["failure"]:
            raise CheckpointError(f"rank {rank} failed in the saving: {told['failure']}")
        return Part(**told["part"])

    def end(self, failure: BaseException | None) -> None:
        if self.mesh.rank == 0:
            self.store.set(_DONE, str(failure or ""))
        told = self._wait(_DONE, "rank 0 has made a checkpoint of it")
        if told or failure:
            raise failure or CheckpointError(told)

    def _wait(self, name: str, what: str) -> str:
        """By asking again and again: a store that waits would keep all others waiting."""
        until = time.monotonic() + self.timeout_s
        while not self.store.check([name]):
            if time.monotonic() > until:
                raise CheckpointError(f"not heard within {self.timeout_s:.0f} s that {what}")
            time.sleep(_LOOK_S)
        return self.store.get(name).decode()


class SaveJob:
    """A save beside the training. Making one copies what is saved, which takes as much host memory until it is
    written."""

    def __init__(self, content: Content, mesh: Mesh) -> None:
        self.directory = final_place(content.folder, content.step)
        self.failure: BaseException | None = None
        rank_files = RankFiles(content, mesh)
        staged = deque(rank_files.acts(keep=True))
        agreement = StoreAgreement(mesh, rank_files.path.name)
        # Not a daemon: a script that ends has its last checkpoint all the same.
        self._thread = threading.Thread(target=self._run, args=(rank_files, staged, agreement), name="save")
        self._thread.start()

    def _run(self, rank_files: RankFiles, staged: deque[Act], agreement: StoreAgreement) -> None:
        try:
            with quiet():
                rank_files.complete((staged.popleft() for _ in range(len(staged))), agreement)
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody asks for it
            self.failure = error
            if rank_files.mesh.rank == 0:
                logger.error("%s was not saved: %s", self.directory, error)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def succeeded(self) -> bool:
        return not self.is_running and self.failure is None

    def wait(self) -> None:
        """Until it is whole, or has failed."""
        self._thread.join()
