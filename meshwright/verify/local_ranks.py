"""Run a function on n local processes, forked from this one. A hang or a death raises an error that names the ranks.

Fork, not spawn: whatever the caller has imported, registered or patched exists on every rank, and the function may be a
closure. In return, the caller must not have made a process group or used a device, since neither survives a fork.

Ranks talk to this process through files of a temporary directory. A file survives the death of its writer, and is whole
or absent because it is renamed into place.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle  # noqa: TID251 - between processes of one run, in a directory that only they use
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
    """Run `function(*args)` on every rank, and return the results in rank order: tensors and plain data.

    `seconds`: the time limit. Raises `RankError` if a rank fails, dies or hangs.
    """
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
    """Serve the store in this process, as torchrun does, so that it outlives every rank; return a description of lost
    ranks.

    The store starts after the fork and ends with this call. Nothing is raised here, because a traceback would keep the
    store alive. A rank forked while a store exists inherits a copy without its thread, and hangs when it drops that
    copy.
    """
    store = serve_store()
    for _ in ranks:
        ports.put(store.port)
    return _wait(ranks, seconds, folder, store)


def _wait(ranks: list[BaseProcess], seconds: float, folder: Path, store: TCPStore) -> str:
    """Wait until all ranks have ended, one has failed, or the time is over. Then kill the others.

    -> the ranks that died or hung, and the last place of every rank
    """
    deadline = time.monotonic() + seconds
    try:
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in ranks):
                time.sleep(0.5)  # let the other ranks write their errors
                break
            ranks[0].join(0.02)
        return _lost(ranks, seconds, folder, store)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _lost(ranks: list[BaseProcess], seconds: float, folder: Path, store: TCPStore) -> str:
    """Describe the ranks that died or hung without an error; "" if an error explains it."""
    failed = {rank for rank in range(len(ranks)) if (folder / f"{rank}.error").exists()}
    died = {rank: p.exitcode for rank, p in enumerate(ranks) if p.exitcode not in (None, 0) and rank not in failed}
    hung = [rank for rank, p in enumerate(ranks) if p.is_alive()]
    # Report a death before anything else: ranks that wait for the dead one hang or fail after it.
    if not died and (failed or not hung):
        return ""  # a failed rank explains why other ranks hang: they wait for it
    codes = ", ".join(map(str, died.values()))
    how = f"died without an error (exit code {codes})" if died else f"hung for {seconds:g} s, the time limit"
    return "\n".join([f"ranks {list(died or hung)} of {len(ranks)} {how}", *last_seen(store, range(len(ranks)))])


def _rank(rank: int, size: int, ports: Any, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run the function in a forked process, with the environment that torchrun would set. Its result or traceback goes
    to a file."""
    gc.freeze()  # garbage of the caller, such as a store whose thread was not forked, must not be destroyed by a rank
    gc.enable()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR=ADDRESS)
    os.environ.update(MASTER_PORT=str(ports.get()), TORCHELASTIC_USE_AGENT_STORE="True", **loopback_devices())
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:  # noqa: BLE001 - the caller gets it, whatever it is
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")  # atomic: a result exists only as a whole
    os._exit(0)  # skips destructors and exit handlers of the caller


def _results(size: int, folder: Path, lost: str) -> list[Any]:
    """Return the results, or raise the errors, each once with the ranks that share it."""
    errors: dict[str, list[int]] = {}
    for rank in range(size):
        if (folder / f"{rank}.error").exists():
            errors.setdefault((folder / f"{rank}.error").read_text(), []).append(rank)
    if errors or lost:
        texts = [
            f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} of {size}:\n{text}" for text, of in errors.items()
        ]
        raise RankError("\n".join([lost, *texts] if lost else texts))
    return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(size)]
