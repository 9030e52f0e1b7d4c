"""A rank that dies, hangs or disagrees: every other one ends soon, with an error that names it and where all stand."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import pickle  # noqa: TID251 - what run_ranks' processes leave
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import meshwright as mw
from meshwright.axes import DENSE, Sum
from meshwright.errors import RankError
from meshwright.mesh import joining
from meshwright.verify import local_ranks, run_ranks
from meshwright.watch import heartbeat
from meshwright.watch.diagnosis import LEFT, RAISED, WAITS, WORKS, Heartbeat, diagnose
from tests import parts, tiny, trials

TIMEOUT_S = 2.0
BEAT_S = 0.4
SOON_S = TIMEOUT_S + 5.0  # a busy machine is slow to start processes


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", BEAT_S)
    monkeypatch.setattr(heartbeat, "_STORE_S", 0.8)


@dataclass
class Outcome:
    output: str  # by the error of a survivor
    cause: str
    seconds: float  # from the first step's end to the error
    left_s: float  # to leave the process groups


def survive(size: int, victim: int, tmp_path: Path, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Start the ranks as run_ranks does, but leave the survivors alone until they end by themselves."""
    fork = multiprocessing.get_context("fork")
    ports = fork.SimpleQueue()
    started = [
        fork.Process(target=local_ranks._rank, args=(rank, size, ports, tmp_path, function, args), daemon=True)
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
        assert heartbeat.position.watch is not None
        heartbeat.position.watch.leave()
        joining.leave()
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
        door = trials.door_of(engine.model, name)
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

        @functools.wraps(real)  # the ranks would see that they have other losses
        def my_loss(scores: Any, fields: Any) -> torch.Tensor:
            if torch.is_grad_enabled():  # not while it is tried whether it looks at tokens alone
                calls.append(1)
                if len(calls) == call:
                    act()
            return real(scores, fields)

        engine.loss = my_loss

    return harm


def one_more(engine: mw.Engine) -> None:
    """A sum of its own, after the first micro-batch's forward: the others never come to it."""
    in_the_loss(2, lambda: engine.model.mesh.all_reduce_(torch.zeros(()), Sum("a sum of my own", DENSE)) and None)(
        engine
    )


def skips(engine: mw.Engine) -> None:
    trials.door_of(engine.model, "layers.1.mixer.leave").armed = lambda x: x[: x.shape[0] // 2]


def raises(engine: mw.Engine) -> None:
    def fail() -> None:
        raise ValueError("a label is missing")

    in_the_loss(2, fail)(engine)


def out_of_memory(engine: mw.Engine) -> None:
    def fail() -> None:
        with heartbeat.waiting_at("layers.1.mixer.enter", "forward"):
            raise torch.OutOfMemoryError("no room")

    at_a_door("layers.1.mixer.enter", 2, fail)(engine)


def ends_between_steps(engine: mw.Engine) -> None:
    """Exit like the interpreter after an uncaught error of the user's loop."""
    sys.last_value = KeyError("label")
    assert heartbeat.position.watch is not None
    heartbeat.position.watch.leave()
    os._exit(1)


MICRO = r"\(step 1, micro-batch 2 of 2\)"
TP, FSDP, BOTH = dict(tp=2), dict(fsdp=2), dict(fsdp=2, tp=2)

# Who is lost, how, in which words; whether that shows at once, or only when the time is over.
LOST: list[tuple[str, dict[str, int], Callable[[mw.Engine], None], list[str], bool]] = [
    ("killed at a door", TP, at_a_door("layers.1.mixer.enter", 2, killed),
     [r"rank 1: .*\bdied\b.*\bprocess\b", rf"rank 0: waiting at layers\.1\.mixer\.enter, forward {MICRO}"], True),
    ("killed at a door", BOTH, at_a_door("layers.1.mixer.enter", 2, killed),
     [r"rank 3: .*\bdied\b.*\bprocess\b", rf"rank 2: waiting at layers\.1\.mixer\.enter, forward {MICRO}"], True),
    ("killed in the loss", FSDP, in_the_loss(2, killed),
     [r"rank 1: .*\bdied\b.*\bprocess\b", rf"rank 0: waiting at FSDP of [\w.]+, .* {MICRO}"], True),
    ("stopped in the loss", FSDP, in_the_loss(2, stopped),
     [r"rank 1: stopped \(SIGSTOP, a debugger\)", r"[2-9] s ago", r"rank 0: waiting at FSDP of "], False),
    ("asleep in the loss", BOTH, in_the_loss(2, asleep),
     [rf"rank 3: .*test_lost_ranks\.py:\d+ in asleep\b.*\bhead\.meet, forward {MICRO}.* [2-6] s",
      r"ranks? (0, )?2: waiting at head\.meet, backward"], False),
    ("killed in the loss of a later stage", dict(pp=2), in_the_loss(2, killed),
     [r"rank 1: .*\bdied\b.*\bprocess\b", r"rank 0: waiting at what goes back to stage 0, micro-batch 2 .*\bstage 0\)"],
     True),
    ("asleep in the loss of a later stage", dict(pp=2), in_the_loss(2, asleep),
     [r"rank 1: .*\bin asleep\b.*\bmicro-batch 2 of 2, stage 1\b", r"rank 0: waiting at what goes back to stage 0"],
     False),
    ("one collective more", FSDP, one_more,
     [rf"rank 1: waiting at a sum of my own {MICRO}", "rank 0: waiting at FSDP of "], False),
    ("a door less", TP, skips,
     [r"rank 0: waiting at layers\.1\.mixer\.leave, forward", r"rank 1: waiting at layers\.1\.mlp\.enter"], False),
    ("out of memory", TP, out_of_memory, [rf"rank 1: raised an error: OutOfMemoryError: no room {MICRO}"], True),
    ("an error outside of our calls", TP, ends_between_steps, ["rank 1: raised an error: KeyError: 'label'"], True),
    ("an error of its own", TP, raises, ["rank 1 failed in the loss of step 1: ValueError: a label is missing"], True),
]  # fmt: skip
TRIED = parts.every(3, LOST)


@pytest.mark.parametrize(
    ("mesh", "harm", "message", "at_once"),
    [case[1:] for case in TRIED],
    ids=[f"{case[0]}, {trials.named(case[1])}" for case in TRIED],
)
def test_every_other_rank_names_it(
    source: Path, tmp_path: Path, mesh: dict[str, int], harm: Any, message: list[str], at_once: bool
) -> None:
    size = trials.world_of(mesh)
    result = survive(size, size - 1, tmp_path, trained, source, mesh, harm, size - 1)
    for rank in range(size - 1):
        outcome = result[rank]
        for pattern in message:
            assert re.search(pattern, outcome.output), outcome
        assert outcome.seconds < (SOON_S - TIMEOUT_S if at_once else SOON_S)
        assert outcome.left_s < 2


@pytest.mark.parametrize(
    ("inner", "place"),
    [
        (["meshwright/mesh/local_collectives.py", "torch/_ops.py", "meshwright/parallel/fsdp.py"], (WAITS, "FSDP")),
        (["work/train.py"], (WORKS, "train.py:7 in inner")),
        (["torch/distributed/distributed_c10d.py", "work/train.py"], (WAITS, "train.py:7 in inner")),
        (["torch/nn/functional.py", "transformers/trainer.py", "work/train.py"], (WORKS, "train.py:7 in inner")),
        (["meshwright/parallel/fp8_gather.py"], (WORKS, "fp8_gather.py:7 in inner")),
    ],
)
def test_a_hook_that_fsdp_calls_is_no_waiting(inner: list[str], place: tuple[str, str]) -> None:
    site = Path(torch.__file__).parents[1]
    files = [f"{site}/{file}" if file.startswith(("torch", "transformers")) else f"/{file}" for file in inner]
    outer = [f"{site}/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "/work/train.py"]
    assert heartbeat._look((file, 7, "inner") for file in files + outer) == place


def keeps_the_store(source: Path, harm: Callable[[mw.Engine], None], port: int, late_s: float) -> Outcome:
    """The store dies with rank 0 if there is no torchrun."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
    if os.environ["RANK"] == "0":
        time.sleep(late_s)  # a rank that is slow to start is not lost
    return trained(source, TP, harm, victim=0)


@pytest.mark.parametrize(("act", "late_s"), [(killed, TIMEOUT_S + 4), (stopped, 0.0)])
def test_the_keeper_of_the_store_is_lost(source: Path, tmp_path: Path, act: Callable[[], None], late_s: float) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    harm = at_a_door("layers.1.mixer.enter", 2, act)
    outcome = survive(2, 0, tmp_path, keeps_the_store, source, harm, port, late_s)[1]
    assert re.search(r"rank 0: .*\bstore\b", outcome.output), outcome
    assert re.search(rf"rank 1: .*layers\.1\.mixer\.enter, forward {MICRO}", outcome.output), outcome
    assert outcome.seconds < SOON_S


def ended_by_torchrun(source: Path, harm: Callable[[mw.Engine], None], log: Path) -> None:
    heartbeat.logger.addHandler(logging.FileHandler(log))
    if os.environ["RANK"] == "0":
        real = heartbeat.Watch.diagnosis

        def and_torchrun_is_quicker(watch: heartbeat.Watch) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(watch)

        heartbeat.Watch.diagnosis = and_torchrun_is_quicker  # type: ignore[method-assign]
    trained(source, TP, harm, victim=1)


def test_who_is_ended_by_torchrun_says_why_first(source: Path, tmp_path: Path) -> None:
    harm = at_a_door("layers.1.mixer.enter", 2, killed)
    assert survive(2, 1, tmp_path, ended_by_torchrun, source, harm, tmp_path / "log") == {}
    assert re.search(r"rank 1: .*\bdied\b.*\bprocess\b", (tmp_path / "log").read_text())


def lost_under_run_ranks(source: Path, harm: Callable[[mw.Engine], None]) -> None:
    engine = mw.Engine(mw.load(source, mw.Mesh(tp=2), dtype=torch.float64), lr=1e-2)
    if engine.model.mesh.rank == 1:
        harm(engine)
    engine.step(tiny.batches(0))


def test_run_ranks_says_where_all_stand(source: Path) -> None:
    asleep_there = at_a_door("layers.1.mixer.enter", 2, asleep)
    with pytest.raises(RankError) as hung:
        run_ranks(2, lost_under_run_ranks, source, asleep_there, seconds=3)
    place = r"layers\.\d\.mixer\.enter, forward \(step 0, micro-batch 2 of 2\)"
    assert re.search(r"\[0, 1\] of 2 .*\bhung\b.* 3 s\b", str(hung.value))
    assert re.search(rf"rank 0 .*{place}", str(hung.value))
    assert re.search(r"rank 1 .*test_lost_ranks\.py:\d+ in asleep\b.*\blayers\.0\.mlp\.leave", str(hung.value))
    with pytest.raises(RankError, match=r"\[1\] of 2 .*\bdied\b.*-9\b"):
        run_ranks(2, lost_under_run_ranks, source, in_the_loss(1, killed), seconds=20)


def at(state: str, place: str, beat: float = 10.0, still_s: float = 4.0, home: str = "host", pid: int = 1) -> Heartbeat:
    return Heartbeat(state, place, "step 7", still_s, beat, home, pid)


def test_the_guilty_come_first_and_thousands_of_ranks_fit_into_a_few_lines() -> None:
    before: dict[int, Heartbeat | None] = {rank: at(WAITS, "the norm") for rank in range(4096)}
    after: dict[int, Heartbeat | None] = {rank: at(WAITS, "the norm", 14.0, 8.0) for rank in range(4096)}
    after[77] = before[77] = at(WORKS, "after the norm", 9.0, home="elsewhere")
    after[78] = at(RAISED, "ValueError: no", 13.0)
    after[79], after[80] = at(WORKS, "train.py:3 in next, after the loss", 14.0, 8.0), None
    after[81] = at(LEFT, "after the norm", 12.0)
    message = diagnose(before, after, "host", 600.0)
    in_this_order = (
        r"rank 80: .*join",
        r"rank 77: .*\bsign of life\b.*\bafter the norm\b.*\bstep 7\b.*\b5 s\b",
        r"rank 81: .*\bafter the norm\b.*\bstep 7\b.*\b2 s\b",
        r"rank 78: .*\bValueError: no\b.*\bstep 7\b.*\b1 s\b",
        r"rank 79: .*\btrain\.py:3 in next\b.*\bthe loss\b.*\bstep 7\b.*\b8 s\b",
        r"ranks 0-76, 82-4095: .*\bthe norm\b.*\bstep 7\b.*\b8 s\b",
        r"timeout_s=600\b",
    )
    assert re.match(".*".join(in_this_order), message), message
    assert re.search(r"its own output, and start\b.*\.$", message), "the advice is for the worst fate"
    assert len(message) < 800


def test_the_odd_one_out_comes_first() -> None:
    """All ranks wait: seven at one collective, and one at another."""
    where = {rank: at(WAITS, "the loss" if rank == 5 else "the norm") for rank in range(8)}
    later = {rank: at(WAITS, each.at, 14.0, 8.0) for rank, each in where.items()}
    assert re.match(r"rank 5: .*the loss.*ranks 0-4, 6-7: .*the norm", diagnose(where, later, "host", 600.0))


def test_many_groups_are_counted_and_show_the_longest_wait() -> None:
    """Six groups are named; each rank of the others counts. The ranks of one place have waited for different times."""
    places = {rank: f"place {rank % 10 if rank < 40 else 10}" for rank in range(60)}
    before = {rank: at(WAITS, place) for rank, place in places.items()}
    after = {rank: at(WAITS, place, 14.0, float(rank + 1)) for rank, place in places.items()}
    message = diagnose(before, after, "host", 600.0)
    assert re.match(r"rank.*: waiting at place 0 \(step 7\), for 31 s\. ", message), message
    assert message.count("waiting at") == 6
    assert "36 ranks elsewhere." in message


def test_what_a_silent_process_of_this_machine_is() -> None:
    silent = {0: at(WORKS, "x", pid=os.getpid())}
    assert re.search(r"no sign of life\b.*\bprocess runs", diagnose(silent, silent, "host", 1.0))
    gone = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    gone.start()
    assert gone.pid is not None
    gone.join()
    silent = {0: at(WORKS, "x", pid=gone.pid)}
    assert re.search(r"\bdied\b.*\bprocess\b", diagnose(silent, silent, "host", 1.0))
    assert re.search(r"no sign of life\b.*\bmachine\b", diagnose(silent, silent, "elsewhere", 1.0))
    nameless = {0: at(WORKS, "x", home="", pid=gone.pid)}  # the table of processes has no name: it may be any machine's
    assert re.search(r"no sign of life\b.*\bmachine\b", diagnose(nameless, nameless, "", 1.0))


@pytest.mark.parametrize(
    ("agent", "ranks", "keeper"),
    [
        ("True", (0, 1), r"the process that started .* on 127\.0\.0\.1"),
        ("", (0, 1), "rank 0"),
        ("", (1, 2), "global rank 0"),
    ],
)
def test_who_keeps_the_store(agent: str, ranks: tuple[int, ...], keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No torchrun where our own launcher started the ranks."""
    for name, value in {"TORCHELASTIC_USE_AGENT_STORE": agent, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    watch = SimpleNamespace(rank=1, ranks=ranks, _elsewhere=lambda: "", _ask=lambda result: None)
    message = heartbeat.Watch.diagnosis(watch)  # type: ignore[arg-type] # a store that does not answer
    assert re.match(f"{keeper}: no answer from the store", message), message


@pytest.mark.parametrize(
    ("rank", "ranks", "local", "others"),
    [(5, range(8), "4", "ranks 0-3"), (2, range(8), "4", "ranks 4-7"), (1, range(8), "8", ""), (0, range(2), "", "")],
)
def test_ranks_of_other_machines(
    rank: int, ranks: range, local: str, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the store nothing is known of them. Machines have consecutive ranks."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    message = heartbeat.Watch._elsewhere(SimpleNamespace(rank=rank, ranks=tuple(ranks)))  # type: ignore[arg-type]
    assert message == (f"Lost or out of reach: {others}, on other machines. " if others else "")


def test_beats_are_rarer_with_thousands_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 1.0)
    assert [heartbeat._every_s(size) for size in (2, 1000, 4000)] == [1.0, 1.0, 4.0]
    assert heartbeat._patience_s(4000) == 10.0


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_the_flight_recorder_is_on_unless_the_user_says_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [each for names in joining.RECORDER for each in names]
    for each in every:
        monkeypatch.setenv(each, "")  # so that what is set below is taken back
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, "/logs/rank_")
    assert joining.record(torch.device("cpu")) == ""
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    message = joining.record(torch.device("cuda", 0))
    assert "/logs/rank_*" in message
    result = {each: os.environ[each] for each in every if each in os.environ}
    assert result == {name: "/logs/rank_", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize(("backends", "refused"), [("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False)])
def test_a_gpu_with_gloo_is_refused(backends: str, refused: bool) -> None:
    """FSDP2 over gloo reads a device's pointer on the host and ends in a segmentation fault (pytorch#132471)."""
    with patch("torch.distributed.get_backend_config", lambda: backends):
        joining.refuse_gloo_on(torch.device("cpu"))
        with pytest.raises(mw.MeshError, match=f"cuda:0.*NCCL.*{backends}") if refused else contextlib.nullcontext():
            joining.refuse_gloo_on(torch.device("cuda", 0))


@pytest.mark.parametrize("state", [RAISED, LEFT])
def test_a_rank_that_raised_does_not_wait_for_nccl(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's orderly end waits for ranks that are in the middle of a collective."""
    ways: list[str] = []
    for name, answer in {"is_initialized": True, "get_backend_config": "cpu:gloo,cuda:nccl"}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ways.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: ways.append("abort"))
    monkeypatch.setattr(heartbeat.position, "now", (state, "a step", 0.0))
    joining.leave()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    joining.leave()  # the program has left the group itself
    monkeypatch.undo()
    assert ways == ["abort" if state == RAISED else "destroy"]


def says_it_in_the_log(source: Path, message: Path) -> list[str]:
    """Where torch would end the process, no code catches an error: the verdict is logged. Rank 1 stays away until both
    ranks have logged their own, however busy the machine is."""
    text: list[str] = []
    engine = mw.Engine(mw.load(source, mw.Mesh(tp=2, timeout_s=20), dtype=torch.float64), lr=1e-2)
    watch = heartbeat.position.watch
    assert watch is not None

    def note(record: logging.LogRecord) -> bool:
        text.append(record.getMessage())
        (message / str(watch.rank)).touch()
        return True

    def stay_away() -> None:
        until = time.monotonic() + 15
        while len(list(message.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.1)

    heartbeat.logger.addFilter(note)
    watch.loud, watch.timeout_s = "The dump is there.", 1.0
    if engine.model.mesh.rank == 1:
        in_the_loss(1, stay_away)(engine)
    engine.step(tiny.batches(0))
    return text


def test_a_rank_that_stands_too_long_says_so_in_the_log(source: Path, tmp_path: Path) -> None:
    for message in run_ranks(2, says_it_in_the_log, source, tmp_path, seconds=40):
        assert len(message) == 1
        assert re.search(
            r"rank 1: .*test_lost_ranks\.py:\d+ in stay_away\b.*rank 0: .* The dump is there\.", message[0]
        )
