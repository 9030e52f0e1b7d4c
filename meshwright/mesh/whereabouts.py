"""Where every rank stands, told to all through the store, so that a rank that is lost can be named, with its door.

The main thread notes each door by an attribute write; a thread puts the note into the store once a second. A collective
that fails is then a `RankError` that says who gives no sign of life, who is elsewhere, and who waits where.
On a GPU the host runs ahead: the door is the host's, and torch's flight recorder knows what the device does.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ..errors import RankError
from ..log import logger
from .verdict import LEFT, RAISED, WAITS, WORKS, Sign, judge

BEAT_S = 1.0
PREFIX = "whereabouts"
_STORE_TIMEOUT = datetime.timedelta(seconds=5)
_FOREIGN = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parents[1]))  # code that is not the user's


class _Here:
    """Of this process, which is at one place only."""

    now: tuple[str, str, float] = (WORKS, "the start", time.monotonic())  # its state, where, since when
    task = ""
    inside = False  # of a call that `watched` guards
    watch: Watch | None = None  # none in a run of one


here = _Here()


def task(what: str) -> None:
    """What the rank is at, beside the place: which step and micro-batch."""
    here.task = what


class standing:
    """`with standing("the norm"):` around a collective: the rank waits there, and then works on after it."""

    def __init__(self, *at: str) -> None:
        self.at = at

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            here.now = (WAITS, ", ".join(self.at), time.monotonic())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not torch.compiler.is_compiling():  # after a failure it stands there still
            here.now = (WORKS, f"after {', '.join(self.at)}", time.monotonic())


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """A collective that fails in here is a RankError that names the lost rank; of another error the others are told."""
    here.inside = True
    try:
        yield
    except Exception as error:
        if here.watch is None or isinstance(error, RankError):
            raise
        if not _of_a_collective(error):
            here.now = (RAISED, f"{type(error).__name__}: {str(error)[:200]}", time.monotonic())
            here.watch.tell()
            raise
        here.now = (WAITS, _stood(error), here.now[2])
        raise RankError(here.watch.verdict()) from error
    finally:
        here.inside = False


def _of_a_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    known = ("gloo", "caused pair closure")  # gloo raises plain RuntimeErrors
    return isinstance(error, RuntimeError) and (here.now[0] == WAITS or any(text in str(error) for text in known))


def _stood(error: Exception) -> str:
    state, at, _ = here.now
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    return at if state == WAITS or last is None else f"{_look(last.tb_frame)[1]}, {at}"


def _look(frame: FrameType) -> tuple[str, str]:
    """State and place of a thread outside of our own doors: FSDP's unit, or else the user's own line."""
    state, unit = WORKS, ""
    while frame.f_back and frame.f_code.co_filename.startswith(_FOREIGN):
        if f"torch{os.sep}distributed" in frame.f_code.co_filename:
            state = WAITS
        # Locals of FSDP's own short frames only: a look keeps them alive as long as their frame.
        if frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
            group = frame.f_locals.get("self")
            if isinstance(group, FSDPParamGroup):  # which may be half made
                unit = f"FSDP of {vars(group).get('_module_fqn') or 'the root'}"
        frame = frame.f_back
    return state, unit or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def sign() -> Sign:
    state, at, since = here.now
    still_s = time.monotonic() - since
    if state == WORKS and still_s > BEAT_S / 2:
        state, line = _look(sys._current_frames()[threading.main_thread().ident or 0])
        at = f"{line}, {at}"
    return Sign(state, at, here.task, still_s, time.time(), _home(), os.getpid())


@functools.cache
def _home() -> str:
    """Names the table of processes: of this boot of this machine, in this container."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Watch:
    """Tells where this rank stands until `leave`. `loud`: it logs the verdict itself, where torch ends the process
    before any error reaches Python."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, loud: str) -> None:
        # A connection of its own: another thread may be waiting for an answer on the first one.
        self.store = PrefixStore(PREFIX, store.clone())  # type: ignore[attr-defined] # torch's stub lacks it
        self.store.set_timeout(_STORE_TIMEOUT)
        self.rank, self.size, self.timeout_s, self.loud = rank, size, timeout_s, loud
        self._over = threading.Event()
        self.tell()
        self._thread = threading.Thread(target=self._beat, name="whereabouts", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        self.store.set(str(self.rank), json.dumps(asdict(sign())))

    def _beat(self) -> None:
        try:
            while not self._over.wait(_every_s(self.size)):
                self.tell()
                if self.loud and here.inside and time.monotonic() - here.now[2] > self.timeout_s:
                    logger.error("%s %s", self.verdict(), self.loud)
                    self.loud = ""
        except dist.DistError:
            return  # the store is gone, and the run with it: `verdict` says so

    def leave(self) -> None:
        self._over.set()
        self._thread.join(_STORE_TIMEOUT.total_seconds())
        with contextlib.suppress(dist.DistError):  # the store is gone: nobody asks any more
            here.now = (here.now[0] if here.now[0] == RAISED else LEFT, here.now[1], here.now[2])
            self.tell()

    def verdict(self) -> str:
        """Of the rank that failed first, for all. In a thread: a store whose process is stopped never answers."""
        found = ["the store of the run, which rank 0 or its torchrun keeps, does not answer; see why that one is gone"]
        asking = threading.Thread(target=self._ask, args=(found,), daemon=True)
        asking.start()
        asking.join(3 * _patience_s(self.size) + _STORE_TIMEOUT.total_seconds())
        return found[-1]

    def _ask(self, found: list[str]) -> None:
        with contextlib.suppress(dist.DistError):  # `found` then keeps what it says of a store that is gone
            self.tell()
            first = self.store.add("judges", 1) == 1
            patience = time.monotonic() + 2 * _patience_s(self.size)
            while not first and time.monotonic() < patience:  # no `store.wait`: our own beats would wait for it
                if self.store.check(["verdict"]):
                    found.append(self.store.get("verdict").decode())
                    return
                time.sleep(_every_s(self.size) / 5)
            found.append(diagnose(self.store, range(self.size), self.timeout_s))
            self.store.set("verdict", found[-1])


def diagnose(store: Store, ranks: range, timeout_s: float) -> str:
    before = signs(store, ranks)
    time.sleep(_patience_s(len(ranks)))
    return judge(before, signs(store, ranks), _home(), timeout_s)


def _every_s(size: int) -> float:
    return max(1.0, size / 1000) * BEAT_S  # a store answers some thousand calls a second with ease


def _patience_s(size: int) -> float:
    """Who changes nothing in the store for so long gives no sign of life."""
    return 2.5 * _every_s(size)


def signs(store: Store, ranks: range) -> Mapping[int, Sign | None]:
    keys = [str(rank) for rank in ranks]
    here_are = keys if store.check(keys) else [key for key in keys if store.check([key])]
    found = {int(key): Sign(**json.loads(text)) for key, text in zip(here_are, store.multi_get(here_are), strict=True)}
    return {rank: found.get(rank) for rank in ranks}


def stands(store: Store, ranks: range) -> list[str]:
    """Where each rank that joined stood last, for whoever keeps the store and is no rank himself."""
    prefixes = {key.rpartition("/")[0] for key in store.list_keys() if f"/{PREFIX}/" in key}
    told = [signs(PrefixStore(prefix, store), ranks) for prefix in prefixes]
    return [f"rank {rank} {mine}" for of_run in told for rank, mine in of_run.items() if mine]
