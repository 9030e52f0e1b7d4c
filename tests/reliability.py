"""Trials of kills, flips, faults and stops: each counts what was lost, silent, left over or hung.

    python -m tests.reliability                       # all trials, as many as docs/reliability.md says; 40 minutes
    python -m tests.reliability --only bytes io       # some of them
    python -m tests.reliability --share 0.1           # a tenth of each

A trial that did not hold is printed with its random seed; the exit code is 1 then. The table at the end is that of
docs/reliability.md. Times of `stops` and `launchers` are promises: try them on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import shutil
import signal
import stat
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.checkpoint import check_bytes, folder, newest_whole, opened_at
from meshwright.train import config_file, launch
from tests import intruders, killed, tiny, worlds
from tests.runs import chats, file_of, source
from tests.started import Started, descendants, forked_ranks, gone, running
from tests.test_checkpoint import bytes_of, engine_of, train
from tests.test_checkpoint_broken import error_of, flip
from tests.test_checkpoint_crash import an_hour_passes, begins, forked

Trial = tuple[str, str]  # what was done; what did not hold ("" if all did)


def kills_while_saving(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL at a random moment of a save, waiting or in the background; two of seven over a step that is there.

    Held: every step that was whole before is whole after, all visible checkpoints are whole to the byte, and the
    process after the last kill resumes from the newest.
    """
    model, dice = tiny.directory(at / "m", "qwen3_tied"), random.Random(seed)
    out = at / "run"
    worlds.run(1, begins, model, out)
    whole = _whole_steps(out)
    for number in range(num):
        wait, over = number % 2 == 0, number % 7 in (2, 5)
        first = max(whole, default=0) - over
        pid = forked(lambda wait=wait, first=first: _saves_on(model, out, wait, first))
        names, earlier = _names(out), whole
        before = time.monotonic() + 60
        while _names(out) == names and time.monotonic() < before:
            time.sleep(0.001)
        time.sleep(dice.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left = sorted({name.split(".")[2].partition("-")[0] for name in _names(out) if name.startswith(".")})
        broken = [f"{each.name} is broken" for each in out.glob("step-*") if error_of(lambda at=each: opened_at(at))]
        whole = _whole_steps(out)
        lost = [f"step {step} is lost" for step in sorted(earlier - whole)]
        how = f"{'waiting' if wait else 'background'}, {'over a step' if over else 'a new step'}"
        yield f"kill {number}, {how}, leaves {left}", ", ".join(broken + lost)
        for step in sorted(whole)[:-2]:
            shutil.rmtree(folder.final_place(out, step), ignore_errors=True)
        whole = set(sorted(whole)[-2:])
    an_hour_passes(out)
    [wrong] = worlds.run(1, _goes_on, model, out, max(whole, default=0))
    yield "the process after the last kill", wrong


def _saves_on(model: Path, out: Path, wait: bool, first: int) -> None:
    """Each step after `first`, until it is killed."""
    engine = engine_of(model, {})
    engine.steps = engine.optimizer.steps = first
    while True:
        train(engine, 1)
        mw.save(engine, out, wait=wait)


def _names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def _whole_steps(out: Path) -> set[int]:
    """The steps of which a checkpoint is there, every byte as it was written."""
    result = [each for each in folder.checkpoints(out) if not error_of(lambda at=each.path: opened_at(at))]
    return {each.step for each in result if not check_bytes(opened_at(each.path))}


def _goes_on(model: Path, out: Path, newest: int) -> str:
    engine = engine_of(model, {})
    mw.resume(engine, out)
    if engine.steps != newest:
        return f"it resumed step {engine.steps} and not {newest}"
    train(engine, 1)
    mw.save(engine, out)
    hidden = [path.name for path in out.iterdir() if path.name.startswith(".")]
    return f"left over: {hidden}" if hidden else ""


def changed_bytes(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """Half: one bit flipped anywhere in a checkpoint. A quarter: a file truncated. A quarter: a file removed.

    Held: `mw.resume` refuses, and so does `mw.load` of the checkpoint where it reads the file.
    """
    run = source(at / "m", "qwen3_tied")
    worlds.run(1, begins, run, at / "run")
    [answers] = worlds.run(1, _resume_all_damaged, at / "m", at / "run" / "step-000001", num, seed, seconds=3600)
    yield from answers


def _resume_all_damaged(model: Path, step: Path, num: int, seed: int) -> list[Trial]:
    engine, dice, trials = engine_of(model, {}), random.Random(seed), []
    files = sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(num):
        file = files[number // 4 % len(files)]
        what, undo = _damage(file, dice, ("flip", "truncate", "flip", "remove")[number % 4])
        wrong = _not_refused(lambda: mw.resume(engine, step), "mw.resume")
        if file.parent == step and file.name != "trainer.json":  # which load does not read
            wrong = wrong or _not_refused(lambda: mw.load(step, dtype=torch.float32), "mw.load")
        undo()
        trials.append((f"{file.relative_to(step)}: {what}", wrong))
    mw.resume(engine, step)
    return trials


def _not_refused(act: Callable[[], object], name: str) -> str:
    try:
        act()
    except mw.MeshwrightError:
        return ""
    except Exception as error:  # noqa: BLE001 - it is reported
        return f"{name} raised {error!r}"
    return f"{name} raised nothing"


def _damage(file: Path, dice: random.Random, how: str) -> tuple[str, Callable[[], object]]:
    """Damage a file; say how, and return what repairs it."""
    size, content = file.stat().st_size, file.read_bytes()
    where = dice.randrange(size)
    if how == "flip":
        flip(file, where)
    elif how == "truncate":
        os.truncate(file, where)
    else:
        file.unlink()
    return f"{how} at {where} of {size} bytes", lambda: file.write_bytes(content)


_FAILING = ("pwrite", "fsync", "open", "rename", "replace", "mkdir", "unlink", "rmdir", "scandir")
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)


def io_faults(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """One system call of a save fails: each call in turn, with one of five error codes, waiting or in the background.
    A save of this model makes 137.

    Held: the step before is whole and to the bit what it was, the save fails by a MeshwrightError or succeeds (it fails
    where the call would have brought bytes of a file to the disk), and the next save succeeds.
    """
    model = tiny.directory(at / "m", "qwen3_tied")
    [answers] = worlds.run(1, _all_faults, model, at, num, seed, seconds=3600)
    yield from answers


def _all_faults(model: Path, at: Path, num: int, seed: int) -> list[Trial]:
    engine, dice, trials = engine_of(model, {}), random.Random(seed), []
    train(engine, 1)
    calls = [(name, call) for name, count in _calls_of_a_save(engine, at / "count").items() for call in range(count)]
    dice.shuffle(calls)
    for number in range(num):
        out, wait = at / f"run-{number}", number % 3 != 0
        mw.save(engine, out)
        before = bytes_of(newest_whole(out) or out)
        train(engine, 1)
        name, call = calls[number % len(calls)]
        code = dice.choice(_ERRORS)
        with _fails_at(name, call, code) as failed:
            message = error_of(lambda out=out, wait=wait: _save(engine, out, wait))
        wrong = _after_fault(engine, out, before, message) if failed else "the save made fewer such calls"
        if not wrong and any(failed) and not message:
            wrong = "bytes did not come to the disk, and the save raised nothing"
        trials.append((f"os.{name} call {call}, {errno.errorcode[code]}", wrong))
        shutil.rmtree(out)
    return trials


def _save(engine: mw.Engine, out: Path, wait: bool) -> None:
    mw.save(engine, out, wait=wait)
    engine.wait()


def _calls_of_a_save(engine: mw.Engine, out: Path) -> dict[str, int]:
    """Count the system calls of a save that follows another in the same folder."""
    mw.save(engine, out)
    counts = {}
    for name in _FAILING:
        seen: list[int] = []
        train(engine, 1)
        with _counted(name, seen):
            mw.save(engine, out)
        counts[name] = len(seen)
    return counts


@contextlib.contextmanager
def _counted(name: str, seen: list[int]) -> Iterator[None]:
    with _replaced(name, lambda real, *args, **named: (seen.append(1), real(*args, **named))[1]):
        yield


@contextlib.contextmanager
def _fails_at(name: str, call: int, code: int) -> Iterator[list[bool]]:
    """Gets an entry when that call fails: whether it would have brought bytes of a file to the disk."""
    seen, failed = list[int](), list[bool]()

    def fail(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == call + 1:
            failed.append(name in ("pwrite", "fsync") and stat.S_ISREG(os.fstat(args[0]).st_mode))
            raise OSError(code, os.strerror(code), *args[:1])
        return real(*args, **named)

    with _replaced(name, fail):
        yield failed


@contextlib.contextmanager
def _replaced(name: str, by: Callable[..., Any]) -> Iterator[None]:
    real = getattr(os, name)
    setattr(os, name, lambda *args, **named: by(real, *args, **named))
    try:
        yield
    finally:
        setattr(os, name, real)


def _after_fault(engine: mw.Engine, out: Path, before: dict[str, bytes], message: str) -> str:
    first = min(out.glob("step-*"))
    if check_bytes(opened_at(first)) or bytes_of(first) != before:
        return f"the step before was damaged; {message}"
    newest = newest_whole(out)
    if newest is None or check_bytes(opened_at(newest)):
        return f"the newest checkpoint is damaged; {message}"
    if not message and newest == first:
        return "the save was lost without an error"
    again = error_of(lambda: (train(engine, 1), mw.save(engine, out)))
    return f"the next save failed: {again}" if again else ""


def killed_ranks(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL of one of four ranks of a run.

    Held: the rank is named, the run restarts by itself, ends bit for bit as if undisturbed, and leaves no process.
    """
    for each, wrong in killed.at_random_moments(at, num, seed):
        yield str(each), ", ".join(wrong)


TIMEOUT_S = 8
_ANOTHER_S = 2.2  # ranks take a signal that comes again within 2 s for the same one
_MESHES: tuple[dict[str, int], ...] = (
    {"fsdp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"fsdp": 2, "ep": 2}, {"fsdp": 2, "tp": 2},
)  # fmt: skip


def stopped_ranks(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGSTOP of one rank while it trains.

    Held: the run ends within timeout_s + 10 s, names that rank, does not call it killed, and leaves no process.
    """
    dice = random.Random(seed)
    for number in range(num):
        mesh = _MESHES[number % len(_MESHES)]
        with _training(at / str(number), mesh, TIMEOUT_S) as (run, ranks):
            time.sleep(dice.random())
            rank, processes = dice.randrange(len(ranks)), descendants(run.pid)
            os.kill(ranks[rank], signal.SIGSTOP)
            began = time.monotonic()
            code = run.end(TIMEOUT_S + 60)
            took = time.monotonic() - began
            yield f"rank {rank} of {mesh} stopped, {took:.1f} s", _stopped_well(run, processes, rank, code, took)


def _stopped_well(run: Started, processes: list[int], rank: int, code: int, took: float) -> str:
    if not gone(processes, 5):
        return "a process outlived its launcher"
    if code == 0:
        return "the run ended with exit code 0"
    if took > TIMEOUT_S + 10:
        return f"it took {took:.1f} s"
    if f"rank {rank}: stopped" not in run.output:
        return f"rank {rank} was not named: {run.output[-800:]}"
    return "it blames memory" if "out of memory" in run.output else ""


_ENDS: tuple[tuple[str, signal.Signals, bool], ...] = (
    ("SIGKILL of the launcher", signal.SIGKILL, False),
    ("SIGINT twice at once", signal.SIGINT, False),
    ("SIGKILL of the launcher, a rank stopped", signal.SIGKILL, True),
    ("SIGINT twice, a rank stopped", signal.SIGINT, True),
)


def killed_launchers(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL of the launcher, or SIGINT twice; half of each while a rank is stopped, so that none can save and leave.

    Held: the launcher and all processes that it has started are gone after 10 s. By themselves ranks would wait for the
    stopped one six times as long.
    """
    dice = random.Random(seed)
    for number in range(num):
        what, signal_number, stuck = _ENDS[number % len(_ENDS)]
        with _training(at / str(number), _MESHES[number // 4 % len(_MESHES)], timeout_s=60) as (run, ranks):
            time.sleep(dice.random())
            processes = [run.pid, *descendants(run.pid)]
            if stuck:
                os.kill(dice.choice(ranks), signal.SIGSTOP)
            os.kill(run.pid, signal_number)
            if signal_number == signal.SIGINT:
                time.sleep(_ANOTHER_S if stuck else dice.random() * 0.2)
                os.kill(run.pid, signal_number)
            left = [] if gone(processes) else [pid for pid in processes if running(pid)]
            names = {run.pid: "the launcher", **{pid: f"rank {rank}" for rank, pid in enumerate(ranks)}}
            yield what, ", ".join(f"{names.get(pid, 'another process')} is left" for pid in left)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            run.end(30)


@contextlib.contextmanager
def _training(at: Path, mesh: dict[str, int], timeout_s: float) -> Iterator[tuple[Started, list[int]]]:
    """A run that has made some steps and has many before it, and the processes of its ranks in their order."""
    family = "qwen3_moe" if "ep" in mesh else "qwen3_tied"
    path, out, world = _prepared(at.parent / family, family), at / "out", 1
    for axis, size in mesh.items():
        world *= size if axis != "ep" else 1
    sets = [f"out={out}", f"launch.timeout_s={timeout_s}", *(f"mesh.{axis}={size}" for axis, size in mesh.items())]
    metrics = out / "metrics.jsonl"
    command = ["train", str(path), *(word for each in sets for word in ("--set", each))]
    with forked_ranks(), Started(command) as run:
        run.until(lambda: metrics.is_file() and metrics.read_text().count('"kind": "step"') > 2, seconds=120)
        yield run, run.ranks[-world:]


def _prepared(at: Path, family: str) -> Path:
    """The file of a run of many steps, with its data laid out once for all trials."""
    if not at.exists():
        at.mkdir()
        chats(at / "chats.jsonl")
        file_of(at, source(at / "m", family), launch={"max_restarts": 0}, train={"steps": 20_000, "dtype": "float32"})
        launch.prepared(config_file.read(at / "run.toml"))
    return at / "run.toml"


def attacked_runs(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """Pickles and junk for each port of a run of two ranks, as soon as it listens and again and again.

    Held: all ports are on 127.0.0.1, none of it runs, and the run ends bit for bit as if undisturbed.
    """
    yield from intruders.attack(at, num, seed)


# How often each is tried: twice as often as in the trials of 2026-11-26, a save's calls once each.
TRIALS: dict[str, tuple[Callable[[Path, int, int], Iterator[Trial]], int]] = {
    "saves": (kills_while_saving, 168),
    "bytes": (changed_bytes, 480),
    "io": (io_faults, 140),
    "ranks": (killed_ranks, 46),
    "stops": (stopped_ranks, 34),
    "launchers": (killed_launchers, 60),
    "intruders": (attacked_runs, 10),
}


def _to_the_end(trials: Iterator[Trial]) -> Iterator[Trial]:
    """A run that hangs, or an error that is not of meshwright, is a trial that did not hold; the next kind is tried."""
    try:
        yield from trials
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        traceback.print_exc()
        yield "the trial itself, after which no other was tried", f"{type(error).__name__}: {str(error)[-800:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    parser.add_argument("--share", type=float, default=1.0, help="of the number of trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="print those that held too")
    options = parser.parse_args()
    rows, num_failed = [], 0
    for name in options.only:
        trial, most = TRIALS[name]
        failed, tried, began = 0, 0, time.monotonic()
        with tempfile.TemporaryDirectory() as at:
            for what, wrong in _to_the_end(trial(Path(at), max(1, round(most * options.share)), options.seed)):
                tried, failed = tried + 1, failed + bool(wrong)
                if wrong or options.each:
                    print(f"{name}, seed {options.seed}: {what}: {wrong or 'held'}", flush=True)
        rows.append(f"| {name} | {tried} | {tried - failed} | {time.monotonic() - began:.0f} s |")
        print(rows[-1], flush=True)
        num_failed += failed
    print("\n| trial | tried | held | took |\n|---|---|---|---|", *rows, sep="\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
