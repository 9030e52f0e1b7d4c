"""A rank that dies, hangs or disagrees: every other one ends soon, with an error that names it and where all stand."""

from __future__ import annotations

import multiprocessing
import os
import pickle  # noqa: TID251 - what run_ranks' processes leave
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import meshwright as mw
from meshwright import mesh as mesh_module
from meshwright.errors import RankError
from meshwright.layout import Door, attributes
from meshwright.mesh import DENSE, whereabouts
from meshwright.verify import ranks
from tests import tiny, trials

TIMEOUT_S = 3.0
BEAT_S = 0.4
SOON_S = TIMEOUT_S + 5.0  # a busy machine is slow to start processes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.directory(tmp_path_factory.mktemp("lost") / "m", "qwen3")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "BEAT_S", BEAT_S)


@dataclass
class Outcome:
    said: str  # by the error of a survivor
    cause: str
    seconds: float  # from the first step's end to the error
    left_s: float  # to leave the process groups


def survive(size: int, victim: int, tmp_path: Path, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Start the ranks as run_ranks does, but leave the survivors alone until they end by themselves."""
    fork = multiprocessing.get_context("fork")
    ports = fork.SimpleQueue()
    started = [
        fork.Process(target=ranks._rank, args=(rank, size, ports, tmp_path, function, args), daemon=True)
        for rank in range(size)
    ]
    for process in started:
        process.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in started:
        ports.put(store.port)
    try:
        deadline = time.monotonic() + 40
        for rank, process in enumerate(started):
            if rank != victim:
                process.join(max(deadline - time.monotonic(), 0))
                assert not process.is_alive(), f"rank {rank} never ended"
    finally:
        for process in started:
            process.kill()
            process.join()
    errors = [path.read_text() for path in tmp_path.glob("*.error") if path.stem != str(victim)]
    assert not errors, "\n".join(errors)
    return {
        r: pickle.loads((tmp_path / f"{r}.result").read_bytes())
        for r in range(size)
        if (tmp_path / f"{r}.result").exists()
    }


def trained(source: Path, mesh: dict[str, int], harm: Callable[[mw.Engine], None], victim: int) -> Outcome:
    """A step that goes well, then one in which `harm` was done to the victim."""
    engine = mw.Engine(mw.load(source, mw.Mesh(**mesh, timeout_s=TIMEOUT_S), dtype=torch.float64), lr=1e-2)
    batches = tiny.batches(engine.model.mesh.data_rank)
    engine.step(batches)
    if engine.model.mesh.rank == victim:
        harm(engine)
    began = time.monotonic()
    try:
        for _ in range(3):
            engine.step(batches)
    except RankError as error:
        failed = time.monotonic()
        assert whereabouts.here.watch is not None
        whereabouts.here.watch.leave()
        mesh_module._leave()
        return Outcome(str(error), repr(error.__cause__), failed - began, time.monotonic() - failed)
    return Outcome("nothing", "", time.monotonic() - began, 0.0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep() -> None:
    time.sleep(60)


def at_a_door(name: str, call: int, act: Callable[[], None]) -> Callable[[mw.Engine], None]:
    """`act` in the `call`th passage of the door, that is in a micro-batch."""

    def harm(engine: mw.Engine) -> None:
        door = dict(attributes(engine.model.parts[0], Door))[name]
        armed, calls = door.armed, []

        def acting(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == call:
                act()
            assert armed is not None
            return armed(x)

        door.armed = acting

    return harm


def in_the_loss(call: int, act: Callable[[], None]) -> Callable[[mw.Engine], None]:
    def harm(engine: mw.Engine) -> None:
        real, calls = engine.loss, []

        def my_loss(scores: Any, fields: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == call:
                act()
            return real(scores, fields)

        engine.loss = my_loss

    return harm


def one_more(engine: mw.Engine) -> None:
    """A sum of its own, after the first micro-batch's forward: the others never come to it."""
    in_the_loss(2, lambda: engine.model.mesh.sum_(torch.zeros(()), DENSE, "a sum of my own") and None)(engine)


def skips(engine: mw.Engine) -> None:
    dict(attributes(engine.model.parts[0], Door))["layers.1.mixer.leave"].armed = lambda x: x[: x.shape[0] // 2]


def raises(engine: mw.Engine) -> None:
    def fail() -> None:
        raise ValueError("a label is missing")

    in_the_loss(2, fail)(engine)


MICRO = r"\(step 1, micro-batch 2 of 2\)"
TP, FSDP, BOTH = dict(tp=2), dict(fsdp=2), dict(fsdp=2, tp=2)

# Who is lost, how, in which words; whether that shows at once, or only when the time is over.
LOST: list[tuple[str, dict[str, int], Callable[[mw.Engine], None], list[str], bool]] = [
    ("killed at a door", TP, at_a_door("layers.1.mixer.enter", 2, killed),
     ["rank 1: died, its process is gone", rf"rank 0: waiting at layers\.1\.mixer\.enter, forward {MICRO}"], True),
    ("killed at a door", BOTH, at_a_door("layers.1.mixer.enter", 2, killed),
     ["rank 3: died, its process is gone", rf"rank 2: waiting at layers\.1\.mixer\.enter, forward {MICRO}"], True),
    ("killed in the loss", FSDP, in_the_loss(2, killed),
     ["rank 1: died, its process is gone", rf"rank 0: waiting at FSDP of [\w.]+, .* {MICRO}"], True),
    ("stopped in the loss", FSDP, in_the_loss(2, stopped),
     [r"rank 1: stopped \(SIGSTOP, a debugger\)", r"[2-9] s ago", r"rank 0: waiting at FSDP of "], False),
    ("asleep in the loss", TP, in_the_loss(2, asleep),
     [rf"rank 1: in no collective: test_lost_ranks\.py:\d+ in asleep, after head\.meet, forward {MICRO}, for [3-6] s",
      r"rank 0: waiting at head\.meet, backward"], False),
    ("asleep in the loss", BOTH, in_the_loss(2, asleep),
     [r"rank 3: in no collective: test_lost_ranks\.py:\d+ in asleep", r"ranks? (0, )?2: waiting at head\.meet, back"], False),
    ("one collective more", FSDP, one_more,
     [rf"rank 1: waiting at a sum of my own {MICRO}", "rank 0: waiting at FSDP of "], False),
    ("a door less", TP, skips,
     [r"rank 0: waiting at layers\.1\.mixer\.leave, forward", r"rank 1: waiting at layers\.1\.mlp\.enter"], False),
    ("an error of its own", TP, raises, [rf"rank 1: raised an error: ValueError: a label is missing {MICRO}"], True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "harm", "told", "at_once"),
    [case[1:] for case in LOST],
    ids=[f"{case[0]}, {trials.named(case[1])}" for case in LOST],
)
def test_every_other_rank_names_it(
    source: Path, tmp_path: Path, mesh: dict[str, int], harm: Any, told: list[str], at_once: bool
) -> None:
    size = trials.world_of(mesh)
    found = survive(size, size - 1, tmp_path, trained, source, mesh, harm, size - 1)
    for rank in range(size - 1):
        print(rank, found.get(rank))
    for rank in range(size - 1):
        outcome = found[rank]
        for pattern in told:
            assert re.search(pattern, outcome.said), outcome
        assert outcome.seconds < (SOON_S - TIMEOUT_S if at_once else SOON_S)
        assert outcome.left_s < 2
