"""Run a function on n local processes, forked from this one. A hang is an error that names the ranks; so is a death.

Fork, so that what the caller has imported, registered or changed is there on every rank. The caller must not have made
a process group or used a device.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle  # noqa: TID251 - between processes of one run, in a directory that is theirs alone
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ..errors import RankError


def run_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
    """`function(*args)` on every rank; the results in the order of the ranks (tensors and plain data)."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks: list[BaseProcess] = [
            fork.Process(target=_rank, args=(rank, size, port, Path(folder), function, args), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        hung = _wait(ranks, seconds)
        return _results(size, Path(folder), hung, seconds)


def _wait(ranks: list[BaseProcess], seconds: float) -> list[int]:
    """Until all have ended, one has failed, or the time is over. Who was still at it."""
    deadline = time.monotonic() + seconds
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in ranks):
                time.sleep(0.5)  # let the others say what they saw
                break
            ranks[0].join(0.02)
        return [rank for rank, p in enumerate(ranks) if p.is_alive()]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(rank: int, size: int, port: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:  # noqa: BLE001 - whatever it was, the caller is told
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")
    os._exit(0)


def _results(size: int, folder: Path, hung: list[int], seconds: float) -> list[Any]:
    errors = {r: (folder / f"{r}.error").read_text() for r in range(size) if (folder / f"{r}.error").exists()}
    if errors:
        raise RankError("\n".join(f"rank {rank} of {size}:\n{text}" for rank, text in errors.items()))
    lost = [r for r in range(size) if not (folder / f"{r}.result").exists()]
    if lost:
        what = f"hung for {seconds:g} s" if lost == hung else "died without a word"
        raise RankError(f"ranks {lost} of {size} {what}")
    return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(size)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
