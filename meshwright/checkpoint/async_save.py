"""Asynchronous checkpoints: copy state to host memory (and exchange rows), then write in a thread that runs no
collective.

A collective in a background thread can deadlock with those of training: NCCL gives no order between two communicators
in flight. So everything that needs other ranks happens before `save` returns, and the threads agree through the run's
TCP store, which no training step uses. A failure is kept until the next call that checks for one.

Staging also copies CPU tensors. torch's async_save did not, and stored values of later steps (pytorch#144657). The
deadline exists because ranks that classify an error differently must not wait for each other forever (xtuner#1852).
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
from .save import RankFiles, WriteAction

_POLL_S = 0.05
_DONE = "done"


class StoreAgreement:
    """An agreement through the TCP store of the run: each rank posts its result, rank 0 commits, all ranks read the
    outcome."""

    def __init__(self, mesh: Mesh, mark: str) -> None:
        self.mesh, self.world, self.timeout_s = mesh, mesh.axes.world, mesh.timeout.total_seconds()
        self.store = mesh.store(f"save/{mark}")

    def parts(self, failure: BaseException | None, part: Part) -> list[Part]:
        """Post this rank's result; on rank 0, wait for all results. Other ranks get an empty list."""
        message = {"failure": f"{type(failure).__name__}: {failure}" if failure else "", "part": asdict(part)}
        self.store.set(str(self.mesh.rank), json.dumps(message))
        # Only rank 0 needs all results; the other ranks go on to `end` and wait for its verdict.
        if self.mesh.rank:
            return []  # only rank 0 commits
        try:
            return [self._part(rank) for rank in range(self.world)]
        except CheckpointError as error:
            self.store.set(_DONE, str(error))
            raise

    def _part(self, rank: int) -> Part:
        """Wait for the result of a rank, and raise its failure."""
        message = json.loads(self._wait(str(rank), f"rank {rank} has written"))
        if message["failure"]:
            raise CheckpointError(f"rank {rank} failed to save: {message['failure']}")
        return Part(**message["part"])

    def end(self, failure: BaseException | None) -> None:
        """Post the outcome on rank 0; raise on all ranks if the save failed.

        The value of the key is the message of the failure, or "" for success, so one key carries both.
        """
        if self.mesh.rank == 0:
            self.store.set(_DONE, str(failure or ""))
        message = self._wait(_DONE, "rank 0 has made a checkpoint of it")
        if message or failure:
            raise failure or CheckpointError(message)

    def _wait(self, name: str, what: str) -> str:
        """Poll for a key until the deadline. A blocking wait of the store would block its other users."""
        deadline = time.monotonic() + self.timeout_s
        while not self.store.check([name]):
            if time.monotonic() > deadline:
                raise CheckpointError(f"timed out after {self.timeout_s:.0f} s waiting until {what}")
            time.sleep(_POLL_S)
        return self.store.get(name).decode()


class SaveJob:
    """A save in the background. Creating a job copies the saved state, which takes as much host memory until it is
    written.

    A job takes host memory for one copy of this rank's weights, masters and optimizer state, so that training need not
    wait for the disk.
    """

    def __init__(self, content: Content, mesh: Mesh) -> None:
        self.directory = final_place(content.folder, content.step)
        self.failure: BaseException | None = None
        rank_files = RankFiles(content, mesh)
        # All copies and exchanges happen now, while training waits. With `keep=True` each write owns its data, because
        # the live tensors change with the next optimizer step.
        staged = deque(rank_files.write_actions(keep=True))
        agreement = StoreAgreement(mesh, rank_files.path.name)
        # Not a daemon thread: the interpreter waits for it at exit, so a script that ends keeps its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=(rank_files, staged, agreement), name="save")
        self._thread.start()

    def _run(self, rank_files: RankFiles, staged: deque[WriteAction], agreement: StoreAgreement) -> None:
        """Write, and keep a failure for the next call that checks for one."""
        try:
            # No progress bar: it would overwrite that of training.
            with quiet():
                # Writes are popped, so that each copy is freed as soon as it is on its way to disk.
                rank_files.complete((staged.popleft() for _ in range(len(staged))), agreement)
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody asks for it
            self.failure = error
            if rank_files.mesh.rank == 0:
                logger.error("%s was not saved: %s", self.directory, error)

    @property
    def is_running(self) -> bool:
        """Return whether the save is still running."""
        return self._thread.is_alive()

    @property
    def succeeded(self) -> bool:
        """Return whether the save has ended without a failure."""
        return not self.is_running and self.failure is None

    def wait(self) -> None:
        """Wait until the save has ended, with or without a failure."""
        self._thread.join()
