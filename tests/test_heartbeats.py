"""Check what heartbeats, diagnoses and deferred signals say and do, function by function, without ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.profiler import record_function

from meshwright.errors import RankError
from meshwright.watch import deferred_signal, diagnosis, heartbeat, region, trace
from meshwright.watch.diagnosis import LEFT, RAISED, WAITS, WORKS, Heartbeat
from meshwright.watch.heartbeat import Watch, names_lost_ranks, waiting_at, waits_at


@pytest.fixture
def position(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A position of this test alone; its clock counts 1, 2, 3."""
    own, clock = heartbeat._Position(), iter(range(1, 100))
    monkeypatch.setattr(heartbeat, "position", own)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), time=lambda: 77.0))
    return own


def at(
    state: str, place: str = "the norm", beat: float = 10.0, still_s: float = 4.0, task: str = "step 7"
) -> Heartbeat:
    return Heartbeat(state, place, task, still_s, beat, "host", 12)


def test_a_rank_waits_at_a_door_until_it_is_through(position: Any) -> None:
    with waiting_at("layers.3.mixer.enter", "forward"):
        assert position.now == (WAITS, "layers.3.mixer.enter, forward", 1.0)
        assert waits_at() == " at layers.3.mixer.enter, forward"
    assert position.now == (WORKS, "after layers.3.mixer.enter, forward", 2.0)
    assert waits_at() == ""
    with suppress(ValueError), waiting_at("the loss"):
        raise ValueError
    assert position.now == (WAITS, "the loss", 3.0), "after a failure it is still there"


def test_a_trace_shows_doors_even_those_that_fail(position: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    class Region(nullcontext[None]):
        def __exit__(self, *args: Any) -> None:
            ended.append((self.enter_result, args))

    monkeypatch.setattr(heartbeat, "region", Region)
    with waiting_at("untraced"):
        pass
    monkeypatch.setattr(trace, "on", True)
    with suppress(ValueError), waiting_at("the loss", "backward"):
        raise ValueError
    assert ended == [("the loss, backward", (None, None, None))]
    assert isinstance(region("update"), record_function)
    monkeypatch.setattr(trace, "on", False)
    assert isinstance(region("update"), nullcontext)


@pytest.mark.parametrize(
    ("error", "working", "waiting"),
    [
        (dist.DistBackendError("NCCL"), True, True),
        (torch.OutOfMemoryError("gloo"), False, False),
        (RuntimeError("[/gloo/pair.cc] reset by peer"), True, True),
        (RuntimeError("Application timeout caused pair closure"), True, True),
        (RuntimeError("shapes do not match"), False, True),
        (ValueError("gloo"), False, False),
    ],
)
def test_errors_of_a_collective(position: Any, error: Exception, working: bool, waiting: bool) -> None:
    for state, expected in ((WORKS, working), (WAITS, waiting)):
        position.now = (state, "x", 0.0)
        assert heartbeat._of_a_collective(error) is expected


def inside_a_call(position: Any, error: BaseException) -> None:
    with names_lost_ranks():
        assert position.inside
        raise error


@pytest.mark.parametrize(
    ("error", "watched", "raised", "now", "num_tells"),
    [
        (ValueError("y" * 300), True, ValueError, (RAISED, "ValueError: " + "y" * 200, 1.0), 1),
        (ValueError("no"), False, ValueError, (WAITS, "the norm", 0.5), 0),
        (RankError("named"), True, RankError, (WAITS, "the norm", 0.5), 0),
        (RuntimeError("lost"), True, RankError, (WAITS, "the norm", 0.5), 0),
        (RuntimeError("lost"), False, RuntimeError, (WAITS, "the norm", 0.5), 0),
        (KeyboardInterrupt(), True, KeyboardInterrupt, (WAITS, "the norm", 0.5), 0),
    ],
)
def test_only_a_collective_that_fails_names_lost_ranks(
    position: Any, error: BaseException, watched: bool, raised: Any, now: Any, num_tells: int
) -> None:
    tells: list[int] = []
    watch = SimpleNamespace(tell=lambda: tells.append(1), diagnosis=lambda: "rank 3: died")
    position.watch, position.now = watch if watched else None, (WAITS, "the norm", 0.5)
    with pytest.raises(raised) as caught:
        inside_a_call(position, error)
    assert (position.inside, position.now, len(tells)) == (False, now, num_tells)
    assert (caught.value is error) == (type(error) is raised)
    if caught.value is not error:
        assert str(caught.value) == "rank 3: died"
        assert caught.value.__cause__ is error


def fails(self: Any, inner: Any = None) -> None:
    if inner is not None:
        fails(inner)
    raise RuntimeError("gloo")


@pytest.mark.parametrize(
    ("names", "unit"), [(["layers.4"], " of layers.4"), ([None], " of the root"), (["b", "a"], " of a"), ([], "")]
)
def test_a_failure_between_doors_names_the_innermost_unit(position: Any, names: list[str | None], unit: str) -> None:
    groups: list[Any] = [object.__new__(FSDPParamGroup) for _ in names]
    for group, name in zip(groups, names, strict=True):
        group._module_fqn = name
    with pytest.raises(RuntimeError) as caught:
        fails(*groups or [None])
    position.now = (WORKS, "after the norm", 0.0)
    line = fails.__code__.co_firstlineno + 3
    assert heartbeat._stood(caught.value) == f"test_heartbeats.py:{line} in fails{unit}, after the norm"
    position.now = (WAITS, "the norm", 0.0)
    assert heartbeat._stood(caught.value) == "the norm"


def test_the_lines_of_the_main_thread_are_read_from_another() -> None:
    with ThreadPoolExecutor(1) as pool:
        lines = pool.submit(heartbeat._main_thread).result()
    functions = [function for _, _, function in lines]
    assert "_main_thread" not in functions
    own = functions.index("test_the_lines_of_the_main_thread_are_read_from_another")
    assert own < functions.index("pytest_pyfunc_call"), "innermost first"
    assert lines[own][0] == __file__


@pytest.mark.parametrize(
    ("state", "since", "expected"),
    [
        (WORKS, 0.0, (WAITS, "FSDP, the norm", 1.0)),
        (WORKS, 0.75, (WORKS, "the norm", 0.25)),
        (WAITS, 0.0, (WAITS, "the norm", 1.0)),
        (RAISED, 0.0, (RAISED, "the norm", 1.0)),
    ],
)
def test_only_a_rank_that_passed_no_door_for_a_while_looks_at_its_lines(
    position: Any, monkeypatch: pytest.MonkeyPatch, state: str, since: float, expected: tuple[str, str, float]
) -> None:
    monkeypatch.setattr(heartbeat, "_main_thread", lambda: [("/x/_fully_shard/y.py", 1, "f")])
    monkeypatch.setattr(heartbeat, "_home", lambda: "boot")
    position.now, position.task = (state, "the norm", since), "step 9"
    beat = heartbeat.heartbeat()
    assert (beat.state, beat.at, beat.still_s) == expected
    assert (beat.task, beat.beat, beat.home) == ("step 9", 77.0, "boot")


@pytest.mark.parametrize(
    ("state", "error", "expected"),
    [
        (WORKS, None, (LEFT, "x", 0.5)),
        (WORKS, ValueError("bad"), (RAISED, "ValueError: bad", 1.0)),
        (RAISED, ValueError("later"), (RAISED, "x", 0.5)),
        (RAISED, None, (RAISED, "x", 0.5)),
    ],
)
def test_the_last_heartbeat_says_how_a_rank_ended(
    position: Any, monkeypatch: pytest.MonkeyPatch, state: str, error: Any, expected: Any
) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    tells: list[int] = []
    for alive in (True, False):
        position.now = (state, "x", 0.5)
        thread = SimpleNamespace(join=lambda _: None, is_alive=lambda alive=alive: alive)
        watch: Any = SimpleNamespace(_over=threading.Event(), _thread=thread, tell=lambda: tells.append(1))
        Watch.leave(watch)
        assert watch._over.is_set()
        assert (position.now, len(tells)) == (((state, "x", 0.5), 0) if alive else (expected, 1))

    def gone() -> None:
        raise dist.DistNetworkError("the store is gone")

    watch.tell = gone
    Watch.leave(watch)


@pytest.mark.parametrize(
    ("loud", "inside", "since", "said"),
    [("W", True, 0.0, ["W"]), ("", True, 0.0, []), ("W", False, 0.0, []), ("W", True, 5.0, [])],
)
def test_a_long_wait_inside_a_call_is_logged_once(
    position: Any, loud: str, inside: bool, since: float, said: list[str]
) -> None:
    """The first beat comes after 1 s on this clock, and the timeout leaves 0.9 s."""
    over, spoken, tells = iter([False, False, True]), list[str](), list[int]()
    position.inside, position.now = inside, (WAITS, "x", since)
    watch: Any = SimpleNamespace(
        _over=SimpleNamespace(wait=lambda _: next(over)), ranks=(0, 1), tell=lambda: tells.append(1), loud=loud,
        timeout_s=1.0, _speak=spoken.append,
    )  # fmt: skip
    Watch._beat(watch)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.endswith("(append)"):
            thread.join(5)
    assert (spoken, len(tells)) == (said, 2)


def test_heartbeats_end_with_the_store() -> None:
    tells: list[int] = []

    def tell() -> None:
        tells.append(1)
        raise dist.DistNetworkError("the store is gone")

    watch: Any = SimpleNamespace(_over=SimpleNamespace(wait=lambda _: len(tells) > 1), ranks=(0,), tell=tell, loud="")
    Watch._beat(watch)
    assert tells == [1]


def test_one_rank_makes_the_diagnosis_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tells, made = HashStore(), list[int](), iter(["first", "second"])
    looked: list[Any] = []

    def look(*args: Any) -> str:
        looked.append(args[1:])
        return next(made)

    monkeypatch.setattr(heartbeat, "look_twice", look)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.004)
    watch: Any = SimpleNamespace(store=store, ranks=(2, 5), timeout_s=30.0, tell=lambda: tells.append(1))
    first, other, late = [""], [""], [""]
    Watch._ask(watch, first)
    Watch._ask(watch, other)
    store.delete_key("diagnosis")
    Watch._ask(watch, late)
    assert (first, other, late) == (["", "first"], ["", "first"], ["", "second"])
    assert (looked, len(tells)) == ([((2, 5), 30.0)] * 2, 3)


@pytest.mark.parametrize(("after_s", "answer"), [(3.6, "of the first rank"), (9.0, "of its own")])
def test_other_ranks_wait_for_the_first_diagnosis(monkeypatch: pytest.MonkeyPatch, after_s: float, answer: str) -> None:
    """They wait for 1.5 times the 2.5 seconds that the first rank needs at least."""
    store, clock, answers = HashStore(), SimpleNamespace(now=0.0), [""]
    store.add("diagnosing", 1)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= after_s:
            store.set("diagnosis", "of the first rank")

    monkeypatch.setattr(heartbeat, "BEAT_S", 1.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(heartbeat, "look_twice", lambda *_: "of its own")
    watch: Any = SimpleNamespace(store=store, ranks=(0, 1), timeout_s=30.0, tell=lambda: None)
    Watch._ask(watch, answers)
    assert answers == ["", answer]
    assert clock.now == pytest.approx(3.6 if answer == "of the first rank" else 3.8)


@pytest.mark.parametrize(("size", "seconds"), [(2, 8.0), (4000, 23.0)])
def test_a_large_mesh_has_more_time_for_its_diagnosis(
    monkeypatch: pytest.MonkeyPatch, size: int, seconds: float
) -> None:
    waited: list[float] = []
    thread = SimpleNamespace(start=lambda: None, join=waited.append)
    monkeypatch.setattr(heartbeat, "BEAT_S", 1.0)
    monkeypatch.setattr(heartbeat, "threading", SimpleNamespace(Thread=lambda **_: thread))
    monkeypatch.setattr(heartbeat, "heartbeat", lambda: at(WAITS))
    watch: Any = SimpleNamespace(rank=1, ranks=tuple(range(size)), _elsewhere=lambda: "", _ask=None)
    assert "no answer from the store" in Watch.diagnosis(watch)
    assert waited == [seconds]


def test_a_rank_writes_its_first_heartbeat_as_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    store, threads = HashStore(), list[Any]()
    own = SimpleNamespace(clone=lambda: store)
    started = SimpleNamespace(start=lambda: threads.append("started"))
    monkeypatch.setattr(heartbeat, "position", heartbeat._Position())
    monkeypatch.setattr(heartbeat, "threading", SimpleNamespace(
        Event=threading.Event, Thread=lambda **given: threads.append(given) or started))  # fmt: skip
    watch = Watch(own, 5, [3, 5], 30.0, "loud")  # type: ignore[arg-type] # a stand-in for the store of the mesh
    read = heartbeat.heartbeats(PrefixStore(heartbeat.PREFIX, store), [3, 5])
    assert (read[3], read[5] and (read[5].state, read[5].at)) == (None, (WORKS, "after joining the run"))
    assert (watch.rank, watch.ranks, watch.timeout_s, watch.loud) == (5, (3, 5), 30.0, "loud")
    assert watch.store.timeout == timedelta(seconds=heartbeat._STORE_S)
    assert threads == [dict(target=watch._beat, name="heartbeat", daemon=True), "started"]


def test_a_table_of_processes_is_of_a_boot_and_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    home = heartbeat._home.__wrapped__
    assert home() == Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    monkeypatch.setattr(heartbeat, "Path", lambda _: Path("/no/such/file"))
    assert home() == "", "a system without /proc has no name for it"


def test_heartbeats_in_the_store() -> None:
    """Each attempt of a run has a prefix of its own, and other keys lie beside heartbeats."""
    store = HashStore()
    for prefix, rank, place in (("try_0", 0, "the loss"), ("try_0", 2, "the norm"), ("try_1", 2, "the end")):
        own = PrefixStore(f"{prefix}/heartbeat", store)
        own.set(str(rank), json.dumps(asdict(at(WAITS, place, task=""))))
        own.add("diagnosing", 1)
    store.set("try_2/other/1", "no heartbeat")
    read = heartbeat.heartbeats(PrefixStore("try_0/heartbeat", store), [2, 1, 0])
    assert [*read.items()] == [(2, at(WAITS, task="")), (1, None), (0, at(WAITS, "the loss", task=""))]
    assert [*heartbeat.heartbeats(PrefixStore("try_0/heartbeat", store), [2, 0])] == [2, 0]
    places = {"0 waits at the loss", "2 waits at the norm", "2 waits at the end"}
    assert {*heartbeat.last_seen(store, range(3))} == {f"rank {place}, for 4 s" for place in places}


def test_two_readings_are_compared_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, waited, home = iter(["before", "after"]), list[float](), lambda: "boot"
    monkeypatch.setattr(heartbeat, "heartbeats", lambda *_: next(readings))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(heartbeat, "_home", home)
    monkeypatch.setattr(heartbeat, "diagnose", lambda *args: args)
    monkeypatch.setattr(heartbeat, "BEAT_S", 1.0)
    assert heartbeat.look_twice(HashStore(), range(3000), 5.0) == ("before", "after", "boot", 5.0)  # type: ignore[comparison-overlap]
    assert waited == [7.5]


@pytest.mark.parametrize(
    ("timeout_s", "after_s"), [(10.0, 9.0), (99.0, 89.1), (100.0, 90.0), (101.0, 91.0), (600.0, 590.0)]
)
def test_the_diagnosis_comes_before_torch_ends_the_process(timeout_s: float, after_s: float) -> None:
    assert heartbeat._loud_after_s(timeout_s) == pytest.approx(after_s)


@pytest.mark.parametrize(
    ("before", "after", "fate"),
    [
        (None, None, diagnosis.NEVER), (at(LEFT), at(LEFT), diagnosis.ENDED),
        (at(RAISED), at(RAISED), diagnosis.FAILED), (at(WORKS), at(WORKS), diagnosis.GONE),
        (at(WAITS), at(WAITS, beat=11.0), diagnosis.WAITING), (at(WAITS), at(WORKS), diagnosis.BUSY),
        (None, at(WORKS), diagnosis.BUSY),
    ],
)  # fmt: skip
def test_fates(before: Heartbeat | None, after: Heartbeat | None, fate: str) -> None:
    assert diagnosis._fate_of(before, after, "another host") == fate


@pytest.mark.parametrize(
    ("state", "fate"),
    [("T", "STOPPED"), ("t", "STOPPED"), ("X", "DIED"), ("Z", "DIED"), ("S", "HELD"), ("R", "HELD"), ("D", "HELD")],
)
def test_states_of_a_silent_process(monkeypatch: pytest.MonkeyPatch, state: str, fate: str) -> None:
    texts = {"/proc/12/stat": f"12 (odd) T) {state} 1 Z T"}
    monkeypatch.setattr(diagnosis, "Path", lambda path: SimpleNamespace(read_text=lambda: texts[path]))
    assert diagnosis._fate_of(at(WORKS), at(WORKS), "host") == getattr(diagnosis, fate)


@pytest.mark.parametrize(
    ("fate", "seen", "place", "since"),
    [
        ("NEVER", None, "", ""),
        ("FAILED", at(RAISED, "ValueError: x"), ": ValueError: x (step 7)", ", 15 s ago"),
        ("WAITING", at(WAITS), " at the norm (step 7)", ", for 6 s"),
        ("BUSY", at(WORKS, "a.py:3"), ": a.py:3 (step 7)", ", for 6 s"),
        ("DIED", at(WAITS, task=""), "; last seen at the norm", ", 15 s ago"),
        ("ENDED", at(LEFT, "after it"), "; last seen after it (step 7)", ", 15 s ago"),
    ],
)
def test_where_ranks_are_and_since_when(fate: str, seen: Heartbeat | None, place: str, since: str) -> None:
    """The longest time of a group counts: one rank stood for 6 s, and one was last seen 15 s ago."""
    beats = [at(WORKS, beat=20.0, still_s=6.0), seen] if seen else []
    assert diagnosis._place(getattr(diagnosis, fate), seen) == place
    assert diagnosis._since(getattr(diagnosis, fate), beats, 25.0) == since


def test_ranks_are_named_by_their_mesh() -> None:
    assert diagnosis.spans([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
    assert [diagnosis.named([3]), diagnosis.named([0, 1])] == ["rank 3", "ranks 0-1"]
    assert diagnosis.named([0, 1], (0, 1, 5)) == "ranks 0-1"
    assert diagnosis.named([0, 2], (4, 6, 9)) == "ranks 0, 2 (global ranks 4, 9)"
    assert diagnosis.named_in((4, 6, 9), [6]) == "rank 1 (global rank 6)"


def test_a_signal_is_held_back_to_the_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        handled.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with deferred_signal(signal.SIGUSR1) as came:
            signal.raise_signal(signal.SIGUSR1)
            assert (came, handled) == ([signal.SIGUSR1], [])
        assert handled == [signal.SIGUSR1]
        with suppress(ValueError), deferred_signal(signal.SIGUSR1):
            raise ValueError
        assert (handled, signal.getsignal(signal.SIGUSR1)) == ([signal.SIGUSR1], handler)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: deferred_signal(signal.SIGUSR1).__enter__()).result() == []
        assert signal.getsignal(signal.SIGUSR1) == handler
    finally:
        signal.signal(signal.SIGUSR1, before)
