"""Heartbeats: each rank writes its position and the time to the run's store, so that an error after a hang names the
lost rank.

At each door the main thread records its position by assigning one attribute (no lock, no system call). A second thread
writes the position to the store once per second. So when a collective fails or times out, the `RankError` can name the
rank that is dead, elsewhere or waiting. On a GPU the host runs ahead of the device: the door is the host's position,
and torch's flight recorder knows the device's.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..errors import RankError
from ..log import logger
from .deferred_signals import deferred_signal
from .diagnosis import LEFT, RAISED, WAITS, WORKS, Heartbeat, Heartbeats, diagnose, named_in
from .trace_regions import region, trace

BEAT_S = 1.0
PREFIX = "heartbeat"
_STORE_S = 3.0  # seconds without an answer after which the store counts as gone
_FOREIGN = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parents[1]))  # paths of code other than the user's

# FSDP calls this code of ours to communicate, so a rank that waits there waits in FSDP.
_SENDS = tuple(
    os.path.join(*at)
    for at in (
        ("mesh", "local_sockets.py"),
        ("mesh", "local_collectives.py"),
        ("parallel", "fsdp.py"),
        ("verify", "recorder.py"),
    )
)


class _Position:
    """The state of this process, which is at one place at a time."""

    now: tuple[str, str, float] = (WORKS, "the start", time.monotonic())  # state, place, since when
    task = ""
    inside = False  # whether a call is running that `names_lost_ranks` guards
    watch: Watch | None = None  # None in a run with one rank


position = _Position()


def doing(task: str) -> None:
    """Record the step and micro-batch that this rank works on. Errors show it next to the place."""
    position.task = task


def waits_at() -> str:
    """Return ` at layers.0.mixer.enter, forward` while this rank is in a collective, otherwise nothing."""
    state, at, _ = position.now
    return f" at {at}" if state == WAITS else ""


class waiting_at:
    """Mark a collective, as in `with waiting_at("the norm"):`. Until it ends, that is where this rank waits.

    A trace shows it under that name. It is a class instead of a generator because it runs at every door, and must be
    cheap.
    """

    traced: AbstractContextManager[Any] | None = None

    def __init__(self, *at: str) -> None:
        self.at = at

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            position.now = (WAITS, ", ".join(self.at), time.monotonic())
            if trace.on:
                self.traced = region(", ".join(self.at))
                self.traced.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.traced is not None:
            self.traced.__exit__(None, None, None)
        if kind is None and not torch.compiler.is_compiling():  # after a failure the rank is still there
            position.now = (WORKS, f"after {', '.join(self.at)}", time.monotonic())


@contextlib.contextmanager
def names_lost_ranks() -> Iterator[None]:
    """Turn a collective that fails inside into a RankError that names the lost rank.

    Any other error goes into the heartbeat, so that ranks that then wait in vain can report it.
    """
    position.inside = True
    try:
        yield
    except Exception as error:
        if position.watch is None or isinstance(error, RankError):
            raise
        # This rank is at fault: it reports its error, and ranks that wait for it will read that.
        if not _of_a_collective(error):
            position.now = (RAISED, _text(error), time.monotonic())
            position.watch.tell()
            raise
        position.now = (WAITS, _stood(error), position.now[2])
        with deferred_signal(
            signal.SIGTERM
        ) as came:  # torchrun ends all ranks of a machine as soon as one of them dies
            diagnosis = position.watch.diagnosis()
            if came:
                logger.error("%s", diagnosis)
        raise RankError(diagnosis) from error
    finally:
        position.inside = False


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _of_a_collective(error: Exception) -> bool:
    """Return whether an error comes from a collective."""
    if isinstance(error, dist.DistError):
        return True
    if isinstance(error, torch.OutOfMemoryError):  # maybe in a collective, but no other rank is to blame
        return False
    known = ("gloo", "caused pair closure")  # gloo raises plain RuntimeErrors
    return isinstance(error, RuntimeError) and (position.now[0] == WAITS or any(text in str(error) for text in known))


def _stood(error: Exception) -> str:
    """Describe where the main thread was when a collective failed: its door, or a unit of FSDP."""
    state, at, _ = position.now
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    # FSDP's frames hold the parameter group as `self`; its name says which unit was being gathered or reduced.
    groups = [frame.f_locals.get("self") for frame in frames]
    unit = next((group._module_fqn or "the root" for group in groups if isinstance(group, FSDPParamGroup)), "")
    lines = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames]
    return at if state == WAITS else f"{_look(lines)[1]}{unit and f' of {unit}'}, {at}"


def _look(lines: Iterable[tuple[str, int, str]]) -> tuple[str, str]:
    """Return state and place of a thread that is not at a door of ours: in FSDP, or at a line of the user's code.

    `lines`: innermost first.
    """
    state = WORKS
    for file, number, function in lines:
        if file.endswith(_SENDS):
            continue
        # FSDP's hooks run between doors, so its frames are the only sign that it communicates.
        if f"{os.sep}_fully_shard{os.sep}" in file:
            return WAITS, "FSDP"
        if f"torch{os.sep}distributed" in file:
            state = WAITS
        if not file.startswith(_FOREIGN):
            return state, f"{Path(file).name}:{number} in {function}"
    return state, "nowhere"


def _main_thread() -> list[tuple[str, int, str]]:
    """Return the Python lines of the main thread.

    faulthandler prints them, because another thread must not touch the frames of a running one.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().split("hread 0x")
    # faulthandler names threads by their pthread id in hex.
    ident = f"{threading.main_thread().ident:016x}"
    main = next((text for text in threads if text.startswith(ident)), "")
    return [(file, int(number), name) for file, number, name in re.findall(r'File "(.*)", line (\d+) in (.*)', main)]


def heartbeat() -> Heartbeat:
    """Return this rank's current heartbeat. If it has passed no door for a while, look up its current line of code."""
    state, at, since = position.now
    still_s = time.monotonic() - since
    # Reading another thread's stack takes milliseconds, so only a rank that has passed no door for a while does it.
    if state == WORKS and still_s > BEAT_S / 2:
        state, line = _look(_main_thread())
        at = f"{line}, {at}"
    return Heartbeat(state, at, position.task, still_s, time.time(), _home(), os.getpid())


@functools.cache
def _home() -> str:
    """Name the process table of a pid: this boot of this machine, in this container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Watch:
    """The thread that writes this rank's heartbeat, until `leave`.

    With `loud` it also logs a diagnosis shortly before the timeout: on a GPU torch's watchdog then ends the process,
    and Python never sees an error. `rank` is this process's global rank, `ranks` are those of its mesh, and `store` is
    the mesh's own: another mesh of the same run writes its own heartbeats.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout_s: float, loud: str) -> None:
        # A separate connection: a store serves one request at a time, and another thread may be blocked in one.
        self.store = PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined] # torch's stub lacks it
        self.store.set_timeout(datetime.timedelta(seconds=_STORE_S))
        self.rank, self.ranks, self.timeout_s, self.loud = rank, tuple(ranks), timeout_s, loud
        self._over = threading.Event()
        position.now = (WORKS, "after joining the run", time.monotonic())
        # Write the first heartbeat at once, so that a rank without any never joined.
        self.tell()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Write the heartbeat."""
        self.store.set(str(self.rank), json.dumps(asdict(heartbeat())))

    def _beat(self) -> None:
        """Write heartbeats until the run is over or the store is gone."""
        try:
            while not self._over.wait(_every_s(len(self.ranks))):
                self.tell()
                # Only diagnose inside a guarded call: between calls, user code may take any time.
                if self.loud and position.inside and time.monotonic() - position.now[2] > _loud_after_s(self.timeout_s):
                    threading.Thread(target=self._speak, args=(self.loud,), daemon=True).start()
                    self.loud = ""
        except dist.DistError:
            return  # the store is gone, and the run with it: `diagnosis` says so

    def _speak(self, where: str) -> None:
        logger.error("%s %s", self.diagnosis(), where)

    def leave(self) -> None:
        """Stop writing, and leave a last heartbeat that says whether this rank ended normally."""
        self._over.set()
        self._thread.join(_STORE_S)
        if self._thread.is_alive():  # the store is stuck, and would block this thread too
            return
        error = sys.last_value if hasattr(sys, "last_value") else None  # the error that ended the script, if any
        if position.now[0] != RAISED:
            position.now = (LEFT, *position.now[1:]) if error is None else (RAISED, _text(error), time.monotonic())
        with contextlib.suppress(dist.DistError):  # the store is gone: nothing reads it any more
            self.tell()

    def diagnosis(self) -> str:
        """Return the diagnosis of the first rank that failed, the same text on all ranks.

        It asks the store in a thread, because a store whose process is stopped never answers.
        """
        answers = [
            f"{_keeper(self.ranks)}: no answer from the store of the run, which it keeps; it died, is stopped, or "
            f"cannot be reached. {self._elsewhere()}{named_in(self.ranks, [self.rank])}: {heartbeat()}. "
            "See its own output and the log of its machine, and start all ranks again."
        ]
        # The daemon thread may hang with the store; the rank must not.
        asking = threading.Thread(target=self._ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(2 * _patience_s(len(self.ranks)) + _STORE_S)
        return answers[-1]

    def _elsewhere(self) -> str:
        """Name the ranks of other machines, about which nothing is known without the store.

        torchrun numbers the ranks of a machine consecutively.
        """
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks[-1] + 1))
        first = self.rank - self.rank % local
        others = [rank for rank in self.ranks if not first <= rank < first + local]
        return f"Lost or out of reach: {named_in(self.ranks, others)}, on other machines. " if others else ""

    def _ask(self, answers: list[str]) -> None:
        """Append the diagnosis, which the first rank to ask makes while all others wait for it."""
        with contextlib.suppress(dist.DistError):  # then the sentence about the lost store remains the last answer
            self.tell()
            # `add` is atomic: exactly one rank makes the diagnosis, so that all report the same.
            first = self.store.add("diagnosing", 1) == 1
            patience = time.monotonic() + 1.5 * _patience_s(len(self.ranks))
            while not first and time.monotonic() < patience:  # not `store.wait`, which would block our own heartbeats
                if self.store.check(["diagnosis"]):
                    answers.append(self.store.get("diagnosis").decode())
                    return
                time.sleep(_every_s(len(self.ranks)) / 5)
            answers.append(look_twice(self.store, self.ranks, self.timeout_s))
            self.store.set("diagnosis", answers[-1])


def _loud_after_s(timeout_s: float) -> float:
    """Return the seconds of waiting after which a diagnosis is logged: the diagnosis takes time itself, and must finish
    before the timeout."""
    return timeout_s - min(10.0, timeout_s / 10)


def _keeper(ranks: Sequence[int]) -> str:
    """Name the process that keeps the store of the run, in terms of a mesh of these global ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return named_in(ranks, [0]) if ranks[0] == 0 else "global rank 0"
    return f"the process that started the ranks (torchrun or meshwright) on {os.environ['MASTER_ADDR']}"


def look_twice(store: Store, ranks: Sequence[int], timeout_s: float) -> str:
    """Compare two readings of the heartbeats: a rank whose heartbeat did not move is not alive."""
    before = heartbeats(store, ranks)
    time.sleep(_patience_s(len(ranks)))
    return diagnose(before, heartbeats(store, ranks), _home(), timeout_s)


def _every_s(size: int) -> float:
    """Return the seconds between heartbeats, longer with thousands of ranks."""
    return max(1.0, size / 1000) * BEAT_S  # the store easily answers a thousand calls per second


def _patience_s(size: int) -> float:
    """Return how many seconds a heartbeat may stay unchanged before its rank counts as lost."""
    return 2.5 * _every_s(size)


def heartbeats(store: Store, ranks: Sequence[int]) -> Heartbeats:
    """Read the heartbeats of these ranks; None for ranks that never joined."""
    keys = [str(rank) for rank in ranks]
    present = keys if store.check(keys) else [key for key in keys if store.check([key])]
    read = {
        int(key): Heartbeat(**json.loads(text)) for key, text in zip(present, store.multi_get(present), strict=True)
    }
    return {rank: read.get(rank) for rank in ranks}


def last_seen(store: Store, ranks: range) -> list[str]:
    """Describe where each rank was last, for the process that keeps the store, which is not a rank itself."""
    # Each attempt of an elastic run has its own prefix.
    prefixes = {key.rpartition("/")[0] for key in store.list_keys() if f"/{PREFIX}/" in key}
    runs = [heartbeats(PrefixStore(prefix, store), ranks) for prefix in prefixes]
    return [f"rank {rank} {beat}" for beats in runs for rank, beat in beats.items() if beat]
