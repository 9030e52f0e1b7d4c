"""Run a function on n forked gloo ranks. A hang is a failure that names the ranks; so is a rank that dies."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle  # noqa: TID251 - between processes of one test
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SECONDS = 60.0


def run(size: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
    """`function(*args)` on every rank; the results in the order of the ranks (tensors and plain data)."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks = [
            fork.Process(target=_rank, args=(rank, size, port, Path(folder), function, args), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + seconds
        while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
            if any(p.exitcode not in (None, 0) for p in ranks):
                time.sleep(0.5)  # let the others say what they saw
                break
            ranks[0].join(0.02)
        hung = [rank for rank, p in enumerate(ranks) if p.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        return _results(size, Path(folder), hung, seconds)


def world(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on `size` ranks."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(*args: Any, **kwargs: Any) -> None:
            run(size, functools.partial(function, *args, **kwargs))

        return test

    return decorate


def _rank(rank: int, size: int, port: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        result = function(*args)
    except BaseException:  # noqa: BLE001 - whatever it was, it is the test's result
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.result")
    os._exit(0)


def _results(size: int, folder: Path, hung: list[int], seconds: float) -> list[Any]:
    errors = {r: (folder / f"{r}.error").read_text() for r in range(size) if (folder / f"{r}.error").exists()}
    if errors:
        raise AssertionError("\n".join(f"rank {rank} of {size}:\n{text}" for rank, text in errors.items()))
    lost = [r for r in range(size) if not (folder / f"{r}.result").exists()]
    if lost:
        what = f"hung for {seconds} s" if lost == hung else "died without a word"
        raise AssertionError(f"ranks {lost} of {size} {what}")
    return [pickle.loads((folder / f"{r}.result").read_bytes()) for r in range(size)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
