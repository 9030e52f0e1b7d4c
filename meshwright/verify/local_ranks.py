"""Run a function on n local processes, forked from this one. A hang is an error that names the ranks; so is a death.

Fork, so that what the caller has imported, registered or changed is there on every rank. The caller must not have made
a process group or used a device.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle  # noqa: TID251 - between processes of one run, in a directory that is theirs alone
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from ..errors import RankError
from ..mesh.loopback import ADDRESS, loopback_devices, serve_store
from ..ops.garbage import collector_paused
from ..watch import last_seen


def run_ranks(size: int, function: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
    """`function(*args)` on every rank; the results in the order of the ranks (tensors and plain data)."""
    fork = multiprocessing.get_context("fork")
    ports = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[BaseProcess] = [
            fork.Process(target=_rank, args=(rank, size, ports, Path(folder), function, args), daemon=True)
            for rank in range(size)
        ]
        with collector_paused():  # nothing is collected between the fork and the `gc.freeze` of a rank
            for process in ranks:
                process.start()
        lost = _with_store(ranks, ports, seconds, Path(folder))
        return _results(size, Path(folder), lost)


def _with_store(ranks: list[BaseProcess], ports: Any, seconds: float, folder: Path) -> str:
    """As torchrun does, the parent keeps the store: it outlives any rank. It ends with this call, which raises nothing
    that would keep it: a rank that is forked beside a store hangs when it drops its copy, whose thread it has not."""
    store = serve_store()
    for _ in ranks:
        ports.put(store.port)
    return _wait(ranks, seconds, folder, store)


def _wait(ranks: list[BaseProcess], seconds: float, folder: Path, store: TCPStore) -> str:
    """Until all have ended, one has failed, or the time is over. Who died or hung, and where all were last."""
    deadline = time.monotonic() + seconds
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in ranks):
                time.sleep(0.5)  # let the others say what they saw
                break
            ranks[0].join(0.02)
        return _lost(ranks, seconds, folder, store)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _lost(ranks: list[BaseProcess], seconds: float, folder: Path, store: TCPStore) -> str:
    said = {rank for rank in range(len(ranks)) if (folder / f"{rank}.error").exists()}
    died = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode not in (None, 0) and rank not in said}
    hung = [rank for rank, p in enumerate(ranks) if p.is_alive()]
    if not died and (said or not hung):
        return ""  # who has failed is a reason for others to hang
    codes = ", ".join(map(str, died.values()))
    how = f"died without a word (exit code {codes})" if died else f"hung for {seconds:g} s, more than they were given"
    return "\n".join([f"ranks {list(died or hung)} of {len(ranks)} {how}", *last_seen(store, range(len(ranks)))])


def _rank(rank: int, size: int, ports: Any, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    gc.freeze()  # garbage of the caller, such as a store whose thread is not here, must not be destroyed here too
    gc.enable()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR=ADDRESS)
    os.environ.update(MASTER_PORT=str(ports.get()), TORCHELASTIC_USE_AGENT_STORE="True", **loopback_devices())
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:  # noqa: BLE001 - whatever it was, the caller is told
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")
    os._exit(0)


def _results(size: int, folder: Path, lost: str) -> list[Any]:
    errors: dict[str, list[int]] = {}  # once for all ranks that say the same
    for rank in range(size):
        if (folder / f"{rank}.error").exists():
            errors.setdefault((folder / f"{rank}.error").read_text(), []).append(rank)
    if errors or lost:
        told = [
            f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} of {size}:\n{text}" for text, of in errors.items()
        ]
        raise RankError("\n".join([lost, *told] if lost else told))
    return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(size)]
