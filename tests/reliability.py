"""Trials of kills, flips, faults and stops: each counts what was lost, silent, left over or hung.

    python -m tests.reliability                       # all trials, as many as docs/reliability.md says; about an hour
    python -m tests.reliability --only flips io       # some of them
    python -m tests.reliability --share 0.1           # a tenth of each

A trial that did not hold is printed with its random seed; the exit code is 1 then. The table at the end is that of
docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.checkpoint import check_bytes, newest_whole, opened_at
from meshwright.train import launch, toml
from meshwright.weights import path_of
from tests import killed, tiny, worlds
from tests.runs import chats, file_of, source
from tests.started import Started, forked_ranks, gone
from tests.test_checkpoint import bytes_of, engine_of, train
from tests.test_checkpoint_broken import error_of, flip
from tests.test_checkpoint_crash import an_hour_passes, begins, forked, saves_on_and_on

Trial = tuple[str, str]  # what was done; what did not hold ("" if all did)


def kills_while_saving(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL at a random moment of a save, over an existing step too, waiting or in the background.

    Held: all visible checkpoints are whole, and the process after it resumes from the newest.
    """
    model, dice = tiny.directory(at / "m", "qwen3_tied"), random.Random(seed)
    out = at / "run"
    worlds.run(1, begins, model, out)
    for number in range(num):
        wait = number % 2 == 0
        pid = forked(lambda wait=wait: saves_on_and_on(model, out, wait))
        names = _names(out)
        before = time.monotonic() + 60
        while _names(out) == names and time.monotonic() < before:
            time.sleep(0.001)
        time.sleep(dice.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        broken = [path.name for path in out.glob("step-*") if error_of(lambda path=path: opened_at(path))]
        damaged = [path.name for path in out.glob("step-*") if not broken and check_bytes(opened_at(path))]
        lost = "no whole checkpoint" if newest_whole(out) is None else ""
        yield f"kill {number}, {'waiting' if wait else 'background'}", lost or ", ".join(broken + damaged)
    an_hour_passes(out)
    [left] = worlds.run(1, _goes_on, model, out)
    yield "the process after the last kill", left


def _names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


def _goes_on(model: Path, out: Path) -> str:
    engine = engine_of(model, {})
    mw.resume(engine, out)
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
        file = files[number % len(files)]
        what, undo = _damage(file, dice, ("flip", "truncate", "flip", "remove")[number // len(files) % 4])
        said = error_of(lambda: mw.resume(engine, step))
        silent = "" if said else "mw.resume said nothing"
        if file.parent == step and file.name != "trainer.json" and not silent:  # which load does not read
            silent = "" if error_of(lambda: mw.load(step, dtype=torch.float32)) else "mw.load said nothing"
        undo()
        trials.append((f"{file.relative_to(step)}: {what}", silent))
    mw.resume(engine, step)
    return trials


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

    Held: the step before is whole and to the bit what it was, the save fails by a MeshwrightError or succeeds, and the
    next save succeeds.
    """
    model = tiny.directory(at / "m", "qwen3_tied")
    [answers] = worlds.run(1, _all_faults, model, at, num, seed, seconds=3600)
    yield from answers


def _all_faults(model: Path, at: Path, num: int, seed: int) -> list[Trial]:
    engine, dice, trials = engine_of(model, {}), random.Random(seed), []
    train(engine, 1)
    calls = _calls_of_a_save(engine, at / "count")
    for number in range(num):
        out, wait = at / f"run-{number}", number % 3 != 0
        mw.save(engine, out)
        before = bytes_of(newest_whole(out) or out)
        train(engine, 1)
        name, call = dice.choice([(name, dice.randrange(count)) for name, count in calls.items() if count])
        code = dice.choice(_ERRORS)
        with _fails_at(name, call, code):
            said = error_of(lambda out=out, wait=wait: _save(engine, out, wait))
        trials.append((f"os.{name} call {call}, {errno.errorcode[code]}", _after_fault(engine, out, before, said)))
        shutil.rmtree(out)
    return trials


def _save(engine: mw.Engine, out: Path, wait: bool) -> None:
    mw.save(engine, out, wait=wait)
    engine.wait()


def _calls_of_a_save(engine: mw.Engine, out: Path) -> dict[str, int]:
    counts = {}
    for name in _FAILING:
        seen: list[int] = []
        with _counted(name, seen):
            mw.save(engine, out / name)
        counts[name] = len(seen)
    return counts


@contextlib.contextmanager
def _counted(name: str, seen: list[int]) -> Iterator[None]:
    with _replaced(name, lambda real, *args, **named: (seen.append(1), real(*args, **named))[1]):
        yield


@contextlib.contextmanager
def _fails_at(name: str, call: int, code: int) -> Iterator[None]:
    seen: list[int] = []

    def fail(real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == call + 1:
            raise OSError(code, os.strerror(code), *args[:1])
        return real(*args, **named)

    with _replaced(name, fail):
        yield


@contextlib.contextmanager
def _replaced(name: str, by: Callable[..., Any]) -> Iterator[None]:
    real = getattr(os, name)
    setattr(os, name, lambda *args, **named: by(real, *args, **named))
    try:
        yield
    finally:
        setattr(os, name, real)


def _after_fault(engine: mw.Engine, out: Path, before: dict[str, bytes], said: str) -> str:
    first = min(out.glob("step-*"))
    if check_bytes(opened_at(first)) or bytes_of(first) != before:
        return f"the step before was damaged; {said}"
    newest = newest_whole(out)
    if newest is None or check_bytes(opened_at(newest)):
        return f"the newest checkpoint is damaged; {said}"
    if not said and newest == first:
        return "the save was lost without an error"
    again = error_of(lambda: (train(engine, 1), mw.save(engine, out)))
    return f"the next save failed: {again}" if again else ""


def killed_ranks(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL of one of four ranks of a run. Held: it restarts by itself, and ends bit for bit as if undisturbed."""
    for each, wrong in killed.at_random_moments(at, num, seed):
        yield str(each), f"not the same: {wrong}" if wrong else ""


TIMEOUT_S = 8
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
        with _training(at / str(number), mesh) as (run, ranks):
            time.sleep(dice.random())
            rank = dice.randrange(len(ranks))
            os.kill(ranks[rank], signal.SIGSTOP)
            began = time.monotonic()
            code = run.end(TIMEOUT_S + 60)
            took = time.monotonic() - began
            yield f"rank {rank} of {mesh} stopped, {took:.1f} s", _stopped_well(run, ranks, rank, code, took)


def _stopped_well(run: Started, ranks: list[int], rank: int, code: int, took: float) -> str:
    if not gone(ranks, 5):
        return "a rank outlived its launcher"
    if code == 0:
        return "the run ended with exit code 0"
    if took > TIMEOUT_S + 10:
        return f"it took {took:.1f} s"
    if f"rank {rank}: stopped" not in run.said:
        return f"rank {rank} was not named: {run.said[-800:]}"
    return "it blames memory" if "no memory" in run.said else ""


def killed_launchers(at: Path, num: int, seed: int) -> Iterator[Trial]:
    """SIGKILL of the launcher, or SIGINT twice. Held: no rank is left after 10 s."""
    dice = random.Random(seed)
    for number in range(num):
        twice = number % 2 == 1
        with _training(at / str(number), _MESHES[number % len(_MESHES)]) as (run, ranks):
            time.sleep(dice.random())
            for _ in range(2 if twice else 1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(run.pid, signal.SIGINT if twice else signal.SIGKILL)
                time.sleep(dice.random() * 0.2)
            left = not gone(ranks)
            with contextlib.suppress(AssertionError):
                run.end(30)
            yield "SIGINT twice" if twice else "SIGKILL of the launcher", "a rank is left" if left else ""


@contextlib.contextmanager
def _training(at: Path, mesh: dict[str, int]) -> Iterator[tuple[Started, list[int]]]:
    """A run that has made some steps and has many before it, and the processes of its ranks in their order."""
    at.mkdir(parents=True)
    chats(at / "chats.jsonl")
    name = "qwen3_moe" if "ep" in mesh else "qwen3_tied"
    world = 1
    for axis, size in mesh.items():
        world *= size if axis != "ep" else 1
    path = file_of(
        at, source(at / "m", name), mesh={**mesh, "timeout_s": TIMEOUT_S}, launch={"max_restarts": 0},
        train={"steps": 100_000, "dtype": "float32"},
    )  # fmt: skip
    config = toml.read(path)
    launch.prepared(config)
    metrics = path_of(config.out) / "metrics.jsonl"
    with forked_ranks(), Started(["train", str(path)]) as run:
        run.until(lambda: metrics.is_file() and metrics.read_text().count('"kind": "step"') > 2, seconds=120)
        yield run, sorted(run.ranks)[-world:]


# How often each is tried: twice as often as in the trials of 2026-11-26.
TRIALS: dict[str, tuple[Callable[[Path, int, int], Iterator[Trial]], int]] = {
    "saves": (kills_while_saving, 168),
    "bytes": (changed_bytes, 360),
    "io": (io_faults, 134),
    "ranks": (killed_ranks, 46),
    "stops": (stopped_ranks, 34),
    "launchers": (killed_launchers, 58),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TRIALS), default=list(TRIALS))
    parser.add_argument("--share", type=float, default=1.0, help="of the number of trials")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows, num_failed = [], 0
    for name in options.only:
        trial, most = TRIALS[name]
        failed, tried, began = 0, 0, time.monotonic()
        with tempfile.TemporaryDirectory() as at:
            for what, wrong in trial(Path(at), max(1, round(most * options.share)), options.seed):
                tried, failed = tried + 1, failed + bool(wrong)
                if wrong:
                    print(f"{name}, seed {options.seed}: {what}: {wrong}", flush=True)
        rows.append(f"| {name} | {tried} | {tried - failed} | {time.monotonic() - began:.0f} s |")
        print(rows[-1], flush=True)
        num_failed += failed
    print("\n| trial | tried | held | took |\n|---|---|---|---|", *rows, sep="\n")
    return int(num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
